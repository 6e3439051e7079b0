"""Layout of a torch_dist checkpoint of Megatron-core: of existing folders, and of new ones.

Such a folder is also a checkpoint of ``torch.distributed.checkpoint`` (DCP). It contains ``.metadata``, which lists all
entries and the parts (chunks) in which each tensor is stored; files ``__<rank>_<number>.distcp``, in which chunks
follow each other, each framed as ``torch.save`` frames a tensor; and Megatron's additions, ``metadata.json`` and
``common.pt`` (since 0.19 the entry ``common_state/shard_0_1`` instead). This module reads the folder as a `Layout`: the
raw bytes of every chunk are dense and row-major at an offset of a file, and a plan between two layouts moves them.
Tensors do not pass through torch, and their bytes do not pass through this module.

- `metadata`: the files other than ``.distcp``.
- `items`: one framed chunk.
- `pickles`: reading pickles without executing them.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from weighbridge._core.layouts import Layout, Placement, Shard, TensorSpec
from weighbridge._core.text.counts import first_lines
from weighbridge._core.text.shortening import shown
from weighbridge._formats.naming.weight_files import check_finished
from weighbridge._formats.side_files.regular import fault_of
from weighbridge._trainers.torch_dist.items import ALIGNMENT, Framing, find_tensor, frame
from weighbridge._trainers.torch_dist.metadata import (
    COMMON_FILE,
    CONFIG_FILE,
    METADATA_FILE,
    CheckpointEntries,
    Item,
    KeyPath,
    read_entries,
    saved,
    write_config,
    write_metadata,
)
from weighbridge.errors import DataLoss, InvalidArgument, LayoutError, NotFound

DEFAULT_FILE_BYTES = 5_000_000_000
"""Default maximum size of a file, so that several files can be written and read in parallel."""
MAX_METADATA_BYTES = 256 << 20
"""Maximum size of a ``.metadata`` that is read. A file for 50,000 chunks has about ten megabytes."""


@dataclass(frozen=True)
class TorchDistCheckpoint:
    """Content of an existing checkpoint, and its places in the files.

    Attributes:
        layout: all tensors, weights as well as optimizer states, and the place of each chunk's bytes. Buffers have the
            names of the files, relative to the folder. Chunks may overlap or leave gaps; a plan detects that.
        others: the entries that are not tensors (``..._extra_state/shard_0_1``, ``rng_state/...``), with their places;
            None for a place that cannot be read.
        paths: path of each entry in the saved nested state dict, if the checkpoint contains it.
        file_sizes: size in bytes of each file that the layout names.
    """

    layout: Layout
    others: Mapping[str, Item | None]
    paths: Mapping[str, KeyPath]
    file_sizes: Mapping[str, int]


@dataclass(frozen=True)
class FramedFile:
    """A file with tensors that will be written.

    Attributes:
        name: name of the file.
        nbytes: size of the file.
        framing: ``(offset, bytes)`` of everything in the file other than the raw bytes of tensors, in order. Together
            with the placements of the layout it covers the file.
    """

    name: str
    nbytes: int
    framing: tuple[tuple[int, bytes], ...] = field(repr=False)


@dataclass(frozen=True)
class TorchDistFiles:
    """A checkpoint that will be written.

    Attributes:
        files: the ``.distcp`` files.
        layout: places of the raw bytes of each shard in these files. Buffers have the names of the files.
        metadata_files: name and content of the other files. ``.metadata`` must be written last, because a folder that
            contains it counts as complete.
    """

    files: tuple[FramedFile, ...]
    layout: Layout
    metadata_files: Mapping[str, bytes] = field(repr=False)

    @property
    def file_sizes(self) -> dict[str, int]:
        """Size in bytes of each ``.distcp`` file."""
        return {file.name: file.nbytes for file in self.files}


def read_torch_dist(folder: Path) -> TorchDistCheckpoint:
    """Find all tensors of an untrusted checkpoint without reading weights.

    Raises:
        NotFound: the folder or its ``.metadata`` does not exist, or a file that ``.metadata`` names is missing.
        DataLoss: ``.metadata`` is damaged, names something that could execute code, or contradicts itself; or a chunk
            is not the dense row-major tensor that ``.metadata`` describes, is compressed or is cut short.
        InvalidArgument: a tensor has an unsupported dtype, name or number of axes.
    """
    if not folder.is_dir():
        raise NotFound(f"there is no folder {folder}")
    entries = read_entries(_read_metadata(folder))
    offsets, sizes = _find_chunks(folder, entries)
    placements = []
    for (shard, item), offset in zip(entries.chunks, offsets, strict=True):
        nbytes = shard.box.volume * entries.tensors[shard.tensor].dtype.itemsize
        placements.append(Placement(shard, item.file, offset, nbytes))
    layout = Layout(MappingProxyType(dict(entries.tensors)), tuple(placements))
    return TorchDistCheckpoint(layout, entries.others, entries.paths, MappingProxyType(sizes))


def read_objects(folder: Path, items: Mapping[str, Item | None], most: int) -> dict[str, bytes]:
    """Return the content of entries that are not tensors, as it is in the files.

    Args:
        folder: the checkpoint.
        items: `TorchDistCheckpoint.others`.
        most: maximum number of bytes to read.

    Raises:
        InvalidArgument: the content has more bytes.
        DataLoss: a file is cut short, or the checkpoint does not contain the place of an entry.
        NotFound: a file is missing.
    """
    nbytes = sum(item.length for item in items.values() if item is not None)
    if nbytes > most:
        raise InvalidArgument(f"the entries of {folder} that are not tensors have {nbytes} bytes, more than {most}")
    found = {}
    for name, item in items.items():
        if item is None:
            raise DataLoss(f"{METADATA_FILE} of {folder} does not contain a readable location of {shown(name)}")
        with open_file(folder, item.file) as (fd, _):
            found[name] = os.pread(fd, item.length, item.offset)
        if len(found[name]) != item.length:
            raise DataLoss(
                f"{shown(name)} in {item.file} at {item.offset}: it should have {item.length} "
                "bytes, but the file ends earlier"
            )
    return found


def read_common(folder: Path, most: int) -> bytes | None:
    """Return the content of ``common.pt``; None if the file does not exist.

    Raises:
        InvalidArgument: the file has more than ``most`` bytes.
        DataLoss: ``common.pt`` is not a regular file.
    """
    try:
        with open_file(folder, COMMON_FILE) as (fd, size), open(fd, "rb", closefd=False) as file:
            if size > most:
                raise InvalidArgument(f"{COMMON_FILE} in {folder} has {size} bytes, more than {most}")
            return file.read(size)
    except NotFound:
        return None


def iterations_in(folder: Path) -> list[str]:
    """Return the names of the newest subfolders that contain a checkpoint.

    Training loops write one for each iteration.
    """
    return sorted(path.parent.name for path in folder.glob(f"*/{METADATA_FILE}"))[-3:]


def _read_metadata(folder: Path) -> bytes:
    try:
        with open_file(folder, METADATA_FILE) as (fd, size):
            if size > MAX_METADATA_BYTES:
                raise DataLoss(f"{METADATA_FILE} has {size} bytes, more than any checkpoint's")
            with open(fd, "rb", closefd=False) as file:
                return file.read(size)
    except NotFound as error:
        check_finished(folder, (path.name for path in folder.glob("*")))
        inner = iterations_in(folder)
        if inner:
            fix = f"give the folder of one checkpoint, such as {', '.join(inner)}"
        else:
            fix = (
                "give the folder that holds .metadata and the .distcp files, as Megatron-core "
                "(torch_dist) and torch.distributed.checkpoint write them"
            )
        found = f", only {CONFIG_FILE}" if (folder / CONFIG_FILE).exists() else ""
        raise NotFound(
            f"{folder} is not a torch_dist or DCP checkpoint: it has no {METADATA_FILE}{found}", fix=fix
        ) from error


@contextmanager
def open_file(folder: Path, name: str) -> Iterator[tuple[int, int]]:
    """Open a file of a folder, and yield its descriptor and size.

    Raises:
        NotFound: the file does not exist.
        DataLoss: the path is not a regular file.
        InvalidArgument: the path is a link that leads out of the folder.
    """
    fault = fault_of(folder / name, folder)
    if isinstance(fault, InvalidArgument):
        raise fault
    try:
        # Without O_NONBLOCK, opening a pipe would block.
        fd = os.open(folder / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise NotFound(f"the file {shown(name)} is missing in {folder}") from error
    except OSError as error:
        raise DataLoss(f"{shown(name)} in {folder} cannot be read: {error.strerror}") from error
    try:
        state = os.fstat(fd)
        if not stat.S_ISREG(state.st_mode):
            raise DataLoss(f"{shown(name)} in {folder} is a folder or a device")
        yield fd, state.st_size
    finally:
        os.close(fd)


def _find_chunks(folder: Path, entries: CheckpointEntries) -> tuple[list[int], dict[str, int]]:
    """Return the offset of each chunk's raw bytes in its file, and the size of each file."""
    offsets = [0] * len(entries.chunks)
    sizes: dict[str, int] = {}
    by_file: dict[str, list[int]] = {}
    for index, (_, item) in enumerate(entries.chunks):
        by_file.setdefault(item.file, []).append(index)
    for file, indexes in by_file.items():
        indexes.sort(key=lambda i: entries.chunks[i][1].offset)
        with open_file(folder, file) as (fd, size):
            sizes[file] = size
            for index in indexes:
                shard, item = entries.chunks[index]
                try:
                    offsets[index] = _find_chunk(fd, size, item, entries.tensors[shard.tensor], shard)
                except (DataLoss, OSError) as error:
                    message = error.message if isinstance(error, DataLoss) else f"it cannot be read ({error})"
                    raise DataLoss(
                        f"{entries.tensors[shard.tensor]} {shard.box} in {file} at {item.offset}: {message}"
                    ) from error
    return offsets, sizes


