"""Weights of a Hugging Face folder, as a stream that is pushed directly from its files."""

from __future__ import annotations

import bisect
import json
import mmap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Self

import numpy as np

from weighbridge._core import dtypes
from weighbridge._core.dtypes import DType
from weighbridge._core.layouts import Layout, Placement, TensorSpec
from weighbridge._core.text.counts import counted
from weighbridge._core.text.shortening import readable
from weighbridge._formats import safetensors_files
from weighbridge._formats.dequantizing import Dequantized
from weighbridge._formats.naming.parameter_names import check_merged, has_own_adapters, head_and_embedding
from weighbridge._formats.naming.weight_files import MERGE_ADAPTER
from weighbridge._formats.push_sources import (
    CastingSource,
    HeldShards,
    MappedSource,
    StreamSource,
    cast_dtypes,
)
from weighbridge._formats.tensor_stream import Ranges, written_as
from weighbridge._memory.file_reads import OpenFile
from weighbridge._transport.pieces import Buffer
from weighbridge.errors import InvalidArgument

if TYPE_CHECKING:
    import torch

    from weighbridge._core.byte_copies import ByteCopy
    from weighbridge._memory.mappings import MappedMemory
    from weighbridge._memory.strided import WrittenCounts


_NAMED = 20


@dataclass(frozen=True)
class HeadBeside:
    """Output head of the same shape and dtype as the embedding.

    The config does not state whether they are tied: that depends on the model's class.

    Attributes:
        head: its name.
        embedding: the embedding's name.
        same: whether both have the same bytes.
    """

    head: str
    embedding: str
    same: bool


@dataclass(frozen=True)
class FolderWeights:
    """The weights in a folder.

    Attributes:
        layout: the weights as one stream, in the order of the files.
        shards: its shards.
        config_json: the config that belongs to them.
        stand_ins: creates tensors without data for checks of names, shapes and dtypes.
        cast_from: safetensors' names of the dtypes in the files that are cast, or dequantised, as they are read.
        remarks: differences between the folder and the pushed weights, for a log.
        beside: a head for which the model's tensors determine whether it is tied; None if there is none.
    """

    layout: Layout
    shards: HeldShards = field(repr=False)
    config_json: bytes = field(repr=False)
    stand_ins: Callable[[], StandIns] = field(repr=False)
    cast_from: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()
    beside: HeadBeside | None = None

    @staticmethod
    def read(folder: Path, config_json: bytes, *, dequantize: DType | None = None) -> FolderWeights:
        """Read the description of the weights in a folder, and check that they are complete.

        Only tensors that must be compared are read.

        A second copy of a tensor that the config ties to another one is left out; additions of wrappers to names are
        removed.

        Args:
            folder: the folder.
            config_json: its ``config.json``.
            dequantize: dtype to which block-quantised fp8 weights are converted as they are read; None keeps them.

        Raises:
            NotFound: the folder does not exist, contains no safetensors file, or a file is missing.
            DataLoss: a file is damaged, or lacks a tensor that the index lists.
            InvalidArgument: the files do not belong to one model, tied tensors differ, or the weights cannot be
                dequantised.
            LayoutError: LoRA adapters are not merged, or two tensors have the same name.
        """
        found = safetensors_files.read_folder(folder)
        if not has_own_adapters(config_json):
            check_merged(found.layout.tensors, MERGE_ADAPTER)
        buffers, remarks = found.buffers, _remarks(folder, found)
        files = _without_copies(found.layout, buffers, config_json)
        if dequantize is not None:
            weights = Dequantized(files, buffers, config_json, dequantize)
            now = weights.layout.tensors
            cast = {
                spec.dtype.name for name, spec in files.tensors.items() if name in now and now[name].dtype != spec.dtype
            }
            return FolderWeights(
                weights.layout,
                weights,
                weights.config_json,
                lambda: StandIns(Layout({}, ()), {}),
                tuple(sorted(cast)),
                remarks,
            )
        layout = Layout.stream(files.tensors.values(), [p.shard for p in files.placements])
        return FolderWeights(
            layout,
            MappedSource(layout, files.placements, buffers),
            config_json,
            lambda: StandIns(files, buffers),
            remarks=remarks,
            beside=_head_beside(files, buffers, config_json),
        )

    def castable_to(self, dtype: str | torch.dtype) -> DType:
        """A dtype that the floating-point weights can be cast to.

        Raises:
            InvalidArgument: the weights or a tensor cannot be cast to it; fp8 tensors are meaningless without their
                scales.
        """
        target = dtypes.parse(dtype)
        if not target.is_float:
            raise InvalidArgument(f"weights cannot be cast to {target}", fix="use bf16, fp16 or fp32")
        for spec in self.layout.tensors.values():
            if spec.dtype.name.startswith("F8_"):
                raise InvalidArgument(
                    f"{spec} cannot be cast to {target}: its values are without their scales",
                    fix="dequantise the weights: --dequantize DTYPE (dequantize=...)",
                )
        return target

    def as_model_has_them(self, model: Mapping[str, TensorSpec], cast: str) -> FolderWeights:
        """The weights in the model's dtypes: unchanged if the dtypes match, otherwise cast as they are read. Errors are
        raised before a version is opened.

        Args:
            model: its tensors, by name.
            cast: as for `torch_shards`.

        A head that the model lacks because its class ties it to the embedding is left out if both are equal.

        Raises:
            InvalidArgument: ``cast`` is unknown, or the head differs.
            LayoutError: names or shapes contradict the model, or a tensor may not be cast; names each.
        """
        from weighbridge._formats.torch_state import check_cast, torch_shards

        check_cast(cast)
        if dict(self.layout.tensors) == dict(model):
            return self
        stand_ins = self.stand_ins()
        tensors, beside = stand_ins.tensors, self.beside
        if beside is not None and beside.embedding in model and beside.head not in model:
            if not beside.same:
                raise _not_tied(beside.head, beside.embedding, "the model's class ties them")
            tensors = {name: tensor for name, tensor in tensors.items() if name != beside.head}
        found = torch_shards(tensors, model, cast=cast, whole=True)
        return replace(
            self,
            layout=found.layout,
            shards=stand_ins.shards(found.layout, found.tensors),
            cast_from=tuple(cast_dtypes(found.layout, found.tensors)),
        )


