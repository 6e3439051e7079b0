"""Boxes: an offset and an extent inside a tensor, the arithmetic on them, and links of boxes of two tensors.

The module does only integer arithmetic on tuples; it does not handle dtypes, bytes or files. Boxes, shards, placements,
links and copies are named tuples: a large model has hundreds of thousands of each, and tuples are created, compared and
hashed three times as fast as frozen dataclasses.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from weighbridge.errors import LayoutError

__all__ = ["Box"]

_MOST_COMPARED = 1 << 20
_MOST_CUTS, _FREE_CUTS = 64, 1 << 18
"""Limit on the work of `_Cuts`: it may sort `_FREE_CUTS` boxes in total, and additionally each box `_MOST_CUTS` times
on average. In a grid of eight axes a box is sorted at most 36 times, and most boxes only a few times.
"""


class Box(NamedTuple):
    """A rectangular region of a tensor, in elements. A scalar tensor has exactly one box, ``Box((), ())``.

    Attributes:
        offset: first element on each axis.
        extent: number of elements on each axis.
    """

    offset: tuple[int, ...]
    extent: tuple[int, ...]

    @staticmethod
    def whole(shape: Sequence[int]) -> Box:
        """Return the box that covers a whole tensor of this shape."""
        return Box((0,) * len(shape), tuple(shape))

    @property
    def volume(self) -> int:
        """Number of elements."""
        return math.prod(self.extent)

    @property
    def end(self) -> tuple[int, ...]:
        """One past the last element on each axis."""
        return tuple(o + e for o, e in zip(self.offset, self.extent, strict=True))

    def fits(self, shape: Sequence[int]) -> bool:
        """Whether the box has the tensor's rank and lies inside it."""
        if not len(self.offset) == len(self.extent) == len(shape):
            return False
        # a loop: this runs for every shard of a large model, and a generator takes three times as long
        for o, e, n in zip(self.offset, self.extent, shape, strict=True):  # noqa: SIM110
            if o < 0 or e < 0 or o + e > n:
                return False
        return True

    def intersect(self, other: Box) -> Box | None:
        """Return the common part; None if the boxes are disjoint."""
        offset = tuple(map(max, self.offset, other.offset))
        sides = zip(self.offset, self.extent, other.offset, other.extent, offset, strict=True)
        extent = tuple([min(a + b, c + d) - o for a, b, c, d, o in sides])
        return Box(offset, extent) if not extent or min(extent) > 0 else None

    def relative_to(self, origin: Sequence[int]) -> Box:
        """Return the same region relative to another origin."""
        return Box(tuple([o - p for o, p in zip(self.offset, origin, strict=True)]), self.extent)

    def under(self, leading: tuple[int, ...]) -> Box:
        """Return the same region of a tensor that is stacked along leading axes, at this index."""
        return Box((*leading, *self.offset), ((1,) * len(leading)) + self.extent)

    def __str__(self) -> str:
        return "[" + ", ".join(f"{o}:{o + e}" for o, e in zip(self.offset, self.extent, strict=True)) + "]"


class Link(NamedTuple):
    """A box of a source tensor that has the same elements as a box of a target tensor.

    Attributes:
        source: name of the source tensor.
        source_box: box of the source tensor.
        target: name of the target tensor.
        target_box: box of the target tensor.
        axes: for each target axis the corresponding source axis, or None if the target's extent is one. Source axes
            that do not occur have extent one. So axes may be permuted, added and removed.
    """

    source: str
    source_box: Box
    target: str
    target_box: Box
    axes: tuple[int | None, ...]

    @property
    def is_identity(self) -> bool:
        """Whether each element has the same position on both sides."""
        return self.source_box == self.target_box and self.axes == tuple(range(len(self.axes)))

    def inverse(self) -> Link:
        """Return the link from the target to the source."""
        axes: list[int | None] = [None] * len(self.source_box.offset)
        for target_axis, source_axis in enumerate(self.axes):
            if source_axis is not None:
                axes[source_axis] = target_axis
        return Link(self.target, self.target_box, self.source, self.source_box, tuple(axes))

    def to_target(self, box: Box) -> Box:
        """Return the box of the target that corresponds to a part of the source box."""
        offset = list(self.target_box.offset)
        extent = [1] * len(offset)
        for axis, source_axis in enumerate(self.axes):
            if source_axis is not None:
                offset[axis] += box.offset[source_axis] - self.source_box.offset[source_axis]
                extent[axis] = box.extent[source_axis]
        return Box(tuple(offset), tuple(extent))

    def to_source(self, box: Box) -> Box:
        """Return the box of the source that corresponds to a part of the target box."""
        offset = list(self.source_box.offset)
        extent = [1] * len(offset)
        for axis, source_axis in enumerate(self.axes):
            if source_axis is not None:
                offset[source_axis] += box.offset[axis] - self.target_box.offset[axis]
                extent[source_axis] = box.extent[axis]
        return Box(tuple(offset), tuple(extent))

    def placed(self, source: str, under: tuple[int, ...], target: str, onto: tuple[int, ...]) -> Link:
        """Return the same link between tensors with other names that are stacked along leading axes, at these
        indexes.
        """
        source_box, target_box, axes = self.source_box, self.target_box, self.axes
        if under:
            source_box = source_box.under(under)
            axes = tuple([None if axis is None else axis + len(under) for axis in axes])
        if onto:
            target_box = target_box.under(onto)
            axes = (None,) * len(onto) + axes
        return Link(source, source_box, target, target_box, axes)


