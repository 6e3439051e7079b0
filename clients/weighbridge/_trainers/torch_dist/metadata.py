"""Metadata of a torch_dist checkpoint: the content of ``.metadata``, ``metadata.json`` and ``common.pt``.

``.metadata`` is a pickle of ``torch.distributed.checkpoint.metadata.Metadata``: ``state_dict_metadata``, a dict of
entry name to ``TensorStorageMetadata(properties, size, chunks)`` or ``BytesStorageMetadata()``, and ``storage_data``, a
dict of ``MetadataIndex(fqn, offset)`` to ``_StorageInfo(relative_path, offset, length)``, where the offset of an index
is that of a chunk. Megatron-core adds all ranks' plans (``all_local_plans``), older versions ``mcore_data``; neither is
needed to find a tensor. ``metadata.json`` names Megatron's backends, and ``common.pt`` contains the values that are not
sharded. Sources: torch/distributed/checkpoint/{metadata,filesystem}.py of torch 2.13, megatron/core/dist_checkpointing
of 0.16.1.
"""

from __future__ import annotations

import io
import json
import math
import pickle
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

from weighbridge._core import dtypes
from weighbridge._core.boxes import Box
from weighbridge._core.layouts import MAX_RANK, Shard, TensorSpec, check_spec
from weighbridge._core.text.shortening import shown
from weighbridge._trainers.torch_dist.names import KNOWN
from weighbridge._trainers.torch_dist.pickles import (
    Instance,
    PickledName,
    are_sizes,
    read_pickle,
)
from weighbridge.errors import DataLoss, InvalidArgument

METADATA_FILE = ".metadata"
CONFIG_FILE = "metadata.json"
COMMON_FILE = "common.pt"
_MAX_PATH = 64

_METADATA = "torch.distributed.checkpoint.metadata.Metadata"
_MCORE_METADATA = "megatron.core.dist_checkpointing.strategies.torch.MCoreMetadata"
_TENSOR = "torch.distributed.checkpoint.metadata.TensorStorageMetadata"
_BYTES = "torch.distributed.checkpoint.metadata.BytesStorageMetadata"
_CHUNK = "torch.distributed.checkpoint.metadata.ChunkStorageMetadata"
_PROPERTIES = (
    "torch.distributed.checkpoint.metadata.TensorProperties",
    "torch.distributed._shard.sharded_tensor.metadata.TensorProperties",
)
_INDEX = "torch.distributed.checkpoint.metadata.MetadataIndex"
_INFO = "torch.distributed.checkpoint.filesystem._StorageInfo"


@dataclass(frozen=True, slots=True)
class Item:
    """Place of a chunk's archive: file, relative to the checkpoint's folder, offset, and length in bytes."""

    file: str
    offset: int
    length: int


KeyPath: TypeAlias = tuple[str | int, ...]
"""Keys of dicts and indexes of lists, from the outermost to the innermost."""


@dataclass(frozen=True)
class CheckpointEntries:
    """Entries of a checkpoint.

    Attributes:
        tensors: all tensors by name.
        chunks: every stored part of a tensor, with its place.
        others: places of the entries that are not tensors, by name; None for a place that cannot be read from
            ``.metadata``.
        paths: path of each entry in the saved nested state dict, if ``.metadata`` contains it.
    """

    tensors: Mapping[str, TensorSpec]
    chunks: Sequence[tuple[Shard, Item]]
    others: Mapping[str, Item | None]
    paths: Mapping[str, KeyPath]


