"""Yardstick of everything on one host: copies of the same tensors within memory, or between a GPU and pinned memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

_MOST_BYTES = 1 << 30


class WarmCopy:
    """Copies tensors into memory that is there already and has been touched; pinned memory if they lie on a GPU.

    The copies lie one behind the other; at 1 GiB, or the largest tensor, they begin again from the start. That is more
    than any cache holds, and a model of 8 GB does not need 8 GB more to be copied.

    Args:
        shapes: dtype and shape of each tensor.
        device: device of the tensors.
    """

    def __init__(self, shapes: Sequence[tuple[torch.dtype, tuple[int, ...]]], device: str = "cpu") -> None:
        sizes = [dtype.itemsize * int(np.prod(shape, dtype=np.int64)) for dtype, shape in shapes]
        room = max(min(sum(sizes), _MOST_BYTES), max(sizes, default=0))
        self._pinned = device != "cpu"
        buffer = torch.ones(max(room, 1), dtype=torch.uint8, pin_memory=self._pinned).numpy()
        self._into: list[Tensor] = []
        offset = 0
        for (dtype, shape), nbytes in zip(shapes, sizes, strict=True):
            offset = 0 if offset + nbytes > room else offset
            count = nbytes // dtype.itemsize
            self._into.append(torch.frombuffer(buffer, dtype=dtype, count=count, offset=offset).reshape(shape))
            offset += nbytes

    def run(self, tensors: Sequence[Tensor]) -> None:
        """Copy the tensors, which are of the shapes given."""
        for into, tensor in zip(self._into, tensors, strict=True):
            into.copy_(tensor, non_blocking=True)
        if self._pinned:
            torch.cuda.synchronize()