def _find_chunk(fd: int, file_size: int, item: Item, spec: TensorSpec, shard: Shard) -> int:
    if item.offset + item.length > file_size:
        raise DataLoss(f"it should have {item.length} bytes, but the file has {file_size}")
    found = find_tensor(fd, item.offset, item.length)
    if found.dtype != spec.dtype.torch_name or found.shape != shard.box.extent:
        raise DataLoss(f"the file contains a tensor {list(found.shape)} of {found.dtype} instead")
    return item.offset + found.offset


def lay_out_torch_dist(
    shards: Sequence[Shard],
    specs: Sequence[TensorSpec],
    max_file_bytes: int = DEFAULT_FILE_BYTES,
    *,
    common: Mapping[str, Any] | bytes | None = None,
    objects: Mapping[str, bytes] | None = None,
    paths: Mapping[str, KeyPath] | None = None,
    aliases: Mapping[str, str] | None = None,
) -> TorchDistFiles:
    """Arrange shards as a checkpoint that ``torch.distributed.checkpoint`` and Megatron's ``dist_checkpointing`` can
    load.

    Every shard becomes one chunk; chunks have the order of the shards. Replicas (`Shard.main` is false) and shards
    without elements are omitted. A shard larger than ``max_file_bytes`` gets its own file. Raw bytes begin at multiples
    of 64. The same arguments give the same bytes.

    Args:
        shards: the chunks. This function does not check that they cover the tensors; a plan does.
        specs: all tensors.
        max_file_bytes: approximate maximum size of a ``.distcp`` file, including framing.
        common: values in ``common.pt``, such as ``{"iteration": 100}``, as plain Python values; or the file's content.
        objects: entries that are not tensors, such as ``..._extra_state/shard_0_1``, with their content. Megatron
            expects a ``torch.save`` of a list with one object, torch a ``torch.save`` of the object.
        paths: paths of entries in a nested state dict, for torch's own tools; by default entries are at its top level.
        aliases: other names of tensors, each with the name under which the tensor is stored.

    Raises:
        LayoutError: a shard does not fit into its tensor, or its tensor does not exist; two shards begin at the same
            place of a tensor; a tensor does not have a shard; a name occurs twice or is out of bounds.
        InvalidArgument: ``max_file_bytes`` is not positive, or ``specs`` is empty.
    """
    if max_file_bytes <= 0:
        raise InvalidArgument(f"the maximum file size must be positive, not {max_file_bytes}")
    if not specs:
        raise InvalidArgument("a checkpoint without tensors cannot be laid out")
    tensors = Layout.stream(specs, shards).tensors
    objects = objects or {}
    chunks = _stored(shards, tensors, objects)
    writer = _Files(max_file_bytes)
    placements = []
    stored = []
    framings: dict[tuple[Any, ...], Framing] = {}
    for shard in chunks:
        dtype = tensors[shard.tensor].dtype
        nbytes = shard.box.volume * dtype.itemsize
        kind = dtype, shard.box.extent
        if kind not in framings:
            framings[kind] = frame(dtype, shard.box.extent)
        item = writer.add(framings[kind].head, nbytes, framings[kind].tail)
        placements.append(Placement(shard, item.file, item.offset + len(framings[kind].head), nbytes))
        stored.append((shard, item))
    named = list(tensors.values())
    for alias, name in (aliases or {}).items():
        named.append(replace(tensors[name], name=alias))
        stored += [(shard._replace(tensor=alias), item) for shard, item in stored if shard.tensor == name]
    others = {name: writer.add(content, 0, b"") for name, content in sorted(objects.items())}
    metadata_files = {
        CONFIG_FILE: write_config(),
        COMMON_FILE: common if isinstance(common, bytes) else saved(dict(common or {})),
        METADATA_FILE: write_metadata(named, stored, others, paths or {}),
    }
    layout = Layout(tensors, tuple(placements))
    return TorchDistFiles(tuple(writer.done()), layout, MappingProxyType(metadata_files))


