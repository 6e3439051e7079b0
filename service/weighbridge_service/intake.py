"""How do versions come in: opened, declared, written and sealed by ranks, or aborted, or given up when nothing more is heard?"""

from __future__ import annotations

import logging
import socket
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from weighbridge.errors import (
    FailedPrecondition,
    InvalidArgument,
    LayoutError,
    NotFound,
    ResourceExhausted,
    Unavailable,
    VersionFailed,
    WeighbridgeError,
)
from weighbridge.layouts import Layout
from weighbridge.resources import Version, VersionState
from weighbridge_service.announcing import CatalogFollower, announce_end, forget_old
from weighbridge_service.catalog import Catalog, LiveVersion, ModelState
from weighbridge_service.clock import unix_ms
from weighbridge_service.config import ServiceConfig
from weighbridge_service.declaring import Home
from weighbridge_service.forwarding import Forwarding, Peers
from weighbridge_service.lending import LentImage
from weighbridge_service.opening_versions import OpeningRequest, check_not_received_alone
from weighbridge_service.publishing import Job, Publisher
from weighbridge_service.receiving import Receiving
from weighbridge_service.standbys import Standbys
from weighbridge_service.version_images import VersionImages
from weighbridge_storage.entries import OpenEntry
from weighbridge_storage.head import Head
from weighbridge_storage.head_changes import (
    check_not_given_up,
    check_same_request,
    renew_version,
    still_open,
)
from weighbridge_storage.image_pool import ImagePool
from weighbridge_storage.images import Image
from weighbridge_storage.names import ModelName

log = logging.getLogger(__name__)

_UNFINISHED = (VersionState.RECEIVING, VersionState.READY)
_STOP_SECONDS = 10.0
_MAX_RANKS = 65_536
_MAX_TEXT = 256


@dataclass(frozen=True, slots=True)
class Declared:
    """The answer to a declaration.

    Attributes:
        layout_needed: the digest is not known: declare again, with the layout.
        assigned: indexes of the shards to push, in the order of the stream.
        stream_bytes: length of the stream.
    """

    layout_needed: bool
    assigned: Sequence[int] = ()
    stream_bytes: int = 0


