"""Copies between GPUs and memory that is shared with the service, by the GPUs' copy engines.

Such memory has to be registered with CUDA once in each process. ``cudaMemcpy2DAsync`` copies spaced rows as fast as
adjacent ones; torch does not use it: its own strided copies go through kernels and pageable buffers. Torch and the
runtime are loaded only if a tensor is on a GPU.
(https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__MEMORY.html)
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, nullcontext
from typing import TYPE_CHECKING, Any, Self

from weighbridge._core.byte_copies import ByteCopy
from weighbridge._memory.byte_rows import Rows
from weighbridge._memory.native_copies import ask_natively
from weighbridge._memory.strided import ShardCopies
from weighbridge.errors import FailedPrecondition, ResourceExhausted

if TYPE_CHECKING:
    import torch

_HOST_TO_DEVICE, _DEVICE_TO_HOST = 1, 2
_REGISTER_DEFAULT, _REGISTER_READ_ONLY = 0, 8
_UNKNOWN = 0
"""Kind of memory that CUDA does not know: neither a GPU's, nor managed, nor pinned."""


class _Attributes(ctypes.Structure):
    """The runtime's ``cudaPointerAttributes``, with room for fields of later releases."""

    _fields_ = (("kind", ctypes.c_int), ("rest", ctypes.c_byte * 252))


def register(address: int, nbytes: int, *, read_only: bool) -> Callable[[], None]:
    """Register memory, so that GPUs can copy from and to it.

    Returns the function that ends this, to be called before the memory is unmapped.

    Args:
        address: address of its first byte.
        nbytes: its size; about 30 GB/s are registered.
        read_only: whether it is mapped only for reading.

    Raises:
        FailedPrecondition: torch has no CUDA runtime that can be used.
        ResourceExhausted: CUDA refuses to register it.
    """
    runtime = _runtime()
    flags = _REGISTER_READ_ONLY if read_only else _REGISTER_DEFAULT
    _check(runtime.cudaHostRegister(address, nbytes, flags), f"registering {nbytes} bytes of memory")
    return functools.partial(runtime.cudaHostUnregister, address)


def is_mapped(address: int) -> bool:
    """Whether CUDA knows memory at an address. An allocator may have freed it and kept the addresses.

    Also True where torch has no usable CUDA runtime.
    """
    attributes = _Attributes()
    try:
        code = _runtime().cudaPointerGetAttributes(ctypes.byref(attributes), address)
        _check(code, "inspecting GPU memory")
    except (FailedPrecondition, ResourceExhausted):
        return True
    return bool(attributes.kind != _UNKNOWN)


def wait_for_streams(tensors: Iterable[torch.Tensor]) -> None:
    """Wait for the work in the current streams of the tensors' GPUs."""
    import torch

    for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
        torch.cuda.current_stream(device).synchronize()


class Reached:
    """A point in the queues of GPUs, after all work submitted so far.

    Args:
        events: one event for each queue.
    """

    def __init__(self, events: Sequence[torch.cuda.Event]) -> None:
        self._events = events

    @property
    def happened(self) -> bool:
        """Whether all of this work is done."""
        return all(event.query() for event in self._events)  # type: ignore[no-untyped-call]  # torch's own

    def wait(self) -> None:
        """Wait until all of this work is done."""
        for event in self._events:
            event.synchronize()


