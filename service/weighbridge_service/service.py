"""What the service does, as one object. The gRPC and HTTP faces translate to it and back and decide nothing."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from weighbridge.errors import (
    DeadlineExceeded,
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
from weighbridge.resources import REF_LATEST, REF_LIVE, Model, Verification, Version, VersionState
from weighbridge.safetensors_files import FilesLayout
from weighbridge.slices import LayoutRequest
from weighbridge_service.config import ServiceConfig
from weighbridge_service.models import (
    Cache,
    RegisteredModel,
    files_key,
    load_model,
    model_for_registration,
    registered,
    summary_from_head,
)
from weighbridge_service.parallel_plans import megatron_layout
from weighbridge_service.publishing import Publisher
from weighbridge_service.reading import OpenVersion, Reading
from weighbridge_service.receiving import Receiving
from weighbridge_service.transfers import Bytes
from weighbridge_storage.head import Head, HeadStore, VersionEntry, allocate_version, delete_ref, set_ref
from weighbridge_storage.images import Image, ImagePool
from weighbridge_storage.local import LocalStore
from weighbridge_storage.names import RESERVED_REFS, ModelName, check_ref_name
from weighbridge_storage.versions import (
    discard_unpublished,
    open_version,
    publish_version,
    side_files,
    verify_version,
    write_version,
)

log = logging.getLogger(__name__)

_KEPT_FAILED = 100
"""Failed versions of each model that are remembered, so that whoever pushed them learns why."""
_KEPT_OPEN = 16
"""Durable versions whose files stay mapped after a pull."""
MAX_RANKS = 65_536
MAX_RUN = 256


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


@dataclass
class _Live:
    """A version of which this process knows more than the store: being received, ready, or failed."""

    receiving: Receiving
    client_of_request: str
    durable_time_ms: int = 0
    publish_error: WeighbridgeError | None = None
    gave_up: bool = False

    @property
    def version(self) -> Version:
        version = self.receiving.version
        if self.durable_time_ms:
            return replace(version, state=VersionState.DURABLE, durable_time_ms=self.durable_time_ms)
        if self.publish_error is not None:
            error = self.publish_error
            return replace(version, error=f"not durable yet: {error.message}", error_details=error.details)
        return version


class _ModelState:
    """What this process knows of one model. Guarded by the service's condition."""

    def __init__(self, model: RegisteredModel) -> None:
        self.model = model
        self.versions: dict[int, _Live] = {}
        self.by_request: dict[str, int] = {}
        self.live: int = 0
        self.opening = threading.Lock()


