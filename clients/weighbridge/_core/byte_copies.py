"""Strided copies of bytes between a stream and a file, as values: what every plan comes to in the end."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Generic, NamedTuple, TypeVar

F = TypeVar("F", bound=Hashable)


class ByteCopy(NamedTuple, Generic[F]):
    """Bytes of a stream, or of a part of one, and where they lie in a file or in memory; one byte for each index.

    Attributes:
        extent: how many bytes on each axis; those of the last one are next to each other on both sides.
        stream_offset: the first byte in the stream.
        stream_strides: distances in the stream, in bytes.
        file: which file or memory, by name or by number.
        file_offset: the first byte in it.
        file_strides: distances in it, in bytes.
    """

    extent: tuple[int, ...]
    stream_offset: int
    stream_strides: tuple[int, ...]
    file: F
    file_offset: int
    file_strides: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes that are copied."""
        return math.prod(self.extent)

    @property
    def dense(self) -> bool:
        """Whether it is one run of bytes on both sides."""
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
