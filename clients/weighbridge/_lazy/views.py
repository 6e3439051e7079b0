"""Strided views of a tensor: the box that each needs, and its strides in the dense box.

Pure arithmetic on shapes and strides, in elements, without torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from weighbridge._core.boxes import Box


class Strided(NamedTuple):
    """A strided view of memory, in elements, as in ``torch.as_strided``.

    Attributes:
        size: elements on each axis of the view.
        stride: distance of neighbours on each axis.
        offset: offset of the first element.
    """

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.size)


def dense_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a row-major tensor without gaps."""
    strides = [1] * len(shape)
    for axis in reversed(range(len(shape) - 1)):
        strides[axis] = strides[axis + 1] * max(shape[axis + 1], 1)
    return tuple(strides)


def is_whole(view: Strided, extent: Sequence[int]) -> bool:
    """Whether a view has all elements of a dense box in row-major order, in any shape."""
    if view.offset != 0 or view.numel != math.prod(extent):
        return False
    dense = dense_strides(view.size)
    return all(n == 1 or s == d for n, s, d in zip(view.size, view.stride, dense, strict=True))


def box_of_view(shape: Sequence[int], view: Strided) -> tuple[Box, Strided]:
    """A small box with all elements of a view, and the view's strides in that box, dense and row-major.

    Exact wherever each axis of the view runs along axes of the tensor, as with narrowing, splitting, permuting and
    reshaping; otherwise rows that are needed in part are included whole.

    Args:
        shape: shape of the tensor, which is dense and row-major.
        view: view of the tensor.
    """
    if view.numel == 0:
        return Box((0,) * len(shape), (0,) * len(shape)), view._replace(offset=0)
    return _along_axes(shape, view) or _whole_rows(shape, view)


def _along_axes(shape: Sequence[int], view: Strided) -> tuple[Box, Strided] | None:
    strides = dense_strides(shape)
    first, rest = [], view.offset
    for stride in strides:
        first.append(rest // stride)
        rest %= stride
    reach = [0] * len(shape)
    runs: list[tuple[int, int]] = []  # for each axis of the view: along which axis of the tensor, and in which steps
    for n, s in zip(view.size, view.stride, strict=True):
        if n == 1 or s == 0:
            runs.append((0, 0))
            continue
        axis = next((a for a, stride in enumerate(strides) if stride <= s and shape[a] > 1), None)
        if axis is None or s % strides[axis]:
            return None
        step = s // strides[axis]
        runs.append((axis, step))
        while True:
            last = first[axis] + step * (n - 1)
            if last < shape[axis]:
                reach[axis] += step * (n - 1)
                break
            # axes that the view has merged: it runs along all of the inner one, repeatedly along the outer one
            outer = next((a for a in reversed(range(axis)) if shape[a] > 1), None)
            if step != 1 or first[axis] or n % shape[axis] or outer is None:
                return None
            reach[axis] += shape[axis] - 1
            n, axis = n // shape[axis], outer
    if any(f + r >= n for f, r, n in zip(first, reach, shape, strict=True)):
        return None
    box = Box(tuple(first), tuple(r + 1 for r in reach))
    inside = dense_strides(box.extent)
    steps = [inside[a] * step if step else s for (a, step), s in zip(runs, view.stride, strict=True)]
    return box, Strided(view.size, tuple(steps), 0)


def _whole_rows(shape: Sequence[int], view: Strided) -> tuple[Box, Strided]:
    """The box with all elements from the view's first to its last."""
    last = view.offset + sum((n - 1) * s for n, s in zip(view.size, view.stride, strict=True))
    offset, extent = [], []
    start, end = view.offset, last
    apart = False
    for n, stride in zip(shape, dense_strides(shape), strict=True):
        if apart:
            offset.append(0)
            extent.append(n)
            continue
        a, b = start // stride, end // stride
        offset.append(a)
        extent.append(b - a + 1)
        apart = a != b
        start, end = start % stride, end % stride
    box = Box(tuple(offset), tuple(extent))
    begin = sum(o * s for o, s in zip(box.offset, dense_strides(shape), strict=True))
    return box, view._replace(offset=view.offset - begin)
