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
        """The copies for the C extension. Cached: a plan serves many pushes."""
        words: list[int] = []
        for copy in self:
            words += (copy.file, copy.file_offset, copy.stream_offset, len(copy.extent))
            for axis in zip(copy.extent, copy.file_strides, copy.stream_strides, strict=True):
                words += axis
        return np.array(words, np.int64)

    @cached_property
    def steps(self) -> Sequence[Sequence[CopyStep]] | None:
        """Steps of each copy for a GPU's copy engine; None if that would be slow or impossible for one of them.

        Cached.
        """
        found = [steps for copy in self if (steps := steps_of(copy)) is not None]
        return found if len(found) == len(self) else None

    @classmethod
    def of(cls, copies: Sequence[ByteCopy[int]]) -> ShardCopies:
        """These copies as `ShardCopies`; unchanged if they are already."""
        return copies if isinstance(copies, cls) else cls(copies)


def is_dense(copies: Sequence[ByteCopy[int]], nbytes: int) -> bool:
    """Whether a shard of so many bytes lies in memory as one run."""
    return len(copies) == 1 and copies[0].extent == (nbytes,)


def view_bytes(data: Bytes, offset: int, extent: tuple[int, ...], strides: tuple[int, ...]) -> Bytes:
    """Bytes of an array, as a strided array."""
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
        copies: the copies.
        memories: memories that are written to.
        encoding: encoding of its elements; None if they are not counted.

    Returns:
        The number of copied elements that are non-finite; an element that goes to two places counts twice.
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
        shard: index of their shard.
        copy: the copy that has written them.
        encoding: encoding of the elements.
    """

    shard: int
    copy: ByteCopy[int]
    encoding: Encoding


class WrittenCounts(NamedTuple):
    """Counts of non-finite elements that were written to memory; an element that went to two places counts twice.

    Attributes:
        counts: for each shard, the count of elements that were counted while they were copied.
        uncounted: elements still to be counted.
    """

    counts: list[int]
    uncounted: list[Uncounted]


def count_written(written: Sequence[Uncounted], memory: Bytes, threads: int = 1) -> list[int]:
    """Numbers of non-finite elements that copies have written to memory, counted in one call of the C extension.

    Args:
        written: the copies' elements, as whole elements.
        memory: the memory.
        threads: most threads that share the work.

    Returns:
        The count of each copy.
    """
    address = memory.ctypes.data
    parts = [_parts(each.copy, address) for each in written]
    lengths = [len(each) for each in parts]
    rows = np.concatenate([np.empty((0, 2), np.int64), *parts])
    encodings = packed_encodings([each.encoding for each in written]).repeat(lengths, axis=0)
    found = count_natively(rows, encodings, threads)
    if found is None:
        return [count_nonfinite(_dense(each.copy, memory), each.encoding) for each in written]
    counts = np.zeros(len(written), np.int64)
    np.add.at(counts, np.arange(len(written)).repeat(lengths), found)
    counted: list[int] = counts.tolist()
    return counted


def _parts(copy: ByteCopy[int], address: int) -> NDArray[np.int64]:
    """Address and length of the runs of bytes that a copy has written to the memory at an address, cut to `_PART`;
    shape [n, 2].
    """
    *rows, width = copy.extent
    start = address + copy.file_offset
    cuts = [(start + cut, min(width - cut, _PART)) for cut in range(0, width, _PART)]
    runs = np.array(cuts, np.int64).reshape(-1, 2)
    for extent, stride in zip(reversed(rows), reversed(copy.file_strides[:-1]), strict=True):
        moved = np.array([(stride, 0)], np.int64) * np.arange(extent)[:, None]
        runs = (moved[:, None] + runs).reshape(-1, 2)
    return runs


def _dense(copy: ByteCopy[int], memory: Bytes) -> Bytes:
    """The bytes that a copy has written to memory, contiguous."""
    written = view_bytes(memory, copy.file_offset, copy.extent, copy.file_strides)
    return np.ascontiguousarray(written).reshape(-1)
