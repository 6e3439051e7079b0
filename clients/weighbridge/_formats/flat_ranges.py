"""Ranges of a flat tensor's elements, as boxes of what the tensor is the memory of: what is left to a rank of ZeRO, and of Megatron's distributed optimizer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from weighbridge._core.boxes import Box, strided_boxes

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class StridedView:
    """Where the elements of a tensor lie in the flat memory of another one.

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


def boxes_of_range(flat: torch.Tensor, first: int, view: StridedView) -> list[tuple[Box, torch.Tensor]]:
    """The boxes of a view whose elements a flat tensor holds, and for each a tensor of its extent that aliases the flat one.

    Args:
        flat: the elements from ``first`` on, dense, of one axis. There may be more than there are: padding, which is in no view.
        first: where it begins in the memory that the view is of.
        view: what is cut into boxes.
    """
    start = first - view.start
    found = []
    for box in strided_boxes(view.shape, view.strides, start, start + flat.numel()):
        at = sum([o * stride for o, stride in zip(box.offset, view.strides, strict=True)]) - start
        found.append((box, flat.as_strided(box.extent, view.strides, flat.storage_offset() + at)))
    return found