def _stored(shards: Sequence[Shard], tensors: Mapping[str, TensorSpec], objects: Mapping[str, bytes]) -> list[Shard]:
    """Return the shards that become chunks."""
    seen: set[tuple[str, tuple[int, ...]]] = set()
    chunks = []
    for shard in shards:
        if not shard.main or (shard.box.volume == 0 and tensors[shard.tensor].nbytes):
            continue
        place = shard.tensor, shard.box.offset
        if place in seen:
            raise LayoutError(f"two shards of {tensors[shard.tensor]} begin at {list(shard.box.offset)}")
        seen.add(place)
        chunks.append(shard)
    bare = tensors.keys() - {shard.tensor for shard in chunks}
    if bare:
        raise LayoutError("some tensors have no stored shard", details=first_lines(sorted(bare)))
    both = objects.keys() & tensors.keys()
    if both:
        raise LayoutError("some objects have the names of tensors", details=first_lines(sorted(both)))
    return chunks


class _Files:
    """Files that are filled one after the other."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._files: list[FramedFile] = []
        self._framing: list[tuple[int, bytes]] = []
        self._nbytes = 0
        self._padded: dict[bytes, bytes] = {}

    def add(self, head: bytes, nbytes: int, tail: bytes) -> Item:
        """Append an item of ``nbytes`` raw bytes between head and tail, and pad it for the next."""
        length = len(head) + nbytes + len(tail)
        if self._nbytes and self._nbytes + length > self._max_bytes:
            self._close()
        item = Item(self._name(), self._nbytes, length)
        padding = bytes(-length % ALIGNMENT)
        end = item.offset + len(head) + nbytes
        self._framing.append((item.offset, head))
        if padding or tail:
            # All chunks of a kind share one object. Otherwise their framing would be the larger part of a small model.
            padded = tail + padding
            self._framing.append((end, self._padded.setdefault(padded, padded)))
        self._nbytes = item.offset + length + len(padding)
        return item

    def done(self) -> Iterator[FramedFile]:
        if self._nbytes:
            self._close()
        yield from self._files

    def _name(self) -> str:
        return f"__{len(self._files)}_0.distcp"

    def _close(self) -> None:
        self._files.append(FramedFile(self._name(), self._nbytes, tuple(self._framing)))
        self._framing = []
        self._nbytes = 0
