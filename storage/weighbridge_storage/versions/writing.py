"""Writing of a version's objects, in an order that is safe against crashes.

The folder is written file by file, in any order, and the manifest last. Only the subsequent change of the head makes
the version part of history. A head never refers to objects that a crash leaves behind, so readers do not see them, and
their number is never assigned again.

Only the holder of the version's claim in the head may write to its folder.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import xxhash

from weighbridge._core.file_names import folders_of
from weighbridge._core.resources import HELD_NONFINITE
from weighbridge._formats.safetensors_files import INDEX_FILE, FilesLayout
from weighbridge.errors import Conflict, DataLoss, NotFound
from weighbridge_storage.documents import entry_json, strict_json
from weighbridge_storage.documents.entries import OpenEntry, VersionEntry
from weighbridge_storage.documents.names import (
    MANIFEST_FILE,
    ModelName,
    blocks_key,
    incoming_prefix,
    version_key,
    version_prefix,
)
from weighbridge_storage.head.head import Head
from weighbridge_storage.head.head_changes import publish
from weighbridge_storage.head.head_store import HeadStore
from weighbridge_storage.head.history import History
from weighbridge_storage.stores.objects import ByteArray, IfMatch, ObjectStore
from weighbridge_storage.versions.digests import FileDigests, digest_bytes
from weighbridge_storage.versions.manifest import (
    FEATURES,
    FILE_FOLDERS,
    FileEntry,
    Manifest,
    TensorEntry,
    tensors_from_json,
    tensors_to_json,
)

_PIECE = 16 << 20


@dataclass(frozen=True)
class Written:
    """Files of a version that are in the store, and the tensors in them, from which a manifest is made."""

    files: Mapping[str, FileEntry]
    tensors: Mapping[str, TensorEntry]

    @staticmethod
    def of(digests: Mapping[str, FileDigests]) -> Written:
        """Files of weights with these digests, by name."""
        return Written(
            {name: each.entry for name, each in digests.items()},
            {name: tensor for each in digests.values() for name, tensor in each.tensors.items()},
        )

    def to_json(self, claim: str) -> bytes:
        """Text for other replicas of the service. ``claim`` names the agreement under which the files were written."""
        return strict_json.encode(
            {
                "requires": [],
                "claim": claim,
                "files": entry_json.named_to_json(self.files),
                "tensors": tensors_to_json(self.tensors),
            }
        )

    @staticmethod
    def from_json(data: bytes, where: str) -> tuple[str, Written]:
        """The claim and the files in a text of `to_json`; ``where`` names it in errors.

        Fields of a file or a tensor that only a later release knows are copied into the manifest. Other unknown fields
        are omitted, unless the text requires them.

        Raises:
            DataLoss: it is malformed.
            FailedPrecondition: it requires a feature that is unknown here.
        """
        fields = strict_json.decode(data, where)
        fields.required(FEATURES)
        with strict_json.malformed_as_data_loss(where):
            return fields.text("claim"), Written(
                entry_json.named_from_json(FileEntry, fields.table("files"), f"{where}, file"),
                tensors_from_json(fields.table("tensors"), where),
            )

    def __or__(self, other: Written) -> Written:
        """Union of both."""
        return Written({**self.files, **other.files}, {**self.tensors, **other.tensors})


NOTHING_WRITTEN = Written({}, {})


def differs_from(parent: Manifest, name: str, data: ByteArray, go_on: Callable[[], None]) -> bool:
    """Whether a file certainly differs from the file of another version. Fast if one of its first tensors differs.

    Args:
        parent: the manifest of the other version.
        name: name of the file.
        data: its bytes, including the header.
        go_on: called from time to time. An error that it raises ends the comparison.
    """
    before = parent.files.get(name)
    if before is None or before.size != len(data):
        return True
    for tensor in sorted((t for t in parent.tensors.values() if t.file == name), key=lambda t: t.offset):
        go_on()
        part = data[tensor.offset : tensor.offset + tensor.nbytes]
        if xxhash.xxh3_128_hexdigest(part.data) != tensor.xxh3_128:
            return True
    return False


def copy_weights(
    store: ObjectStore, model: ModelName, number: int, name: str, digests: FileDigests, parent: Manifest
) -> bool:
    """Let the store copy one file of weights from another version, if the file is identical there.

    Returns whether it was copied.

    Args:
        store: the store.
        model: the model.
        number: number of the version.
        name: name of the file.
        digests: digests of its bytes by `digest_file`.
        parent: the manifest of the other version.
    """
    before = parent.files.get(name)
    if before is None or not before.same_content(digests.entry):
        return False
    try:
        store.copy(version_key(parent.model, parent.version, name), version_key(model, number, name))
    except NotFound:  # the file has been deleted since
        return False
    return True


def write_weights(
    store: ObjectStore, model: ModelName, number: int, name: str, data: ByteArray, go_on: Callable[[], None]
) -> None:
    """Write one file of weights.

    Args:
        store: the store.
        model: the model.
        number: number of the version.
        name: name of the file.
        data: its bytes, including the header.
        go_on: called from time to time. An error that it raises ends the write.

    Raises:
        ResourceExhausted: no space. The same call can be repeated.
    """
    # overwrite: an earlier attempt may have written it
    store.put(version_key(model, number, name), _pieces(data, go_on), mode="overwrite")


def write_block_digests(store: ObjectStore, model: ModelName, number: int, name: str, digests: FileDigests) -> None:
    """Write the block digests of one file of weights. Raises as `write_weights`."""
    store.put(blocks_key(model, number, name), digests.blocks, mode="overwrite")


def _pieces(data: ByteArray, go_on: Callable[[], None]) -> Iterator[memoryview]:
    view = data.data
    for start in range(0, len(view), _PIECE):
        go_on()
        yield view[start : start + _PIECE]


def write_side_files(
    store: ObjectStore, model: ModelName, number: int, files: FilesLayout, side_keys: Mapping[str, str]
) -> Written:
    """Write the files of a version other than its weights and its manifest: the index, and copies of registered files.

    Args:
        store: the store.
        model: the model.
        number: number of the version.
        files: layout of its weights in their files.
        side_keys: keys of the registered files in the store, by name.
    """
    entries: dict[str, FileEntry] = {}
    for name, key in side_keys.items():
        content, _ = store.get(key)
        store.copy(key, version_key(model, number, name))
        entries[name] = digest_bytes(content)
    index = files.index_json
    if index is not None:
        store.put(version_key(model, number, INDEX_FILE), index, mode="overwrite")
        entries[INDEX_FILE] = digest_bytes(index)
    return Written(entries, {})


def write_manifest(
    store: ObjectStore, model: ModelName, entry: OpenEntry, written: Written, layouts: str = ""
) -> Manifest:
    """Write a version's manifest after all its files. Returns the manifest that the store then contains.

    The first manifest of these files is not replaced: replicas that publish a version together may run different
    releases or make different digests, and the manifest may have been signed before a late replica writes its own.

    Args:
        store: the store.
        model: the model.
        entry: the version as it was opened.
        written: its files.
        layouts: digest of the layouts of all ranks; empty if unknown.

    Raises:
        FailedPrecondition: the existing manifest requires a feature that this release does not know.
        Conflict: another writer replaced the manifest in the meantime.
    """
    nonfinite = not entry.allow_nonfinite and any(tensor.nonfinite for tensor in written.tensors.values())
    manifest = Manifest(
        model=model,
        version=entry.number,
        step=entry.step,
        run=entry.run,
        created_ms=entry.created_ms,
        files=written.files,
        tensors=written.tensors,
        lineage={"parent": entry.parent} if entry.parent else {},
        metadata=entry.metadata,
        held=tuple(sorted({*entry.held, HELD_NONFINITE})) if nonfinite else entry.held,
        provenance=provenance_of(entry, layouts),
        requires=(FILE_FOLDERS,) if folders_of(written.files) else (),
    )
    key = version_key(model, entry.number, MANIFEST_FILE)
    try:
        store.put(key, manifest.to_json(), mode="create")
        return manifest
    except Conflict:
        there, etag = store.get(key)
    try:
        found = Manifest.from_json(there, key)
        if _same_files(found, manifest):
            return found
    except DataLoss:
        pass  # left by an interrupted attempt
    store.put(key, manifest.to_json(), mode=IfMatch(etag))
    return manifest


def _same_files(one: Manifest, other: Manifest) -> bool:
    """Whether two manifests describe the same version and the same bytes."""
    return (
        (one.model, one.version) == (other.model, other.version)
        and one.files.keys() == other.files.keys()
        and all(one.files[name].same_content(file) for name, file in other.files.items())
    )


def provenance_of(entry: OpenEntry, layouts: str) -> dict[str, Any]:
    """Provenance of a version for its manifest, in addition to step, run, lineage and metadata.

    Unknown fields are omitted.
    """
    known = {"by": entry.by, "layouts": layouts, "cast_from": list(entry.cast_from)}
    return {"ranks": entry.ranks, **{name: value for name, value in known.items() if value}}


def publish_version(heads: HeadStore, model: ModelName, entry: VersionEntry) -> VersionEntry:
    """Make a version whose folder is complete part of history, and move ``latest``, in one compare-and-swap.

    Returns:
        The entry in history: ``entry``, unless another replica has published the version before, under the same claim.

    Raises:
        VersionFailed: the version failed or was aborted in the meantime.
        AlreadyExists: another writer holds its claim.
    """

    def change(history: History) -> tuple[Head, VersionEntry]:
        head = publish(history, entry)
        return head, history.under(head).find(entry.number) or entry

    return heads.edit(model, change)


def discard_version(store: ObjectStore, model: ModelName, number: int) -> None:
    """Delete all objects of a version that failed or was aborted and can no longer be published."""
    for prefix in (version_prefix(model, number), incoming_prefix(model, number)):
        for key in list(store.list(prefix)):
            store.delete(key)
    store.discard_unfinished(version_prefix(model, number), older_than_s=0)
