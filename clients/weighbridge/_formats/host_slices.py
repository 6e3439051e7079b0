"""Slices of a version in memory of this process. They can be read any number of times."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

from weighbridge._core.layouts import Layout
from weighbridge._formats.tensor_stream import check_target
from weighbridge._memory import cuda_copies

if TYPE_CHECKING:
    import torch

__all__ = ["HostSlices", "Slices"]

_ALIGNMENT = 64


class Slices(Protocol):
    """Slices of a version that are on this machine."""

    def tensor(self, index: int) -> torch.Tensor:
        """A slice, by its index in the layout, contiguous and in host memory. Do not write to it."""

    def fill(self, targets: Iterable[tuple[int, torch.Tensor]]) -> None:
        """Copy slices to tensors; all are complete when it returns.

        Args:
            targets: the index of a slice in the layout, and a tensor of its dtype with as many elements, on any device.
                No two of the tensors share memory.
        """


class HostSlices:
    """One buffer for the slices of a layout.

    Args:
        layout: layout of the slices.
        buffer: reused if it is large enough.
        pin: whether GPUs will copy from it.

    Attributes:
        buffer: the buffer.
    """

    def __init__(self, layout: Layout, buffer: torch.Tensor | None = None, *, pin: bool = False) -> None:
        import torch

        self._layout = layout
        self._offsets: list[int] = []
        end = 0
        for placement in layout.placements:
            self._offsets.append(end)
            end += -(-placement.nbytes // _ALIGNMENT) * _ALIGNMENT
        if buffer is None or len(buffer) < end or buffer.is_pinned() < pin:
            buffer = torch.empty(end, dtype=torch.uint8, device="cpu", pin_memory=pin)
        self.buffer = buffer

    def __repr__(self) -> str:
        return f"<HostSlices: {len(self._offsets)} slices in {len(self.buffer)} bytes>"

    def tensor(self, index: int) -> torch.Tensor:
        """A slice, by its index in the layout; valid until the buffer is reused."""
        shard, _, _, nbytes = self._layout.placements[index]
        dtype = self._layout.tensors[shard.tensor].dtype.torch
        start = self._offsets[index]
        return self.buffer[start : start + nbytes].view(dtype).view(shard.box.extent)

    def fill(self, targets: Iterable[tuple[int, torch.Tensor]]) -> None:
        """Copy slices to tensors, as `Slices.fill`.

        Copies from a pinned buffer to GPUs are queued without waiting in between.
        """
        filled: list[torch.Tensor] = []
        for index, tensor in targets:
            check_target(self._layout, self._layout.placements[index], tensor)
            tensor.copy_(self.tensor(index).view(tensor.shape), non_blocking=tensor.is_cuda)
            filled.append(tensor)
        cuda_copies.wait_for_streams(filled)
