"""Layout of safetensors files: of new ones, and of existing ones by their headers.

Format (https://github.com/huggingface/safetensors#format): 8 bytes, the length N of the header as a little-endian
unsigned integer; N bytes of JSON, ``{"name": {"dtype", "shape", "data_offsets": [begin, end]}, "__metadata__": {}}``,
padded with spaces; then the data, to which the offsets are relative. A folder of several files has
``model.safetensors.index.json`` with ``{"metadata": {"total_size"}, "weight_map": {tensor: file}}``.
"""

from __future__ import annotations

import json
import re
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from weighbridge._core import dtypes
from weighbridge._core.boxes import Box
from weighbridge._core.layouts import Layout, Placement, Shard, TensorSpec, check_spec
from weighbridge._memory.file_reads import OpenFile
from weighbridge.errors import DataLoss, InvalidArgument, NotFound

INDEX_FILE = "model.safetensors.index.json"
DEFAULT_SHARD_BYTES = 5_000_000_000
"""Largest file unless asked otherwise: hubs refuse files over 50 GB, and loaders read files in parallel."""
MAX_HEADER_BYTES = 100_000_000
"""The limit that safetensors' own reader has."""
_ALIGNMENT = 8
_LARGEST = (1 << 63) - 1
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,200}\.safetensors")


@dataclass(frozen=True, slots=True)
class TensorFile:
    """One safetensors file: its name, its first bytes (length and header), and its whole size in bytes."""

    name: str
    header: bytes
    nbytes: int


@dataclass(frozen=True)
class FilesLayout:
    """The files of a model, and where in them every tensor lies. Buffers of the layout are named like the files."""

    files: tuple[TensorFile, ...]
    layout: Layout

    @property
    def file_sizes(self) -> dict[str, int]:
        """Size of each file in bytes."""
        return {file.name: file.nbytes for file in self.files}

    @property
    def index_json(self) -> bytes | None:
        """Content of the index file; None where there is one file and so no index."""
        if len(self.files) == 1:
            return None
        weight_map = {p.shard.tensor: p.buffer for p in self.layout.placements}
        index = {"metadata": {"total_size": self.layout.nbytes}, "weight_map": weight_map}
        return (json.dumps(index, indent=2) + "\n").encode()


def lay_out_files(specs: Sequence[TensorSpec], max_shard_bytes: int = DEFAULT_SHARD_BYTES) -> FilesLayout:
    """Lay whole tensors out in files named as transformers names them.

    Tensors keep their order; within a file, those with wider elements come first, so that every tensor is aligned to
    its element. A tensor larger than ``max_shard_bytes`` gets a file of its own.

    Raises:
        InvalidArgument: ``max_shard_bytes`` is not positive, or there is no tensor.
    """
    if max_shard_bytes <= 0:
        raise InvalidArgument(f"the maximum shard size must be positive, not {max_shard_bytes}")
    if not specs:
        raise InvalidArgument("a model without tensors cannot be laid out")
    groups: list[list[TensorSpec]] = [[]]
    filled = 0
    for spec in specs:
        if groups[-1] and filled + spec.nbytes > max_shard_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(spec)
        filled += spec.nbytes
    files = []
    placements = []
    for number, group in enumerate(groups, start=1):
        name = (
            "model.safetensors" if len(groups) == 1 else f"model-{number:05}-of-{len(groups):05}.safetensors"
        )
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        offset = 0
        ordered = sorted(group, key=lambda spec: -spec.dtype.itemsize)
        for spec in ordered:
            header[spec.name] = {
                "dtype": spec.dtype.name,
                "shape": list(spec.shape),
                "data_offsets": [offset, offset + spec.nbytes],
            }
            offset += spec.nbytes
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % _ALIGNMENT)
        head = len(text).to_bytes(8, "little") + text
        files.append(TensorFile(name, head, len(head) + offset))
        for spec in ordered:
            begin = len(head) + header[spec.name]["data_offsets"][0]
            shard = Shard(spec.name, Box.whole(spec.shape))
            placements.append(Placement(shard, name, begin, spec.nbytes))
    tensors = MappingProxyType({spec.name: spec for spec in specs})
    return FilesLayout(tuple(files), Layout(tensors, tuple(placements)))


