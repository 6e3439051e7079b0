"""Strided copies between shards and the files of a version, carried out on tensors and on bytes."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from weighbridge.errors import DataLoss, WeighbridgeError
from weighbridge.lane_memory import MappedMemory
from weighbridge.layouts import Layout
from weighbridge.native_copies import Plan, Region, copy_natively, region_of
from weighbridge.v1 import local_lane_pb2 as pb

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

Bytes = NDArray[np.uint8]


class StridedCopy(NamedTuple):
    """Bytes of a dense, row-major shard, and where they lie in memory; one byte for each index. The last axis is dense.

    Attributes:
        extent: how many bytes on each axis.
        shard_offset: of the first byte in the shard.
        shard_strides: distances in the shard, in bytes.
        memory: which memory, by number.
        memory_offset: of the first byte in the memory.
        memory_strides: distances in the memory, in bytes.
    """

    extent: tuple[int, ...]
    shard_offset: int
    shard_strides: tuple[int, ...]
    memory: int
    memory_offset: int
    memory_strides: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes that are copied."""
        return math.prod(self.extent)

    @property
    def memory_end(self) -> int:
        """One past the last byte in the memory."""
        return _end(self.memory_offset, self.extent, self.memory_strides)

    @property
    def shard_end(self) -> int:
        """One past the last byte in the shard."""
        return _end(self.shard_offset, self.extent, self.shard_strides)


def _end(offset: int, extent: Sequence[int], strides: Sequence[int]) -> int:
    return offset + sum((n - 1) * stride for n, stride in zip(extent, strides, strict=True)) + 1


class ShardCopies(tuple[StridedCopy, ...]):
    """Copies of one shard."""

    @cached_property
    def packed(self) -> Plan:
        """For the C extension. Made once: a plan serves many pushes."""
        words: list[int] = []
        for copy in self:
            words += (copy.memory, copy.memory_offset, copy.shard_offset, len(copy.extent))
            for axis in zip(copy.extent, copy.memory_strides, copy.shard_strides, strict=True):
                words += axis
        return np.array(words, np.int64)

    @classmethod
    def of(cls, copies: Sequence[StridedCopy]) -> ShardCopies:
        """These copies; themselves if they are packed already."""
        return copies if isinstance(copies, cls) else cls(copies)


def placed_copies(
    plan: pb.LanePlan, stream: Layout, places: Mapping[str, tuple[int, int]], sizes: Sequence[int]
) -> list[ShardCopies]:
    """The copies of each shard of a stream, with the files where they lie now. What the service says is checked.

    Args:
        plan: how the shards lie in files.
        stream: the shards.
        places: for each file the number of its memory, and the offset of its first byte there.
        sizes: bytes of each memory.

    Raises:
        DataLoss: a copy goes beyond its shard or its memory, or the plan is for other shards.
    """
    if len(plan.shards) != len(stream.placements):
        raise DataLoss(f"the plan has {len(plan.shards)} shards, and the stream {len(stream.placements)}")
    found = [places.get(name) for name in plan.files]
    copies: list[ShardCopies] = []
    for shard, placement in zip(plan.shards, stream.placements, strict=True):
        of_shard = []
        for each in shard.copies:
            place = found[each.file] if each.file < len(found) else None
            lengths = {len(each.extent), len(each.shard_strides), len(each.file_strides)}
            if place is None or len(lengths) != 1 or 0 in each.extent or not each.extent:
                raise DataLoss(f"the plan for {placement.shard.tensor} is malformed")
            copy = StridedCopy(
                tuple(each.extent),
                each.shard_offset,
                tuple(each.shard_strides),
                place[0],
                place[1] + each.file_offset,
                tuple(each.file_strides),
            )
            if copy.shard_end > placement.nbytes or copy.memory_end > sizes[copy.memory]:
                raise DataLoss(f"the plan for {placement.shard.tensor} goes beyond its memory")
            of_shard.append(copy)
        copies.append(ShardCopies(of_shard))
    return copies


def is_dense(copies: Sequence[StridedCopy], nbytes: int) -> bool:
    """Whether a shard of so many bytes lies in memory in one run."""
    return len(copies) == 1 and copies[0].extent == (nbytes,)


def view_bytes(data: Bytes, offset: int, extent: tuple[int, ...], strides: tuple[int, ...]) -> Bytes:
    """Bytes of an array as a strided array."""
    return np.ndarray(extent, np.uint8, data, offset, strides)


def write_bytes(shard: Bytes, copies: Sequence[StridedCopy], memories: Sequence[Bytes]) -> None:
    """Copy the bytes of a shard to memory."""
    plan = ShardCopies.of(copies).packed
    regions = [region_of(memory, written=True) for memory in memories]
    if copy_natively([(region_of(shard, written=False), plan)], regions, into_memory=True, threads=1):
        return
    for copy in copies:
        target = view_bytes(memories[copy.memory], copy.memory_offset, copy.extent, copy.memory_strides)
        np.copyto(target, view_bytes(shard, copy.shard_offset, copy.extent, copy.shard_strides))


