"""Layout of safetensors files: of new ones, and of existing ones by their headers.

Format (https://github.com/huggingface/safetensors#format): 8 bytes, the length N of the header as a little-endian
unsigned integer; N bytes of JSON, ``{"name": {"dtype", "shape", "data_offsets": [begin, end]}, "__metadata__": {}}``,
padded with spaces; then the data, to which the offsets are relative. A folder of several files has
``model.safetensors.index.json`` with ``{"metadata": {"total_size"}, "weight_map": {tensor: file}}``.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from weighbridge._core import dtypes
from weighbridge._core.boxes import Box
from weighbridge._core.layouts import Layout, Placement, Shard, TensorSpec, check_spec
from weighbridge._formats.naming.parameter_names import unwrapped_names
from weighbridge._formats.naming.weight_files import (
    ADAPTER_WEIGHTS,
    check_finished,
    check_listed,
    check_parts,
    weight_files,
)
from weighbridge._formats.side_files.regular import open_regular
from weighbridge._memory.file_reads import OpenFile
from weighbridge.errors import DataLoss, InvalidArgument, NotFound

INDEX_FILE = "model.safetensors.index.json"
DEFAULT_SHARD_BYTES = 5_000_000_000
"""Default maximum size of a file: hubs refuse files over 50 GB, and loaders read files in parallel."""
MAX_HEADER_BYTES = 100_000_000
"""The limit of safetensors' own reader."""
_SHARDING = "DCP_SHARDING_INFO"
"""Key in the metadata of headers under which torch's HuggingFaceStorageWriter records where parts of tensors begin."""
_ALIGNMENT = 8
_LARGEST = (1 << 63) - 1
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,200}\.safetensors")


@dataclass(frozen=True, slots=True)
class TensorFile:
    """One safetensors file.

    Attributes:
        name: its name.
        header: its first bytes: length and header.
        nbytes: its whole size in bytes.
        metadata: the header's ``__metadata__``, as strings.
    """

    name: str
    header: bytes
    nbytes: int
    metadata: Mapping[str, str] = field(default_factory=dict, compare=False)


@dataclass(frozen=True)
class FilesLayout:
    """The files of a model, and the position of every tensor in them.

    Buffers of the layout are named like the files.
    """

    files: tuple[TensorFile, ...]
    layout: Layout

    @property
    def file_sizes(self) -> dict[str, int]:
        """Size of each file in bytes."""
        return {file.name: file.nbytes for file in self.files}

    @property
    def index_json(self) -> bytes | None:
        """Content of the index file; None if there is a single file and therefore no index."""
        if len(self.files) == 1:
            return None
        weight_map = {p.shard.tensor: p.buffer for p in self.layout.placements}
        index = {"metadata": {"total_size": self.layout.nbytes}, "weight_map": weight_map}
        return (json.dumps(index, indent=2) + "\n").encode()


def lay_out_adapter(specs: Sequence[TensorSpec]) -> FilesLayout:
    """Lay out the tensors of an adapter in one file, as peft does. Raises as `lay_out_files`."""
    return lay_out_files(specs, _LARGEST, single=ADAPTER_WEIGHTS)


def lay_out_files(
    specs: Sequence[TensorSpec],
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    *,
    single: str = "model.safetensors",
) -> FilesLayout:
    """Lay out whole tensors in files with transformers' names.

    Tensors keep their order; within a file, those with wider elements come first, so that every tensor is aligned to
    its element. A tensor larger than ``max_shard_bytes`` gets a separate file. If there is only one file, its name is
    ``single``.

    Raises:
        InvalidArgument: ``max_shard_bytes`` is not positive, or there are no tensors.
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
        name = single if len(groups) == 1 else f"model-{number:05}-of-{len(groups):05}.safetensors"
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
        nbytes: size of the file in bytes; None if ``data`` is the whole file.

    Raises:
        DataLoss: the file is truncated, its header violates the format, or its tensors overlap, leave gaps or exceed
            the end.
    """
    whole = len(data) if nbytes is None else nbytes
    if len(data) < 8:
        raise DataLoss(f"{file} has {len(data)} bytes: too short for a safetensors file")
    length = int.from_bytes(bytes(data[:8]), "little")
    if length > min(MAX_HEADER_BYTES, len(data) - 8):
        raise DataLoss(f"{file} declares a header of {length} bytes and has only {len(data) - 8} more")
    try:
        header = json.loads(bytes(data[8 : 8 + length]).decode("utf-8"), object_pairs_hook=_no_repeats)
        metadata = _texts(header.pop("__metadata__", None))
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
    return TensorFile(file, bytes(data[: 8 + length]), whole, metadata), specs, placements


