"""Sums of the words of tensors: whether a copy has the bytes of what it was copied from, wherever the two lie.

A sum tells bytes of another version, or half written ones, from the right ones (two in 2**64 agree by chance). It does not tell elements that
have changed places.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from weighbridge._core.byte_copies import ByteCopy
from weighbridge._memory.mappings import MappedMemory
from weighbridge._memory.native_copies import sum_natively

if TYPE_CHECKING:
    import torch

Words: TypeAlias = NDArray[Any]

_LARGEST = 8
_DTYPES = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}
AT_ONCE = 32 << 20
"""Bytes that are added up at one time."""


def word_of(copies: Iterable[ByteCopy[int]]) -> int:
    """Bytes of the largest words, 1, 2, 4 or 8, of which a shard and its places in memory consist."""
    found = _LARGEST
    for copy in copies:
        found = math.gcd(found, copy.extent[-1], copy.stream_offset, copy.file_offset)
        found = math.gcd(found, *copy.stream_strides[:-1], *copy.file_strides[:-1])
    return found


def sum_of(shard: torch.Tensor, word: int) -> torch.Tensor:
    """Sum of the words of a contiguous tensor, modulo 2**64, as an ``int64`` on the tensor's device; it is not waited for.

    Args:
        shard: its elements follow each other in memory.
        word: bytes of each word; divides the tensor's bytes and its address.
    """
    import torch

    dtype = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[word]
    words = shard.detach().reshape(-1).view(torch.uint8).view(dtype)
    return words.sum(dtype=torch.int64)


def words_in_memory(
    copies: Iterable[ByteCopy[int]], memories: Sequence[MappedMemory], word: int
) -> Iterator[Words]:
    """Words of a shard where they lie, some 32 MB at a time. Their sums add up to that of the shard.

    Args:
        copies: of the shard.
        memories: that these name by number.
        word: bytes of each word; divides `word_of` the copies.
    """
    for copy in copies:
        extent = (*copy.extent[:-1], copy.extent[-1] // word)
        strides = (*copy.file_strides[:-1], word)
        words: Words = np.ndarray(extent, _DTYPES[word], memories[copy.file].bytes, copy.file_offset, strides)
        rows = max(extent[0] * AT_ONCE // max(copy.nbytes, 1), 1)
        for start in range(0, extent[0], rows):
            yield words[start : start + rows]


def total(pieces: Iterable[Words], threads: int = 1) -> int:
    """Sum of the words of some pieces, as ``int64`` has it modulo 2**64. The interpreter is free meanwhile.

    Args:
        pieces: of words of one size.
        threads: at most so many share them, where the C extension is there and pieces are contiguous.
    """
    given = list(pieces)
    together = [piece for piece in given if piece.flags.c_contiguous]
    sums = None
    if together:
        parts = np.array([(piece.ctypes.data, piece.nbytes) for piece in together], np.int64)
        sums = sum_natively(parts, together[0].itemsize, threads)
    rest = given if sums is None else [piece for piece in given if not piece.flags.c_contiguous]
    found = sum(int(piece.sum(dtype=np.int64)) for piece in rest)
    return _as_signed(found if sums is None else found + int(sums.sum()))


def _as_signed(found: int) -> int:
    return (found + (1 << 63)) % (1 << 64) - (1 << 63)
