"""Boxes of a tensor whose elements lie in a range of flat memory: the part of a rank under ZeRO, or under Megatron's distributed optimizer."""

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
        strides: how far its elements lie apart along each axis, in elements.
        start: where its first one lies.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    start: int = 0

    @staticmethod
    def dense(shape: Sequence[int]) -> StridedView:
        """All elements of a tensor in row-major order."""
        return StridedView(tuple(shape), tuple([math.prod(shape[axis + 1 :]) for axis in range(len(shape))]))


class Part(NamedTuple):
    """Box of a view. All of its elements lie in a range of the memory that the view is of.

    Attributes:
        box: in the coordinates of the view.
        strides: of the view.
        at: where the box's first element lies, counted from the beginning of the range.
    """

    box: Box
    strides: tuple[int, ...]
    at: int

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """The elements of the box, as a tensor of its extent that aliases the range, which is dense and has one axis."""
        return flat.as_strided(self.box.extent, self.strides, flat.storage_offset() + self.at)


def parts_of_range(first: int, size: int, view: StridedView) -> list[Part]:
    """The boxes of a view that lie in a range of memory.

    Args:
        first: where the range begins in the memory that the view is of.
        size: how many elements it has; those that are not the view's, as padding, are in no box.
        view: what is cut into boxes.
    """
    start = first - view.start
    found = []
    for box in strided_boxes(view.shape, view.strides, start, start + size):
        at = sum([o * stride for o, stride in zip(box.offset, view.strides, strict=True)]) - start
        found.append(Part(box, view.strides, at))
    return found
