"""Which models, versions and refs there are: what the store's heads say, and what this process knows beyond that."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from weighbridge.errors import (
    DataLoss,
    DeadlineExceeded,
    FailedPrecondition,
    NotFound,
    VersionFailed,
    WeighbridgeError,
)
from weighbridge.layouts import TensorSpec
from weighbridge.resources import REF_LATEST, REF_LIVE, Model, Verification, Version, VersionState
from weighbridge_service.models import (
    RegisteredModel,
    files_key,
    is_registered,
    load_model,
    model_for_registration,
    registered,
    summary_from_head,
)
from weighbridge_service.receiving import Receiving
from weighbridge_service.store_readers import DEFAULT_GRACE, StoreReaders, reading_since
from weighbridge_storage.entries import VersionEntry
from weighbridge_storage.head import Head
from weighbridge_storage.head_changes import delete_ref, set_ref
from weighbridge_storage.head_store import HeadStore
from weighbridge_storage.history import History
from weighbridge_storage.leases import Grace
from weighbridge_storage.names import RESERVED_REFS, ModelName, check_ref_name
from weighbridge_storage.objects import ObjectStore
from weighbridge_storage.version_reading import side_files
from weighbridge_storage.version_verifying import verify_version

log = logging.getLogger(__name__)

_RETIRED = "it was taken out of history, and is there only for those who are reading it"
_KEPT_MODELS = 64
"""Models that a process remembers, those with versions that it receives or has in memory not counted: 70 MB for the largest."""


@dataclass
class LiveVersion:
    """A version of which this process knows more than the store: being received, ready, or failed.

    Attributes:
        receiving: how far it is.
        client_of_request: which client opened it.
        open_until_ms: when others may take it for abandoned, in milliseconds since 1970 UTC.
        waiting_for_others: whether this replica has done its part, and there is nothing it could do now.
        announced: whether ``live`` has been told of it.
        durable_time_ms: when it became durable; 0 if it is not.
        publish_error: why the last attempt at making it durable failed.
        gave_up: whether there will be no other attempt.
    """

    receiving: Receiving
    client_of_request: str
    open_until_ms: int
    waiting_for_others: bool = False
    announced: bool = False
    durable_time_ms: int = 0
    publish_error: WeighbridgeError | None = None
    gave_up: bool = False

    @property
    def version(self) -> Version:
        """The version as it stands now."""
        version = self.receiving.version
        if version.state is VersionState.READY and not self.announced:
            # engines that ask for `live` could still get the one before
            return replace(version, state=VersionState.RECEIVING, ready_time_ms=0)
        if version.state is VersionState.FAILED:
            return version  # by its own reason, whatever came of closing it
        if self.gave_up and self.receiving.image is None:
            version = replace(version, state=VersionState.FAILED)
        if self.durable_time_ms:
            return replace(version, state=VersionState.DURABLE, durable_time_ms=self.durable_time_ms)
        if self.publish_error is not None:
            error = self.publish_error
            return replace(version, error=f"not durable yet: {error.message}", error_details=error.details)
        return version


class ModelState:
    """What this process knows of one model. Guarded by the catalog's condition, but for `opening`.

    Attributes:
        model: its registration and what is derived from it.
        versions: the versions it knows more of than the store, by number.
        by_request: the newest of them for each request.
        live: number of the newest version that is ready; 0 if none was since the process began.
        opening: is held while a version is opened.
    """

    def __init__(self, model: RegisteredModel) -> None:
        self.model = model
        self.versions: dict[int, LiveVersion] = {}
        self.by_request: dict[str, int] = {}
        self.live: int = 0
        self.opening = threading.Lock()


class Catalog:
    """Models, versions and refs. Thread-safe.

    Args:
        store: where they lie.
        grace: how long what was taken out of history can still be read.

    Attributes:
        heads: the heads of all models.
        readers: who reads versions from the store.
        changed: is notified whenever a version's state or a ref may have changed; guards the states of models.
        stopping: set when the service goes down.
    """

    def __init__(self, store: ObjectStore, grace: Grace = DEFAULT_GRACE) -> None:
        self.store = store
        self.heads = HeadStore(store)
        self.readers = StoreReaders(store, grace)
        self.changed = threading.Condition()
        self.stopping = threading.Event()
        self._states: OrderedDict[ModelName, ModelState] = OrderedDict()
        self._changes = 0

    def register_model(
        self, name: str, files: Mapping[str, bytes], dtype: str = "", found: Sequence[TensorSpec] = ()
    ) -> Model:
        """Register a model, or replace its files where its tensors stay the same.

        Args:
            name: ``namespace/name``.
            files: the files besides the weights.
            dtype: of the weights; empty takes what ``found`` says, or else the config.
            found: the tensors in the files of weights, if there are such files.

        Raises:
            InvalidArgument: the name, a file or the config is wrong, its model type has no weight map, or the tensors are
                not those of the config.
            FailedPrecondition: the model is registered with other tensors.
        """
        model_name = ModelName.parse(name)
        there = self.heads.read(model_name)
        model = model_for_registration(model_name, files, dtype, found, there[0] if there else None)
        if there is not None:
            registered(there[0], model)  # refuse before anything is written
        if there is None or there[0].files_id != model.files_id:
            for file, content in files.items():
                self.store.put(files_key(model_name, model.files_id, file), content, mode="overwrite")
        head = self.heads.update(model_name, lambda h: ((new := registered(h, model)), new), create=True)
        with self.changed:
            state = self._states.get(model_name)
            if state is None:
                self._keep(ModelState(model))
            elif state.model.files_id != model.files_id or state.model.kept != model.kept:
                state.model = model
        return summary_from_head(model_name, head, self.refs_of(model_name, head))

    def get_model(self, name: str) -> Model:
        """One model. Raises NotFound."""
        model_name = ModelName.parse(name)
        head = self.head(model_name)
        return summary_from_head(model_name, head, self.refs_of(model_name, head))

    def list_models(self, after: str = "", limit: int = 100) -> list[Model]:
        """Up to ``limit`` models by namespace and name, from the one behind ``after`` on. Only their heads are read."""
        found: list[Model] = []
        for name in self.heads.models(after):
            if len(found) >= limit:
                break
            try:
                found.append(self.get_model(str(name)))
            except NotFound:  # it was never registered to the end
                continue
            except (
                DataLoss,
                FailedPrecondition,
            ) as error:  # one that cannot be read must not hide the others
                log.error("%s cannot be listed: %s", name, error)
        return found

    def model_files(self, name: str, version: str = "") -> dict[str, bytes]:
        """The files besides the weights that belong to a version, or as registered now."""
        model_name = ModelName.parse(name)
        history = self.history(model_name)
        if version:
            found = self.resolve(model_name, version, history)
            if found.state is VersionState.DURABLE:
                with self.unless_deleted(model_name, found.number):
                    return side_files(self.store, model_name, found.number)
        head = history.head
        return {
            file: self.store.get(files_key(model_name, head.files_id, file))[0]
            for file in head.registration["files"]
        }

    def head(self, name: ModelName) -> Head:
        """What the store says of a model, but for its older versions. Raises NotFound."""
        return self.history(name).head

    def history(self, name: ModelName) -> History:
        """What the store says of a model. Raises NotFound."""
        found = self.heads.history(name)
        if found is None:
            raise NotFound(
                f"there is no model {name}",
                fix="register it: weighbridge import HF_DIR NAMESPACE/NAME, or trainer.register_model",
            )
        return found

    def state(self, name: ModelName, head: Head | None = None) -> ModelState:
        """What this process knows of a model; as registered in ``head``, if one is given. Raises NotFound."""
        with self.changed:
            state = self._states.get(name)
            if state is not None:
                self._states.move_to_end(name)
        if state is not None and (head is None or is_registered(head, state.model)):
            return state
        head = head or self.head(name)
        model = load_model(self.store, name, head)
        with self.changed:
            state = self._states.get(name) or self._keep(ModelState(model))
            if not is_registered(head, state.model):  # another thread may have loaded it meanwhile
                state.model = model
        return state

    def reinstated(self, state: ModelState) -> ModelState:
        """The state to put a new version into: this one, unless it was forgotten and another has taken its place."""
        with self.changed:
            return self._states.setdefault(state.model.name, state)

    def _keep(self, state: ModelState) -> ModelState:
        """Remember a model; those that were not used for longest and have nothing under way are forgotten for it."""
        self._states[state.model.name] = state
        idle = [name for name, other in self._states.items() if not other.versions and other is not state]
        for name in idle[: max(len(self._states) - _KEPT_MODELS, 0)]:
            if not self._states[name].opening.locked():
                del self._states[name]
        return state

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
            changes = self._changes
            found = self.resolve(model_name, version, invisible=True)
            if wait_for is None or _reached(found.state, wait_for):
                return found
            live = self.live(model_name, found.number)
            if found.state is VersionState.FAILED or (live is not None and live.gave_up):
                raise VersionFailed(f"{found} failed: {found.error}", details=found.error_details)
            left = deadline - time.monotonic()
            if left <= 0:
                raise DeadlineExceeded(f"{found} was not {wait_for.value} in time")
            self._wait_for_change(changes, min(left, 1.0))

    def list_versions(
        self, name: str, *, before: int = 0, limit: int = 100, include_invisible: bool = False
    ) -> list[Version]:
        """Up to ``limit`` versions, newest first, from below number ``before`` on (0 begins with the newest)."""
        model_name = ModelName.parse(name)
        with self.changed:
            state = self._states.get(model_name)
            known = dict(state.versions) if state else {}
        # read after that: what has become durable meanwhile is in it
        history = self.history(model_name)
        head = history.head
        found = {
            entry.number: _from_entry(model_name, entry) for entry in history.newest(limit, before or None)
        }
        if include_invisible:
            for number in (*head.open, *head.failed):
                if (elsewhere := _invisible(model_name, head, number)) is not None:
                    found[number] = elsewhere
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
        self.head(model_name)
        last = after
        while active.is_set() and not self.stopping.is_set():
            changes = self._changes
            try:
                found: Version | None = self.resolve(model_name, ref)
            except NotFound:
                found = None
            if found is not None and found.number != last:
                last = found.number
                yield found
                continue
            # a tag can be moved by another process, which nothing here hears of: look again now and then
            self._wait_for_change(changes, 1.0)

    def refs(self, name: str) -> dict[str, int]:
        """Version number by ref."""
        model_name = ModelName.parse(name)
        return self.refs_of(model_name, self.head(model_name))

    def set_ref(self, name: str, ref: str, version: str) -> Version:
        """Let a tag name a durable version.

        Raises:
            InvalidArgument: the tag's name is not allowed.
            NotFound: no such version.
            FailedPrecondition: it is not durable yet.
        """
        model_name = ModelName.parse(name)
        found = self.resolve(model_name, version)
        if found.state is not VersionState.DURABLE:
            raise FailedPrecondition(
                f"{found} is not in the object store yet", fix="wait until it is durable"
            )
        self.heads.edit(model_name, lambda history: (set_ref(history, ref, found.number), None))
        self.notify()
        return found

    def delete_ref(self, name: str, ref: str) -> None:
        """Take a tag away. Raises NotFound."""
        self.heads.update(ModelName.parse(name), lambda head: (delete_ref(head, ref), None))
        self.notify()

    def verify(self, name: str, version: str) -> Verification:
        """Compare a durable version's files with its manifest."""
        model_name = ModelName.parse(name)
        asked_ms = self.readers.clock()
        history = self.history(model_name)
        found = self.resolve(model_name, version, history)
        if found.state is not VersionState.DURABLE:
            raise FailedPrecondition(
                f"{found} is not in the object store yet", fix="wait until it is durable"
            )
        since_ms = reading_since(history.find(found.number), asked_ms)
        with (
            self.readers.begin(model_name, found.number, since_ms),
            self.unless_deleted(model_name, found.number),
        ):
            return verify_version(self.store, model_name, found.number)

    def refs_of(self, name: ModelName, head: Head) -> dict[str, int]:
        """All refs of a model, those in its head and ``live``."""
        refs = head.ref_numbers
        with self.changed:
            state = self._states.get(name)
            live = max(state.live if state else 0, refs.get(REF_LATEST, 0))
        if live:
            refs[REF_LIVE] = live
        return refs

    def resolve(
        self, name: ModelName, version: str, history: History | None = None, *, invisible: bool = False
    ) -> Version:
        """The version of a number or a ref. One that was taken out of history is found by its number as long as it is there.

        Args:
            name: the model.
            version: a number or a ref.
            history: the model's, if the caller has just read it.
            invisible: also a version that is being received or has failed.

        Raises:
            NotFound: no such model, version or ref.
            VersionFailed, FailedPrecondition: it is not visible.
        """
        history = history or self.history(name)
        refs = self.refs_of(name, history.head)
        if version.isascii() and version.isdigit() and len(version) <= 12:
            number = int(version)
        elif version in refs:
            number = refs[version]
        else:
            raise NotFound(
                f"{name} has no version or ref {version[:80]!r}",
                fix=f"refs it has: {', '.join(sorted(refs)) or 'none yet'}; or name a version by number",
            )
        live = self.live(name, number)
        entry = history.find(number)
        if entry is not None:
            found = live.version if live and live.durable_time_ms else _from_entry(name, entry)
            return replace(found, error=_RETIRED) if entry.retired else found
        if live is not None and live.durable_time_ms and history.is_gone(number):
            raise _deleted(name, number)
        there = live.version if live is not None else _invisible(name, history.head, number)
        if there is None:
            raise NotFound(f"{name} has no version {number}")
        if invisible or there.state.visible:
            return there
        if there.state is VersionState.FAILED:
            raise VersionFailed(f"{there} failed: {there.error}", details=there.error_details)
        raise FailedPrecondition(f"{there} is not complete yet", fix="wait until it is ready")

    @contextmanager
    def unless_deleted(self, name: ModelName, number: int) -> Iterator[None]:
        """Where the block finds that objects of a durable version are missing, and the version was deleted, say that.

        Raises:
            NotFound: it was taken out of history, and its objects are being deleted or are gone.
        """
        try:
            yield
        except (DataLoss, NotFound) as error:
            if self.history(name).durable(number) is not None:
                raise
            raise _deleted(name, number) from error

    def live(self, name: ModelName, number: int) -> LiveVersion | None:
        """What this process knows of a version beyond the store."""
        with self.changed:
            state = self._states.get(name)
            return state.versions.get(number) if state else None

    def has_unfinished(self) -> bool:
        """Whether a version is being received, or is ready and not durable yet."""
        return any(
            live.version.state is VersionState.RECEIVING
            or (live.version.state is VersionState.READY and not live.gave_up)
            for live in self.live_versions()
        )

    def count(self, state: VersionState) -> int:
        """Versions in this state of which this process knows more than the store."""
        return sum(live.version.state is state for live in self.live_versions())

    def notify(self) -> None:
        """Wake whoever waits for a version or a ref."""
        with self.changed:
            self._changes += 1
            self.changed.notify_all()

    def _wait_for_change(self, since: int, seconds: float) -> None:
        """Wait until something has changed since the counter stood so."""
        with self.changed:
            self.changed.wait_for(lambda: self._changes != since, seconds)

    def live_versions(self) -> list[LiveVersion]:
        """Versions that this process knows more of than the store."""
        with self.changed:
            return [live for state in self._states.values() for live in state.versions.values()]


def _deleted(name: ModelName, number: int) -> NotFound:
    return NotFound(f"{name}@{number} was deleted", fix="take another version; a tag keeps one for good")


def _reached(state: VersionState, wanted: VersionState) -> bool:
    order = (VersionState.RECEIVING, VersionState.READY, VersionState.DURABLE)
    return state in order and wanted in order and order.index(state) >= order.index(wanted)


def _invisible(name: ModelName, head: Head, number: int) -> Version | None:
    """A version that is being received, perhaps by other replicas of the service, or that was given up."""
    there = head.open.get(number)
    if there is not None:
        return Version(
            model=str(name),
            number=number,
            state=VersionState.RECEIVING,
            step=there.step,
            run=there.run,
            ranks=there.ranks,
            create_time_ms=there.created_ms,
        )
    failed = head.failed.get(number)
    if failed is None:
        return None
    return Version(model=str(name), number=number, state=VersionState.FAILED, error=failed.reason)


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