def read_entries(data: bytes) -> CheckpointEntries:
    """Read ``.metadata`` without executing code from it.

    Raises:
        DataLoss: the data is not such a pickle, or names types that do not belong in one; a chunk does not fit into its
            tensor, occurs twice or has no storage; or its storage is transformed or outside the folder.
        InvalidArgument: a tensor has an unsupported dtype, name or number of axes.
    """
    metadata = _instance(read_pickle(data, KNOWN, METADATA_FILE), _METADATA, _MCORE_METADATA)
    entries, storage = metadata.fields("state_dict_metadata", "storage_data")
    if type(entries) is not dict or type(storage) is not dict:
        raise DataLoss(f"{METADATA_FILE} has no entries, or no locations of entries")
    items = _read_storage(storage)
    tensors: dict[str, TensorSpec] = {}
    chunks: list[tuple[Shard, Item]] = []
    others: dict[str, Item | None] = {}
    counted = 0
    for name, entry in entries.items():
        if type(name) is not str:
            raise DataLoss(f"{METADATA_FILE} has an entry whose name is not a string")
        if type(entry) is Instance and entry.kind == _BYTES:
            item = items.get((name, None))
            others[name] = item if isinstance(item, Item) else None
            continue
        spec, boxes = _read_tensor(name, entry)
        counted += len(entry.state["chunks"])
        if counted > len(data):
            # a pickle may refer to the same list many times; torch writes about a hundred bytes for each chunk
            raise DataLoss(f"{METADATA_FILE} lists more chunks than can be in its {len(data)} bytes")
        tensors[name] = spec
        seen = set()
        for box in boxes:
            if box.offset in seen:
                raise DataLoss(f"{METADATA_FILE} lists two chunks of {spec} at {list(box.offset)}")
            seen.add(box.offset)
            item = items.get((name, box.offset))
            if item is None:
                raise DataLoss(f"{METADATA_FILE} does not say where {spec} {box} is stored")
            if isinstance(item, str):
                raise DataLoss(f"{METADATA_FILE} stores {spec} {box} in a way that cannot be read: {item}")
            chunks.append((Shard(name, box), item))
    return CheckpointEntries(tensors, chunks, others, _read_paths(metadata.state.get("planner_data"), entries))


def _read_paths(paths: Any, entries: Mapping[str, Any]) -> dict[str, KeyPath]:
    """Return the paths of entries. Other data that planners store there is ignored."""
    if type(paths) is not dict:
        return {}
    return {name: path for name, path in paths.items() if type(name) is str and name in entries and is_path(path)}


def is_path(path: Any) -> bool:
    """Whether a value from a pickle is a `KeyPath`."""
    # a pickle may refer to the same tuple many times
    return type(path) is tuple and 0 < len(path) <= _MAX_PATH and all(type(each) in (str, int) for each in path)


def _instance(value: Any, *kinds: str) -> Instance:
    if type(value) is not Instance or value.kind not in kinds:
        raise DataLoss(f"{METADATA_FILE} contains another value where a {kinds[0]} is expected")
    return value


def _read_storage(storage: Mapping[Any, Any]) -> Mapping[tuple[str, tuple[int, ...] | None], Item | str]:
    """Return the places of chunks by entry and offset. The offset is None for an entry that is not a tensor. A place
    that cannot be read is a sentence with the reason.
    """
    items: dict[tuple[str, tuple[int, ...] | None], Item | str] = {}
    for index, info in storage.items():
        fields = _instance(index, _INDEX).fields("fqn")
        offset = index.state.get("offset")
        if type(fields[0]) is not str or not (offset is None or (_is_short(offset) and are_sizes(offset))):
            raise DataLoss(f"{METADATA_FILE} has an index with an invalid name or offset")
        key = fields[0], offset
        if key in items:
            raise DataLoss(f"{METADATA_FILE} stores {shown(fields[0])} {list(offset or ())} twice")
        items[key] = _read_item(_instance(info, _INFO))
    return items


def _is_short(sizes: Any) -> bool:
    """Whether a tuple has at most as many items as a tensor can have axes. Reading long tuples that many entries share
    would take very long.
    """
    return type(sizes) is tuple and len(sizes) <= MAX_RANK


def _read_item(info: Instance) -> Item | str:
    file, offset, length = info.fields("relative_path", "offset", "length")
    if type(file) is not str or not are_sizes((offset, length)):
        return "its file, offset or length is invalid"
    if outside := _outside(file):
        return outside
    if info.state.get("transform_descriptors"):
        return "it was transformed when it was written, for example compressed"
    return Item(file, offset, length)


@lru_cache(maxsize=1024)  # many chunks are in one file
def _outside(file: str) -> str:
    """Return the reason why a relative path must not be opened; empty if it may be opened."""
    parts = file.split("/")
    if len(file) > 1024 or not file.isprintable() or any(part in ("", ".", "..") for part in parts):
        return f"its file {shown(file)} is not the plain name of a file in the checkpoint's folder"
    return ""