def _remarks(folder: Path, found: safetensors_files.FolderFiles) -> tuple[str, ...]:
    """Remarks about parts of a folder that are not pushed."""
    remarks = []
    if found.left_out:
        names = ", ".join(map(readable, found.left_out[:_NAMED]))
        remarks.append(f"{names} in {folder}: left out, not part of the model's set of files")
    if found.wrapped:
        remarks.append(
            f"{counted(found.wrapped, 'name')} in {folder}: without the parts that torch.compile, FSDP or DDP added"
        )
    return tuple(remarks)


class StandIns:
    """Tensors without data, in address space that is never accessed.

    The address of one, or of a view of it, identifies the bytes of the files.

    Args:
        files: the tensors and their positions.
        buffers: the files.

    Attributes:
        tensors: by name.
    """

    def __init__(self, files: Layout, buffers: Mapping[str, OpenFile]) -> None:
        import torch

        self._buffers = buffers
        self._placements: list[Placement] = []
        self._starts: list[int] = []
        end = 0
        for placement in files.placements:
            if placement.nbytes:
                self._placements.append(placement)
                self._starts.append(end)
                end += -(-placement.nbytes // _ALIGNMENT) * _ALIGNMENT
        self._space = torch.frombuffer(mmap.mmap(-1, max(end, 1), _NEVER_THERE), dtype=torch.uint8)
        self.tensors: dict[str, torch.Tensor] = {}
        starts = {p.shard.tensor: start for p, start in zip(self._placements, self._starts, strict=True)}
        for placement in files.placements:
            spec, start = files.tensors[placement.shard.tensor], starts.get(placement.shard.tensor, 0)
            data = self._space[start : start + placement.nbytes]
            self.tensors[spec.name] = data.view(spec.dtype.torch).reshape(spec.shape)

    def shards(self, layout: Layout, tensors: Sequence[torch.Tensor]) -> HeldShards:
        """Shards that are read, and cast, as they are pushed.

        Args:
            layout: layout of the shards, as one stream.
            tensors: the tensor of each: a stand-in, or a view of one.
        """
        return _CastFiles(layout, tensors, [self._part(tensor) for tensor in tensors])

    def _part(self, tensor: torch.Tensor) -> _FilePart:
        if not tensor.numel():
            return _FilePart(next(iter(self._buffers.values())), 0, ())
        at = tensor.data_ptr() - self._space.data_ptr()
        index = bisect.bisect_right(self._starts, at) - 1
        place = self._placements[index]
        offset = place.offset + at - self._starts[index]
        strides = tuple(stride * tensor.element_size() for stride in tensor.stride())
        return _FilePart(self._buffers[place.buffer], offset, strides)


class _FilePart(NamedTuple):
    """Place of a tensor's elements in a file: the byte of the first one, and distances on each axis in bytes."""

    file: OpenFile
    offset: int
    strides: tuple[int, ...]


class _CastFiles(CastingSource):
    """Shards in files that are cast as they are read.

    Args:
        layout: of the stream.
        tensors: their stand-ins.
        parts: position of each.
    """

    def __init__(self, layout: Layout, tensors: Sequence[torch.Tensor], parts: Sequence[_FilePart]) -> None:
        super().__init__(layout, tensors)
        self._parts = parts

    def select(self, indexes: Sequence[int], stream: Layout) -> Self:
        """See `HeldShards.select`."""
        made = super().select(indexes, stream)
        made._parts = [self._parts[index] for index in indexes]
        return made

    def stage(self, ranges: Ranges) -> StreamSource:
        """See `ShardSource.stage`."""
        made = _CastStream(self._layout, self._tensors, self._parts)
        return made.shifted(self._shifts) if self._shifts else made

    def write(
        self,
        copies: Sequence[Sequence[ByteCopy[int]]],
        memories: Sequence[MappedMemory],
        on_written: Callable[[Sequence[int]], None] | None = None,
    ) -> WrittenCounts:
        """See `ShardSource.write`. One tensor at a time is in memory."""
        return self.stage([]).write(copies, memories, on_written)


class _CastStream(StreamSource):
    """A stream that is read from files and cast on demand."""

    def __init__(self, layout: Layout, tensors: Sequence[torch.Tensor], parts: Sequence[_FilePart]) -> None:
        super().__init__(layout)
        self._tensors = tensors
        self._parts = parts

    def read(self, start: int, stop: int) -> Buffer:
        """See `StreamSource.read`."""
        found = []
        placements = self._layout.placements
        index = bisect.bisect_right(placements, start, key=lambda each: each.offset + each.nbytes)
        while index < len(placements) and placements[index].offset < stop:
            offset, nbytes = placements[index].offset, placements[index].nbytes
            if nbytes:
                found.append(self._cast(index, max(start - offset, 0), min(stop - offset, nbytes)))
            index += 1
        return found[0] if len(found) == 1 else b"".join(found)

    def _cast(self, index: int, start: int, stop: int) -> memoryview:
        """Bytes of a shard in the dtype of the stream; only the whole rows that contain them are read."""
        import torch

        tensor, part = self._tensors[index], self._parts[index]
        dtype = written_as(self._layout.tensors[self._layout.placements[index].shard.tensor], tensor)
        size, shape, strides = tensor.element_size(), tuple(tensor.shape), part.strides
        if tensor.is_contiguous():
            shape, strides = (tensor.numel(),), (size,)
        row_bytes = tensor.numel() // shape[0] * dtype.itemsize
        first, last = start // row_bytes, -(-stop // row_bytes)
        raw = np.empty((last - first, *shape[1:], size), np.uint8)
        part.file.read_into(raw, part.offset + first * strides[0], (*strides, 1))
        elements = torch.from_numpy(raw.reshape(-1)).view(tensor.dtype)
        cast = elements.to(dtype).view(torch.uint8).numpy()
        return cast[start - first * row_bytes : stop - first * row_bytes].data


_ALIGNMENT = 64
_NEVER_THERE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE
_COMPARED = 32 << 20


def same(buffers: Mapping[str, OpenFile], one: Placement, other: Placement) -> bool:
    """Whether two tensors of the same size are equal."""
    for start in range(0, one.nbytes, _COMPARED):
        end = min(start + _COMPARED, one.nbytes)
        first, second = (buffers[p.buffer][p.offset + start : p.offset + end] for p in (one, other))
        if not np.array_equal(first, second):
            return False
    return True


def tied_copies(config_json: bytes, tensors: Mapping[str, TensorSpec]) -> dict[str, str]:
    """Tensors in the files that a config ties to another tensor, each with that other tensor.

    Published folders contain such copies: transformers omits them when it writes, and ignores them when it reads.
    """
    pair = _alike(tensors) if _says_tied(config_json) is True else None
    return {} if pair is None else {pair[0]: pair[1]}


def _says_tied(config_json: bytes) -> bool | None:
    """Whether a config ties the head to the embedding; None if the model's class decides, or if this is not a
    config.
    """
    try:
        config = json.loads(config_json)
        text = config.get("text_config") or {}
        said = config.get("tie_word_embeddings", text.get("tie_word_embeddings"))
    except (ValueError, AttributeError, RecursionError):
        return None  # the code that reads the config itself reports what is wrong with it
    return said if isinstance(said, bool) else None


def _alike(tensors: Mapping[str, TensorSpec]) -> tuple[str, str] | None:
    """The head and the embedding, if both exist and have the same shape and dtype."""
    pair = head_and_embedding(tensors)
    if pair is None:
        return None
    head, embedding = (tensors[name] for name in pair)
    return pair if (head.dtype, head.shape) == (embedding.dtype, embedding.shape) else None


def _head_beside(files: Layout, buffers: Mapping[str, OpenFile], config_json: bytes) -> HeadBeside | None:
    pair = _alike(files.tensors) if _says_tied(config_json) is None else None
    if pair is None:
        return None
    placed = {p.shard.tensor: p for p in files.placements}
    return HeadBeside(*pair, same(buffers, placed[pair[0]], placed[pair[1]]))


def _not_tied(head: str, embedding: str, why: str) -> InvalidArgument:
    return InvalidArgument(
        f"{head} is not the same as {embedding}, and {why}",
        fix="set tie_word_embeddings to false in config.json, or leave one of them out",
    )


def _without_copies(files: Layout, buffers: Mapping[str, OpenFile], config_json: bytes) -> Layout:
    copies = tied_copies(config_json, files.tensors)
    if not copies:
        return files
    placed = {p.shard.tensor: p for p in files.placements}
    for copy, original in copies.items():
        if not same(buffers, placed[copy], placed[original]):
            raise _not_tied(copy, original, "config.json ties them")
    return files.without(copies)
