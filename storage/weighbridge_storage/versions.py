"""How does a version get into a store?

A version's folder is written file by file, its manifest last; only the head, which is changed after that, makes it
part of history. What a crash leaves behind is in no head, so nobody sees it, and its number is never given again.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import xxhash

from weighbridge.resources import Version
from weighbridge.safetensors_files import INDEX_FILE, FilesLayout
from weighbridge_storage.head import VersionEntry
from weighbridge_storage.head_changes import publish
from weighbridge_storage.head_store import HeadStore
from weighbridge_storage.manifest import FileEntry, Manifest, TensorEntry
from weighbridge_storage.names import MANIFEST_FILE, ModelName, version_key, version_prefix
from weighbridge_storage.objects import ByteArray, ObjectStore
from weighbridge_storage.version_reading import side_files, verify_version

__all__ = ["discard_unpublished", "publish_version", "side_files", "verify_version", "write_version"]

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
        entries[name] = _entry(np.frombuffer(store.get(key)[0], np.uint8))
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


def discard_unpublished(store: ObjectStore, model: ModelName, number: int) -> None:
    """Delete what an attempt at a version that never became part of history has left behind."""
    for key in list(store.list(version_prefix(model, number))):
        store.delete(key)
