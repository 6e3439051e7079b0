"""How does a version come out of a store, and prove that it is unharmed?"""

from __future__ import annotations

import xxhash

from weighbridge.errors import DataLoss, NotFound, WeighbridgeError
from weighbridge.resources import Verification
from weighbridge.safetensors_files import INDEX_FILE, FilesLayout, layout_of_files
from weighbridge_storage.manifest import Manifest
from weighbridge_storage.names import MANIFEST_FILE, ModelName, version_key
from weighbridge_storage.objects import ByteArray, ObjectStore

_PIECE = 64 << 20


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
