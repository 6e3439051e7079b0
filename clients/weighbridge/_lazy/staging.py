"""Staging place: memory for a version before it is applied, with the layout of the parameters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager

import torch

from weighbridge._lazy.recording import Shape
from weighbridge._lazy.views import Strided

_ALIGNMENT = 512
"""Alignment in bytes; that of torch's own allocator for tensors on a GPU."""


class StagingPlace:
    """Memory for one version at a time.

    Args:
        memory: ``uint8``, one dimension, on the device of the parameters, or pinned.
    """

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory = memory
        self._found: tuple[Mapping[str, Shape], Mapping[str, torch.Tensor]] = ({}, {})

    def __repr__(self) -> str:
        return f"<StagingPlace: {self.nbytes} bytes on {self._memory.device}>"

    @property
    def nbytes(self) -> int:
        """Size of the memory."""
        return self._memory.numel()

    @property
    def device(self) -> torch.device:
        """Device of the memory."""
        return self._memory.device

    def tensors(self, shapes: Mapping[str, Shape]) -> Mapping[str, torch.Tensor]:
        """Tensors in the memory with these shapes, by name: as many as fit, in order. Cached for the last mapping."""
        if shapes is not self._found[0]:
            self._found = (shapes, self._tensors(shapes))
        return self._found[1]

    def _tensors(self, shapes: Mapping[str, Shape]) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        start = 0
        for name, shape in shapes.items():
            nbytes = extent_of(shape)
            if start + nbytes > self.nbytes:
                continue
            flat = self._memory[start : start + nbytes].view(shape.dtype)
            found[name] = flat.as_strided(shape.size, shape.stride)
            start += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        return found


@contextmanager
def on_stream_of(device: torch.device, stream: torch.cuda.Stream | None = None) -> Iterator[None]:
    """Run the block's GPU work on a stream of its own, or on ``stream``, and wait for it at the end; nothing on other
    devices.
    """
    with ExitStack() as stack:
        if device.type == "cuda":
            stream = stream or torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch's own
            stack.callback(stream.synchronize)
            stack.enter_context(torch.cuda.stream(stream))
        yield


def staging_bytes(shapes: Iterable[Shape]) -> int:
    """Size of a place with room for tensors of all these shapes."""
    return sum(-(-extent_of(shape) // _ALIGNMENT) * _ALIGNMENT for shape in shapes)


def extent_of(shape: Shape) -> int:
    """Bytes from a tensor's first element to the end of its last."""
    if 0 in shape.size:
        return 0
    last = sum((n - 1) * stride for n, stride in zip(shape.size, shape.stride, strict=True))
    return int(last + 1) * shape.dtype.itemsize


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a tensor from its first to its last in memory, with any elements between them."""
    return tensor.as_strided((extent_of(Shape.of(tensor)) // tensor.itemsize,), (1,))


def packed(tensors: Mapping[str, torch.Tensor], memories: Iterable[torch.Tensor]) -> dict[str, torch.Tensor] | None:
    """Copies of tensors with the same strides, in memory of other tensors; tensors that lie there already are not
    copied.

    Args:
        tensors: tensors by name.
        memories: tensors whose values are no longer needed. No two of them share memory.

    Returns:
        The tensors by name; None, with nothing written, if they do not fit.
    """
    free = [flat(each).view(torch.uint8) for each in memories if each.numel()]
    found: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if any(_touches(tensor, each) for each in free):
            found[name] = tensor
            free = [each for each in free if not _touches(tensor, each)]
    rest = {name: tensor for name, tensor in tensors.items() if name not in found}
    for name, tensor in sorted(rest.items(), key=lambda item: -extent_of(Shape.of(item[1]))):
        shape = Shape.of(tensor)
        nbytes = extent_of(shape)
        index = next((i for i, each in enumerate(free) if each.numel() >= nbytes), None)
        if index is None:
            return None
        memory = free[index]
        found[name] = memory[:nbytes].view(shape.dtype).as_strided(shape.size, shape.stride)
        free[index] = memory[-(-nbytes // _ALIGNMENT) * _ALIGNMENT :]
    for name, tensor in rest.items():
        found[name].copy_(tensor)
    return found


def _touches(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors overlap in memory."""
    first, second = tensor.data_ptr(), other.data_ptr()
    return bool(first < second + extent_of(Shape.of(other)) and second < first + extent_of(Shape.of(tensor)))


def part_of(tensor: torch.Tensor, part: Strided) -> torch.Tensor:
    """A part of a tensor, counted from its own first element, without autograd history."""
    found = tensor.detach()
    return found.as_strided(part.size, part.stride, found.storage_offset() + part.offset)
