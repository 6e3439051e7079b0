"""Do rows bring what copies of bytes bring, within host memory and by the function of a copy engine?"""

from __future__ import annotations

import ctypes
import importlib.util
import random
from typing import Any

import numpy as np
import pytest

from weighbridge._core.byte_copies import ByteCopy
from weighbridge._memory.byte_rows import copy_rows, rows_of
from weighbridge._memory.native_copies import ask_natively

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("weighbridge._memory._native") is None,
    reason="there is no C extension",
)
COPY_2D = ctypes.CFUNCTYPE(
    ctypes.c_int,
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_size_t),
    *(ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p),
)
"""Type of ``cudaMemcpy2DAsync``."""
REFUSED = 700


class Engine:
    """A copy engine that is the processor.

    Args:
        refuses: number of the call that it refuses, and all after it.
    """

    def __init__(self, refuses: int = -1) -> None:
        self.calls: list[tuple[int, int]] = []
        self._refuses = refuses
        self._function = COPY_2D(self._copy)
        self.address = ctypes.cast(self._function, ctypes.c_void_p).value or 0

    def _copy(self, target: Any, target_pitch: int, source: Any, source_pitch: int, *rest: Any) -> int:
        width, rows, direction, stream = rest
        if len(self.calls) == self._refuses:
            return REFUSED
        self.calls.append((direction, stream))
        for row in range(rows):
            ctypes.memmove(target + row * target_pitch, source + row * source_pitch, width)
        return 0


def random_copy(dice: random.Random) -> tuple[ByteCopy[int], int, int]:
    """A copy between a dense shard and a memory in which rows lie apart; and the bytes of both."""
    axes = dice.randint(1, 3)
    extent = (*(dice.randint(1, 4) for _ in range(axes - 1)), dice.randint(64, 200))
    around = dice.randint(0, 30)
    shard, memory = [1], [1]
    for axis in range(axes - 1, 0, -1):
        shard.insert(0, shard[0] * extent[axis])
        memory.insert(0, memory[0] * extent[axis] + around)
    offset = dice.randint(0, 50)
    copy = ByteCopy(extent, 0, tuple(shard), 1, offset, tuple(memory))
    return copy, shard[0] * extent[0], offset + memory[0] * extent[0]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("by_engine", [False, True])
def test_rows_bring_the_bytes_of_copies(seed: int, by_engine: bool) -> None:
    dice = random.Random(seed)
    copy, shard_bytes, memory_bytes = random_copy(dice)
    memory = np.random.default_rng(seed).integers(0, 256, memory_bytes, np.uint8)
    shard = np.zeros(shard_bytes, np.uint8)
    rows = rows_of([copy], shard.ctypes.data, [0, memory.ctypes.data])
    assert rows is not None
    engine = Engine()
    if by_engine:
        assert ask_natively(engine.address, rows, 1, 77) == 0
        assert engine.calls == [(1, 77)] * len(rows)
    else:
        assert copy_rows(rows, threads=2)
    expected = np.ndarray(copy.extent, np.uint8, memory, copy.file_offset, copy.file_strides)
    assert shard.tobytes() == expected.tobytes()


def test_many_copies_are_asked_for_until_one_is_refused() -> None:
    memory = np.arange(256, dtype=np.uint8)
    shard = np.zeros(256, np.uint8)
    rows = np.array(
        [(shard.ctypes.data + at, 64, memory.ctypes.data + at, 64, 64, 1) for at in range(0, 256, 64)],
        np.int64,
    )
    engine = Engine(refuses=2)
    assert ask_natively(engine.address, rows, 1, 0) == REFUSED
    assert len(engine.calls) == 2
    assert (shard[:128] == memory[:128]).all()
    assert not shard[128:].any()


def test_narrow_rows_are_left_to_other_means() -> None:
    assert rows_of([ByteCopy((9, 8), 0, (8, 1), 0, 0, (64, 1))], 0, [0]) is None