def _texts(metadata: Any) -> dict[str, str]:
    """Strings in the metadata of a header, without other values, which not all readers refuse."""
    found = metadata.items() if isinstance(metadata, dict) else ()
    return {key: value for key, value in found if isinstance(value, str)}


def _entry(name: str, entry: Any) -> tuple[int, int, str, str, tuple[int, ...]]:
    """Begin, end, name, dtype and shape of one tensor, from a header."""
    begin, end = entry["data_offsets"]
    shape = entry["shape"]
    if not isinstance(shape, list) or any(type(n) is not int or abs(n) > _LARGEST for n in (begin, end, *shape)):
        raise ValueError(f"offsets and extents of {name[:80]!r} are not 64-bit integers")
    return begin, end, name, str(entry["dtype"])[:40], tuple(shape)


def _no_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key occurs twice")
    return found


def layout_of_files(
    buffers: Mapping[str, memoryview | OpenFile], sizes: Mapping[str, int] | None = None
) -> FilesLayout:
    """The layout of existing files, from their headers.

    Args:
        buffers: by name, data for `read_header`.
        sizes: sizes of the files in bytes, by name; None if the buffers are whole files.

    Raises:
        DataLoss: a header is invalid, or a tensor is in two files.
    """
    files = []
    tensors: dict[str, TensorSpec] = {}
    placements: list[Placement] = []
    for name, data in buffers.items():
        file, specs, placed = read_header(data, name, None if sizes is None else sizes[name])
        for spec in specs:
            if spec.name in tensors:
                raise DataLoss(f"{spec.name} is in {name} and in another file of the same folder")
            tensors[spec.name] = spec
        files.append(file)
        placements += placed
    return FilesLayout(tuple(files), Layout(MappingProxyType(tensors), tuple(placements)))


@dataclass(frozen=True)
class FolderFiles:
    """The weights in a folder, complete according to the folder's index and file names.

    Attributes:
        layout: the tensors, by their names without those of wrappers, and their positions. Buffers are named like the
            files.
        buffers: the files, open for reading.
        left_out: names of safetensors files in the folder that are not the model's.
        wrapped: number of names that contained names of wrappers.
    """

    layout: Layout
    buffers: Mapping[str, OpenFile] = field(repr=False)
    left_out: tuple[str, ...] = ()
    wrapped: int = 0


def read_folder(folder: Path, *, by_path: bool = False) -> FolderFiles:
    """Open the weights in an HF folder, and compare its index, the names of its files and their headers.

    Args:
        folder: the folder.
        by_path: whether buffers, and files in errors, are named by their paths.

    Raises:
        NotFound: as `map_folder`.
        DataLoss: as `map_folder` and `layout_of_files`, or the files lack a tensor that the index lists.
        InvalidArgument: a file is a link out of the folder; or files belong to several models, are an adapter's, or
            each hold one rank's parts of tensors.
        LayoutError: two tensors would have the same name without those of wrappers.
    """
    names, left_out, listed = _weights_in(folder)
    buffers = {str(folder / name) if by_path else name: map_file(folder, name) for name in names}
    found = layout_of_files({name: data.data for name, data in buffers.items()})
    for file in found.files:
        check_parts(file.name, file.metadata, _offsets_of_parts(file))
    check_listed(listed, found.layout.tensors)
    own = unwrapped_names(found.layout.tensors)
    wrapped = sum(name != given for given, name in own.items())
    return FolderFiles(found.layout.renamed(own) if wrapped else found.layout, buffers, left_out, wrapped)


