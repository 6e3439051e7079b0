"""Boxes of a tensor whose elements are in a range of flat memory: a rank's part with ZeRO or with Megatron's
distributed optimizer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from weighbridge._core.boxes import Box, strided_boxes

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class StridedView:
    """Position of a tensor's elements in the flat memory of another tensor.

    Attributes:
        shape: its extent.
        strides: distance of neighbouring elements on each axis, in elements.
        start: position of its first element.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    start: int = 0

    @staticmethod
    def dense(shape: Sequence[int]) -> StridedView:
        """All elements of a tensor in row-major order."""
        return StridedView(tuple(shape), tuple([math.prod(shape[axis + 1 :]) for axis in range(len(shape))]))


class RangePart(NamedTuple):
    """Box of a view whose elements are all in a range of the view's memory.

    Attributes:
        box: the box, in the coordinates of the view.
        strides: strides of the view.
        at: position of the box's first element, relative to the beginning of the range.
    """

    box: Box
    strides: tuple[int, ...]
    at: int

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """The elements of the box, as a tensor of its extent that aliases the range.

        The range is dense and has one axis.
        """
        return flat.as_strided(self.box.extent, self.strides, flat.storage_offset() + self.at)


def parts_of_range(first: int, size: int, view: StridedView) -> list[RangePart]:
    """The boxes of a view that are in a range of memory.

    Args:
        first: beginning of the range in the view's memory.
        size: number of elements in the range; elements outside the view, such as padding, are in no box.
        view: the view that is cut into boxes.
    """
    start = first - view.start
    found = []
    for box in strided_boxes(view.shape, view.strides, start, start + size):
        at = sum([o * stride for o, stride in zip(box.offset, view.strides, strict=True)]) - start
        found.append(RangePart(box, view.strides, at))
    return found
