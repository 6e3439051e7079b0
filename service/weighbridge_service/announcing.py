"""What does the catalog learn of a version that is received here: that it is ready, durable, failed, or left to others?"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from weighbridge.errors import WeighbridgeError
from weighbridge.resources import VersionState
from weighbridge_service.catalog import Catalog, LiveVersion, ModelState
from weighbridge_service.clock import unix_ms
from weighbridge_service.models import RegisteredModel
from weighbridge_service.receiving import Receiving

log = logging.getLogger(__name__)

_KEPT_ENDED = 100
"""Ended versions of each model that are remembered, so that whoever pushed them learns what became of them."""


def announce_end(catalog: Catalog, state: ModelState, model: RegisteredModel, receiving: Receiving) -> None:
    """A version is no longer being received: it is what ``live`` names from now on, or has failed.

    Args:
        catalog: learns of it.
        state: of the version's model, with the version.
        model: the registration under which it was opened.
        receiving: the version.
    """
    version, image = receiving.version, receiving.image
    with catalog.changed:
        live = state.versions.get(version.number)
        if version.state is VersionState.READY and live is not None:
            model.known_set = receiving.known_set or model.known_set
            state.live = max(state.live, version.number)
            live.announced = True
            if image is not None:
                image.freeze()
            _release_images(state)
        else:
            model.known_set = None  # if replicas do not agree on it, they have to find a new one
        catalog.notify()
    if version.state is VersionState.READY:
        log.info("%s is ready", version)
    else:
        log.warning("%s failed: %s", version, version.error)


@dataclass(frozen=True, slots=True)
class CatalogFollower:
    """Tells the catalog how a publication gets on; a `publishing.Follower`.

    Attributes:
        catalog: learns of it.
        state: of the version's model, with the version.
        live: the version.
    """

    catalog: Catalog
    state: ModelState
    live: LiveVersion

    def on_failure(self, error: WeighbridgeError, last: bool) -> None:
        """See `publishing.Follower`."""
        self._settle(error, last=last)

    def on_waiting(self, for_others: bool) -> None:
        """See `publishing.Follower`."""
        self.live.waiting_for_others = for_others

    def on_success(self) -> None:
        """See `publishing.Follower`."""
        self._settle(None, last=True)
        log.info("%s is durable", self.live.version)

    def on_left_to_others(self) -> None:
        """See `publishing.Follower`. No more is known of the version from now on than its head says."""
        number = self.live.receiving.version.number
        with self.catalog.changed:
            _forget(self.state, number, self.live)
            self.catalog.notify()

    def _settle(self, error: WeighbridgeError | None, *, last: bool) -> None:
        with self.catalog.changed:
            self.live.publish_error = error
            self.live.gave_up = error is not None and last
            if error is None:
                self.live.durable_time_ms = unix_ms()
            _release_images(self.state)
            self.catalog.notify()


def forget_old(state: ModelState) -> None:
    """Keep what this process knows of a model's ended versions bounded. The catalog's `changed` is held."""
    ended = [
        number
        for number, live in sorted(state.versions.items())
        if live.receiving.image is None and live.version.state is not VersionState.RECEIVING
    ]
    for number in ended[:-_KEPT_ENDED]:
        _forget(state, number, state.versions[number])


def _forget(state: ModelState, number: int, live: LiveVersion) -> None:
    state.versions.pop(number, None)
    if state.by_request.get(live.receiving.request_id) == number:
        del state.by_request[live.receiving.request_id]


def _release_images(state: ModelState) -> None:
    """Let go of the images of versions that are done and are not what ``live`` names."""
    for number, live in state.versions.items():
        # one that is durable and not announced yet is about to be what `live` names
        done = (live.durable_time_ms and live.announced) or live.gave_up
        image = live.receiving.image
        if done and image is not None and number != state.live:
            live.receiving.image = None
            image.release()
