"""Catalog of models, versions and refs, from the store's heads and the snapshots of this process."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import TypeVar

from weighbridge._core.json_values import JsonValue
from weighbridge._core.layouts import TensorSpec
from weighbridge._core.metadata import BaseVersion, Condition, all_hold
from weighbridge._core.resources import REQUEST_DONE, Model, Verification, Version, VersionState, why_failed
from weighbridge._core.text.counts import named
from weighbridge._core.text.suggestions import did_you_mean, model_meant, question
from weighbridge.errors import (
    DataLoss,
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    Unavailable,
    VersionFailed,
    WeighbridgeError,
)
from weighbridge_service.access.audit import note as note_change
from weighbridge_service.catalog.changes import Changes
from weighbridge_service.catalog.head_versions import (
    approval_in,
    deleted,
    in_memory,
    invisible_version,
    number_in,
    page_of,
    refs_of,
    version_of_entry,
)
from weighbridge_service.catalog.holding import with_approval
from weighbridge_service.catalog.known_models import KnownModels
from weighbridge_service.catalog.snapshots import Snapshots
from weighbridge_service.catalog.store_readers import DEFAULT_GRACE, StoreReaders, reading_since
from weighbridge_service.models.library_models import check_library_model
from weighbridge_service.models.listed_tensors import has_tensor_list, write_tensor_list
from weighbridge_service.models.registered_model import KEPT_SHARDS, RegisteredModel
from weighbridge_service.models.registration import (
    files_key,
    is_listed,
    is_part_of,
    is_registered,
    load_model,
    model_for_registration,
    registered,
    registered_files,
    registered_names,
    summary_from_head,
    with_part,
)
from weighbridge_service.runtime.clock import unix_ms
from weighbridge_storage.documents.names import RESERVED_REFS, ModelName, first_version_of
from weighbridge_storage.head.head import Head
from weighbridge_storage.head.head_changes import keep
from weighbridge_storage.head.head_store import HeadStore
from weighbridge_storage.head.history import History
from weighbridge_storage.head.leases import Grace
from weighbridge_storage.head.open_versions import give_up_abandoned
from weighbridge_storage.stores.objects import ObjectStore
from weighbridge_storage.versions.reading import side_files
from weighbridge_storage.versions.verifying import verify_version

log = logging.getLogger(__name__)

T = TypeVar("T")
V = TypeVar("V", bound=JsonValue)

AWAY = (Unavailable, DeadlineExceeded)
"""Errors of a store that cannot be reached. Versions in memory can be read nevertheless."""
MOST_LOOKED_AT = 10_000
"""Maximum number of versions whose metadata one listing compares. More would occupy a control call for seconds."""
_PAGE = 1000
"""Number of versions that a filtered listing reads at a time."""
_LATELY = 16
"""Number of newest versions that are searched for a held one, to explain why a ref names none."""
_MOST_ALIKE = 1000
"""Maximum number of models that are searched for a name similar to one that does not exist."""


class Catalog:
    """Catalog of models, versions and refs. Thread-safe.

    Args:
        store: the object store that holds them.
        grace: time for which a version that was taken out of history can still be read.
        guarded: the same store with short timeouts, for heads and configs, which callers wait for; None for ``store``.
        kept_models: number of models that are remembered.
        kept_shards: number of shards of declared layouts that each of them remembers.
        open_names: whether every caller may know all models' names, so that errors may suggest some.

    Attributes:
        store: the store for large objects.
        heads: the heads of all models.
        readers: reads of versions from the store, and their leases.
        changes: notifies listeners of changes in this process.
        snapshots: versions that this process knows beyond the store.
        known_models: the registrations that this process remembers.
        stopping: set when the service shuts down.
    """

    def __init__(
        self,
        store: ObjectStore,
        grace: Grace = DEFAULT_GRACE,
        guarded: ObjectStore | None = None,
        *,
        kept_models: int = 128,
        kept_shards: int = KEPT_SHARDS,
        open_names: bool = True,
    ) -> None:
        self.store = store
        self._open_names = open_names
        self._guarded = guarded or store
        self.heads = HeadStore(self._guarded)
        self.readers = StoreReaders(store, grace)
        self.stopping = threading.Event()
        self.changes = Changes()
        self.snapshots = Snapshots(self.changes)
        self.known_models = KnownModels(kept_models, self.snapshots.any_unfinished, kept_shards)

    def register_model(
        self,
        name: str,
        files: Mapping[str, bytes],
        dtype: str = "",
        found: Sequence[TensorSpec] = (),
        *,
        weight_map: bool = True,
        shown: Callable[[str], bool] = lambda _name: True,
    ) -> Model:
        """Register a model, or replace its files if its tensors stay the same.

        Args:
            name: ``namespace/name``.
            files: the files other than the weights.
            dtype: dtype of the weights; if empty, that of ``found``, or else of the config.
            found: the tensors in the files of weights, if there are such files.
            weight_map: False registers it by its tensors alone, even if there is a weight map for its model type.
            shown: returns whether the caller may know of a model of this name, such as an adapter.

        Raises:
            InvalidArgument: the name, a file or the config is wrong; its model type has no weight map and its tensors
                are not known; or the tensors do not match the config, by the weight map, or else by transformers' own
                model if it has one.
            FailedPrecondition: the model is registered with other tensors.
        """
        model_name = ModelName.parse(name)
        if model_name.part:
            raise InvalidArgument(
                f"{name} is a part of {model_name.model}: its first push registers it",
                fix=f"register {model_name.model}",
            )
        there = self.heads.read_any(model_name)
        head = there[0] if there else None
        asks = head is not None and is_listed(head) and not found
        listed = self.model(model_name, head).listed if asks else None
        model = model_for_registration(model_name, files, dtype, found, head, listed, weight_map=weight_map)
        known = head is not None and head.registration.get("listed") == model.kept.listed
        if found and weight_map and model.listed is not None and not known and not model.is_adapter:
            copies = check_library_model(files["config.json"], model.listed.specs)
            own = [spec for spec in found if spec.name not in copies]
            model = model_for_registration(model_name, files, dtype, own, head) if copies else model
        if there is not None:
            registered(there[0], model)  # refuse before anything is written
        if there is None or there[0].files_id != model.files_id:
            for file, content in files.items():
                self.store.put(files_key(model_name, model.files_id, file), content, mode="overwrite")
        first_version = first_version_of(model.files_id)
        if model.listed is not None and not has_tensor_list(self.store, model_name, model.listed, first_version):
            write_tensor_list(self.store, model_name, model.listed, first_version)
        head = self.heads.update(model_name, lambda h: ((new := registered(h, model)), new), create=True)
        self.known_models.keep(model, unless=lambda known: (known.files_id, known.kept) == (model.files_id, model.kept))
        self.snapshots.forget_deleted(model_name, head)
        self.changes.notify(model_name)
        return self._summary(model_name, head, shown)

    def register_part(self, name: ModelName) -> Head:
        """Register a part of a model, unless it is registered. Returns the model's head.

        Raises:
            NotFound: the model does not exist.
            FailedPrecondition: versions of the part are still being received that belong to a deleted model of the same
                name.
        """
        of = self.head(name.model)
        if self.registered_history(name, of) is None:
            now_ms = unix_ms()
            self.heads.update(name, lambda head: (with_part(name, head, of, now_ms), None), create=True)
        return of

    def get_model(self, name: str, shown: Callable[[str], bool] = lambda _name: True) -> Model:
        """One model. Raises NotFound, which suggests a similar name of the models that are ``shown``."""
        model_name = ModelName.parse(name)
        try:
            head = self.head(model_name)
        except NotFound as error:
            if self._open_names:
                raise
            meant = self._alike(model_name, shown)
            raise NotFound(f"{error.message}{question(meant)}", fix=_write(meant, error.fix)) from error
        return self._summary(model_name, head, shown)

    def _summary(self, name: ModelName, head: Head, shown: Callable[[str], bool]) -> Model:
        """A model, with only those adapters that are ``shown`` to the caller."""
        found = summary_from_head(name, head, self.refs_of(name, head))
        return replace(found, adapters=tuple(filter(shown, found.adapters))) if found.adapters else found

    def adapters(
        self, name: str, version: str = "", shown: Callable[[str], bool] = lambda _name: True
    ) -> dict[str, tuple[int, ...]]:
        """Adapters based on a model: numbers of the base versions by adapter name. Only the model's head is read.

        Args:
            name: ``namespace/name``.
            version: a number or a ref, for the adapters on that version alone.
            shown: returns whether the caller may know of a model.

        Raises:
            NotFound: the model or version does not exist.
        """
        model_name = ModelName.parse(name)
        history = self.history(model_name)
        number = self.resolve(model_name, version, history).number if version else None
        found: dict[str, list[int]] = {}
        for pin in history.head.pins:
            if number in (None, pin.version) and shown(pin.adapter):
                found.setdefault(pin.adapter, []).append(pin.version)
        return {adapter: tuple(sorted(found[adapter])) for adapter in sorted(found)}

    def list_models(
        self, after: str = "", limit: int = 100, shown: Callable[[str], bool] = lambda _name: True
    ) -> list[Model]:
        """Up to ``limit`` models after the name ``after``, by namespace and name. Arguments and errors as `listed`."""
        return self.listed(lambda name, head: self._summary(name, head, shown), after, limit, shown)

    def listed(
        self,
        of: Callable[[ModelName, Head], T],
        after: str,
        limit: int,
        shown: Callable[[str], bool],
    ) -> list[T]:
        """A page of results of ``of`` for each model, by namespace and name. Only the models' heads are read.

        Args:
            of: computes the result from a model's name and head.
            after: the page begins after the model of this name; empty for the first page.
            limit: maximum number of results.
            shown: returns whether to list a model: the caller wants it, and may see it.

        Raises:
            DataLoss, FailedPrecondition: there are models, but none of them can be read, as in a store of a later
                release.
        """
        found: list[T] = []
        unreadable: DataLoss | FailedPrecondition | None = None
        for name in self.heads.models(after):
            if len(found) >= limit:
                break
            if not shown(str(name)):
                continue
            try:
                history = self.registered_history(name)
                if history is not None:
                    found.append(of(name, history.head))
            except (
                DataLoss,
                FailedPrecondition,
            ) as error:  # list the other models nevertheless
                log.error("%s cannot be listed: %s", name, error)
                unreadable = unreadable or error
        if unreadable is not None and not found and not after:
            raise unreadable
        return found

    def kept(self, name: str, kind: type[V]) -> V:
        """Stored value of this type for a model, such as its `Retention`. Raises NotFound."""
        return self.head(ModelName.parse(name)).kept(kind)

    def keep(self, name: str, value: V) -> V:
        """Store a value for a model, which replaces the value of the same type. The audit log records both.

        Raises NotFound.
        """
        model, kind = ModelName.parse(name), type(value)
        before = self.heads.update(model, lambda head: (keep(head, value), head.kept(kind)))
        note_change(before=before.to_json(), after=value.to_json(), state=REQUEST_DONE)
        self.changes.notify(model)
        return value

    def model_files(self, name: str, version: str = "") -> dict[str, bytes]:
        """Files other than the weights: those of a version, or the ones registered now if it is empty."""
        model_name = ModelName.parse(name)
        history = self.history(model_name)
        head = history.head
        if version:
            found = self.resolve(model_name, version, history)
            if found.state.stored:
                with self.unless_deleted(model_name, found.number):
                    return side_files(self.store, model_name, found.number)
            opened = head.open.get(found.number)
            if opened is not None and opened.files_id != head.files_id:  # files were registered since
                return registered_files(self.store, model_name, opened.files_id)
        return {
            file: self.store.get(files_key(model_name, head.files_id, file))[0] for file in head.registration["files"]
        }

    def head(self, name: ModelName) -> Head:
        """Head of a model, which lacks its older versions. Raises NotFound."""
        return self.history(name).head

    def history(self, name: ModelName) -> History:
        """History of a model. Raises NotFound, which suggests a similar name."""
        found = self.registered_history(name)
        if found is None and name.part:
            self.head(name.model)
            raise NotFound(f"{name.model} has no {name.part} state", fix="push one: optimizer= and state= of a push")
        if found is None:
            meant = self._alike(name) if self._open_names else ""
            raise NotFound(
                f"there is no model {name}{question(meant)}",
                fix=_write(meant, "register it: weighbridge import HF_DIR NAMESPACE/NAME, or trainer.register_model"),
            )
        return found

    def registered_history(self, name: ModelName, of: Head | None = None) -> History | None:
        """History of a model; None if its registration was never completed, or if it was deleted.

        ``of`` is the head of a part's model.
        """
        found = self.heads.history(name)
        if name.part and found is not None:
            if of is None and (model := self.heads.read(name.model)) is not None:
                of = model[0]
            found = found if of is not None and is_part_of(found.head, of) else None
        self.snapshots.forget_deleted(name, None if found is None else found.head)
        return found

    def _alike(self, name: ModelName, shown: Callable[[str], bool] = lambda _name: True) -> str:
        """Name of a model similar to a name that does not exist; empty if there is none."""
        try:
            there = map(str, islice(self.heads.models(), _MOST_ALIKE))
            known = [each for each in there if each != str(name) and shown(each)]
        except WeighbridgeError:  # the store fails: report the missing name without a suggestion
            return ""
        return model_meant(str(name), known)

    def model(self, name: ModelName, head: Head | None = None) -> RegisteredModel:
        """Registration of a model; that in ``head``, if given. Raises NotFound."""
        model = self.known_models.get(name)
        if head is None:
            known = self.heads.last_read(name)
            current = known is None or (model is not None and known.files_id == model.files_id)
        else:
            current = model is not None and is_registered(head, model)
        if model is not None and current:
            return model
        head = head or self.head(name)
        loaded = load_model(self._guarded, name, head)
        # another thread may have loaded it in the meantime
        return self.known_models.keep(loaded, unless=partial(is_registered, head))

    def model_opened(self, name: ModelName, head: Head, files_id: str) -> RegisteredModel:
        """Registration with which a version in this head was opened.

        The version keeps its files if others were registered since.

        Raises:
            NotFound: these files are not registered any more.
        """
        model = self.model(name, head)
        if model.files_id == files_id:
            return model
        files = sorted(registered_names(self._guarded, name, files_id))
        return load_model(
            self._guarded,
            name,
            replace(head, files_id=files_id, registration={**head.registration, "files": files}),
        )

    def adopt(self, model: RegisteredModel) -> None:
        """Remember a registration that another replica has read from the store, unless the model is known here."""
        self.known_models.keep(model, unless=lambda _: True)

    def forget_model(self, name: ModelName) -> None:
        """Forget a model, which was deleted, and notify its followers."""
        self.known_models.forget(name)
        self.changes.notify(name)

    # --- versions

    def without_orphans(self, name: ModelName, history: History, numbers: Iterable[int]) -> History:
        """History in which these open versions are closed if they are orphaned: their lease has expired, and this
        process does not receive them.

        Otherwise a caller would see such a version as being received until another push to the model closes it.
        """
        now_ms, opened = unix_ms(), history.head.open
        if not any(opened[each].until_ms < now_ms and self.snapshots.get(name, each) is None for each in numbers):
            return history
        present = self.snapshots.present(name)
        try:
            self.heads.update(name, lambda head: (give_up_abandoned(head, now_ms, present), None))
            return self.history(name)
        except WeighbridgeError as error:  # this process may lack permission to write, or the store fails
            log.debug("the orphaned versions of %s cannot be closed: %s", name, error)
            return history

    def get_version(self, name: str, version: str) -> Version:
        """One version, by number or ref, in any state. Raises NotFound."""
        model_name = ModelName.parse(name)
        found = self.resolve(model_name, version, invisible=True)
        known = None if found.state.visible else self.snapshots.get(model_name, found.number)
        return self._with_lacks([found])[0] if known is None else known.described

    def _with_lacks(self, versions: list[Version]) -> list[Version]:
        """The versions, with an error for those whose base was deleted."""
        read: dict[str, History | None] = {}
        unreadable: set[str] = set()
        for index, version in enumerate(versions):
            base = BaseVersion.of(version.metadata)
            if base is None or version.error or base.model in unreadable:
                continue
            try:
                if base.model not in read:
                    read[base.model] = self.heads.history(ModelName.parse(base.model))
                history = read[base.model]
                lacks = history is None or history.durable(base.number) is None
            except WeighbridgeError:  # whether the base exists is unknown now
                unreadable.add(base.model)
                continue
            if lacks:
                versions[index] = replace(version, error=f"its base {base} was deleted")
        return versions

    def list_versions(
        self,
        name: str,
        *,
        before: int = 0,
        limit: int = 100,
        include_invisible: bool = False,
        where: Sequence[Condition] = (),
    ) -> list[Version]:
        """Up to ``limit`` versions with numbers below ``before``, newest first; 0 begins with the newest.

        With ``where``, only versions whose metadata meets all conditions, among the next `MOST_LOOKED_AT` versions.
        """

        def wanted(version: Version) -> Version | None:
            return version if all_hold(where, version.metadata) else None

        return self._with_lacks(self.listed_versions(name, wanted, before, limit, include_invisible=include_invisible))

    def listed_versions(
        self, name: str, of: Callable[[Version], T | None], before: int, limit: int, *, include_invisible: bool = False
    ) -> list[T]:
        """A page of results of ``of`` for each version of a model, newest first.

        Args:
            name: ``namespace/name``.
            of: computes the result from a version; None leaves the version out. At most `MOST_LOOKED_AT` are read.
            before: the page begins with the newest version below this number; 0 for the first page.
            limit: maximum number of results.
            include_invisible: whether to also list versions that are being received or have failed.

        Raises:
            NotFound: the model does not exist.
        """
        found: list[T] = []
        read, size = 0, limit
        while read < MOST_LOOKED_AT:
            size = min(size, MOST_LOOKED_AT - read)
            _head, page = self.page_of_versions(name, before, size, include_invisible=include_invisible)
            found += [result for result in map(of, page) if result is not None]
            if len(page) < size or len(found) >= limit:
                break
            read, before, size = read + size, page[-1].number, _PAGE
        return found[:limit]

    def page_of_versions(
        self, name: str, before: int, limit: int, *, include_invisible: bool = False
    ) -> tuple[Head, list[Version]]:
        """Up to ``limit`` versions with numbers below ``before``, newest first, and the head that they are from.

        Arguments and errors as `listed_versions`.
        """
        model_name = ModelName.parse(name)
        known = self.snapshots.of_model(model_name)
        # read after the snapshots, so that it contains versions that have become durable since
        history = self.history(model_name)
        if include_invisible:
            history = self.without_orphans(model_name, history, history.head.open)
        return history.head, page_of(model_name, history, known, before, limit, include_invisible=include_invisible)

    def refs(self, name: str) -> dict[str, int]:
        """Version number by ref."""
        model_name = ModelName.parse(name)
        return self.refs_of(model_name, self.head(model_name))

    def verify(self, name: str, version: str, *, sha256: bool = False) -> Verification:
        """Compare a durable version's files with its manifest; with ``sha256``, also compute the SHA-256 of each."""
        with self.reading_stored(name, version) as found:
            return verify_version(self.store, ModelName.parse(name), found.number, sha256=sha256)

    @contextmanager
    def reading_stored(self, name: str, version: str) -> Iterator[Version]:
        """Context of a durable version, whose objects are kept while the block reads them.

        Raises:
            NotFound: the model, version or ref does not exist, or the version was deleted in the meantime.
            FailedPrecondition: the version is not durable yet.
        """
        model_name = ModelName.parse(name)
        asked_ms = self.readers.clock()
        history = self.history(model_name)
        found = self.resolve(model_name, version, history)
        if not found.state.stored:
            raise FailedPrecondition(f"{found} is not in the object store yet", fix="wait until it is durable")
        since_ms = reading_since(history.find(found.number), asked_ms)
        with (
            self.readers.begin(model_name, found.number, since_ms),
            self.unless_deleted(model_name, found.number),
        ):
            yield found

    def refs_of(self, name: ModelName, head: Head) -> dict[str, int]:
        """All refs of a model, those in its head and ``live``."""
        return refs_of(head, self.snapshots.of_model(name))

    def resolve(
        self, name: ModelName, version: str, history: History | None = None, *, invisible: bool = False
    ) -> Version:
        """The version with a number or a ref.

        A version that was taken out of history is found by its number until it is deleted.

        Args:
            name: the model.
            version: a number or a ref.
            history: history of the model, if the caller has just read it.
            invisible: whether to also find a version that is being received or has failed.

        Raises:
            NotFound: the model, version or ref does not exist.
            VersionFailed, FailedPrecondition: the version is not visible.
        """
        if history is None:
            try:
                history = self.history(name)
            except AWAY:
                found = self.in_memory(name, version)
                if found is None:
                    raise
                return found
            if invisible:
                history = self.without_orphans(name, history, history.head.open.keys() & {number_in(version)})
        snapshots = self.snapshots.of_model(name)  # once: the ``live`` version may fail at any time
        refs = refs_of(history.head, snapshots)
        number = number_in(version)
        if number is None:
            number = refs.get(version)
        if number is None:
            held = self._newest_held(name, history) if version in RESERVED_REFS or not refs else 0
            if not held and not refs:
                raise NotFound(
                    f"{name} has no versions yet, so there is no {version[:80]!r}",
                    fix="push: the first push makes one",
                )
            because = f": its version {held} is held" if held else ""
            approve = f"weighbridge approve {name}@{held}; " if held else ""
            raise NotFound(
                f"{name} has no version or ref {version[:80]!r}{because or did_you_mean(version[:80], refs)}",
                fix=f"{approve}refs it has: {named(sorted(refs)) or 'none yet'}; or name a version by number",
            )
        entry = history.find(number)
        if entry is not None:
            return version_of_entry(name, history.head, entry)
        known = snapshots.get(number)
        durable = known is not None and known.version.state is VersionState.DURABLE
        if durable and history.is_gone(number):
            raise deleted(name, number)
        there = (
            invisible_version(name, history.head, number)
            if known is None
            else with_approval(known.version, approval_in(history.head, number))
        )
        if there is None:
            raise NotFound(
                f"{name} has no version {number}", fix=f"list its versions: weighbridge versions {name} --all"
            )
        if invisible or there.state.visible:
            return there
        if there.state.given_up:
            raise VersionFailed(why_failed(there), details=there.error_details)
        raise FailedPrecondition(f"{there} is not complete yet", fix="wait until it is ready")

    def in_memory(self, name: ModelName, version: str) -> Version | None:
        """A visible version that this process has in memory, by its number or as ``live``. Does not read the store.

        None if there is none, or if ``live`` named a newer version when the store was last read: ``live`` never goes
        back.
        """
        return in_memory(self.heads.last_read(name), self.snapshots.of_model(name), version)

    def _newest_held(self, name: ModelName, history: History) -> int:
        """Number of the newest held version, among the last published ones and those in memory here; 0 if there is
        none.
        """
        published = (entry.number for entry in history.newest(_LATELY) if entry.held)
        versions = (known.version for known in self.snapshots.of_model(name).values())
        return max((*published, *(v.number for v in versions if v.held and v.state.visible)), default=0)

    @contextmanager
    def unless_deleted(self, name: ModelName, number: int) -> Iterator[None]:
        """Turn errors about missing objects of a durable version, raised in the block, into NotFound if the version was
        deleted.

        Raises:
            NotFound: the version was taken out of history, and its objects are being deleted or are gone.
        """
        try:
            yield
        except (DataLoss, NotFound) as error:
            if self.history(name).durable(number) is not None:
                raise
            raise deleted(name, number) from error


def _write(meant: str, fix: str) -> str:
    return f"write {meant}, or {fix}" if meant else fix