def subtract(box: Box, others: Iterable[Box]) -> list[Box]:
    """Return the elements of ``box`` that are in none of ``others``, as disjoint boxes."""
    remaining = [box]
    for other in others:
        remaining = [piece for part in remaining for piece in _subtract_one(part, other)]
        if not remaining:
            break
    return remaining


def _subtract_one(box: Box, other: Box) -> Iterator[Box]:
    common = box.intersect(other)
    if common is None:
        yield box
        return
    offset, extent = list(box.offset), list(box.extent)
    for axis in range(len(offset)):
        before = common.offset[axis] - offset[axis]
        after = offset[axis] + extent[axis] - common.end[axis]
        if before:
            yield Box(tuple(offset), (*extent[:axis], before, *extent[axis + 1 :]))
        if after:
            start = (*offset[:axis], common.end[axis], *offset[axis + 1 :])
            yield Box(start, (*extent[:axis], after, *extent[axis + 1 :]))
        offset[axis], extent[axis] = common.offset[axis], common.extent[axis]


def first_overlap(boxes: Sequence[Box]) -> tuple[int, int, Box] | None:
    """Return two boxes that share elements, as ``(i, j, common part)``; None if all are disjoint.

    Boxes are split recursively by planes that do not cut any of them, so a grid of any size needs only a few sorts.
    Only boxes that no plane separates are compared with each other.

    Raises:
        LayoutError: the search would take minutes, because planes separate too few boxes. No known way to shard tensors
            produces such boxes.
    """
    compared = 0
    cuts = _Cuts(boxes)
    groups = [[index for index, box in enumerate(boxes) if box.volume]]
    while groups:
        group = groups.pop()
        if len(group) < 2:
            continue
        _, parted = cuts.part(group)
        if len(parted) > 1:
            groups += parted
        else:
            compared += len(group) ** 2 // 2
            if compared > _MOST_COMPARED:
                raise LayoutError(f"{len(group)} boxes are interlocked so that no straight cut parts them")
            for i, j in itertools.combinations(group, 2):
                common = boxes[i].intersect(boxes[j])
                if common is not None:
                    return i, j, common
    return None


def gaps(box: Box, others: Sequence[Box]) -> Iterator[Box]:
    """Yield the elements of a box that are in none of others, as disjoint boxes.

    The others are disjoint and lie in the box.

    The others are split as in `first_overlap`, so the first gaps are found soon, regardless of the number of boxes.

    Raises:
        LayoutError: see `first_overlap`.
    """
    cuts = _Cuts(others)
    waiting = [(box, [index for index, other in enumerate(others) if other.volume])]
    while waiting:
        region, group = waiting.pop()
        axis, parted = cuts.part(group) if len(group) > 1 else (0, [group])
        if len(parted) < 2:
            yield from subtract(region, [others[index] for index in group])
            continue
        reached = region.offset[axis]
        for part in parted:
            start = min(others[index].offset[axis] for index in part)
            end = max(others[index].offset[axis] + others[index].extent[axis] for index in part)
            if start > reached:
                yield _slab(region, axis, reached, start)
            waiting.append((_slab(region, axis, start, end), part))
            reached = end
        if reached < region.offset[axis] + region.extent[axis]:
            yield _slab(region, axis, reached, region.offset[axis] + region.extent[axis])


