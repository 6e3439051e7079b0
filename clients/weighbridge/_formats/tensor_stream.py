"""Conversion between tensors and the stream of bytes that they form on the wire."""

from __future__ import annotations

import bisect
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from weighbridge._core import dtypes
from weighbridge._core.dtypes import DType
from weighbridge._core.layouts import Layout, Placement, TensorSpec
from weighbridge._formats.shifts import NO_SHIFTS, Shifts, shifted
from weighbridge.errors import LayoutError

if TYPE_CHECKING:
    import torch


Ranges = Sequence[tuple[int, int]]
"""Parts of a stream, sorted and disjoint: the first byte of each and one past its last."""


def copy_out(
    layout: Layout,
    tensors: Sequence[torch.Tensor],
    staging: NDArray[np.uint8],
    ranges: Ranges,
    shifts: Shifts = NO_SHIFTS,
) -> None:
    """Copy parts of a stream of tensors on any device to a buffer, one part after another.

    Args:
        layout: of the stream.
        tensors: one for each placement, with as many elements as its box, in row-major order of its axes. They are cast
            according to `written_as`.
        staging: destination, at least as large as the parts.
        ranges: the parts.
        shifts: constants to add to elements.
    """
    import torch

    with torch.no_grad():
        base = 0
        for start, stop in ranges:
            for placement, tensor in _between(layout, tensors, start, stop):
                dtype = written_as(layout.tensors[placement.shard.tensor], tensor)
                shift = shifts.get(placement.shard.tensor, 0.0)
                check_size(placement, tensor, dtype)
                first, last = max(start, placement.offset), min(stop, placement.offset + placement.nbytes)
                offset = base + first - start
                if last - first == placement.nbytes:
                    if shift:
                        tensor = with_shift(tensor, dtype, shift)
                    if dtype != tensor.dtype:  # casts of rows give the same bits as all other ways
                        tensor = tensor.contiguous()
                        # and on a GPU they are cast before the copy: a casting copy to host memory casts on the CPU,
                        # where NaN gets other bits
                        tensor = tensor if tensor.is_cpu else tensor.to(dtype)
                    torch.frombuffer(staging, dtype=dtype, count=tensor.numel(), offset=offset).view(
                        tensor.shape
                    ).copy_(tensor)
                else:
                    span = first - placement.offset, last - placement.offset
                    part = _bytes_of(tensor.detach(), dtype, *span, shift)
                    torch.frombuffer(staging, dtype=torch.uint8, count=last - first, offset=offset).copy_(part)
            base += stop - start


def written_as(spec: TensorSpec, tensor: torch.Tensor) -> torch.dtype:
    """The dtype of a tensor's elements in a stream: floating-point numbers of 16 bits or more are cast, all others are
    sent unchanged.
    """
    return cast_of(spec, tensor.dtype)


def cast_of(spec: TensorSpec, dtype: torch.dtype) -> torch.dtype:
    """As `written_as`, for a tensor with this dtype."""
    return _cast_of(spec.dtype, dtype)


@functools.cache  # called several times for each tensor of a push
def _cast_of(wanted: DType, dtype: torch.dtype) -> torch.dtype:
    are_numbers = dtype.is_floating_point and dtype.itemsize > 1
    return wanted.torch if wanted.is_float and are_numbers else dtype


def with_shift(tensor: torch.Tensor, dtype: torch.dtype, shift: float) -> torch.Tensor:
    """A tensor in a dtype with a constant added to each element: a copy in host memory, in row-major order."""
    import torch

    cast = tensor.detach().contiguous().to(dtype).cpu()
    data = shifted(cast.reshape(-1).view(torch.uint8).numpy(), dtypes.from_torch(dtype), shift)
    return torch.from_numpy(data).view(dtype).view(cast.shape)