def read_header(
    data: memoryview | OpenFile, file: str, nbytes: int | None = None
) -> tuple[TensorFile, list[TensorSpec], list[Placement]]:
    """Read and check the header of a safetensors file, trusting nothing in it.

    Args:
        data: all bytes of the file (of an open one, only the header is read), or at least its length and header.
        file: its name, for placements and messages.
        nbytes: size of the file in bytes; None if ``data`` is all of it.

    Raises:
        DataLoss: the file is cut short, its header is not what the format says, or its tensors overlap, leave gaps or
            reach beyond the end.
    """
    whole = len(data) if nbytes is None else nbytes
    if len(data) < 8:
        raise DataLoss(f"{file} has {len(data)} bytes: too short for a safetensors file")
    length = int.from_bytes(bytes(data[:8]), "little")
    if length > min(MAX_HEADER_BYTES, len(data) - 8):
        raise DataLoss(f"{file} announces a header of {length} bytes and has only {len(data) - 8} more")
    try:
        header = json.loads(bytes(data[8 : 8 + length]).decode("utf-8"), object_pairs_hook=_no_repeats)
        header.pop("__metadata__", None)
        entries = sorted(_entry(name, entry) for name, entry in header.items())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataLoss(f"the header of {file} is not a safetensors header: {error!r}"[:300]) from error
    specs = []
    placements = []
    position = 0
    for begin, end, name, dtype, shape in entries:
        try:
            spec = TensorSpec(name, dtypes.from_safetensors(dtype), shape)
            check_spec(spec)
        except InvalidArgument as error:
            raise type(error)(f"{file}: {error.message}", fix=error.fix) from error
        if begin != position or end - begin != spec.nbytes:
            raise DataLoss(
                f"{file}: {spec} has the data offsets [{begin}, {end}], "
                f"but begins at {position} and takes {spec.nbytes} bytes"
            )
        position = end
        specs.append(spec)
        placements.append(Placement(Shard(name, Box.whole(shape)), file, 8 + length + begin, spec.nbytes))
    if 8 + length + position != whole:
        raise DataLoss(f"{file} has {whole} bytes, its header describes {8 + length + position}")
    return TensorFile(file, bytes(data[: 8 + length]), whole), specs, placements


def _entry(name: str, entry: Any) -> tuple[int, int, str, str, tuple[int, ...]]:
    """Begin, end, name, dtype and shape of one tensor, as a header has them."""
    begin, end = entry["data_offsets"]
    shape = entry["shape"]
    if not isinstance(shape, list) or any(
        type(n) is not int or abs(n) > _LARGEST for n in (begin, end, *shape)
    ):
        raise ValueError(f"offsets and extents of {name[:80]!r} are not integers of 64 bits")
    return begin, end, name, str(entry["dtype"])[:40], tuple(shape)


def _no_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key stands twice")
    return found


def layout_of_files(
    buffers: Mapping[str, memoryview | OpenFile], sizes: Mapping[str, int] | None = None
) -> FilesLayout:
    """The layout of existing files, from their headers.

    Args:
        buffers: by name, what `read_header` takes.
        sizes: of the files in bytes, by name; None if the buffers are all of them.

    Raises:
        DataLoss: a header is wrong, or a tensor stands in two files.
    """
    files = []
    tensors: dict[str, TensorSpec] = {}
    placements: list[Placement] = []
    for name, data in buffers.items():
        file, specs, placed = read_header(data, name, None if sizes is None else sizes[name])
        for spec in specs:
            if spec.name in tensors:
                raise DataLoss(f"{spec.name} stands in {name} and in another file of the same folder")
            tensors[spec.name] = spec
        files.append(file)
        placements += placed
    return FilesLayout(tuple(files), Layout(MappingProxyType(tensors), tuple(placements)))


def map_folder(folder: Path) -> dict[str, OpenFile]:
    """Open all safetensors files that belong to the model in an HF folder.

    Where there is an index, its files are taken, otherwise every ``*.safetensors`` file.

    Raises:
        NotFound: no such folder, no safetensors file in it, or one that the index names is missing.
        DataLoss: the index cannot be read, or names files outside the folder.
    """
    if not folder.is_dir():
        raise NotFound(f"there is no folder {folder}")
    index = folder / INDEX_FILE
    if index.exists():
        try:
            names = sorted(set(json.loads(_read_index(index))["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise DataLoss(f"{index} is not a safetensors index: {error!r}"[:300]) from error
        if any(not isinstance(name, str) or not _FILE_NAME.fullmatch(name) for name in names):
            raise DataLoss(
                f"{index} names something that is no safetensors file, or lies outside of the folder"
            )
    else:
        names = sorted(path.name for path in folder.glob("*.safetensors"))
    if not names:
        raise NotFound(
            f"there are no safetensors files in {folder}",
            fix="save the model with model.save_pretrained(folder), which writes safetensors",
        )
    return {name: map_file(folder / name) for name in names}


def _read_index(index: Path) -> bytes:
    """The content of an index. Raises DataLoss if it is none: what never ends, or has no end in memory, is not read."""
    found = index.stat()
    if not stat.S_ISREG(found.st_mode) or found.st_size > MAX_HEADER_BYTES:
        what = f"of {found.st_size} bytes" if stat.S_ISREG(found.st_mode) else "that is not a regular file"
        raise DataLoss(
            f"{index} is an index {what}",
            fix="save the model again, or remove it if there is one file of weights",
        )
    return index.read_bytes()


def has_weights(folder: Path) -> bool:
    """Whether there are safetensors files in a folder, or should be."""
    return (folder / INDEX_FILE).exists() or any(folder.glob("*.safetensors"))


def map_file(path: Path) -> OpenFile:
    """Open one file, to be read as bytes.

    Raises:
        NotFound: there is no such file.
        DataLoss: there is something else of this name.
    """
    try:
        return OpenFile(path)
    except FileNotFoundError as error:
        raise NotFound(
            f"there is no file {path}", fix="download or save all files of the folder again"
        ) from error
