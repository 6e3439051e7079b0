"""Strided copies of bytes between a stream and a file, as values. Every plan is finally expressed in such copies."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Generic, NamedTuple, TypeVar

F = TypeVar("F", bound=Hashable)


class ByteCopy(NamedTuple, Generic[F]):
    """Bytes of a stream, or of a part of it, and their places in a file or in memory. Each index stands for one byte.

    Attributes:
        extent: number of bytes on each axis. The bytes of the last axis are adjacent on both sides.
        stream_offset: offset of the first byte in the stream.
        stream_strides: strides in the stream, in bytes.
        file: the file or memory, by name or by number.
        file_offset: offset of the first byte in the file.
        file_strides: strides in the file, in bytes.
    """

    extent: tuple[int, ...]
    stream_offset: int
    stream_strides: tuple[int, ...]
    file: F
    file_offset: int
    file_strides: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Number of bytes that are copied."""
        return math.prod(self.extent)

    @property
    def dense(self) -> bool:
        """Whether the bytes are one contiguous run on both sides."""
        return len(self.extent) == 1

    @property
    def stream_end(self) -> int:
        """One past the last byte in the stream."""
        return _end(self.stream_offset, self.extent, self.stream_strides)

    @property
    def file_end(self) -> int:
        """One past the last byte in the file."""
        return _end(self.file_offset, self.extent, self.file_strides)


def _end(offset: int, extent: Sequence[int], strides: Sequence[int]) -> int:
    return offset + sum((n - 1) * stride for n, stride in zip(extent, strides, strict=True)) + 1