def _bytes_of(tensor: torch.Tensor, dtype: torch.dtype, start: int, stop: int, shift: float = 0.0) -> torch.Tensor:
    """Bytes ``start`` to ``stop`` of a tensor's elements in a dtype, in row-major order; no more than needed is copied
    or cast.
    """
    import torch

    # if a tensor is not in row-major order, whole rows are copied
    rows = tensor.view(-1) if tensor.is_contiguous() else tensor
    row_bytes = rows[:1].numel() * dtype.itemsize
    first = start // row_bytes
    part = rows[first : -(-stop // row_bytes)]
    if rows is tensor:
        part = part.clone(memory_format=torch.contiguous_format)
    if shift:
        part = with_shift(part, dtype, shift)
    return part.to(dtype).view(-1).view(torch.uint8)[start - first * row_bytes : stop - first * row_bytes]


def _between(
    layout: Layout, tensors: Sequence[torch.Tensor], start: int, stop: int
) -> Iterator[tuple[Placement, torch.Tensor]]:
    """The placements with bytes in a range of a stream, and their tensors."""
    placements = layout.placements
    index = bisect.bisect_right(placements, start, key=lambda each: each.offset + each.nbytes)
    while index < len(placements) and placements[index].offset < stop:
        if placements[index].nbytes:
            yield placements[index], tensors[index]
        index += 1


def check_size(placement: Placement, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> None:
    """Refuse a tensor whose size in bytes differs from its placement's; computed for the given dtype, if any.

    Raises:
        LayoutError: the sizes differ.
    """
    nbytes = tensor.numel() * (dtype or tensor.dtype).itemsize
    if nbytes != placement.nbytes:
        raise LayoutError(
            f"{placement.shard.tensor}: a tensor of {nbytes} bytes was given for box {placement.shard.box} of "
            f"{placement.nbytes} bytes"
        )


def check_target(layout: Layout, placement: Placement, tensor: torch.Tensor) -> None:
    """Refuse a tensor that cannot receive a slice. An integer tensor receives the raw bytes.

    Raises:
        LayoutError: its size differs, or its floating-point dtype differs, so that the bytes would represent other
            numbers.
    """
    name = placement.shard.tensor
    dtype = layout.tensors[name].dtype
    if tensor.dtype.is_floating_point and tensor.dtype != dtype.torch:
        raise LayoutError(
            f"{name}: a tensor of {tensor.dtype} was given for a slice of {dtype.torch}",
            fix=f"pass one of {dtype.torch}, or pull with dtype= to cast the slice",
        )
    check_size(placement, tensor)


class StreamWriter:
    """Writes an incoming stream into tensors.

    Args:
        layout: of the stream.
        tensor_for: returns the tensor for a placement when its first byte arrives. Contiguous tensors in host memory
            are written in place, others through a copy.
    """

    def __init__(self, layout: Layout, tensor_for: Callable[[int], torch.Tensor]) -> None:
        self._layout = layout
        self._tensor_for = tensor_for
        self._next = 0
        self._filled = 0
        self._current: tuple[torch.Tensor, torch.Tensor, NDArray[np.uint8]] | None = None

    def feed(self, data: memoryview) -> Iterator[tuple[int, torch.Tensor]]:
        """Write the next bytes of the stream. Yields each placement that they complete, and its tensor."""
        rest = data
        placements = self._layout.placements
        while self._next < len(placements):
            placement = placements[self._next]
            if self._current is None:
                if not rest and placement.nbytes:
                    return
                tensor = self._tensor_for(self._next)
                check_target(self._layout, placement, tensor)
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
    """A tensor, its stand-in in contiguous host memory (the tensor itself if it already is contiguous there), and the
    stand-in's bytes.
    """
    import torch

    tensor = tensor.detach()
    if tensor.device.type == "cpu" and tensor.is_contiguous():
        host = tensor
    else:
        host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    view: NDArray[np.uint8] = host.reshape(-1).view(torch.uint8).numpy()
    return tensor, host, view
