"""What an engine can ask for: whole tensors, its tensor-parallel slices, or explicit boxes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FullTensors:
    """Whole tensors.

    Attributes:
        names: only these, in this order; all tensors of the model if empty.
    """

    names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """What one rank of a tensor-parallel engine holds, by the model's own parallel plan.

    Key-value heads are replicated where there are fewer heads than ranks; what the plan does not cut comes whole.

    Attributes:
        size: ranks that share the model.
        rank: this one, from 0.
    """

    size: int
    rank: int


@dataclass(frozen=True, slots=True)
class Boxes:
    """Explicit boxes of tensors.

    Attributes:
        boxes: ``(tensor name, offset, extent)``, offset and extent in elements on each axis. A tensor may occur in
            several boxes.
    """

    boxes: Sequence[tuple[str, Sequence[int], Sequence[int]]]


LayoutRequest = FullTensors | TensorParallel | Boxes
