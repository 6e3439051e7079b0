"""Are sums of words those of Python's own integers, wherever the words lie, with the C extension and without?"""

from __future__ import annotations

import importlib.util
import random

import numpy as np
import pytest
import torch

from weighbridge._memory import native_copies, word_sums

DTYPES = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}
needs_extension = pytest.mark.skipif(
    importlib.util.find_spec("weighbridge._memory._native") is None,
    reason="there is no C extension",
)


def by_integers(pieces: list[word_sums.Words]) -> int:
    """Sum modulo 2**64, as a signed integer of 64 bits."""
    found = sum(int(word) for piece in pieces for word in piece.reshape(-1))
    return (found + 2**63) % 2**64 - 2**63


@pytest.mark.parametrize("extension", [pytest.param(True, marks=needs_extension), False])
@pytest.mark.parametrize("word", [1, 2, 4, 8])
@pytest.mark.parametrize("seed", range(5))
def test_pieces_add_up_as_integers_do(
    seed: int, word: int, extension: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not extension:
        monkeypatch.setattr(native_copies, "_extension", lambda: None)
    dice = random.Random(seed)
    pieces: list[word_sums.Words] = []
    for _ in range(dice.randint(1, 6)):
        rows, columns, around = dice.randint(1, 5), dice.randint(0, 300), dice.randint(0, 3)
        memory = np.random.default_rng(dice.random().hex().encode()[2]).integers(
            0, 256, (rows * (columns + around) + 1) * word, np.uint8
        )
        whole = memory[word:].view(DTYPES[word]).reshape(rows, columns + around)
        pieces.append(whole[:, :columns])  # rows apart where there is something around them
    assert word_sums.total(pieces, threads=dice.randint(1, 3)) == by_integers(pieces)


@pytest.mark.parametrize("word", [1, 2, 4, 8])
def test_a_tensor_and_the_memory_that_it_was_copied_from_have_one_sum(word: int) -> None:
    bits = np.random.default_rng(word).integers(0, 256, 64_000, np.uint8)
    tensor = torch.from_numpy(bits.copy())
    assert int(word_sums.sum_of(tensor, word)) == word_sums.total([bits.view(DTYPES[word])], threads=2)


@needs_extension
@pytest.mark.parametrize("word", [0, 3, 16])
def test_words_of_another_size_are_refused(word: int) -> None:
    with pytest.raises(ValueError, match="words are not of 1, 2, 4 or 8 bytes"):
        native_copies.sum_natively(np.zeros((1, 2), np.int64), word)
