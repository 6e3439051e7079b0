"""Sums of the words of tensors, to compare a copy with its source, on whatever devices the two are.

A sum distinguishes bytes of another version, or half-written ones, from the right ones (two in 2**64 agree by chance).
It does not detect elements that have changed places.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from weighbridge._memory.byte_rows import COUNT, Rows

if TYPE_CHECKING:
    import torch

_LARGEST = 8


def words_of(rows: Rows) -> NDArray[np.int64]:
    """Bytes of the largest words, 1, 2, 4 or 8, into which both sides of each copy of rows can be divided."""
    words: NDArray[np.int64] = np.gcd.reduce(rows[:, :COUNT], axis=1, initial=_LARGEST)
    return words


def as_words(tensor: torch.Tensor, word: int) -> torch.Tensor:
    """The words of a contiguous tensor, in one dimension; ``words.sum(dtype=torch.int64)`` is their sum modulo 2**64.

    Args:
        tensor: contiguous.
        word: bytes of each word; divides the tensor's bytes and its address.
    """
    import torch

    dtype = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[word]
    return tensor.detach().reshape(-1).view(torch.uint8).view(dtype)