def _offsets_of_parts(file: TensorFile) -> dict[str, list[int]]:
    """Offsets of the parts of tensors in a file, as torch's HuggingFaceStorageWriter records them.

    Raises DataLoss if they cannot be read.
    """
    noted = file.metadata.get(_SHARDING)
    if noted is None:
        return {}
    try:
        return {name: [int(n) for n in of["saved_offsets"]] for name, of in json.loads(noted).items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataLoss(f"{_SHARDING} in the header of {file.name} cannot be read: {error!r}"[:300]) from error


def map_folder(folder: Path) -> dict[str, OpenFile]:
    """Open all safetensors files of the model in an HF folder, as selected by `weight_files`.

    Raises:
        NotFound: the folder does not exist, contains no safetensors file, or lacks a file that the index or the names
            of other files imply.
        DataLoss: the index cannot be read, or names files outside the folder.
        InvalidArgument: files belong to several models, are an adapter's, or each hold one rank's parts of tensors.
    """
    names, _, _ = _weights_in(folder)
    return {name: map_file(folder, name) for name in names}


def _weights_in(folder: Path) -> tuple[tuple[str, ...], tuple[str, ...], Mapping[str, str]]:
    """Files that contain a folder's weights, the other safetensors files in it, and its index, which is empty if there
    is none.
    """
    if not folder.is_dir():
        raise NotFound(f"there is no folder {folder}")
    there = [path.name for path in folder.glob("*.safetensors")]
    index = folder / INDEX_FILE
    listed: dict[str, str] = {}
    has_index = os.path.lexists(index)  # a dangling link counts as a missing index
    if has_index:
        try:
            listed = dict(json.loads(_read_index(index, folder))["weight_map"].items())
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise DataLoss(f"{index} is not a safetensors index: {error!r}"[:300]) from error
        files: list[Any] = list(listed.values())
        if any(not isinstance(name, str) or not _FILE_NAME.fullmatch(name) for name in files):
            raise DataLoss(f"{index} names something that is not a safetensors file, or is outside the folder")
    found = weight_files(there, listed.values() if has_index else None)
    if not found.taken:
        check_finished(folder, (path.name for path in folder.glob("*")))
        raise NotFound(
            f"there are no safetensors files in {folder}",
            fix=f"{' and '.join(pickled)} cannot be read without running the code in them: load "
            "the folder with transformers' from_pretrained, "
            "and save it with save_pretrained(NEW_FOLDER), which writes safetensors"
            if (pickled := sorted(path.name for path in folder.glob("pytorch_model*.bin"))[:3])
            else "save the model with model.save_pretrained(folder), which writes safetensors",
        )
    return found.taken, found.left_out, listed


def _read_index(index: Path, folder: Path) -> bytes:
    """The content of an index. Endless or too large files are not read.

    Raises:
        NotFound: it is a dangling link.
        DataLoss: it is not an index.
        InvalidArgument: it is a link out of the folder.
    """
    with os.fdopen(open_regular(index, folder), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > MAX_HEADER_BYTES:
            raise DataLoss(
                f"{index} has {size} bytes, too many for an index",
                fix="save the model again, or remove the index if there is only one file of weights",
            )
        return file.read(MAX_HEADER_BYTES)


def has_weights(folder: Path) -> bool:
    """Whether a folder contains safetensors files, or should contain them."""
    return os.path.lexists(folder / INDEX_FILE) or any(folder.glob("*.safetensors"))


def map_file(folder: Path, name: str) -> OpenFile:
    """Open one file of a folder for reading as bytes.

    Raises:
        NotFound: the file does not exist.
        DataLoss: the name belongs to something else than a file.
        InvalidArgument: it is a link out of the folder.
    """
    return OpenFile(folder / name, open_regular(folder / name, folder))
