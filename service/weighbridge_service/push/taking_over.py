"""Takeover of a version that is not durable yet, or of a share of one, which a stopping replica hands over."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping

from weighbridge.errors import FailedPrecondition, ResourceExhausted
from weighbridge_service.catalog.catalog import Catalog
from weighbridge_service.catalog.holding import HoldReasons
from weighbridge_service.plan.declarations import Agreement, Declarations, Home
from weighbridge_service.push.effect_runner import Facilities
from weighbridge_service.push.handover import HandedVersion
from weighbridge_service.push.machine import events as on
from weighbridge_service.push.machine.answers import check_owned
from weighbridge_service.push.machine.state import PushState
from weighbridge_service.push.opener import Opener, version_opened
from weighbridge_service.push.registry import Registry
from weighbridge_service.push.session import PushSession, now
from weighbridge_storage.memory.images import Image
from weighbridge_storage.stores.objects import ByteArray

log = logging.getLogger(__name__)

_MEMORY_PAUSE = 0.1
"""Seconds between two requests for memory for a version that is taken over."""


class TakingOver:
    """Receiver of versions that other replicas hand over. Thread-safe.

    Args:
        catalog: the registered models.
        registry: the sessions of versions.
        opener: makes sessions.
        facilities: resources that pushes share.
    """

    def __init__(self, catalog: Catalog, registry: Registry, opener: Opener, facilities: Facilities) -> None:
        self._catalog = catalog
        self._registry = registry
        self._opener = opener
        self._facilities = facilities

    def take_over(
        self,
        sender: Home,
        version: HandedVersion,
        fill: Callable[[Mapping[str, ByteArray]], None],
        may_wait: Callable[[], bool],
    ) -> None:
        """Take over a version, or a share of one, that another replica hands over. Repeated calls do nothing.

        Args:
            sender: the replica that stops.
            version: the version or share.
            fill: reads all files into arrays of their sizes.
            may_wait: returns whether there is time left to wait for memory.

        Raises:
            FailedPrecondition: this replica stops, too.
            AlreadyExists: this replica knows the version already, as given up or under another claim.
            ResourceExhausted: there is no memory for the files.
            WeighbridgeError: ``fill`` has failed.
        """
        if self.has_taken(version):
            return
        model, entry, home = version.model, version.entry, self._facilities.home
        image = self._image_for(version, may_wait)
        begun = False
        try:
            fill(image.buffers)
            image.freeze()
            with self._opener.opening(model.name):
                if self.has_taken(version):
                    return
                opened, agreed = version_opened(model, entry), version.agreed_by(home)
                declared = Declarations.taken_over(opened, home, version.ranks, agreed)
                holding = HoldReasons.of(entry).with_elsewhere(version.number, version.nonfinite)
                limits, ready_ms = self._facilities.limits, version.ready_ms
                state = PushState.taken_over(opened, declared, version.number, limits, ready_ms, now(), holding)
                self._catalog.adopt(model)
                session = self._opener.session(state, model, entry, version.ranks[0][0], image)
                self._enter(session, agreed, version.number)
                begun = True
        finally:
            if not begun:
                image.release()
        log.info("%s: taken over from %s", session.snapshot.version, sender)
        self._registry.supersede(session)

    def has_taken(self, version: HandedVersion) -> bool:
        """Whether this replica has taken over the version or share already. Raises the same errors as `take_over`."""
        if self._opener.draining:
            raise FailedPrecondition("the service is shutting down")
        there = self._registry.of_version(version.model.name, version.entry.number)
        for push in there:
            check_owned(push.state, version.claim)
        return any(version.share is None or push.share_number == version.number for push in there)

    def _enter(self, session: PushSession, agreed: Agreement, number: int) -> None:
        """Start the session of the version or share, in addition to the sessions of the version that this replica has
        already.
        """
        there = self._registry.of_version(session.model.name, session.number)
        if not there:
            self._registry.add(session)
            return
        self._registry.add_taken(session)
        session.post(on.Superseded())  # its image serves no reads once the version is durable
        for each in (push for push in there if isinstance(push, PushSession)):
            each.post(on.ShareMoved(number, self._facilities.home, agreed.handovers[number]))

    def _image_for(self, version: HandedVersion, may_wait: Callable[[], bool]) -> Image:
        """Image for the files, allocated in the order of requests."""
        request = self._facilities.allocator.request(version.model, version.entry.number, version.files)
        try:
            while True:
                try:
                    return request.take()
                except ResourceExhausted as error:
                    if error.retry_after is None or not may_wait():
                        raise
                time.sleep(_MEMORY_PAUSE)
        finally:
            request.leave()
