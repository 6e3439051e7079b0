"""Strided copies between a shard and memory, as values, and carried out on bytes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from weighbridge._core.byte_copies import ByteCopy
from weighbridge._core.nonfinite import Encoding, count_nonfinite
from weighbridge._memory.copy_steps import CopyStep, steps_of
from weighbridge._memory.native_copies import (
    Plan,
    copy_natively,
    count_natively,
    packed_encodings,
    region_of,
)

Bytes = NDArray[np.uint8]
_PART = 1 << 20
"""Bytes that one of several threads counts at a time; whole elements of any dtype."""


class ShardCopies(tuple[ByteCopy[int], ...]):
    """Copies of one shard."""

    @cached_property
    def packed(self) -> Plan:
        """For the C extension. Made once: a plan serves many pushes."""
        words: list[int] = []
        for copy in self:
            words += (copy.file, copy.file_offset, copy.stream_offset, len(copy.extent))
            for axis in zip(copy.extent, copy.file_strides, copy.stream_strides, strict=True):
                words += axis
        return np.array(words, np.int64)

    @cached_property
    def steps(self) -> Sequence[Sequence[CopyStep]] | None:
        """For a GPU's copy engine, those of each copy; None if that would be slow for one of them, or it cannot. Made once, too."""
        found = [steps for copy in self if (steps := steps_of(copy)) is not None]
        return found if len(found) == len(self) else None

    @classmethod
    def of(cls, copies: Sequence[ByteCopy[int]]) -> ShardCopies:
        """These copies; themselves if they are packed already."""
        return copies if isinstance(copies, cls) else cls(copies)


def is_dense(copies: Sequence[ByteCopy[int]], nbytes: int) -> bool:
    """Whether a shard of so many bytes lies in memory in one run."""
    return len(copies) == 1 and copies[0].extent == (nbytes,)


def view_bytes(data: Bytes, offset: int, extent: tuple[int, ...], strides: tuple[int, ...]) -> Bytes:
    """Bytes of an array as a strided array."""
    return np.ndarray(extent, np.uint8, data, offset, strides)


def write_bytes(
    shard: Bytes,
    copies: Sequence[ByteCopy[int]],
    memories: Sequence[Bytes],
    encoding: Encoding | None = None,
) -> int:
    """Copy the bytes of a shard to memory.

    Args:
        shard: its bytes.
        copies: where they go.
        memories: that are written to.
        encoding: of its elements; None if they are not counted.

    Returns:
        How many of the elements that were copied are non-finite, an element that goes to two places twice.
    """
    plan = ShardCopies.of(copies).packed
    regions = [region_of(memory, written=True) for memory in memories]
    counts = copy_natively(
        [(region_of(shard, written=False), plan)], regions, into_memory=True, threads=1, encodings=[encoding]
    )
    if counts is not None:
        return counts[0]
    found = 0
    for copy in copies:
        source = view_bytes(shard, copy.stream_offset, copy.extent, copy.stream_strides)
        np.copyto(view_bytes(memories[copy.file], copy.file_offset, copy.extent, copy.file_strides), source)
        if encoding is not None:
            found += count_nonfinite(np.ascontiguousarray(source).reshape(-1), encoding)
    return found


class Uncounted(NamedTuple):
    """Elements in memory whose non-finite ones are still to be counted.

    Attributes:
        shard: index of the shard that they belong to.
        copy: which has brought them there.
        encoding: of the elements.
    """

    shard: int
    copy: ByteCopy[int]
    encoding: Encoding


class WrittenCounts(NamedTuple):
    """Counts of the non-finite elements that were written to memory, an element that went to two places twice.

    Attributes:
        counts: for each shard, of what was counted on its way.
        uncounted: the rest.
    """

    counts: list[int]
    uncounted: list[Uncounted]


def count_written(copy: ByteCopy[int], memory: Bytes, encoding: Encoding, threads: int = 1) -> int:
    """How many of the elements that a copy has brought to memory are non-finite.

    Args:
        copy: whole elements.
        memory: where it has brought them.
        encoding: of the elements.
        threads: at most so many share the work.
    """
    if not copy.nbytes:
        return 0
    starts = np.array([memory.ctypes.data + copy.file_offset], np.int64)
    for extent, stride in zip(copy.extent[:-1], copy.file_strides[:-1], strict=True):
        starts = (starts[:, None] + np.arange(extent) * stride).reshape(-1)
    width = copy.extent[-1]
    cuts = np.arange(0, width, _PART)
    lengths = np.tile(np.minimum(width - cuts, _PART), len(starts))
    rows = np.stack([(starts[:, None] + cuts).reshape(-1), lengths], axis=1)
    found = count_natively(rows, np.repeat(packed_encodings([encoding]), len(rows), axis=0), threads)
    if found is not None:
        return int(found.sum())
    written = view_bytes(memory, copy.file_offset, copy.extent, copy.file_strides)
    return count_nonfinite(np.ascontiguousarray(written).reshape(-1), encoding)
