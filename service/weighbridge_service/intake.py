"""Taking versions in: opened, declared, written, sealed, and made durable behind the back of those who pull them."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

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
from weighbridge_service.catalog import Catalog, LiveVersion, ModelState
from weighbridge_service.config import ServiceConfig
from weighbridge_service.models import RegisteredModel, files_key
from weighbridge_service.publishing import Publisher
from weighbridge_service.receiving import Receiving
from weighbridge_storage.head import Head, OpenEntry
from weighbridge_storage.head_changes import (
    claim_version,
    give_up_abandoned,
    give_up_version,
    open_version,
    renew_version,
)
from weighbridge_storage.images import Image, ImagePool
from weighbridge_storage.names import ModelName
from weighbridge_storage.versions import discard_unpublished, publish_version, write_version

log = logging.getLogger(__name__)

_LEASE_MS = 120_000
"""How long a version stays open without being renewed. Clocks of replicas differ by less."""
_UNFINISHED = (VersionState.RECEIVING, VersionState.READY)
_KEPT_ENDED = 100
"""Ended versions of each model that are remembered, so that whoever pushed them learns what became of them."""
MAX_RANKS = 65_536
MAX_TEXT = 256


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
        publisher: makes ready versions durable.
        bytes_in: bytes of weights that have arrived.
        draining: whether new versions are refused.
    """

    def __init__(self, catalog: Catalog, images: ImagePool, config: ServiceConfig) -> None:
        self._catalog = catalog
        self._images = images
        self._config = config
        self.publisher = Publisher(config.publish_attempts)
        self.bytes_in = 0
        self._counting = threading.Lock()
        self.draining = False
        self._janitor = threading.Thread(target=self._watch_over, name="janitor", daemon=True)
        self._janitor.start()

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
        if not 1 <= ranks <= MAX_RANKS:
            raise InvalidArgument(f"{ranks} ranks are not between 1 and {MAX_RANKS}")
        if not 0 <= step < 1 << 53:
            raise InvalidArgument(f"step {step} is not between 0 and 2**53")
        for what, text in (("run", run), ("request_id", request_id), ("client_id", client_id)):
            if not text or len(text) > MAX_TEXT or not text.isprintable():
                raise InvalidArgument(
                    f"the {what} is empty, longer than {MAX_TEXT} characters, or not printable"
                )
        state = self._catalog.state(model_name)
        with state.opening:
            there = self._opened_before(state, request_id, client_id)
            if there is not None:
                if there.ranks != ranks:
                    raise InvalidArgument(
                        f"{there} was opened with {there.ranks} ranks, and now with {ranks}",
                        fix="all ranks pass the same world_size; if two trainers push this step, give each its own run",
                    )
                if (there.step, there.run) != (step, run):
                    raise InvalidArgument(
                        f"{there} of run {there.run!r} was opened with the same request_id; this is step {step} of {run!r}",
                        fix="give each push a request_id of its own",
                    )
                return there
            if self.draining:
                raise Unavailable("the service is shutting down", fix="try again when it is back")
            receiving = self._catalog.count(VersionState.RECEIVING)
            if receiving >= self._config.max_receiving:
                raise ResourceExhausted(
                    f"{receiving} versions are being received", fix="wait until one is done, or abort one"
                )
            asked = _Asked(request_id, step, run, ranks)
            entry, head = self._catalog.heads.update(model_name, asked.open)
            number = entry.number
            model = self._catalog.state(model_name, head).model
            version = Version(
                model=name,
                number=number,
                state=VersionState.RECEIVING,
                step=step,
                run=run,
                ranks=ranks,
                tensor_bytes=model.files.layout.nbytes,
                create_time_ms=entry.created_ms,
            )
            state = self._catalog.reinstated(state)
            received = Receiving(
                version,
                request_id,
                prepare=model.prepare,
                acquire_image=lambda: self._acquire_image(model),
                known=model.known_set,
                on_end=lambda ended: self._on_end(state, model, ended),
            )
            with self._catalog.changed:
                state.versions[number] = LiveVersion(received, client_id, entry.parent, entry.until_ms)
                state.by_request[request_id] = number
                _forget_old(state)
        log.info("opened %s for run %s with %d ranks", version, run, ranks)
        return version

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

    def _acquire_image(self, model: RegisteredModel) -> Image:
        deadline = time.monotonic() + self._config.image_wait
        while True:
            try:
                image = self._images.acquire(model.files.file_sizes)
                break
            except ResourceExhausted:
                with self._catalog.changed:
                    left = deadline - time.monotonic()
                    if left <= 0:
                        raise
                    self._catalog.changed.wait(min(left, 0.5))
        try:
            buffers = image.buffers
            for file in model.files.files:
                buffers[file.name][: len(file.header)] = memoryview(file.header)
        except BaseException:
            image.release()
            raise
        return image

    def _receiving(self, name: str, number: int) -> tuple[ModelState, Receiving]:
        model_name = ModelName.parse(name)
        state = self._catalog.state(model_name)
        live = self._catalog.live(model_name, number)
        if live is None:
            head = self._catalog.head(model_name)
            if number in head.versions:
                raise FailedPrecondition(f"{name}@{number} is sealed", fix="push a new version")
            if number in head.open:
                self._give_up(state.model, number, "the service was restarted while it was being received")
            raise NotFound(
                f"{name}@{number} is not being received",
                fix="the service may have been restarted since it was opened: push again",
            )
        return state, live.receiving

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
        state, receiving = self._receiving(name, number)
        if layout is not None:
            if layout.digest != digest:
                raise LayoutError("the layout does not have the digest that was sent with it")
            state.model.add_layout(space, layout)
        elif not state.model.knows_layout(digest):
            return Declared(layout_needed=True)
        prepared = receiving.declare(
            rank, client_id, digest, seconds=min(seconds, self._config.declare_timeout)
        )
        return Declared(False, prepared.assigned[rank], prepared.streams[rank].nbytes)

    def write(
        self, name: str, number: int, rank: int, client_id: str, pieces: Iterator[tuple[int, memoryview, int]]
    ) -> int:
        """Take pieces of a rank's stream, as offset, data and checksum; how many bytes came."""
        _, receiving = self._receiving(name, number)
        count = 0
        for offset, data, checksum in pieces:
            receiving.write(rank, client_id, offset, data, checksum)
            count += len(data)
            with self._counting:
                self.bytes_in += len(data)
        return count

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
        _, receiving = self._receiving(name, number)
        if receiving.version.state.visible:
            raise FailedPrecondition(f"{receiving.version} is visible already and cannot be aborted")
        receiving.fail(VersionFailed(reason[:500] or "aborted"))
        return self._catalog.get_version(name, str(number))

    def _on_end(self, state: ModelState, model: RegisteredModel, receiving: Receiving) -> None:
        version, image = receiving.version, receiving.image
        if version.state is not VersionState.READY or image is None:
            log.warning("%s failed: %s", version, version.error)
            self._catalog.notify()
            self._give_up(model, version.number, version.error)
            return
        image.freeze()
        known = receiving.known_set
        with self._catalog.changed:
            if known is not None:
                model.known_set = known
            state.live = max(state.live, version.number)
            live = state.versions[version.number]
            live.announced = True
            self._release_images(state)
            self._catalog.notify()
        log.info("%s is ready", version)
        self._publish(state, model, live, version, image)

    def _publish(
        self, state: ModelState, model: RegisteredModel, live: LiveVersion, version: Version, image: Image
    ) -> None:
        """Make a ready version durable, in the background."""
        # the config that the weights were mapped with, whatever has been registered since
        keys = {file: files_key(model.name, model.files_id, file) for file in model.side_files}

        def publish(write_id: str) -> None:
            heads = self._catalog.heads
            heads.update(model.name, lambda head: (claim_version(head, version.number, write_id), None))
            with image.lease():
                write_version(
                    self._catalog.store,
                    model.name,
                    version,
                    model.files,
                    image.read_only_buffers,
                    keys,
                    live.parent,
                )
            publish_version(heads, model.name, version, model.files, model.files_id, write_id)

        def on_success() -> None:
            with self._catalog.changed:
                live.durable_time_ms = time.time_ns() // 1_000_000
                live.publish_error = None
                self._release_images(state)
                self._catalog.notify()
            log.info("%s is durable", live.version)

        def on_failure(error: WeighbridgeError, last: bool) -> None:
            if last:
                self._give_up(model, version.number, error.message)
            with self._catalog.changed:
                live.publish_error = error
                live.gave_up = last
                self._release_images(state)
                self._catalog.notify()

        self.publisher.submit(str(version), publish, on_failure=on_failure, on_success=on_success)

    def _renew(self, live: LiveVersion) -> None:
        """Keep an open version open."""
        version = live.version
        now_ms = time.time_ns() // 1_000_000
        if live.gave_up or version.state not in _UNFINISHED or live.open_until_ms - now_ms > _LEASE_MS // 2:
            return
        try:
            until_ms = now_ms + _LEASE_MS
            self._catalog.heads.update(
                ModelName.parse(version.model),
                lambda head: (renew_version(head, version.number, until_ms), None),
            )
            live.open_until_ms = until_ms
        except WeighbridgeError as error:
            log.warning("%s could not be kept open: %s", version, error)

    def _give_up(self, model: RegisteredModel, number: int, reason: str) -> None:
        """Close a version that will not be published, and delete what there is of it."""
        try:
            now_ms = time.time_ns() // 1_000_000
            head = self._catalog.heads.update(
                model.name, lambda head: ((new := give_up_version(head, number, reason, now_ms)), new)
            )
            # an attempt may fail after its head was written: what is in the head is never discarded
            if number not in head.versions:
                discard_unpublished(self._catalog.store, model.name, number)
        except WeighbridgeError as error:
            log.warning("%s@%d could not be cleaned up, and will be later: %s", model.name, number, error)

    def _release_images(self, state: ModelState) -> None:
        """Let go of the images of versions that are done and are not what ``live`` names."""
        for number, live in state.versions.items():
            done = live.durable_time_ms or live.gave_up
            image = live.receiving.image
            if done and image is not None and number != state.live:
                live.receiving.image = None
                image.release()

    def _watch_over(self) -> None:
        """Give up versions of which nothing more is heard."""
        while not self._catalog.stopping.wait(1.0):
            for live in self._catalog.live_versions():
                live.receiving.time_out(self._config.receive_timeout)
                self._renew(live)

    def join(self) -> None:
        """Wait for this object's own thread, after the catalog's `stopping` was set."""
        self._janitor.join()


@dataclass(frozen=True, slots=True)
class _Asked:
    """What a request says of the version that it opens."""

    request_id: str
    step: int
    run: str
    ranks: int

    def open(self, head: Head) -> tuple[Head, tuple[OpenEntry, Head]]:
        """Open the version; gives it, and the head with it."""
        now_ms = time.time_ns() // 1_000_000
        changed, entry = open_version(
            give_up_abandoned(head, now_ms),
            request_id=self.request_id,
            step=self.step,
            run=self.run,
            ranks=self.ranks,
            now_ms=now_ms,
            lease_ms=_LEASE_MS,
        )
        return changed, (entry, changed)


def _forget_old(state: ModelState) -> None:
    """Keep what this process knows of ended versions bounded."""
    ended = [
        number
        for number, live in sorted(state.versions.items())
        if live.receiving.image is None and live.version.state is not VersionState.RECEIVING
    ]
    for number in ended[:-_KEPT_ENDED]:
        live = state.versions.pop(number)
        if state.by_request.get(live.receiving.request_id) == number:
            del state.by_request[live.receiving.request_id]
