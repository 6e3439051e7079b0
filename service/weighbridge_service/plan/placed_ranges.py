"""Parts of the ranks' streams that are not in exactly one place of the files: padding, and tensors that the files
contain several times.

With these, a rank that counts elements in its stream, such as NaN elements, gets the same count as the service gets
from the files.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from weighbridge._core.boxes import Box
from weighbridge_service.plan.planning import Plan


class PlacedRange(NamedTuple):
    """Neighbouring elements of a stream with the same number of places in the files.

    Attributes:
        start, end: first byte, and one past the last.
        places: number of places; 0 for padding.
    """

    start: int
    end: int
    places: int


def placed_ranges(plan: Plan, uneven: Collection[str]) -> Mapping[int, Sequence[PlacedRange]]:
    """The parts of each rank's stream that are not in exactly one place, sorted. Ranks without such parts are omitted.

    Args:
        plan: plan from the streams, in buffers named like the ranks, to the files.
        uneven: names of the tensors that can have such parts.
    """
    indexes = {index for name in uneven for index in plan.source.by_tensor.get(name, ())}
    begins: dict[int, Counter[int]] = {index: Counter() for index in indexes}
    for copy in plan.copies:
        if copy.source in indexes:
            extent = plan.source.placements[copy.source].shard.box.extent
            for start, end in _runs(copy.source_box, extent):
                begins[copy.source][start] += 1
                begins[copy.source][end] -= 1
    found: dict[int, list[PlacedRange]] = defaultdict(list)
    for index in sorted(indexes, key=lambda each: plan.source.placements[each].offset):
        placement = plan.source.placements[index]
        itemsize = plan.source.tensors[placement.shard.tensor].dtype.itemsize
        bounds = sorted({0, placement.shard.box.volume, *begins[index]})
        places = 0
        for start, end in itertools.pairwise(bounds):
            places += begins[index][start]
            if places != 1:
                first, last = (placement.offset + each * itemsize for each in (start, end))
                found[int(placement.buffer)].append(PlacedRange(first, last, places))
    return found


def _runs(box: Box, extent: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Contiguous runs of a box's elements in a row-major array, each as its first element and one past its last."""
    if not box.volume:
        return
    axis = len(extent)
    while axis and box.extent[axis - 1] == extent[axis - 1]:
        axis -= 1
    # axes before `axis` select runs; the one just before it is cut
    outer = max(axis - 1, 0)
    dense = math.prod(extent[axis:])
    first = (box.offset[outer] if axis else 0) * dense
    length = (box.extent[outer] if axis else 1) * dense
    above = math.prod(extent[outer:])
    for at in itertools.product(
        *(range(o, o + n) for o, n in zip(box.offset[:outer], box.extent[:outer], strict=True))
    ):
        row = 0
        for position, n in zip(at, extent[:outer], strict=True):
            row = row * n + position
        yield row * above + first, row * above + first + length
