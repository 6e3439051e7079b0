"""Transfer: execution of a plan, range by range of a stream.

One side of the plan is a stream, which is sent in messages that may end anywhere. The other side is the files of an
image. Each range of the stream is compiled to a list of strided copies. The list is cached, because every version with
the same layouts has the same messages.
"""

from __future__ import annotations

import bisect
import math
import uuid
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from weighbridge._core.boxes import Box, row_major_boxes
from weighbridge._core.byte_copies import ByteCopy
from weighbridge._core.layouts import STREAM
from weighbridge_service.plan.planning import Copy, Plan
from weighbridge_storage.memory.file_bytes import FileBytes

Bytes = NDArray[np.uint8]
_KEPT_RANGES = 16_384
"""Maximum number of cached ranges per transfer: 16 GiB of stream in messages of 1 MiB."""


class _Part(NamedTuple):
    """A copy of the plan, seen from the shard on the stream's side."""

    box: Box
    other: int
    other_box: Box
    axes: tuple[int | None, ...]  # for each axis of the other side, the axis on the stream's side


class _Range(NamedTuple):
    """A compiled range of the stream: its copies, and the number of bytes of each file that they fill or read."""

    pieces: tuple[ByteCopy[str], ...]
    filled: Mapping[str, int]


class StreamShards(NamedTuple):
    """Shards of one stream, in the order of their bytes; empty shards are omitted.

    Attributes:
        starts, ends: first byte in the stream, and one past the last, of each shard; ``[shards]``.
        first: index of each shard's first part, and the number of all parts; ``[shards + 1]``.
        places: index of the placement in the files, of each part; ``[parts]``.
        nbytes: bytes of each part; ``[parts]``.
    """

    starts: NDArray[np.int64]
    ends: NDArray[np.int64]
    first: NDArray[np.int64]
    places: NDArray[np.int64]
    nbytes: NDArray[np.int64]


