"""Migration of a store: heads of formats 1 and 2 and manifests of format 1 become those of now.

Every step may be broken off anywhere, be done again, and be done by several processes at a time:

1. The files of a version are read once and compared with its manifest. The block digests are written, then the manifest in the place of
   the one of before. A version whose manifest has the format of now is done.
2. When all versions that a head leads to are done, it is written in the format of now, with the non-finite elements that their manifests
   name, on condition that it has not changed; the nodes of its history before it. A model whose head has the format of now is done.

So a reader finds a head of before, which the service refuses, or one of now, and then all manifests are of now, too. A service of
before refuses what is done already; all must have been stopped, as one that goes on can add versions of before.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from weighbridge._core.json_values import JsonValue
from weighbridge._core.resources import REF_LATEST
from weighbridge.errors import (
    Conflict,
    DataLoss,
    DeadlineExceeded,
    FailedPrecondition,
    NotFound,
    WeighbridgeError,
)
from weighbridge_storage.documents import document_digests, strict_json
from weighbridge_storage.documents.entries import Ref
from weighbridge_storage.documents.names import MANIFEST_FILE, ModelName, blocks_key, version_key
from weighbridge_storage.head.head import Head
from weighbridge_storage.head.head_changes import stamp
from weighbridge_storage.head.head_store import HeadStore
from weighbridge_storage.migration import head_format2, manifest_format1
from weighbridge_storage.stores.objects import IfMatch, ObjectStore
from weighbridge_storage.versions.manifest import Manifest
from weighbridge_storage.versions.reading import tensors_of_files
from weighbridge_storage.versions.verifying import digest_object

_ATTEMPTS = 10
"""How often a head is begun with anew because somebody else has changed it, or its write may have failed."""


@dataclass(frozen=True)
class MigratedModel(JsonValue):
    """What was done with one model.

    Attributes:
        name: its name.
        versions: the versions whose manifests were replaced now.
        nbytes: how much was read of them, in bytes.
        dropped: versions that were taken out of history because they are damaged.
        problems: by number, why a version cannot be migrated. If there are any, the head is still one of before.
        failure: why the model as a whole cannot be migrated; empty if that is not so.
        fix: what to do about the problems.
    """

    name: str
    versions: tuple[int, ...]
    nbytes: int
    dropped: tuple[int, ...]
    problems: dict[int, str]
    failure: str = ""
    fix: str = ""

    @property
    def ok(self) -> bool:
        """Whether all is migrated."""
        return not self.problems and not self.failure


def migrate_store(
    store: ObjectStore,
    *,
    drop_damaged: bool = False,
    on_progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> Iterator[MigratedModel]:
    """Migrate all models of a store, one after another.

    Args:
        store: the store.
        drop_damaged: as in `migrate_model`.
        on_progress: is told the bytes that are done, and all of them.

    Yields:
        What was done with each model that had something to be migrated, or cannot be read.

    Raises:
        WeighbridgeError: the store failed; the same call can be repeated.
    """
    heads = HeadStore(store)
    sizes = {model: _nbytes_of_before(store, model) for model in heads.models()}
    total, done = sum(sizes.values()), 0

    def on_bytes(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        on_progress(min(done, total), total)

    for model in sizes:
        found: MigratedModel | None
        try:
            found = migrate_model(store, heads, model, drop_damaged=drop_damaged, on_bytes=on_bytes)
        except (DataLoss, FailedPrecondition, Conflict) as error:  # the others are none the worse for it
            found = MigratedModel(str(model), (), 0, (), {}, failure=str(error))
        if found is not None:
            yield found


def _nbytes_of_before(store: ObjectStore, model: ModelName) -> int:
    """Bytes of the versions of a head of before; 0 if the model has none that can be read."""
    try:
        text, _ = store.get(model.head_key)
        if not is_of_before(text, model.head_key):
            return 0
        head = head_format2.read_head(text, model.head_key)
    except (NotFound, DataLoss):
        return 0
    return sum(entry.nbytes for entry in head.recent.values())


def migrate_model(
    store: ObjectStore,
    heads: HeadStore,
    model: ModelName,
    *,
    drop_damaged: bool = False,
    on_bytes: Callable[[int], None] = lambda _nbytes: None,
) -> MigratedModel | None:
    """Migrate one model.

    Args:
        store: where it lies.
        heads: the heads in that store.
        model: which model.
        drop_damaged: take versions out of history whose bytes are not those of their manifests, with the refs that name them;
            without it, they keep the model from being migrated.
        on_bytes: is told how many more bytes were read, or need not be.

    Returns:
        What was done; None if the head has the format of now, or there is none.

    Raises:
        DataLoss: the head is malformed.
        FailedPrecondition: it has a format that is not known here.
        Conflict: others change it all the time.
        WeighbridgeError: the store failed; the same call can be repeated.
    """
    done: dict[int, int] = {}
    nonfinite: dict[int, int] = {}
    dropped: tuple[int, ...] = ()

    def report(problems: Mapping[int, WeighbridgeError]) -> MigratedModel:
        said = {number: str(error) for number, error in problems.items()}
        fix = _fix_for(problems.values()) if problems else ""
        return MigratedModel(str(model), tuple(done), sum(done.values()), dropped, said, fix=fix)

    for attempt in range(_ATTEMPTS):
        try:
            text, etag = store.get(model.head_key)
        except NotFound:
            return None
        if not is_of_before(text, model.head_key):
            Head.from_json(text, model.head_key)
            return report({}) if attempt else None
        before = head_format2.read_head(text, model.head_key)
        problems = _migrate_versions(store, model, before, done, nonfinite, on_bytes)
        damaged = {number for number, error in problems.items() if isinstance(error, DataLoss)}
        if problems.keys() - (damaged if drop_damaged else set()):
            return report(problems)
        dropped = tuple(sorted(damaged))
        after = stamp(_counted(without(before, dropped), nonfinite), before, uuid.uuid4().hex)
        try:
            store.put(model.head_key, heads.settle(model, after).to_json(), mode=IfMatch(etag))
        except (Conflict, DeadlineExceeded):  # the next attempt sees what there is now
            continue
        return report({})
    raise Conflict(
        f"the head of {model} is changed by others", fix="stop all services of this store, and try again"
    )


def _migrate_versions(
    store: ObjectStore,
    model: ModelName,
    head: Head,
    done: dict[int, int],
    nonfinite: dict[int, int],
    on_bytes: Callable[[int], None],
) -> dict[int, WeighbridgeError]:
    """Migrate the versions of a head that are not done; gives what is wrong with others.

    Args:
        store: where they lie.
        model: whose versions.
        head: its head.
        done: gets how many bytes were read of each version that was migrated now.
        nonfinite: gets how many non-finite elements each has; those that are in it are not looked at again.
        on_bytes: as in `migrate_model`.
    """
    problems: dict[int, WeighbridgeError] = {}
    for number, entry in sorted(head.recent.items()):
        if number in nonfinite:
            continue
        counter = _Counter(on_bytes)
        try:
            manifest, migrated = migrate_version(store, model, number, counter.took)
            nonfinite[number] = manifest.nonfinite_elements
            if migrated:
                done[number] = counter.nbytes
        except (DataLoss, FailedPrecondition) as error:
            if not entry.retired:  # otherwise it may be half deleted, and will be gone soon
                problems[number] = error
        on_bytes(max(entry.nbytes - counter.nbytes, 0))
    return problems


def _fix_for(problems: Iterable[WeighbridgeError]) -> str:
    if all(isinstance(error, DataLoss) for error in problems):
        return "restore these versions from a backup, or run again with --drop-damaged"
    return "use the newer Weighbridge that has written these versions"


class _Counter:
    """Counts bytes and passes them on."""

    def __init__(self, on_bytes: Callable[[int], None]) -> None:
        self.nbytes = 0
        self._on_bytes = on_bytes

    def took(self, nbytes: int) -> None:
        self.nbytes += nbytes
        self._on_bytes(nbytes)


def is_of_before(head: bytes, where: str) -> bool:
    """Whether the text of a head has a format that is to be migrated. Raises DataLoss."""
    if document_digests.ends_with_digest(head):
        return False  # whatever format it seems to have, if it is damaged
    return strict_json.decode(head, where).integer("format") in head_format2.FORMATS


def migrate_version(
    store: ObjectStore, model: ModelName, number: int, took: Callable[[int], None]
) -> tuple[Manifest, bool]:
    """Write a version's block digests, and its manifest in the format of now.

    Args:
        store: where it lies.
        model: whose version.
        number: which version.
        took: is told how many more bytes were read.

    Returns:
        The manifest, and whether that was still to be done.

    Raises:
        DataLoss: its manifest is missing, malformed or that of another version, or its files are not what the manifest says.
        FailedPrecondition: a newer release has written its manifest.
    """
    key = version_key(model, number, MANIFEST_FILE)
    try:
        text, _ = store.get(key)
    except NotFound as error:
        raise DataLoss(f"the manifest of {model}@{number} is missing from the store") from error
    if (
        document_digests.ends_with_digest(text)
        or strict_json.decode(text, key).integer("format") != manifest_format1.FORMAT
    ):
        return _check_name(Manifest.from_json(text, key), model, number), False
    manifest = _check_name(manifest_format1.read_manifest(text, key), model, number)
    tensors = tensors_of_files(manifest)
    found = {}
    for name in manifest.files:
        try:
            found[name] = digest_object(
                store, version_key(model, number, name), name, tensors.get(name, ()), took
            )
        except NotFound as error:
            raise DataLoss(f"{name} of {model}@{number} is missing from the store") from error
    after = manifest_format1.with_digests(manifest, found)
    for name in after.weight_files:
        store.put(blocks_key(model, number, name), found[name].blocks, mode="overwrite")
    store.put(key, after.to_json(), mode="overwrite")
    return after, True


def _counted(head: Head, nonfinite: Mapping[int, int]) -> Head:
    """A head of before, with the numbers of non-finite elements that are known of its versions."""
    recent = {
        number: replace(entry, nonfinite_elements=nonfinite.get(number, 0))
        for number, entry in head.recent.items()
    }
    return replace(head, recent=recent)


def _check_name(manifest: Manifest, model: ModelName, number: int) -> Manifest:
    if (manifest.model, manifest.version) != (model, number):
        raise DataLoss(f"the manifest of {model}@{number} is that of {manifest.model}@{manifest.version}")
    return manifest


def without(head: Head, numbers: Collection[int]) -> Head:
    """A head of before, without some of its versions and the refs that name them; ``latest`` names the highest that is left."""
    recent = {number: entry for number, entry in head.recent.items() if number not in numbers}
    refs = {name: ref for name, ref in head.refs.items() if ref.version not in numbers}
    released = [number for number, entry in recent.items() if entry.released]
    if REF_LATEST not in refs and released:
        refs[REF_LATEST] = Ref(max(released))
    return replace(head, recent=recent, refs=refs)