def write_tensors(
    shards: Iterable[tuple[torch.Tensor, Sequence[StridedCopy]]], memories: Sequence[MappedMemory]
) -> None:
    """Copy shards to memory: from host memory by as many threads as torch has, from GPUs by their copy engines.

    Args:
        shards: tensors on any device, their elements in row-major order of their axes, not necessarily contiguous; and where
            their bytes go.
        memories: mapped for writing.
    """
    by_engine: list[tuple[torch.Tensor, Sequence[StridedCopy]]] = []
    rest: list[tuple[torch.Tensor, Sequence[StridedCopy]]] = []
    for shard, copies in shards:
        (by_engine if shard.is_cuda and _pinned(copies, memories) else rest).append((shard, copies))
    with contextlib.ExitStack() as stack:
        if by_engine:
            from weighbridge.cuda_copies import CopyQueue

            queue = stack.enter_context(CopyQueue([memory.address for memory in memories]))
            rest += [(shard, copies) for shard, copies in by_engine if not queue.write(shard, copies)]
        # GPUs copy meanwhile
        _copy_tensors(rest, memories, into_memory=True)


def read_tensor(shard: torch.Tensor, copies: Sequence[StridedCopy], memories: Sequence[MappedMemory]) -> None:
    """Fill a shard, on any device, from memory; bytes that no copy brings become zeros.

    Args:
        shard: what is filled.
        copies: where its elements lie.
        memories: mapped for reading.
    """
    import torch

    with torch.no_grad():
        shard = shard.detach()
        target = (
            shard if shard.is_contiguous() else torch.empty_like(shard, memory_format=torch.contiguous_format)
        )
        if sum(copy.nbytes for copy in copies) < shard.numel() * shard.element_size():
            target.zero_()
        done = False
        if target.is_cuda and _pinned(copies, memories):
            from weighbridge.cuda_copies import CopyQueue

            with CopyQueue([memory.address for memory in memories]) as queue:
                done = queue.read(target, copies)
        if not done:
            _copy_tensors([(target, copies)], memories, into_memory=False)
        if target is not shard:
            shard.copy_(target)


def _copy_tensors(
    shards: Sequence[tuple[torch.Tensor, Sequence[StridedCopy]]],
    memories: Sequence[MappedMemory],
    *,
    into_memory: bool,
) -> None:
    """Copy shards to memory or from it: by the extension those in host memory, by torch all others."""
    import torch

    arrays = [memory.bytes for memory in memories]  # they keep the mappings, too
    regions = [region_of(array, written=into_memory) for array in arrays]
    together = [each for each in shards if _has_bytes(each[0])]
    # others become contiguous one at a time: all of them would need room for as much again
    alone = ([each] for each in shards if not _has_bytes(each[0]))
    for batch in (together, *alone):
        flats = [(shard.detach().contiguous().view(-1), copies) for shard, copies in batch]
        if all(_has_bytes(flat) for flat, _ in flats):
            plans = [
                (Region(flat.data_ptr(), flat.numel() * flat.element_size()), ShardCopies.of(copies).packed)
                for flat, copies in flats
            ]
            if copy_natively(plans, regions, into_memory=into_memory, threads=torch.get_num_threads()):
                continue
        for flat, copies in flats:
            for copy in copies:
                ours, theirs = _views(copy, flat, memories[copy.memory].tensor)
                target, source = (theirs, ours) if into_memory else (ours, theirs)
                target.copy_(source)


def _has_bytes(shard: torch.Tensor) -> bool:
    """Whether the elements lie in host memory at the tensor's address, as they are."""
    import torch

    known = type(shard) in (torch.Tensor, torch.nn.Parameter)  # other classes may hold no memory themselves
    return known and shard.is_cpu and shard.is_contiguous() and not (shard.is_neg() or shard.is_conj())


def _pinned(copies: Sequence[StridedCopy], memories: Sequence[MappedMemory]) -> bool:
    """Whether GPUs can copy to and from what these copies need."""
    return all(_try_to_pin(memories[number]) for number in {copy.memory for copy in copies})


def _try_to_pin(memory: MappedMemory) -> bool:
    try:
        memory.pin()
    except WeighbridgeError as error:
        log.info(
            "GPUs do not copy to and from the service's memory by themselves, which is slower: %s",
            error.message,
        )
    return memory.pinned


def _views(copy: StridedCopy, flat: torch.Tensor, memory: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The two sides of a copy: in the shard's own elements if it consists of whole ones, in bytes otherwise."""
    import torch

    size = flat.element_size()
    offsets = (copy.shard_offset, copy.memory_offset + memory.data_ptr())
    strides = (*copy.shard_strides[:-1], *copy.memory_strides[:-1])
    if size == 1 or copy.extent[-1] % size or any(n % size for n in (*offsets, *strides)):
        flat, size = flat.view(torch.uint8), 1
    extent = (*copy.extent[:-1], copy.extent[-1] // size)
    # an offset that is given to as_strided counts from the beginning of the storage, of which this may be a part
    ours = flat[copy.shard_offset // size :].as_strided(extent, _in_elements(copy.shard_strides, size))
    base = memory[copy.memory_offset : copy.memory_end].view(flat.dtype)
    return ours, base.as_strided(extent, _in_elements(copy.memory_strides, size))


def _in_elements(strides: tuple[int, ...], size: int) -> tuple[int, ...]:
    return (*(stride // size for stride in strides[:-1]), 1)