def _read_tensor(name: str, entry: Any) -> tuple[TensorSpec, list[Box]]:
    properties, size, chunks = _instance(entry, _TENSOR).fields("properties", "size", "chunks")
    state = _instance(properties, *_PROPERTIES).state
    if type(state) is not tuple or not state or type(state[0]) is not PickledName:
        raise DataLoss(f"{METADATA_FILE} does not contain the dtype of {shown(name)}")
    if not are_sizes(size) or type(chunks) is not list:
        raise DataLoss(f"{METADATA_FILE} does not contain the shape of {shown(name)}, or its chunks")
    try:
        dtype = dtypes.parse(state[0].name)
    except InvalidArgument as error:
        raise InvalidArgument(f"{shown(name)}: {error.message}", fix=error.fix) from error
    spec = TensorSpec(name, dtype, size)
    check_spec(spec)
    boxes = []
    for chunk in chunks:
        offset, extent = _instance(chunk, _CHUNK).fields("offsets", "sizes")
        if not (_is_short(offset) and _is_short(extent) and are_sizes(offset) and are_sizes(extent)):
            raise DataLoss(f"{METADATA_FILE} has a chunk of {spec} without offset or size")
        box = Box(offset, extent)
        if len(offset) != len(extent) or not box.fits(size):
            raise DataLoss(
                f"{METADATA_FILE} has a chunk at {list(offset)[:9]} of size {list(extent)[:9]} that does not fit "
                f"into {spec}"
            )
        # Ranks that do not have elements of an unevenly sharded tensor still list their part of it.
        if box.volume or not math.prod(size):
            boxes.append(box)
    return spec, boxes


def write_metadata(
    specs: Iterable[TensorSpec],
    chunks: Iterable[tuple[Shard, Item]],
    objects: Mapping[str, Item],
    paths: Mapping[str, KeyPath],
) -> bytes:
    """Return the content of ``.metadata``. It uses the classes of the installed torch, because they will read it.

    With the same versions of torch and Python, the same arguments give the same bytes.

    Args:
        specs: all tensors.
        chunks: chunks of the tensors, with their places.
        objects: entries that are not tensors, with their places.
        paths: paths of entries in a nested state dict. Entries without a path are at its top level.
    """
    import torch
    from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        BytesStorageMetadata,
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

    # A pickle refers back to objects that it already contains, so equal names must be the same object here.
    tensors = {}
    for spec in specs:
        properties = TensorProperties(dtype=spec.dtype.torch)
        tensors[sys.intern(spec.name)] = TensorStorageMetadata(properties, torch.Size(spec.shape), [])
    storage = {}
    for shard, item in chunks:
        chunk = ChunkStorageMetadata(torch.Size(shard.box.offset), torch.Size(shard.box.extent))
        tensors[shard.tensor].chunks.append(chunk)
        index = MetadataIndex(sys.intern(shard.tensor), chunk.offsets)
        storage[index] = _StorageInfo(sys.intern(item.file), item.offset, item.length)
    for name, item in objects.items():
        index = MetadataIndex(sys.intern(name))
        storage[index] = _StorageInfo(sys.intern(item.file), item.offset, item.length)
    entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {
        **tensors,
        **{sys.intern(name): BytesStorageMetadata() for name in objects},
    }
    # With planner_data, torch's own dcp_to_torch_save can turn the checkpoint into a plain file.
    metadata = Metadata(
        state_dict_metadata=entries,
        planner_data={name: paths.get(name, (name,)) for name in entries},
        storage_data=storage,
        version=CURRENT_DCP_VERSION,
    )
    return pickle.dumps(metadata, protocol=4)


def write_config() -> bytes:
    """Return the content of ``metadata.json``, by which Megatron chooses how to load."""
    backends = {
        "sharded_backend": "torch_dist",
        "sharded_backend_version": 1,
        "common_backend": "torch",
        "common_backend_version": 1,
    }
    return json.dumps(backends).encode()


def saved(value: Any) -> bytes:
    """Encode a value with ``torch.save``, the format of ``common.pt`` and of entries that are not tensors."""
    import torch

    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()