class Transfer:
    """A plan, ready for execution.

    Args:
        plan: the plan.
        scatter: whether the stream is the plan's source (a push) or its target (a pull, a restore).

    Attributes:
        files: layout of the files.
        parts: number of copies in the plan.
        identity: id that is unique among all transfers of all processes.
    """

    def __init__(self, plan: Plan, *, scatter: bool) -> None:
        self._stream, self.files = (plan.source, plan.target) if scatter else (plan.target, plan.source)
        self._scatter = scatter
        self._copies: list[list[Copy]] = [[] for _ in self._stream.placements]
        for copy in plan.copies:
            self._copies[copy.source if scatter else copy.target].append(copy)
        self.parts = len(plan.copies)
        self.identity = uuid.uuid4().hex
        self._has_zeros = bool(plan.zeros)
        self._order: dict[str, list[int]] = {}
        for index, placement in enumerate(self._stream.placements):
            if placement.nbytes:
                self._order.setdefault(placement.buffer, []).append(index)
        self._starts = {
            buffer: [self._stream.placements[i].offset for i in order] for buffer, order in self._order.items()
        }
        self._ranges: dict[tuple[str, int, int], _Range] = {}
        self._filled: dict[tuple[str, int, int], Mapping[str, int]] = {}
        self._shards: dict[str, StreamShards] = {}

    def scatter(self, data: Any, offset: int, files: Mapping[str, Bytes], buffer: str = STREAM) -> Mapping[str, int]:
        """Copy a range of a stream to its places in the files.

        Args:
            data: bytes of the range, any buffer.
            offset: offset of the range in the stream.
            files: writable bytes of each file; bytes for other files are skipped.
            buffer: name of the stream, if there are several.

        Returns:
            Number of bytes that the range fills in each file, including skipped files.
        """
        stream = np.frombuffer(data, dtype=np.uint8)
        compiled = self._range(buffer, offset, offset + len(stream))
        for piece in compiled.pieces:
            if piece.file not in files:
                continue
            if piece.dense:
                end = piece.file_offset + piece.extent[0]
                files[piece.file][piece.file_offset : end] = stream[
                    piece.stream_offset : piece.stream_offset + piece.extent[0]
                ]
            else:
                np.copyto(_view_file(piece, files), _view_stream(piece, stream))
        return compiled.filled

    def gather(self, offset: int, length: int, files: Mapping[str, FileBytes]) -> memoryview:
        """Read a range of the stream from its places in the files; a view of the file if the range is contiguous there.

        Raises:
            DataLoss, Unavailable, ResourceExhausted: as `FileBytes`.
        """
        pieces = self._range(STREAM, offset, offset + length).pieces
        if len(pieces) == 1 and pieces[0].dense and pieces[0].extent[0] == length:
            return files[pieces[0].file].read(pieces[0].file_offset, length).data
        stream = np.zeros(length, np.uint8) if self._has_zeros else np.empty(length, np.uint8)
        for piece in pieces:
            target = _view_stream(piece, stream)
            files[piece.file].copy_to(target, piece.file_offset, piece.file_strides)
        return stream.data

    def collect(self, start: int, stop: int, files: Mapping[str, Bytes], buffer: str = STREAM) -> Bytes | None:
        """Gather a range of a stream from its places in the files; the inverse of `scatter`.

        Args:
            start: first byte of the range.
            stop: one past its last byte.
            files: bytes of each file.
            buffer: name of the stream, if there are several.

        Returns:
            The bytes, as a view if they are contiguous in a file; None if these files do not contain all of them.
        """
        pieces = self._range(buffer, start, stop).pieces
        if any(piece.file not in files for piece in pieces):
            return None
        if len(pieces) == 1 and pieces[0].dense and pieces[0].extent[0] == stop - start:
            offset = pieces[0].file_offset
            return files[pieces[0].file][offset : offset + stop - start]
        stream, covered = np.empty(stop - start, np.uint8), np.zeros(stop - start, np.uint8)
        for piece in pieces:
            np.copyto(_view_stream(piece, stream), _view_file(piece, files))
            _view_stream(piece, covered)[...] = 1
        return stream if covered.all() else None

    def pieces(self, start: int, stop: int, buffer: str = STREAM) -> list[ByteCopy[str]]:
        """The copies of a range of a stream, for execution by the caller.

        Args:
            start: first byte of the range.
            stop: one past its last byte.
            buffer: name of the stream, if there are several.
        """
        return list(self._compile(buffer, start, stop))

    def shards(self, buffer: str = STREAM) -> StreamShards:
        """The shards of a stream, and the places of their bytes. Cached, since a plan serves many versions."""
        found = self._shards.get(buffer)
        if found is None:
            order = self._order.get(buffer, [])
            placements = [self._stream.placements[index] for index in order]
            copies = [[self._part(copy) for copy in self._copies[index]] for index in order]
            found = self._shards[buffer] = StreamShards(
                np.array([each.offset for each in placements], np.int64),
                np.array([each.offset + each.nbytes for each in placements], np.int64),
                np.cumsum([0, *map(len, copies)]),
                np.array([part.other for of_shard in copies for part in of_shard], np.int64),
                np.array([self._nbytes(part) for of_shard in copies for part in of_shard], np.int64),
            )
        return found

    def _nbytes(self, part: _Part) -> int:
        return part.other_box.volume * self.files.tensors[self.files.placements[part.other].shard.tensor].dtype.itemsize

    def filled(self, start: int, stop: int, buffer: str = STREAM) -> Mapping[str, int]:
        """Number of bytes that a range of a stream fills in each file; the result of `scatter` without the copies."""
        found = self._filled.get((buffer, start, stop))
        if found is None:
            known = self._ranges.get((buffer, start, stop))
            # compiled copies are not cached here: a whole stream has many, and they are not needed again
            found = _fills(self._compile(buffer, start, stop)) if known is None else known.filled
            if len(self._filled) < _KEPT_RANGES:
                self._filled[buffer, start, stop] = found
        return found

    def _range(self, buffer: str, start: int, stop: int) -> _Range:
        found = self._ranges.get((buffer, start, stop))
        if found is None:
            pieces = tuple(self._compile(buffer, start, stop))
            found = _Range(pieces, _fills(pieces))
            if len(self._ranges) < _KEPT_RANGES:
                self._ranges[buffer, start, stop] = found
        return found

    def _compile(self, buffer: str, start: int, stop: int) -> Iterator[ByteCopy[str]]:
        order = self._order.get(buffer, [])
        first = bisect.bisect_right(self._starts.get(buffer, []), start) - 1
        for position in range(max(first, 0), len(order)):  # a slice would copy the rest of the list
            index = order[position]
            placement = self._stream.placements[index]
            if placement.offset >= stop:
                break
            # the bytes of an element are an additional axis, so that a range may begin and end inside an element
            itemsize = self._stream.tensors[placement.shard.tensor].dtype.itemsize
            extent = (*placement.shard.box.extent, itemsize)
            begin = max(start - placement.offset, 0)
            end = min(stop - placement.offset, placement.nbytes)
            parts = list(map(self._part, self._copies[index]))
            for box in row_major_boxes(extent, begin, end):
                for part in parts:
                    common = box.intersect(Box((*part.box.offset, 0), (*part.box.extent, itemsize)))
                    if common is not None:
                        yield self._piece(common, part, extent, placement.offset - start)

    def _part(self, copy: Copy) -> _Part:
        if self._scatter:
            return _Part(copy.source_box, copy.target, copy.target_box, copy.axes)
        axes = _inverse(copy.axes, len(copy.source_box.offset))
        return _Part(copy.target_box, copy.source, copy.source_box, axes)

    def _piece(self, box: Box, part: _Part, extent: tuple[int, ...], stream_base: int) -> ByteCopy[str]:
        other = self.files.placements[part.other]
        stream_strides = _row_major(extent)
        file_axis_strides = _row_major((*other.shard.box.extent, extent[-1]))
        file_strides = [0] * len(extent)
        file_offset = other.offset + box.offset[-1]
        file_strides[-1] = 1
        for axis, stream_axis in enumerate(part.axes):
            into = part.other_box.offset[axis]
            if stream_axis is not None:
                into += box.offset[stream_axis] - part.box.offset[stream_axis]
                file_strides[stream_axis] = file_axis_strides[axis]
            file_offset += into * file_axis_strides[axis]
        stream_offset = stream_base + sum(o * s for o, s in zip(box.offset, stream_strides, strict=True))
        shape, ours, theirs = _merged(box.extent, stream_strides, file_strides)
        return ByteCopy[str](shape, stream_offset, ours, other.buffer, file_offset, theirs)