class CopyQueue:
    """Copies that are submitted one after the other, on any number of GPUs, and are all done when the context ends.

    They wait for the work that the current streams have so far; later work of these streams waits for them only after
    `precede`.

    Args:
        addresses: address of each memory's first byte; memories that are used must be registered.
    """

    def __init__(self, addresses: Sequence[int]) -> None:
        self._addresses = addresses
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._kept: list[torch.Tensor] = []

    def write(self, flat: torch.Tensor, copies: Sequence[ByteCopy[int]], *, after_stream: bool = True) -> bool:
        """Copy a shard from its GPU to memory. Returns False, with nothing done, if the copy engine cannot.

        Args:
            flat: the shard; contiguous.
            copies: copies of its bytes.
            after_stream: whether to wait for work that the current stream got since the first copy from this device.
        """
        self._kept.append(flat)  # it may be a temporary copy, which must not be freed before it was read
        copied = self._copy(flat, copies, _DEVICE_TO_HOST, after_stream=after_stream)
        if not copied:
            self._kept.pop()
        return copied

    def read(self, shard: torch.Tensor, copies: Sequence[ByteCopy[int]]) -> torch.cuda.Event | None:
        """Fill a contiguous shard on a GPU from memory; the caller keeps it alive until then.

        Returns:
            Event of the filled shard; None, with nothing done, if the copy engine cannot.
        """
        if not self._copy(shard.detach().view(-1), copies, _HOST_TO_DEVICE):
            return None
        filled: torch.cuda.Event = self._streams[shard.device].record_event()
        return filled

    def fill(self, shard: torch.Tensor, copies: Sequence[ByteCopy[int]], *, after_stream: bool) -> bool:
        """Fill a contiguous shard on a GPU from memory by the end of the context; the caller keeps it alive until then.

        Args:
            shard: the shard.
            copies: copies of its elements.
            after_stream: whether to wait for work that the current stream got since the first copy to this device.

        Returns:
            Whether it is being filled; False, with nothing done, if the copy engine cannot.
        """
        return self._copy(shard.detach().view(-1), copies, _HOST_TO_DEVICE, after_stream=after_stream)

    def move(self, rows: Rows, device: torch.device) -> None:
        """Copy rows from memory to a GPU by the end of the context; the caller keeps the targets alive until then.

        Args:
            rows: rows in the memories of this queue.
            device: the GPU.
        """
        import torch

        stream = self._stream(device, after_stream=False)
        function = ctypes.cast(_runtime().cudaMemcpy2DAsync, ctypes.c_void_p).value or 0
        with torch.cuda.device(device):
            code = ask_natively(function, rows, _HOST_TO_DEVICE, stream.cuda_stream)
        _check(code, "copying from memory to a GPU")

    def reached(self) -> Reached:
        """The point after the copies so far."""
        return Reached([stream.record_event() for stream in self._streams.values()])

    def precede(self, device: torch.device) -> None:
        """Let later work of the device's current stream wait for the copies so far, so that shards may be overwritten
        or freed there.
        """
        import torch

        torch.cuda.current_stream(device).wait_stream(self._streams[device])
        self._kept.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Wait for all copies."""
        with ExitStack() as all_of_them:  # even if one fails: callers must not assume that the others are done
            for stream in self._streams.values():
                all_of_them.callback(stream.synchronize)
        self._kept.clear()

    def _copy(
        self,
        flat: torch.Tensor,
        copies: Sequence[ByteCopy[int]],
        direction: int,
        *,
        after_stream: bool = True,
    ) -> bool:
        import torch

        planned = ShardCopies.of(copies)
        if planned.steps is None:
            return False
        device = flat.device
        runtime, stream = _runtime(), self._stream(device, after_stream=after_stream)
        # entering a device takes longer than submitting a copy
        is_current = device.index == torch.cuda.current_device()
        with nullcontext() if is_current else torch.cuda.device(device):
            for copy, steps in zip(planned, planned.steps, strict=True):
                for step in steps:
                    ours = (flat.data_ptr() + step.shard_offset, step.shard_pitch)
                    theirs = (self._addresses[copy.file] + step.memory_offset, step.memory_pitch)
                    target, source = (theirs, ours) if direction == _DEVICE_TO_HOST else (ours, theirs)
                    code = runtime.cudaMemcpy2DAsync(
                        *target, *source, step.width, step.rows, direction, stream.cuda_stream
                    )
                    _check(code, "copying between a GPU and memory")
        return True

    def _stream(self, device: torch.device, *, after_stream: bool) -> torch.cuda.Stream:
        import torch

        known = device in self._streams
        if not known:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream = self._streams[device]
        if after_stream or not known:
            stream.wait_stream(torch.cuda.current_stream(device))
        return stream


def _check(code: int, what: str) -> None:
    if code:
        runtime = _runtime()
        runtime.cudaGetLastError()  # or the next CUDA call of the process would report it
        raise ResourceExhausted(f"{what} failed: {runtime.cudaGetErrorString(code).decode()}")


@functools.cache
def _runtime() -> Any:
    """The CUDA runtime that torch has loaded."""
    import torch

    version = torch.version.cuda
    if version is None:
        raise FailedPrecondition("torch was built without CUDA")
    torch.cuda.init()  # type: ignore[no-untyped-call]
    try:
        runtime = ctypes.CDLL(f"libcudart.so.{version.partition('.')[0]}")
    except OSError as error:
        raise FailedPrecondition(f"torch's CUDA runtime cannot be found: {error}") from error
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    runtime.cudaHostRegister.argtypes = (pointer, size, ctypes.c_uint)
    runtime.cudaHostUnregister.argtypes = (pointer,)
    runtime.cudaMemcpy2DAsync.argtypes = (
        pointer, size, pointer, size, size, size, ctypes.c_int, pointer,
    )  # fmt: skip
    runtime.cudaPointerGetAttributes.argtypes = (pointer, pointer)
    runtime.cudaGetErrorString.argtypes = (ctypes.c_int,)
    runtime.cudaGetErrorString.restype = ctypes.c_char_p
    return runtime
