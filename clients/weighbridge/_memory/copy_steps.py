"""Steps of a strided copy for a GPU's copy engine, by ``cudaMemcpy2DAsync``."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from weighbridge._core.byte_copies import ByteCopy

_LARGEST_PITCH = (1 << 31) - 1
_NARROWEST_ROW = 64
"""Bytes of a row below which the copy engines are slower than a kernel that gathers the elements."""
_MOST_STEPS = 4096
"""Most steps of one copy: each takes some microseconds to submit."""


class CopyStep(NamedTuple):
    """Rows that the copy engine moves in one step; all in bytes.

    Attributes:
        shard_offset: offset of the first row in the shard.
        shard_pitch: distance of two rows there.
        memory_offset: offset of the first row in the memory.
        memory_pitch: distance of two rows there.
        width: bytes of a row.
        rows: number of rows.
    """

    shard_offset: int
    shard_pitch: int
    memory_offset: int
    memory_pitch: int
    width: int
    rows: int


def steps_of(copy: ByteCopy[int]) -> Sequence[CopyStep] | None:
    """Steps of the copy engine for a strided copy; None if that would be slow, or impossible."""
    width = copy.extent[-1]
    rows, shard_pitch, memory_pitch = 1, width, width
    outer = copy.extent[:-1]
    if outer:
        rows, shard_pitch, memory_pitch = outer[-1], copy.stream_strides[-2], copy.file_strides[-2]
        outer = outer[:-1]
    pitches = (shard_pitch, memory_pitch)
    if rows > 1 and (width < _NARROWEST_ROW or min(pitches) < width or max(pitches) > _LARGEST_PITCH):
        return None
    steps = tuple(itertools.islice(_steps(copy, outer, (shard_pitch, memory_pitch, width, rows)), _MOST_STEPS + 1))
    return steps if len(steps) <= _MOST_STEPS else None


def _steps(copy: ByteCopy[int], outer: tuple[int, ...], step: tuple[int, int, int, int]) -> Iterator[CopyStep]:
    shard_pitch, memory_pitch, width, rows = step
    for index in itertools.product(*map(range, outer)):
        in_shard = sum(i * stride for i, stride in zip(index, copy.stream_strides, strict=False))
        in_memory = sum(i * stride for i, stride in zip(index, copy.file_strides, strict=False))
        yield CopyStep(
            copy.stream_offset + in_shard,
            shard_pitch,
            copy.file_offset + in_memory,
            memory_pitch,
            width,
            rows,
        )