def _slab(box: Box, axis: int, start: int, end: int) -> Box:
    """Return the part of a box between two planes across an axis."""
    offset, extent = list(box.offset), list(box.extent)
    offset[axis], extent[axis] = start, end - start
    return Box(tuple(offset), tuple(extent))


class _Cuts:
    """Splits boxes by planes that do not cut any of them, within a limit on the work of all splits."""

    def __init__(self, boxes: Sequence[Box]) -> None:
        self._boxes = boxes
        self._left = _FREE_CUTS + _MOST_CUTS * len(boxes)

    def part(self, group: Sequence[int]) -> tuple[int, list[list[int]]]:
        """Return an axis, and the parts along it; one part if no plane splits the group.

        Raises LayoutError beyond the limit on work.
        """
        for axis in range(len(self._boxes[group[0]].offset)):
            self._left -= len(group)
            if self._left < 0:
                raise LayoutError(
                    f"{len(self._boxes)} boxes are interlocked so that a straight cut parts few of them from the others"
                )
            parted = _parted(self._boxes, group, axis)
            if len(parted) > 1:
                return axis, parted
        return 0, [list(group)]


def _parted(boxes: Sequence[Box], group: Sequence[int], axis: int) -> list[list[int]]:
    """Split the group wherever a plane across the axis does not cut a box."""
    parted: list[list[int]] = []
    reach = -1
    for index in sorted(group, key=lambda i: boxes[i].offset[axis]):
        start = boxes[index].offset[axis]
        if start >= reach:
            parted.append([])
        parted[-1].append(index)
        reach = max(reach, start + boxes[index].extent[axis])
    return parted


def row_major_boxes(extent: Sequence[int], start: int, stop: int) -> list[Box]:
    """Return the elements ``start`` to ``stop`` of a row-major array as at most ``2 * rank - 1`` boxes, in order."""
    if start >= stop:
        return []
    if not extent:
        return [Box((), ())]
    row = math.prod(extent[1:])
    if len(extent) == 1:
        return [Box((start,), (stop - start,))]
    found: list[Box] = []
    first, into = divmod(start, row)
    last, rest = divmod(stop, row)
    if into:
        end = stop if first == last else (first + 1) * row
        found += _in_row(first, row_major_boxes(extent[1:], into, end - first * row))
        if first == last:
            return found
        first += 1
    if last > first:
        found.append(Box((first, *(0 for _ in extent[1:])), (last - first, *extent[1:])))
    if rest:
        found += _in_row(last, row_major_boxes(extent[1:], 0, rest))
    return found


def strided_boxes(extent: Sequence[int], strides: Sequence[int], start: int, stop: int) -> list[Box]:
    """Return the elements of a strided array that lie in a range of its memory, as at most ``2 * rank - 1`` boxes of
    the array.

    Args:
        extent: extent of the array.
        strides: distance between neighbours along each axis, in elements. No two elements may share a place, and the
            elements at one index of an axis may not be interleaved with those at another index. Any view that slicing
            and permuting a dense array produces satisfies this.
        start, stop: the range, relative to the array's first element.
    """
    order = sorted(range(len(extent)), key=lambda axis: -strides[axis] if extent[axis] > 1 else 0)
    sizes, steps = [extent[axis] for axis in order], [strides[axis] for axis in order]
    found = row_major_boxes(sizes, _before(sizes, steps, start), _before(sizes, steps, stop))
    back = sorted(range(len(order)), key=order.__getitem__)
    return [Box(tuple([box.offset[at] for at in back]), tuple([box.extent[at] for at in back])) for box in found]


def _before(extent: Sequence[int], strides: Sequence[int], position: int) -> int:
    """Return the number of elements of a strided array that lie before a position in memory.

    Axes are in descending order of their strides.
    """
    left, found, volume = max(position, 0), 0, math.prod(extent)
    for size, stride in zip(extent, strides, strict=True):
        if size > 1:
            volume //= size
            whole = min(left // stride, size)
            found += whole * volume
            if whole == size:
                return found
            left -= whole * stride
    return found + (1 if left and volume else 0)


def _in_row(row: int, boxes: Iterable[Box]) -> list[Box]:
    return [Box((row, *box.offset), (1, *box.extent)) for box in boxes]
