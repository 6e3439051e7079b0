"""Copies between GPUs and memory that is shared with the service, made by the GPUs' own copy engines.

Such memory has to be registered with CUDA once in each process. Rows that lie apart are copied as fast as those that lie together,
by ``cudaMemcpy2DAsync``, which torch does not use: its own strided copies go through kernels and pageable buffers. Imported only where
a tensor is on a GPU. (https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__MEMORY.html)
"""

from __future__ import annotations

import ctypes
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from weighbridge._core.byte_copies import ByteCopy
from weighbridge.errors import FailedPrecondition, ResourceExhausted

if TYPE_CHECKING:
    import torch

_HOST_TO_DEVICE, _DEVICE_TO_HOST = 1, 2
_REGISTER_DEFAULT, _REGISTER_READ_ONLY = 0, 8
_LARGEST_PITCH = (1 << 31) - 1
_NARROWEST_ROW = 64
"""Bytes of a row below which the copy engines are slower than a kernel that gathers the elements."""
_MOST_STEPS = 4096
"""Steps of one copy: each takes some microseconds to ask for."""


class Step(NamedTuple):
    """Rows that the copy engine moves in one go; all in bytes.

    Attributes:
        shard_offset: of the first row in the shard.
        shard_pitch: distance of two rows there.
        memory_offset: of the first row in the memory.
        memory_pitch: distance of two rows there.
        width: of a row.
        rows: how many.
    """

    shard_offset: int
    shard_pitch: int
    memory_offset: int
    memory_pitch: int
    width: int
    rows: int


@functools.lru_cache(maxsize=1 << 16)  # a plan serves many pushes and pulls
def steps_of(copy: ByteCopy[int]) -> Sequence[Step] | None:
    """What the copy engine has to do for a strided copy; None if that would be slow, or it cannot."""
    width = copy.extent[-1]
    rows, shard_pitch, memory_pitch = 1, width, width
    outer = copy.extent[:-1]
    if outer:
        rows, shard_pitch, memory_pitch = outer[-1], copy.stream_strides[-2], copy.file_strides[-2]
        outer = outer[:-1]
    pitches = (shard_pitch, memory_pitch)
    if rows > 1 and (width < _NARROWEST_ROW or min(pitches) < width or max(pitches) > _LARGEST_PITCH):
        return None
    steps = tuple(
        itertools.islice(_steps(copy, outer, (shard_pitch, memory_pitch, width, rows)), _MOST_STEPS + 1)
    )
    return steps if len(steps) <= _MOST_STEPS else None


def _steps(copy: ByteCopy[int], outer: tuple[int, ...], step: tuple[int, int, int, int]) -> Iterator[Step]:
    shard_pitch, memory_pitch, width, rows = step
    for index in itertools.product(*map(range, outer)):
        in_shard = sum(i * stride for i, stride in zip(index, copy.stream_strides, strict=False))
        in_memory = sum(i * stride for i, stride in zip(index, copy.file_strides, strict=False))
        yield Step(
            copy.stream_offset + in_shard,
            shard_pitch,
            copy.file_offset + in_memory,
            memory_pitch,
            width,
            rows,
        )


def register(address: int, nbytes: int, *, read_only: bool) -> Callable[[], None]:
    """Let GPUs copy from and to memory; gives what ends that, which is to be called before the memory is unmapped.

    Args:
        address: of its first byte.
        nbytes: its size; about 30 GB/s are registered.
        read_only: whether it is mapped only for reading.

    Raises:
        FailedPrecondition: torch has no CUDA runtime that can be used.
        ResourceExhausted: CUDA refuses it.
    """
    runtime = _runtime()
    flags = _REGISTER_READ_ONLY if read_only else _REGISTER_DEFAULT
    _check(runtime.cudaHostRegister(address, nbytes, flags), f"registering {nbytes} bytes of memory")
    return functools.partial(runtime.cudaHostUnregister, address)


class CopyQueue:
    """Copies that are asked for one after the other and are all done when the context ends, on any number of GPUs.

    They wait for what the current streams have been given to do so far, and later work of these streams waits for nothing.

    Args:
        addresses: of each memory's first byte; those that are used must be registered.
    """

    def __init__(self, addresses: Sequence[int]) -> None:
        self._addresses = addresses
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._kept: list[torch.Tensor] = []

    def write(self, shard: torch.Tensor, copies: Sequence[ByteCopy[int]]) -> bool:
        """Copy a shard from its GPU to memory; False if it cannot be done in this way, and nothing was done."""
        flat = shard.detach().contiguous().view(-1)
        self._kept.append(flat)  # it may be a copy of our own, which must not be freed before it was read
        copied = self._copy(flat, copies, _DEVICE_TO_HOST)
        if not copied:
            self._kept.pop()
        return copied

    def read(self, shard: torch.Tensor, copies: Sequence[ByteCopy[int]]) -> torch.cuda.Event | None:
        """Fill a contiguous shard on a GPU from memory; it stays the caller's to keep until then.

        Returns:
            What happens when the shard is filled; None if it cannot be done in this way, and nothing was done.
        """
        if not self._copy(shard.detach().view(-1), copies, _HOST_TO_DEVICE):
            return None
        filled: torch.cuda.Event = self._streams[shard.device].record_event()
        return filled

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with ExitStack() as all_of_them:  # also if one fails: nobody may think that the others are done
            for stream in self._streams.values():
                all_of_them.callback(stream.synchronize)
        self._kept.clear()

    def _copy(self, flat: torch.Tensor, copies: Sequence[ByteCopy[int]], direction: int) -> bool:
        import torch

        planned = [(copy.file, steps_of(copy)) for copy in copies]
        if any(steps is None for _, steps in planned):
            return False
        runtime, stream = _runtime(), self._stream(flat.device)
        with torch.cuda.device(flat.device):
            for memory, steps in planned:
                for step in steps or ():
                    ours = (flat.data_ptr() + step.shard_offset, step.shard_pitch)
                    theirs = (self._addresses[memory] + step.memory_offset, step.memory_pitch)
                    target, source = (theirs, ours) if direction == _DEVICE_TO_HOST else (ours, theirs)
                    code = runtime.cudaMemcpy2DAsync(
                        *target, *source, step.width, step.rows, direction, stream.cuda_stream
                    )
                    _check(code, "copying between a GPU and memory")
        return True

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        import torch

        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream = self._streams[device]
        stream.wait_stream(torch.cuda.current_stream(device))
        return stream


def _check(code: int, what: str) -> None:
    if code:
        runtime = _runtime()
        runtime.cudaGetLastError()  # or the next call of anybody would report it
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
    runtime.cudaGetErrorString.argtypes = (ctypes.c_int,)
    runtime.cudaGetErrorString.restype = ctypes.c_char_p
    return runtime