def _fills(pieces: Iterable[ByteCopy[str]]) -> dict[str, int]:
    filled: dict[str, int] = {}
    for piece in pieces:
        filled[piece.file] = filled.get(piece.file, 0) + piece.nbytes
    return filled


def _inverse(axes: tuple[int | None, ...], rank: int) -> tuple[int | None, ...]:
    inverse: list[int | None] = [None] * rank
    for axis, other in enumerate(axes):
        if other is not None:
            inverse[other] = axis
    return tuple(inverse)


def _row_major(extent: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(extent[axis + 1 :]) for axis in range(len(extent)))


def _merged(
    shape: tuple[int, ...], ours: tuple[int, ...], theirs: list[int]
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """The same elements with as few axes as possible: axes of extent one are dropped, and axes that are dense together
    are merged.
    """
    merged: list[tuple[int, int, int]] = []
    for extent, a, b in zip(shape, ours, theirs, strict=True):
        if extent == 1:
            continue
        if merged and merged[-1][1] == extent * a and merged[-1][2] == extent * b:
            merged[-1] = (merged[-1][0] * extent, a, b)
        else:
            merged.append((extent, a, b))
    if not merged or merged[-1][1:] != (1, 1):
        merged.append((1, 1, 1))
    return tuple(m[0] for m in merged), tuple(m[1] for m in merged), tuple(m[2] for m in merged)


def _view_stream(piece: ByteCopy[str], stream: Bytes) -> Bytes:
    return np.ndarray(piece.extent, np.uint8, stream, piece.stream_offset, piece.stream_strides)


def _view_file(piece: ByteCopy[str], files: Mapping[str, Bytes]) -> Bytes:
    return np.ndarray(piece.extent, np.uint8, files[piece.file], piece.file_offset, piece.file_strides)
