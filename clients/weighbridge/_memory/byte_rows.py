"""Copies of rows of bytes, many in one call without the interpreter's lock: within host memory, or by a GPU's copy
engines.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from weighbridge._core.byte_copies import ByteCopy
from weighbridge._memory.native_copies import AddressRange, copy_natively
from weighbridge._memory.strided import ShardCopies

Rows: TypeAlias = NDArray[np.int64]
"""Copies of equally spaced rows, shape [n, 6]: address of the target's first row, pitch of its rows, address and pitch
of the source's, bytes of a row, number of rows. The order is that of the arguments of ``cudaMemcpy2DAsync``."""
TARGET, TARGET_PITCH, SOURCE, SOURCE_PITCH, WIDTH, COUNT = range(6)

_ALL_MEMORY = AddressRange(0, 1 << 62)


def rows_of(copies: Sequence[ByteCopy[int]], shard: int, memories: Sequence[int]) -> Rows | None:
    """Rows that fill a shard from memory.

    Args:
        copies: copies of the shard.
        shard: address of the shard.
        memories: addresses of the memories, by the copies' numbers.

    Returns:
        The rows; None if copy engines cannot copy them, or would be slow.
    """
    planned = ShardCopies.of(copies)
    if planned.steps is None:
        return None
    found: list[tuple[int, ...]] = []
    for copy, steps in zip(planned, planned.steps, strict=True):
        base = memories[copy.file]
        for step in steps:
            target, source = shard + step.shard_offset, base + step.memory_offset
            found.append((target, step.shard_pitch, source, step.memory_pitch, step.width, step.rows))
    return np.array(found, np.int64).reshape(-1, 6)


def copy_rows(rows: Rows, threads: int) -> bool:
    """Copy rows within host memory.

    Args:
        rows: no two of them write to the same bytes.
        threads: most threads that share the work.

    Returns:
        Whether the rows were copied; False if there is no C extension.
    """
    n = len(rows)
    plan = np.zeros((n, 10), np.int64)  # see `native_copies.Plan`: two axes, addresses in the place of offsets
    plan[:, 1], plan[:, 2], plan[:, 3] = rows[:, SOURCE], rows[:, TARGET], 2
    plan[:, 4], plan[:, 5], plan[:, 6] = rows[:, COUNT], rows[:, SOURCE_PITCH], rows[:, TARGET_PITCH]
    plan[:, 7], plan[:, 8], plan[:, 9] = rows[:, WIDTH], 1, 1
    done = copy_natively([(_ALL_MEMORY, plan)], [_ALL_MEMORY], into_memory=False, threads=threads)
    return done is not None