class Intake:
    """Versions on their way in. Thread-safe.

    Args:
        catalog: which models there are; learns of the versions.
        images: where versions are put together.
        config: limits and time-outs.

    Attributes:
        home: this process, as other replicas see it.
        publisher: makes versions durable.
        standbys: images that trainers of this machine have mapped ahead of the next version.
        bytes_in: bytes of weights that have arrived.
        bytes_in_locally: of these, bytes that trainers have written to shared memory themselves.
        draining: whether new versions are refused.
    """

    def __init__(self, catalog: Catalog, images: ImagePool, config: ServiceConfig) -> None:
        self._catalog = catalog
        self._config = config
        self.home = Home(config.advertise, uuid.uuid4().hex)
        self._lease_ms = round(config.open_lease * 1000)
        self._peers = Peers(config.peer_patience)
        self.publisher = Publisher(
            catalog.store, catalog.heads, config.publish_attempts, spreading=bool(config.advertise)
        )
        self.standbys = Standbys(images)
        self._images = VersionImages(catalog, images, self.standbys, config.image_wait)
        self.bytes_in = 0
        self.bytes_in_locally = 0
        self._counting = threading.Lock()
        self.draining = False
        self._janitor = threading.Thread(target=self._watch_over, name="janitor", daemon=True)
        self._janitor.start()

    def reachable_at(self, port: int) -> None:
        """Take note of the port at which this process answers gRPC calls; before that, no version can be opened."""
        host, _, advertised = self._config.advertise.rpartition(":")
        address = f"{host or socket.gethostname()}:{port if advertised in ('', '0') else advertised}"
        self.home = replace(self.home, address=address)

    def open_version(
        self, name: str, *, step: int, run: str, ranks: int, request_id: str, client_id: str
    ) -> Version:
        """Give a number for a new version, or the one that this request has been given before.

        A request whose version has ended is given a new one, unless the caller took part in that version.

        Raises:
            NotFound: the model is not registered.
            InvalidArgument: a number or text is out of bounds, or contradicts what another rank has said.
            ResourceExhausted: too many versions are being received.
        """
        model_name = ModelName.parse(name)
        if not 1 <= ranks <= _MAX_RANKS:
            raise InvalidArgument(f"{ranks} ranks are not between 1 and {_MAX_RANKS}")
        if not 0 <= step < 1 << 53:
            raise InvalidArgument(f"step {step} is not between 0 and 2**53")
        for what, text in (("run", run), ("request_id", request_id), ("client_id", client_id)):
            if not text or len(text) > _MAX_TEXT or not text.isprintable():
                raise InvalidArgument(
                    f"the {what} is empty, longer than {_MAX_TEXT} characters, or not printable"
                )
        state = self._catalog.state(model_name)
        with state.opening:
            there = self._opened_before(state, request_id, client_id)
            if there is not None:
                check_same_request(there.number, (there.step, there.run, there.ranks), (step, run, ranks))
                return there
            self._check_room()
            with self._catalog.changed:
                dead = {n for n, live in state.versions.items() if live.receiving.failed}
            asked = OpeningRequest(request_id, step, run, ranks, self.home, self._lease_ms, frozenset(dead))
            entry, head = self._catalog.heads.update(model_name, lambda head: asked.open(head, unix_ms()))
            receiving = self._begin(state, entry, head, client_id)
        log.info("opened %s for run %s with %d ranks", receiving.version, run, ranks)
        return receiving.version

    def _check_room(self) -> None:
        """Raise if no further version can be received (ResourceExhausted), or none any more (Unavailable)."""
        if self.draining:
            raise Unavailable("the service is shutting down", fix="try again when it is back")
        count = self._catalog.count(VersionState.RECEIVING)
        if count >= self._config.max_receiving:
            raise ResourceExhausted(
                f"{count} versions are being received", fix="wait until one is done, or abort one"
            )

    def _begin(self, state: ModelState, entry: OpenEntry, head: Head, client_id: str) -> Receiving:
        """Receive an open version here. The state's `opening` is held."""
        model = self._catalog.state(state.model.name, head).model
        if model.files_id != entry.files_id:
            self.publisher.give_up(
                model, entry.number, "the model was registered anew while it was being received", by=self.home
            )
            raise VersionFailed(
                f"{model.name}@{entry.number} was given up: the model was registered anew while it was being received",
                fix="push the step again",
            )
        state = self._catalog.reinstated(state)
        version = Version(
            model=str(model.name),
            number=entry.number,
            state=VersionState.RECEIVING,
            step=entry.step,
            run=entry.run,
            ranks=entry.ranks,
            tensor_bytes=model.files.layout.nbytes,
            create_time_ms=entry.created_ms,
        )
        receiving = Receiving(
            version,
            entry.request_id,
            home=self.home,
            prepare=model.prepare,
            acquire_image=lambda files, clients: self._images.acquire(model, entry.number, files, clients),
            forwarding=Forwarding(self._peers, str(model.name), entry.number),
            confirm=lambda: self._confirm(model.name, entry.number),
            known=model.known_set,
            on_end=lambda ended: announce_end(self._catalog, state, model, ended),
            recall=self.standbys.recall,
        )
        live = LiveVersion(receiving, client_id, entry.until_ms)
        with self._catalog.changed:
            state.versions[entry.number] = live
            state.by_request[entry.request_id] = entry.number
            forget_old(state)
        self.publisher.start(Job(model, entry, receiving, CatalogFollower(self._catalog, state, live)))
        return receiving

    def _opened_before(self, state: ModelState, request_id: str, client_id: str) -> Version | None:
        with self._catalog.changed:
            live = state.versions.get(state.by_request.get(request_id, 0))
        if live is None:
            return None
        version = live.version
        if version.state is VersionState.FAILED:
            return None
        if version.state is VersionState.RECEIVING:
            return version
        took_part = live.client_of_request == client_id or live.receiving.takes_part(client_id)
        return version if took_part else None

    def _confirm(self, model: ModelName, number: int) -> None:
        """Raise VersionFailed if a version is no longer open. A store that is away is no reason not to become ready."""
        try:
            check_not_given_up(self._catalog.history(model), number)
        except VersionFailed:
            raise
        except WeighbridgeError as error:
            log.warning("whether %s@%d is still open could not be seen: %s", model, number, error)

    def _receiving(self, name: str, number: int) -> tuple[ModelState, Receiving]:
        """A version that is being received here, or was."""
        model_name = ModelName.parse(name)
        state = self._catalog.state(model_name)
        live = self._catalog.live(model_name, number)
        if live is None:
            history = self._catalog.history(model_name)
            if history.durable(number) is not None:
                raise FailedPrecondition(f"{name}@{number} is sealed", fix="push a new version")
            entry = history.head.open.get(number)
            if entry is not None:
                check_not_received_alone(entry, self.home)
                self.publisher.give_up_if_lost(state.model, entry, self.home)
            raise NotFound(
                f"{name}@{number} is not being received",
                fix="the service may have been restarted since it was opened: push again",
            )
        return state, live.receiving

    def _joined(self, name: str, number: int, client_id: str) -> tuple[ModelState, Receiving]:
        """A version that is being received here, or will be from now on because it was opened at another replica."""
        model_name = ModelName.parse(name)
        if self._catalog.live(model_name, number) is None:
            state = self._catalog.state(model_name)
            with state.opening:
                head = self._catalog.head(model_name)
                entry = head.open.get(number)
                if entry is not None and self._catalog.live(model_name, number) is None:
                    self._check_room()
                    check_not_received_alone(entry, self.home)
                    self._begin(state, entry, head, client_id)
        return self._receiving(name, number)

    def declare_layout(
        self,
        name: str,
        number: int,
        rank: int,
        client_id: str,
        digest: str,
        layout: Layout | None,
        space: str,
        seconds: float,
    ) -> Declared:
        """Say what a rank holds. Waits for the other ranks, at most ``seconds``.

        Raises:
            LayoutError: the layouts contradict the model or each other; the version has failed.
            DeadlineExceeded: not all ranks came in time.
        """
        state, receiving = self._joined(name, number, client_id)
        if layout is not None:
            if layout.digest != digest:
                raise LayoutError("the layout does not have the digest that was sent with it")
            state.model.add_layout(space, layout)
        elif not state.model.knows_layout(digest):
            return Declared(layout_needed=True)
        agreed = receiving.declare(
            rank, client_id, digest, seconds=min(seconds, self._config.declare_timeout)
        )
        prepared = agreed.prepared
        return Declared(False, prepared.assigned[rank], prepared.streams[rank].nbytes)

    def write(
        self, name: str, number: int, rank: int, client_id: str, pieces: Iterator[tuple[int, memoryview, int]]
    ) -> int:
        """Take pieces of a rank's stream, as offset, data and checksum; how many bytes came."""
        _, receiving = self._receiving(name, number)
        return self._take(
            pieces,
            lambda offset, data, checksum: receiving.write(rank, client_id, offset, data, checksum),
        )

    def take_forwarded(
        self, name: str, number: int, rank: int, claim: str, pieces: Iterator[tuple[int, memoryview, int]]
    ) -> int:
        """Take parts of a rank's stream that another replica passes on; how many bytes came.

        Raises:
            Unavailable: no rank has declared here yet; try again.
            VersionFailed: the version is not open any more, or the replicas do not agree.
        """
        model_name = ModelName.parse(name)
        live = self._catalog.live(model_name, number)
        if live is None:
            still_open(self._catalog.head(model_name), number)
            raise Unavailable(f"no rank of {name}@{number} has come to {self.home} yet", fix="try again")
        receiving = live.receiving
        return self._take(
            pieces,
            lambda offset, data, checksum: receiving.write_forwarded(claim, rank, offset, data, checksum),
        )

    def _take(
        self,
        pieces: Iterator[tuple[int, memoryview, int]],
        write: Callable[[int, memoryview, int], None],
    ) -> int:
        count = 0
        for offset, data, checksum in pieces:
            write(offset, data, checksum)
            count += len(data)
            with self._counting:
                self.bytes_in += len(data)
        return count

    def lend_image(self, name: str, number: int, rank: int, client_id: str) -> tuple[Receiving, LentImage]:
        """Let a rank's process, on this machine, write its stream to where it belongs. See `Receiving.lend`."""
        _, receiving = self._receiving(name, number)
        return receiving, receiving.lend(rank, client_id)

    def take_lent(self, receiving: Receiving, rank: int, nbytes: int) -> None:
        """A rank's process has written its stream, of so many bytes, and has let go of the image."""
        receiving.end_lending(rank, complete=True)
        with self._counting:
            self.bytes_in += nbytes
            self.bytes_in_locally += nbytes

    def prepare_image(self, name: str, client_id: str) -> Image | None:
        """The image that a model's next version will probably be written to; None if there is none now.

        See `VersionImages.prepare`. While the service is shutting down, there is none.

        Raises:
            NotFound: the model is not registered.
            FailedPrecondition: the client has not pushed the model lately.
        """
        state = self._catalog.state(ModelName.parse(name))
        return None if self.draining else self._images.prepare(state, client_id)

    def push_state(self, name: str, number: int, rank: int) -> tuple[list[tuple[int, int]], int, bool]:
        """Ranges of a rank's stream that have arrived, its length, and whether it is sealed."""
        return self._receiving(name, number)[1].push_state(rank)

    def seal_rank(self, name: str, number: int, rank: int, client_id: str) -> Version:
        """The rank has pushed everything."""
        _, receiving = self._receiving(name, number)
        receiving.seal(rank, client_id)
        return self._catalog.get_version(name, str(number))

    def abort_version(self, name: str, number: int, reason: str) -> Version:
        """Give a version up. Raises FailedPrecondition if it is visible already."""
        model_name = ModelName.parse(name)
        reason = reason[:500] or "aborted"
        live = self._catalog.live(model_name, number)
        if live is None and number in self._catalog.head(model_name).open:  # it is received elsewhere
            self.publisher.give_up(self._catalog.state(model_name).model, number, reason, by=None)
            return self._catalog.get_version(name, str(number))
        _, receiving = self._receiving(name, number)
        if receiving.version.state.visible:
            raise FailedPrecondition(f"{receiving.version} is visible already and cannot be aborted")
        receiving.fail(VersionFailed(reason))
        found = self._catalog.get_version(name, str(number))
        if found.state.visible:  # another replica has just published it
            raise FailedPrecondition(f"{found} is visible already and cannot be aborted")
        return found

    def _renew(self, live: LiveVersion) -> None:
        """Keep an open version open, as long as this replica has something to do for it."""
        version = live.version
        now_ms = unix_ms()
        done = live.gave_up or live.waiting_for_others or version.state not in _UNFINISHED
        if done or live.open_until_ms - now_ms > self._lease_ms // 2:
            return
        try:
            until_ms = now_ms + self._lease_ms
            self._catalog.heads.update(
                ModelName.parse(version.model),
                lambda head: (renew_version(head, version.number, until_ms), None),
            )
            live.open_until_ms = until_ms
        except VersionFailed as error:
            live.receiving.fail(error)
        except WeighbridgeError as error:
            log.warning("%s could not be kept open: %s", version, error)

    def _watch_over(self) -> None:
        """Give up versions of which nothing more is heard."""
        while not self._catalog.stopping.wait(1.0):
            for live in self._catalog.live_versions():
                try:
                    live.receiving.look_again()
                    live.receiving.time_out(self._config.receive_timeout)
                    self._renew(live)
                except Exception:  # the others must not suffer from it
                    log.exception("watching over %s failed", live.version)

    def stop(self) -> None:
        """Leave what is not done as it is, after the catalog's `stopping` was set; waits for threads."""
        self._peers.close()
        self.publisher.stop(_STOP_SECONDS)
        self._janitor.join()
