"""Reader of a durable version: its manifest, its weights and its other files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np

from weighbridge._formats.safetensors_files import INDEX_FILE, FilesLayout, layout_of_files
from weighbridge.errors import DataLoss, FailedPrecondition, InvalidArgument, NotFound
from weighbridge_storage.cache.block_cache import BlockCache
from weighbridge_storage.documents.names import MANIFEST_FILE, ModelName, version_key
from weighbridge_storage.memory.file_bytes import FileBytes, FileOnDisk, Place
from weighbridge_storage.memory.read_checks import DigestedRange
from weighbridge_storage.stores.objects import ByteArray, ObjectStore
from weighbridge_storage.versions.manifest import Manifest, TensorEntry

_HEADERS_AT_A_TIME = 16


def read_manifest(store: ObjectStore, model: ModelName, number: int) -> Manifest:
    """A version's manifest.

    Raises:
        DataLoss: the manifest is missing or malformed, although the version is part of history.
    """
    return Manifest.from_json(read_manifest_text(store, model, number), version_key(model, number, MANIFEST_FILE))


def read_manifest_text(store: ObjectStore, model: ModelName, number: int) -> bytes:
    """A version's manifest in its stored form.

    Raises:
        DataLoss: the manifest is missing, although the version is part of history.
    """
    try:
        return store.get(version_key(model, number, MANIFEST_FILE))[0]
    except NotFound as error:
        raise DataLoss(f"the manifest of {model}@{number} is missing from the store") from error


def open_version(
    store: ObjectStore, cache: BlockCache, model: ModelName, number: int
) -> tuple[FilesLayout, dict[str, FileBytes]]:
    """Open the weights of a durable version. Returns their layout in files, and the files' bytes.

    Reads only the headers. Tensors are compared with their digests when they are read.

    Args:
        store: store of the version.
        cache: cache for reads from a remote store.
        model: the model.
        number: number of the version.

    Raises:
        DataLoss: a file is missing, or differs from the manifest. ResourceExhausted, Unavailable: the cache does not
            have space for it.
    """
    manifest = read_manifest(store, model, number)
    tensors = tensors_of_files(manifest)
    sizes = {name: manifest.files[name].size for name in tensors}
    reader = _Reader(store, model, number, sizes)
    with ThreadPoolExecutor(_HEADERS_AT_A_TIME, thread_name_prefix="headers") as pool:
        heads = dict(zip(tensors, pool.map(reader.head, tensors, tensors.values()), strict=True))
    files = layout_of_files({name: data.data for name, data in heads.items()}, sizes)
    _check_places(files, manifest)
    digests = {
        name: [
            DigestedRange(tensor, entry.offset, entry.nbytes, entry.xxh3_128) for tensor, entry in parts if entry.nbytes
        ]
        for name, parts in tensors.items()
    }
    near = {name: reader.open(name, parts) for name, parts in digests.items()}
    if all(near.values()):
        return files, {name: file for name, file in near.items() if file is not None}
    return files, dict(cache.open(reader.title, sizes, reader.fetch, digests))


def _nothing() -> None:
    """Do nothing: for a file of the store, it does not matter whether another process still has it open."""


class _Reader:
    """Reader of a version's files. Its errors name the file that differs from the manifest."""

    def __init__(self, store: ObjectStore, model: ModelName, number: int, sizes: Mapping[str, int]) -> None:
        self._store = store
        self._sizes = sizes
        self._key = partial(version_key, model, number)
        self.title = f"{model}@{number}"

    def open(self, name: str, digests: Sequence[DigestedRange]) -> FileOnDisk | None:
        """Open a file. Returns None if the store's objects are not files on this machine."""
        descriptor = self._opened(name)
        if descriptor is None:
            return None
        # other processes open it again, so that they get a file that was restored since
        place = Place(self._key(name), self._sizes[name], 0, partial(self._opened_near, name), False, _nothing, digests)
        return FileOnDisk(descriptor, name, self.title, place=place, digests=digests)

    def _opened(self, name: str) -> int | None:
        try:
            return self._store.open(self._key(name))
        except NotFound as error:
            raise self._missing(name) from error

    def _opened_near(self, name: str) -> int:
        descriptor = self._opened(name)
        if descriptor is None:
            raise FailedPrecondition(f"{name} of {self.title} is not a file on this machine")
        return descriptor

    def head(self, name: str, tensors: Sequence[tuple[str, TensorEntry]]) -> ByteArray:
        """A file's bytes before its first tensor."""
        try:
            self._check_size(name, self._store.size(self._key(name)))
        except NotFound as error:
            raise self._missing(name) from error
        return np.frombuffer(self.fetch(name, 0, tensors[0][1].offset), np.uint8)

    def fetch(self, name: str, start: int, length: int) -> bytes:
        """A part of a file."""
        try:
            return self._store.read_range(self._key(name), start, length)
        except NotFound as error:
            raise self._missing(name) from error
        except InvalidArgument as error:
            raise DataLoss(f"{name} of {self.title} is shorter than the manifest records") from error

    def _check_size(self, name: str, found: int) -> None:
        if found != self._sizes[name]:
            raise DataLoss(f"{name} of {self.title} has {found} bytes, but the manifest records {self._sizes[name]}")

    def _missing(self, name: str) -> DataLoss:
        return DataLoss(f"{name} of {self.title} is missing from the store")


def tensors_of_files(manifest: Manifest) -> dict[str, list[tuple[str, TensorEntry]]]:
    """The tensors of each file that contains tensors, in the order of their offsets."""
    tensors: dict[str, list[tuple[str, TensorEntry]]] = {}
    for name, entry in sorted(manifest.tensors.items(), key=lambda item: (item[1].file, item[1].offset)):
        tensors.setdefault(entry.file, []).append((name, entry))
    return tensors


def _check_places(files: FilesLayout, manifest: Manifest) -> None:
    title = f"{manifest.model}@{manifest.version}"
    for placement in files.layout.placements:
        entry = manifest.tensors.get(placement.shard.tensor)
        spec = files.layout.tensors[placement.shard.tensor]
        if entry is None or (entry.file, entry.offset, entry.dtype, entry.shape) != (
            placement.buffer,
            placement.offset,
            spec.dtype,
            spec.shape,
        ):
            raise DataLoss(f"{placement.shard.tensor} of {title} does not match the manifest, or is stored elsewhere")
    if len(files.layout.tensors) != len(manifest.tensors):
        raise DataLoss(f"{title} lacks tensors that its manifest lists")


def side_files(store: ObjectStore, model: ModelName, number: int) -> dict[str, bytes]:
    """The files of a durable version other than its weights, by name."""
    manifest = read_manifest(store, model, number)
    return {
        name: store.get(version_key(model, number, name))[0]
        for name in manifest.files.keys() - manifest.weight_files - {INDEX_FILE}
    }
