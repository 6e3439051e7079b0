"""Between tensors and the stream of bytes that they form on the wire."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from weighbridge.errors import LayoutError
from weighbridge.layouts import Layout, Placement

if TYPE_CHECKING:
    import torch


def copy_out(layout: Layout, tensors: Sequence[torch.Tensor], staging: NDArray[np.uint8]) -> None:
    """Copy tensors, on any device, to their places in a stream.

    Args:
        layout: of the stream.
        tensors: one for each placement, with as many elements as its box, in row-major order of its axes.
        staging: at least ``layout.nbytes`` bytes.
    """
    import torch

    with torch.no_grad():
        for placement, tensor in zip(layout.placements, tensors, strict=True):
            check_size(placement, tensor)
            if placement.nbytes:
                torch.frombuffer(
                    staging, dtype=tensor.dtype, count=tensor.numel(), offset=placement.offset
                ).view(tensor.shape).copy_(tensor)


def check_size(placement: Placement, tensor: torch.Tensor) -> None:
    """Refuse a tensor that does not have as many bytes as its placement.

    Raises:
        LayoutError: it has not.
    """
    nbytes = tensor.numel() * tensor.element_size()
    if nbytes != placement.nbytes:
        raise LayoutError(
            f"{placement.shard.tensor}: a tensor of {nbytes} bytes was given for box {placement.shard.box} of "
            f"{placement.nbytes} bytes"
        )


class StreamWriter:
    """Writes a stream, as it comes in, into tensors.

    Args:
        layout: of the stream.
        tensor_for: gives the tensor for a placement, when its first byte arrives. Contiguous tensors in host memory
            are written in place, others through a copy.
    """

    def __init__(self, layout: Layout, tensor_for: Callable[[int], torch.Tensor]) -> None:
        self._layout = layout
        self._tensor_for = tensor_for
        self._next = 0
        self._filled = 0
        self._current: tuple[torch.Tensor, torch.Tensor, NDArray[np.uint8]] | None = None

    def feed(self, data: memoryview) -> Iterator[tuple[int, torch.Tensor]]:
        """Take the next bytes of the stream; gives each placement that they complete, and its tensor."""
        rest = data
        placements = self._layout.placements
        while self._next < len(placements):
            placement = placements[self._next]
            if self._current is None:
                if not rest and placement.nbytes:
                    return
                tensor = self._tensor_for(self._next)
                check_size(placement, tensor)
                self._current = _open(tensor)
            target, host, view = self._current
            count = min(len(rest), placement.nbytes - self._filled)
            if count:
                view[self._filled : self._filled + count] = np.frombuffer(rest[:count], np.uint8)
                rest = rest[count:]
                self._filled += count
            if self._filled < placement.nbytes:
                return
            if host is not target:
                target.copy_(host)
            yield self._next, target
            self._next, self._filled, self._current = self._next + 1, 0, None


def _open(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, NDArray[np.uint8]]:
    """A tensor, its stand-in in contiguous host memory (the same one if it is so itself), and that one's bytes."""
    import torch

    tensor = tensor.detach()
    if tensor.device.type == "cpu" and tensor.is_contiguous():
        host = tensor
    else:
        host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    view: NDArray[np.uint8] = host.reshape(-1).view(torch.uint8).numpy()
    return tensor, host, view
