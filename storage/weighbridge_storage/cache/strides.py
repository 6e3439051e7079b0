"""Blocks of a file that contain a strided box of bytes. All functions are pure."""

from __future__ import annotations

import numpy as np


def blocks_touched(offset: int, shape: tuple[int, ...], strides: tuple[int, ...], block: int) -> tuple[int, ...]:
    """Numbers, ascending, of the blocks that may contain at least one byte of the box.

    Axes whose bytes are less than a block apart are treated as one run, because no block within the run can be skipped.

    Args:
        offset: offset of the first byte.
        shape: number of bytes on each axis. If it is 0 for any axis, the box is empty.
        strides: distances between these bytes; not negative.
        block: bytes of a block; block ``n`` begins at ``n * block``.
    """
    if 0 in shape:
        return ()
    starts, run = np.array([offset], dtype=np.int64), 1
    for extent, stride in sorted(zip(shape, strides, strict=True), key=lambda axis: axis[1]):
        if stride <= block:
            run += (extent - 1) * stride
        else:
            starts = np.add.outer(starts, np.arange(extent, dtype=np.int64) * stride).reshape(-1)
    first, last = starts // block, (starts + run - 1) // block
    if len(starts) == 1:
        return tuple(range(int(first[0]), int(last[0]) + 1))
    width = int((last - first).max()) + 1
    candidates = first[:, None] + np.arange(width)
    return tuple(np.unique(candidates[candidates <= last[:, None]]).tolist())


def widest_axis(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """The axis whose first and last bytes are furthest apart."""
    spans = [(extent - 1) * stride for extent, stride in zip(shape, strides, strict=True)]
    return spans.index(max(spans))