class Weighbridge:
    """One service over one object store. All methods are safe to call from many threads.

    Args:
        config: its settings.
    """

    def __init__(self, config: ServiceConfig) -> None:
        self.config = config
        config.store.mkdir(parents=True, exist_ok=True)
        scratch = config.store / ".images"
        scratch.mkdir(exist_ok=True)
        self.store = LocalStore(config.store)
        self.heads = HeadStore(self.store)
        self.images = ImagePool(config.memory_budget, scratch)
        self.publisher = Publisher(config.publish_attempts)
        self.bytes_in = 0
        self.bytes_out = 0
        self._changed = threading.Condition()
        self._states: dict[ModelName, _ModelState] = {}
        self._opened: Cache[tuple[FilesLayout, Mapping[str, Bytes]]] = Cache(_KEPT_OPEN)
        self._draining = False
        self._stop = threading.Event()
        self._janitor = threading.Thread(target=self._watch_over, name="janitor", daemon=True)
        self._janitor.start()

    # -- models ------------------------------------------------------------------------------------------------------

    def register_model(self, name: str, files: Mapping[str, bytes], dtype: str = "") -> Model:
        """Register a model, or replace its files where its tensors stay the same.

        Raises:
            InvalidArgument: the name, a file or the config is wrong, or its model type has no weight map.
            FailedPrecondition: the model is registered with other tensors.
        """
        model_name = ModelName.parse(name)
        model = model_for_registration(model_name, files, dtype)
        found = self.heads.read(model_name)
        if found is not None:
            registered(found[0], model, files)  # refuse before anything is written
        if found is None or found[0].files_id != model.files_id:
            for file, content in files.items():
                self.store.put(files_key(model_name, model.files_id, file), content, mode="overwrite")
        head = self.heads.update(
            model_name, lambda h: ((new := registered(h, model, files)), new), create=True
        )
        with self._changed:
            state = self._states.get(model_name)
            if state is None:
                self._states[model_name] = _ModelState(model)
            elif state.model.files_id != model.files_id:
                state.model = model
        return summary_from_head(model_name, head, self._refs(model_name, head))

    def get_model(self, name: str) -> Model:
        """One model. Raises NotFound."""
        model_name = ModelName.parse(name)
        head = self._head(model_name)
        return summary_from_head(model_name, head, self._refs(model_name, head))

    def list_models(self, after: str = "", limit: int = 100) -> list[Model]:
        """Up to ``limit`` models by name, from the one behind ``after`` on."""
        names = [name for name in self.heads.list_models() if str(name) > after][:limit]
        return [self.get_model(str(name)) for name in names]

    def model_files(self, name: str, version: str = "") -> dict[str, bytes]:
        """The files besides the weights that belong to a version, or as registered now."""
        model_name = ModelName.parse(name)
        head = self._head(model_name)
        if version:
            found = self._resolve(model_name, version, head)
            if found.state is VersionState.DURABLE:
                return side_files(self.store, model_name, found.number)
        return {
            file: self.store.get(files_key(model_name, head.files_id, file))[0]
            for file in head.registration["files"]
        }

    def _head(self, name: ModelName) -> Head:
        found = self.heads.read(name)
        if found is None:
            raise NotFound(
                f"there is no model {name}",
                fix="register it: weighbridge import HF_DIR NAMESPACE/NAME, or trainer.register_model",
            )
        return found[0]

    def _state(self, name: ModelName) -> _ModelState:
        with self._changed:
            state = self._states.get(name)
        if state is not None:
            return state
        model = load_model(self.store, name, self._head(name))
        with self._changed:
            return self._states.setdefault(name, _ModelState(model))

    # -- versions and refs -------------------------------------------------------------------------------------------

    def get_version(
        self, name: str, version: str, wait_for: VersionState | None = None, seconds: float = 0.0
    ) -> Version:
        """One version, by number or ref; waits until it has reached a state, if one is given.

        Raises:
            NotFound: no such model or version.
            VersionFailed: it failed instead.
            DeadlineExceeded: not within ``seconds``.
        """
        model_name = ModelName.parse(name)
        deadline = time.monotonic() + seconds
        while True:
            found = self._resolve(model_name, version, invisible=True)
            if wait_for is None or _reached(found.state, wait_for):
                return found
            live = self._live(model_name, found.number)
            if found.state is VersionState.FAILED or (live is not None and live.gave_up):
                raise VersionFailed(f"{found} failed: {found.error}", details=found.error_details)
            with self._changed:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise DeadlineExceeded(f"{found} was not {wait_for.value} in time")
                self._changed.wait(min(left, 1.0))

    def list_versions(
        self, name: str, *, before: int = 0, limit: int = 100, include_invisible: bool = False
    ) -> list[Version]:
        """Up to ``limit`` versions, newest first, from below number ``before`` on (0 begins with the newest)."""
        model_name = ModelName.parse(name)
        head = self._head(model_name)
        found = {number: _from_entry(model_name, entry) for number, entry in head.versions.items()}
        with self._changed:
            state = self._states.get(model_name)
            known = dict(state.versions) if state else {}
        for number, live in known.items():
            version = live.version
            if number not in found and version.state is VersionState.DURABLE:
                continue  # deleted since
            if version.state.visible or include_invisible:
                found[number] = version
        numbers = sorted((n for n in found if not before or n < before), reverse=True)
        return [found[number] for number in numbers[:limit]]

    def watch_ref(self, name: str, ref: str, after: int, active: threading.Event) -> Iterator[Version]:
        """The version a ref names, if it is another than ``after``, and each one it moves to.

        Args:
            name: the model.
            ref: which ref; it need not exist yet.
            after: the number seen last, 0 if none.
            active: cleared when the caller has gone.

        Raises:
            NotFound: the model is not registered.
            InvalidArgument: no ref can have this name.
        """
        model_name = ModelName.parse(name)
        if ref not in RESERVED_REFS:
            check_ref_name(ref)  # what no ref can be called would be waited for in vain
        self._head(model_name)
        last = after
        while active.is_set() and not self._stop.is_set():
            try:
                found: Version | None = self._resolve(model_name, ref)
            except NotFound:
                found = None
            if found is not None and found.number != last:
                last = found.number
                yield found
                continue
            with self._changed:
                # a tag can be moved by another process, which nothing here hears of: look again now and then
                self._changed.wait(1.0)

    def refs(self, name: str) -> dict[str, int]:
        """Version number by ref."""
        model_name = ModelName.parse(name)
        return self._refs(model_name, self._head(model_name))

    def set_ref(self, name: str, ref: str, version: str) -> Version:
        """Let a tag name a durable version.

        Raises:
            InvalidArgument: the tag's name is not allowed.
            NotFound: no such version.
            FailedPrecondition: it is not durable yet.
        """
        model_name = ModelName.parse(name)
        found = self._resolve(model_name, version)
        if found.state is not VersionState.DURABLE:
            raise FailedPrecondition(
                f"{found} is not in the object store yet", fix="wait until it is durable"
            )
        self.heads.update(model_name, lambda head: (set_ref(head, ref, found.number), None))
        self._notify()
        return found

    def delete_ref(self, name: str, ref: str) -> None:
        """Take a tag away. Raises NotFound."""
        self.heads.update(ModelName.parse(name), lambda head: (delete_ref(head, ref), None))
        self._notify()

    def verify(self, name: str, version: str) -> Verification:
        """Compare a durable version's files with its manifest."""
        model_name = ModelName.parse(name)
        found = self._resolve(model_name, version)
        if found.state is not VersionState.DURABLE:
            raise FailedPrecondition(
                f"{found} is not in the object store yet", fix="wait until it is durable"
            )
        return verify_version(self.store, model_name, found.number)

    def _refs(self, name: ModelName, head: Head) -> dict[str, int]:
        refs = dict(head.refs)
        with self._changed:
            state = self._states.get(name)
            live = max(state.live if state else 0, refs.get(REF_LATEST, 0))
        if live:
            refs[REF_LIVE] = live
        return refs

    def _resolve(
        self, name: ModelName, version: str, head: Head | None = None, *, invisible: bool = False
    ) -> Version:
        """The version of a number or a ref."""
        head = head or self._head(name)
        refs = self._refs(name, head)
        if version.isascii() and version.isdigit() and len(version) <= 12:
            number = int(version)
        elif version in refs:
            number = refs[version]
        else:
            raise NotFound(
                f"{name} has no version or ref {version[:80]!r}",
                fix=f"refs it has: {', '.join(sorted(refs)) or 'none yet'}; or name a version by number",
            )
        live = self._live(name, number)
        if number in head.versions:
            return live.version if live and live.durable_time_ms else _from_entry(name, head.versions[number])
        if live is not None and (invisible or live.version.state.visible):
            return live.version
        if live is not None:
            found = live.version
            if found.state is VersionState.FAILED:
                raise VersionFailed(f"{found} failed: {found.error}", details=found.error_details)
            raise FailedPrecondition(f"{found} is not complete yet", fix="wait until it is ready")
        raise NotFound(f"{name} has no version {number}")

    def _live(self, name: ModelName, number: int) -> _Live | None:
        with self._changed:
            state = self._states.get(name)
            return state.versions.get(number) if state else None

    # -- receiving ---------------------------------------------------------------------------------------------------

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
            if not text or len(text) > MAX_RUN or not text.isprintable():
                raise InvalidArgument(
                    f"the {what} is empty, longer than {MAX_RUN} characters, or not printable"
                )
        if self._draining:
            raise Unavailable("the service is shutting down", fix="try again when it is back")
        state = self._state(model_name)
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
            with self._changed:
                receiving = sum(
                    live.version.state is VersionState.RECEIVING
                    for other in self._states.values()
                    for live in other.versions.values()
                )
            if receiving >= self.config.max_receiving:
                raise ResourceExhausted(
                    f"{receiving} versions are being received", fix="wait until one is done, or abort one"
                )
            number = self.heads.update(model_name, allocate_version)
            version = Version(
                model=name,
                number=number,
                state=VersionState.RECEIVING,
                step=step,
                run=run,
                ranks=ranks,
                tensor_bytes=state.model.files.layout.nbytes,
                create_time_ms=time.time_ns() // 1_000_000,
            )
            received = Receiving(
                version,
                request_id,
                prepare=state.model.prepare,
                acquire_image=lambda: self._acquire_image(state.model),
                known=state.model.known_set,
                on_end=lambda ended: self._on_end(state, ended),
            )
            with self._changed:
                state.versions[number] = _Live(received, client_id)
                state.by_request[request_id] = number
                _forget_old(state)
        log.info("opened %s for run %s with %d ranks", version, run, ranks)
        return version

    def _opened_before(self, state: _ModelState, request_id: str, client_id: str) -> Version | None:
        with self._changed:
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
        deadline = time.monotonic() + self.config.image_wait
        while True:
            try:
                image = self.images.acquire(model.files.file_sizes)
                break
            except ResourceExhausted:
                with self._changed:
                    left = deadline - time.monotonic()
                    if left <= 0:
                        raise
                    self._changed.wait(min(left, 0.5))
        buffers = image.buffers
        for file in model.files.files:
            buffers[file.name][: len(file.header)] = memoryview(file.header)
        return image

    def _receiving(self, name: str, number: int) -> tuple[_ModelState, Receiving]:
        model_name = ModelName.parse(name)
        state = self._state(model_name)
        live = self._live(model_name, number)
        if live is None:
            if number in self._head(model_name).versions:
                raise FailedPrecondition(f"{name}@{number} is sealed", fix="push a new version")
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
            rank, client_id, digest, seconds=min(seconds, self.config.declare_timeout)
        )
        return Declared(False, prepared.assigned[rank], prepared.streams[rank].nbytes)

    def write(
        self, name: str, number: int, rank: int, client_id: str, pieces: Iterator[tuple[int, bytes, int]]
    ) -> int:
        """Take pieces of a rank's stream, as offset, data and checksum; how many bytes came."""
        _, receiving = self._receiving(name, number)
        count = 0
        for offset, data, checksum in pieces:
            receiving.write(rank, client_id, offset, data, checksum)
            count += len(data)
            self.bytes_in += len(data)
        return count

    def push_state(self, name: str, number: int, rank: int) -> tuple[list[tuple[int, int]], int, bool]:
        """Ranges of a rank's stream that have arrived, its length, and whether it is sealed."""
        return self._receiving(name, number)[1].push_state(rank)

    def seal_rank(self, name: str, number: int, rank: int, client_id: str) -> Version:
        """The rank has pushed everything."""
        _, receiving = self._receiving(name, number)
        receiving.seal(rank, client_id)
        return self.get_version(name, str(number))

    def abort_version(self, name: str, number: int, reason: str) -> Version:
        """Give a version up. Raises FailedPrecondition if it is visible already."""
        _, receiving = self._receiving(name, number)
        if receiving.version.state.visible:
            raise FailedPrecondition(f"{receiving.version} is visible already and cannot be aborted")
        receiving.fail(VersionFailed(reason[:500] or "aborted"))
        return self.get_version(name, str(number))

    def _on_end(self, state: _ModelState, receiving: Receiving) -> None:
        version = receiving.version
        if version.state is not VersionState.READY:
            log.warning("%s failed: %s", version, version.error)
            self._notify()
            return
        known = receiving.known_set
        image = receiving.image
        assert image is not None
        image.freeze()
        with self._changed:
            if known is not None:
                state.model.known_set = known
            state.live = max(state.live, version.number)
            live = state.versions[version.number]
            self._release_images(state)
            self._changed.notify_all()
        log.info("%s is ready", version)
        model = state.model

        def publish(write_id: str) -> None:
            head = self._head(model.name)
            keys = {file: files_key(model.name, head.files_id, file) for file in head.registration["files"]}
            with image.lease():
                write_version(
                    self.store, model.name, version, model.files, image.read_only_buffers, keys,
                    head.refs.get(REF_LATEST),
                )  # fmt: skip
            publish_version(self.heads, model.name, version, model.files, head.files_id, write_id)

        def on_success() -> None:
            with self._changed:
                live.durable_time_ms = time.time_ns() // 1_000_000
                live.publish_error = None
                self._release_images(state)
                self._changed.notify_all()
            log.info("%s is durable", live.version)

        def on_failure(error: WeighbridgeError, last: bool) -> None:
            with contextlib.suppress(WeighbridgeError):
                # an attempt may fail after its head was written: what is in the head is never discarded
                if version.number not in self._head(model.name).versions:
                    discard_unpublished(self.store, model.name, version.number)
            with self._changed:
                live.publish_error = error
                live.gave_up = last
                self._release_images(state)
                self._changed.notify_all()

        self.publisher.submit(str(version), publish, on_failure=on_failure, on_success=on_success)

    def _release_images(self, state: _ModelState) -> None:
        """Let go of the images of versions that are done and are not what ``live`` names."""
        for number, live in state.versions.items():
            done = live.durable_time_ms or live.gave_up
            image = live.receiving.image
            if done and image is not None and number != state.live:
                live.receiving.image = None
                image.release()

    # -- reading -----------------------------------------------------------------------------------------------------

    def plan_pull(self, name: str, version: str, request: LayoutRequest) -> tuple[Version, Layout]:
        """Which version a pull would read, and which slices it would bring."""
        model_name = ModelName.parse(name)
        found = self._resolve(model_name, version)
        return found, self._state(model_name).model.pull_layout(request)

    def pull(self, name: str, version: str, request: LayoutRequest, offset: int) -> Reading:
        """Slices of a version as a stream, from byte ``offset`` on."""
        model_name = ModelName.parse(name)
        model = self._state(model_name).model
        layout = model.pull_layout(request)
        opened = self._open(model_name, version)
        try:
            transfer = model.pull_transfer(opened.files.layout, layout)
        except BaseException:
            opened.close()
            raise
        return Reading(opened.version, layout, offset, opened, transfer)

    def restore(self, name: str, version: str, layout: Layout, offset: int) -> Reading:
        """The shards of a trainer rank as a stream, from byte ``offset`` on."""
        model_name = ModelName.parse(name)
        model = self._state(model_name).model
        opened = self._open(model_name, version)
        try:
            transfer = model.restore_transfer(opened.files.layout, layout)
        except BaseException:
            opened.close()
            raise
        return Reading(opened.version, layout, offset, opened, transfer)

    def open(self, name: str, version: str) -> OpenVersion:
        """A visible version's bytes; close it after use."""
        return self._open(ModelName.parse(name), version)

    def describe_shards(self, name: str, tp_size: int, tp_rank: int, pp_size: int, pp_rank: int) -> Layout:
        """The shards that a Megatron-core rank holds."""
        model = self._state(ModelName.parse(name)).model
        return megatron_layout(model.bridge, model.dtype, tp_size, tp_rank, pp_size, pp_rank)

    def _open(self, name: ModelName, version: str) -> OpenVersion:
        found = self._resolve(name, version)
        state = self._state(name)
        with self._changed:
            live = state.versions.get(found.number)
            image = live.receiving.image if live else None
            if image is not None:
                lease = image.lease()
                return OpenVersion(found, state.model.files, image.read_only_buffers, lease)
        if found.state is not VersionState.DURABLE:
            found = self._resolve(name, str(found.number))  # it may have become durable since
        if found.state is not VersionState.DURABLE:
            raise FailedPrecondition(
                f"{found} is no longer held: it could not be made durable and a newer one is live"
            )
        files, buffers = self._opened.get_or_make(
            (name, found.number), lambda: open_version(self.store, name, found.number)
        )
        return OpenVersion(found, files, buffers)

    # -- life --------------------------------------------------------------------------------------------------------

    @property
    def draining(self) -> bool:
        """Whether the service is shutting down."""
        return self._draining

    def counts(self) -> dict[VersionState, int]:
        """Versions that this process knows of, by state."""
        with self._changed:
            versions = [live.version for state in self._states.values() for live in state.versions.values()]
        return {wanted: sum(v.state is wanted for v in versions) for wanted in VersionState}

    def drain(self) -> bool:
        """Refuse new versions, wait for those under way, and stop; whether all of them were finished."""
        self._draining = True
        deadline = time.monotonic() + self.config.drain_seconds
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    not any(
                        live.version.state is VersionState.RECEIVING
                        for state in self._states.values()
                        for live in state.versions.values()
                    )
                ),
                self.config.drain_seconds,
            )
        done = self.publisher.drain(max(deadline - time.monotonic(), 0.0))
        received = self.counts()[VersionState.RECEIVING] == 0
        self._stop.set()
        self._notify()
        self._janitor.join()
        return done and received

    def close(self) -> None:
        """Let go of files and memory. Call `drain` before."""
        self._stop.set()
        self._notify()
        self._janitor.join()
        self.images.trim()
        self.store.close()

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _watch_over(self) -> None:
        """Give up versions of which nothing more is heard."""
        while not self._stop.wait(1.0):
            with self._changed:
                receiving = [
                    live.receiving
                    for state in self._states.values()
                    for live in state.versions.values()
                    if live.receiving.version.state is VersionState.RECEIVING
                ]
            for each in receiving:
                each.time_out(self.config.receive_timeout)


def _reached(state: VersionState, wanted: VersionState) -> bool:
    order = (VersionState.RECEIVING, VersionState.READY, VersionState.DURABLE)
    return state in order and wanted in order and order.index(state) >= order.index(wanted)


def _from_entry(name: ModelName, entry: VersionEntry) -> Version:
    return Version(
        model=str(name),
        number=entry.number,
        state=VersionState.DURABLE,
        step=entry.step,
        run=entry.run,
        tensor_bytes=entry.nbytes,
        received_bytes=entry.nbytes,
        create_time_ms=entry.created_ms,
    )


def _forget_old(state: _ModelState) -> None:
    """Keep what this process knows of ended versions bounded."""
    ended = [
        number
        for number, live in sorted(state.versions.items())
        if live.receiving.image is None and live.version.state is not VersionState.RECEIVING
    ]
    for number in ended[:-_KEPT_FAILED]:
        live = state.versions.pop(number)
        if state.by_request.get(live.receiving.request_id) == number:
            del state.by_request[live.receiving.request_id]
