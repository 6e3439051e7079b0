"""How does a version get into a store, come out of it again, and prove that it is unharmed?

A version's folder is written file by file, its manifest last; only the head, which is changed after that, makes it
part of history. What a crash leaves behind is in no head, so nobody sees it, and its number is never given again.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import xxhash

from weighbridge.errors import DataLoss, NotFound, WeighbridgeError
from weighbridge.resources import Verification, Version
from weighbridge.safetensors_files import INDEX_FILE, FilesLayout, layout_of_files
from weighbridge_storage.head import VersionEntry
from weighbridge_storage.head_changes import publish
from weighbridge_storage.head_store import HeadStore
from weighbridge_storage.manifest import FileEntry, Manifest, TensorEntry
from weighbridge_storage.names import MANIFEST_FILE, ModelName, version_key, version_prefix
from weighbridge_storage.objects import ByteArray, ObjectStore

_PIECE = 64 << 20


def write_version(
    store: ObjectStore,
    model: ModelName,
    version: Version,
    files: FilesLayout,
    buffers: Mapping[str, ByteArray],
    side_keys: Mapping[str, str],
    parent: int,
) -> None:
    """Write a version's folder: weights, index, other files, and the manifest last. Nothing becomes visible by it.

    Args:
        store: where to.
        model: whose version.
        version: number, step, run and time for the manifest.
        files: how the weights lie in their files.
        buffers: the bytes of these files.
        side_keys: by name, where the other files lie in the store.
        parent: the version that was the latest when this one was opened, for its lineage; 0 if there was none.

    Raises:
        ResourceExhausted: no room; the same call can be repeated.
    """
    entries: dict[str, FileEntry] = {}
    for name, key in side_keys.items():
        store.copy(key, version_key(model, version.number, name))
        entries[name] = _entry(store.map(key))
    index = files.index_json
    if index is not None:
        store.put(version_key(model, version.number, INDEX_FILE), index, mode="overwrite")
        entries[INDEX_FILE] = FileEntry(len(index), xxhash.xxh3_128_hexdigest(index))
    # digests are computed while the disk is busy
    with ThreadPoolExecutor(1, thread_name_prefix="digest") as beside:
        tensors = beside.submit(_tensor_entries, files, buffers)
        weights = beside.submit(lambda: {file.name: _entry(buffers[file.name]) for file in files.files})
        for file in files.files:
            data = buffers[file.name].data
            pieces = (data[i : i + _PIECE] for i in range(0, len(data), _PIECE))
            # overwrite: an attempt before this one may have got as far as here
            store.put(version_key(model, version.number, file.name), pieces, mode="overwrite")
        manifest = Manifest(
            model=model,
            version=version.number,
            step=version.step,
            run=version.run,
            created_ms=version.create_time_ms,
            files={**entries, **weights.result()},
            tensors=tensors.result(),
            lineage={"parent": parent} if parent else {},
        )
    store.put(version_key(model, version.number, MANIFEST_FILE), manifest.to_json(), mode="overwrite")


def publish_version(
    heads: HeadStore, model: ModelName, version: Version, files: FilesLayout, files_id: str, write_id: str
) -> None:
    """Make a version whose folder is complete part of history, and move ``latest``: one conditional write."""
    entry = VersionEntry(
        number=version.number,
        step=version.step,
        run=version.run,
        created_ms=version.create_time_ms,
        nbytes=sum(file.nbytes for file in files.files),
        tensor_count=len(files.layout.tensors),
        files_id=files_id,
        write_id=write_id,
    )
    heads.update(model, lambda head: (publish(head, entry), None))


def _tensor_entries(files: FilesLayout, buffers: Mapping[str, ByteArray]) -> dict[str, TensorEntry]:
    entries = {}
    for p in files.layout.placements:
        spec = files.layout.tensors[p.shard.tensor]
        digest = xxhash.xxh3_128_hexdigest(buffers[p.buffer][p.offset : p.offset + p.nbytes].data)
        entries[spec.name] = TensorEntry(spec.dtype, spec.shape, p.buffer, p.offset, p.nbytes, digest)
    return entries


def _entry(data: ByteArray) -> FileEntry:
    return FileEntry(len(data), xxhash.xxh3_128_hexdigest(data.data))


def read_manifest(store: ObjectStore, model: ModelName, number: int) -> Manifest:
    """A version's manifest.

    Raises:
        DataLoss: it is not there, or malformed, although the version is part of history.
    """
    return Manifest.from_json(
        read_manifest_text(store, model, number), version_key(model, number, MANIFEST_FILE)
    )


def read_manifest_text(store: ObjectStore, model: ModelName, number: int) -> bytes:
    """A version's manifest as it is stored.

    Raises:
        DataLoss: it is not there, although the version is part of history.
    """
    try:
        return store.get(version_key(model, number, MANIFEST_FILE))[0]
    except NotFound as error:
        raise DataLoss(f"the manifest of {model}@{number} is missing from the store") from error


def open_version(
    store: ObjectStore, model: ModelName, number: int
) -> tuple[FilesLayout, dict[str, ByteArray]]:
    """The weights of a durable version: how they lie in files, and the files' bytes, read-only.

    Raises:
        DataLoss: a file is missing, or is not what the manifest says it is.
    """
    manifest = read_manifest(store, model, number)
    names = sorted({tensor.file for tensor in manifest.tensors.values()})
    buffers = {}
    for name in names:
        try:
            buffers[name] = store.map(version_key(model, number, name))
        except NotFound as error:
            raise DataLoss(f"{name} of {model}@{number} is missing from the store") from error
        if len(buffers[name]) != manifest.files[name].size:
            raise DataLoss(
                f"{name} of {model}@{number} has {len(buffers[name])} bytes, and the manifest says "
                f"{manifest.files[name].size}"
            )
    files = layout_of_files({name: data.data for name, data in buffers.items()})
    for placement in files.layout.placements:
        entry = manifest.tensors.get(placement.shard.tensor)
        if entry is None or (entry.file, entry.offset, entry.nbytes) != (
            placement.buffer,
            placement.offset,
            placement.nbytes,
        ):
            raise DataLoss(
                f"{placement.shard.tensor} of {model}@{number} does not lie where the manifest says"
            )
    if len(files.layout.tensors) != len(manifest.tensors):
        raise DataLoss(f"{model}@{number} lacks tensors that its manifest lists")
    return files, buffers


def verify_version(store: ObjectStore, model: ModelName, number: int) -> Verification:
    """Read all files of a durable version and compare them with its manifest.

    Args:
        store: where the version lies.
        model: whose version.
        number: which version.

    Raises:
        DataLoss: the manifest itself is missing or malformed.
    """
    manifest = read_manifest(store, model, number)
    problems: list[str] = []
    done = checked = 0
    for name, file in manifest.files.items():
        tensors = {t: entry for t, entry in manifest.tensors.items() if entry.file == name}
        try:
            data = store.map(version_key(model, number, name))
        except WeighbridgeError as error:
            problems.append(f"{name}: {error.message}")
            continue
        if len(data) != file.size:
            problems.append(f"{name} has {len(data)} bytes instead of {file.size}")
            continue
        for tensor, entry in tensors.items():
            if (
                xxhash.xxh3_128_hexdigest(data[entry.offset : entry.offset + entry.nbytes].data)
                != entry.xxh3_128
            ):
                problems.append(f"tensor {tensor} in {name} does not agree with its digest")
            checked += 1
        if xxhash.xxh3_128_hexdigest(data.data) != file.xxh3_128:
            problems.append(f"{name} does not agree with its digest")
        done += file.size
    return Verification(number, checked, done, tuple(problems))


def side_files(store: ObjectStore, model: ModelName, number: int) -> dict[str, bytes]:
    """The files besides the weights of a durable version, by name."""
    manifest = read_manifest(store, model, number)
    weights = {tensor.file for tensor in manifest.tensors.values()}
    return {
        name: store.get(version_key(model, number, name))[0]
        for name in manifest.files
        if name not in weights and name != INDEX_FILE
    }


def discard_unpublished(store: ObjectStore, model: ModelName, number: int) -> None:
    """Delete what an attempt at a version that never became part of history has left behind."""
    for key in list(store.list(version_prefix(model, number))):
        store.delete(key)
