"""Are sums of words those of Python's own integers, wherever the words lie?"""

from __future__ import annotations

import importlib.util
import random

import numpy as np
import pytest
import torch

from weighbridge._memory import word_sums
from weighbridge._memory.native_copies import sum_natively

DTYPES = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("weighbridge._memory._native") is None,
    reason="there is no C extension",
)


def by_integers(words: np.ndarray) -> int:
    """Sum modulo 2**64, as a signed integer of 64 bits."""
    found = sum(int(word) for word in words.reshape(-1))
    return (found + 2**63) % 2**64 - 2**63


@pytest.mark.parametrize("word", [1, 2, 4, 8])
@pytest.mark.parametrize("seed", range(5))
def test_rows_add_up_as_integers_do(seed: int, word: int) -> None:
    dice = random.Random(seed)
    kept, rows, expected = [], [], []
    for number in range(dice.randint(1, 6)):
        count, columns, around = dice.randint(1, 5), dice.randint(0, 300), dice.randint(0, 3)
        memory = np.random.default_rng((seed, word, number)).integers(
            0, 256, (count * (columns + around) + 1) * word, np.uint8
        )
        words = memory[word:].view(DTYPES[word]).reshape(count, columns + around)[:, :columns]
        kept.append(memory)
        pitch = (columns + around) * word
        rows.append((0, 0, memory.ctypes.data + word, pitch, columns * word, count))
        expected.append(by_integers(words))
    found = sum_natively(np.array(rows, np.int64), np.full(len(rows), word, np.int64), dice.randint(1, 3))
    assert found.tolist() == expected


@pytest.mark.parametrize(
    ("count", "columns", "around"),
    [(1, 5 << 20, 0), (3, (1 << 20) + 24, 8), (5000, 1000, 40), (1, 1 << 20, 0), (2, (1 << 20) - 8, 16)],
)
def test_rows_that_several_threads_share_add_up_as_those_of_one(count: int, columns: int, around: int) -> None:
    memory = np.random.default_rng(1).integers(0, 256, count * (columns + around), np.uint8)
    rows = np.array([(0, 0, memory.ctypes.data, columns + around, columns, count)] * 2, np.int64)
    sizes = np.array([8, 2], np.int64)
    bytes_ = np.ascontiguousarray(memory.reshape(count, columns + around)[:, :columns])
    found = sum_natively(rows, sizes, threads=4)
    expected = [bytes_.view(dtype).sum(dtype=np.int64) for dtype in (np.int64, np.int16)]
    assert found.tolist() == expected


@pytest.mark.parametrize("word", [1, 2, 4, 8])
def test_a_tensor_and_the_memory_that_it_was_copied_from_have_one_sum(word: int) -> None:
    bits = np.random.default_rng(word).integers(0, 256, 64_000, np.uint8)
    tensor = torch.from_numpy(bits.copy())
    rows = np.array([(0, 64_000, bits.ctypes.data, 64_000, 64_000, 1)], np.int64)
    found = sum_natively(rows, np.array([word], np.int64), threads=2)
    assert int(word_sums.as_words(tensor, word).sum(dtype=torch.int64)) == found[0]


@pytest.mark.parametrize(
    ("row", "word"),
    [
        ((64, 64, 128, 64, 64, 1), 8),
        ((64, 64, 132, 64, 64, 2), 4),
        ((64, 60, 128, 64, 6, 2), 2),
        ((65, 64, 128, 64, 64, 1), 1),
    ],
)
def test_words_are_the_largest_of_which_both_sides_consist(row: tuple[int, ...], word: int) -> None:
    assert word_sums.words_of(np.array([row], np.int64)).tolist() == [word]


@pytest.mark.parametrize("word", [0, 3, 16])
def test_words_of_another_size_are_refused(word: int) -> None:
    with pytest.raises(ValueError, match="words are not of 1, 2, 4 or 8 bytes"):
        sum_natively(np.zeros((1, 6), np.int64), np.array([word], np.int64))
