"""Loans of the service's memory: what can be done with it, and when it goes back."""

from __future__ import annotations

import traceback
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from weighbridge._core.layouts import Layout
from weighbridge._formats.push_sources import ShardSource
from weighbridge._formats.tensor_stream import check_target
from weighbridge._lane.connection import LaneConnection
from weighbridge._lane.plans import PlacedPlan
from weighbridge._memory.copying import read_tensors
from weighbridge._memory.mappings import MappedMemory
from weighbridge._memory.sampling import sample_of
from weighbridge._memory.strided import ShardCopies, Uncounted, count_written, is_dense
from weighbridge._transport import rpc
from weighbridge.v1 import local_lane_pb2 as pb

if TYPE_CHECKING:
    import torch


class WriteLoan:
    """Memory that a rank writes its stream to; made by `LocalLane.write`.

    Attributes:
        streamed: the parts of the stream that belong elsewhere, and go by gRPC.
    """

    def __init__(
        self, connection: LaneConnection, number: int, memory: MappedMemory, plan: PlacedPlan
    ) -> None:
        self.streamed = plan.streamed
        self._connection = connection
        self._number = number
        self._memory: MappedMemory | None = memory
        self._copies = plan.copies
        self._ranges: Sequence[tuple[int, int]] | None = None
        self._sample: list[pb.SampledPiece] = []
        self._uncounted: list[Uncounted] = []

    def fill(
        self, source: ShardSource, stream: Layout, part: Sequence[int] | None = None
    ) -> Sequence[int] | None:
        """Copy shards to where they belong, and take note of a sample of them before.

        Args:
            source: the shards.
            stream: layout of all shards of the rank.
            part: which of them these are; all by default. Parts that follow each other are all of them together.

        Returns:
            For each shard of the stream how many of the elements that were written are non-finite; but for those that `count` counts. None
            if the source does not count.
        """
        counts = [0] * len(self._copies)
        if self._memory is None:
            return counts
        if self._ranges is None:
            self._ranges = sample_of(stream.nbytes, self.streamed)
        indexes = range(len(self._copies)) if part is None else part
        try:
            sampled = _all_of(self._ranges) if part is None else _within(self._ranges, stream, part)
            self._sample += _sampled(source, sampled)
            written = source.write([self._copies[index] for index in indexes], [self._memory])
            if written is None:
                return None
            self._uncounted += [each._replace(shard=indexes[each.shard]) for each in written.uncounted]
            for index, count in zip(indexes, written.counts, strict=True):
                counts[index] += count
            return counts
        except BaseException as error:
            traceback.clear_frames(error.__traceback__)  # they hold arrays over the memory
            raise

    def count(self) -> Sequence[int]:
        """For each shard how many elements are non-finite of those that were not counted while they were written; once, before the end."""
        found = [0] * len(self._copies)
        uncounted, self._uncounted = self._uncounted, []
        if self._memory is not None and uncounted:
            import torch

            for shard, copy, encoding in uncounted:
                found[shard] += count_written(copy, self._memory.bytes, encoding, torch.get_num_threads())
        return found

    def end(self, *, complete: bool) -> None:
        """Write no more. The mapping stays, with its registration with CUDA, for later pushes, if the service knows of that.

        Args:
            complete: whether all that belongs to the memory was written.

        Raises:
            WeighbridgeError: the version has failed, or the service is gone.
        """
        memory, self._memory = self._memory, None
        if memory is not None:
            kept = self._connection.keeps_mappings
            if not kept:
                memory.close()
            end = pb.EndWrite(loan=self._number, complete=complete, kept=kept, sample=self._sample)
            self._connection.ask(pb.LaneRequest(end_write=end))


class _Sampled(NamedTuple):
    """A range of a rank's stream that is sampled.

    Attributes:
        start, end: in the stream of the rank.
        at: where it begins in the stream of the source.
    """

    start: int
    end: int
    at: int


def _all_of(ranges: Sequence[tuple[int, int]]) -> list[_Sampled]:
    """The ranges, of a source that has the whole stream."""
    return [_Sampled(start, end, start) for start, end in ranges]


def _within(ranges: Sequence[tuple[int, int]], stream: Layout, part: Sequence[int]) -> list[_Sampled]:
    """What of the ranges lies in some of the shards, which are the stream of a source."""
    found, at = [], 0
    for index in part:
        placement = stream.placements[index]
        for start, end in ranges:
            first, last = max(start, placement.offset), min(end, placement.offset + placement.nbytes)
            if first < last:
                found.append(_Sampled(first, last, at + first - placement.offset))
        at += placement.nbytes
    return found


def _sampled(source: ShardSource, ranges: Sequence[_Sampled]) -> list[pb.SampledPiece]:
    """Checksums of parts of a stream that are going to be written: the service compares them when it verifies the version."""
    if not ranges:
        return []
    there = sorted((each.at, each.at + each.end - each.start) for each in ranges)
    staged = source.stage(there)
    try:
        return [
            pb.SampledPiece(start=start, end=end, checksum=rpc.checksum(staged.read(at, at + end - start)))
            for start, end, at in ranges
        ]
    finally:
        if staged is not source:
            staged.release()


class ReadLoan:
    """A version that is read where it lies; made by `LocalLane.read`. It is held until all tensors made from it are gone, too."""

    def __init__(
        self,
        layout: Layout,
        copies: list[ShardCopies],
        private: Sequence[MappedMemory],
        kept: Sequence[MappedMemory],
        end: Callable[[], None],
    ) -> None:
        self._layout = layout
        self._copies = copies
        self._memories = kept
        self._exported = [memory.exported() for memory in private]
        holder = _Holder()
        # not at the interpreter's exit: tensors may be in use until the process ends, and then the loan does, too
        weakref.finalize(holder, end).atexit = False
        for each in self._exported:
            each.holder = holder  # whatever keeps one of them keeps the loan

    def tensor(self, index: int) -> torch.Tensor:
        """A slice, by its index in the layout: a view of the version if it lies there in one run, a copy otherwise."""
        import torch

        shard = self._layout.placements[index].shard
        dtype = self._layout.tensors[shard.tensor].dtype.torch
        copies, nbytes = self._copies[index], self._layout.placements[index].nbytes
        if nbytes and is_dense(copies, nbytes) and copies[0].file_offset % dtype.itemsize == 0:
            flat = torch.frombuffer(
                self._exported[copies[0].file],
                dtype=dtype,
                count=nbytes // dtype.itemsize,
                offset=copies[0].file_offset,
            )
            return flat.view(shard.box.extent)
        made = torch.empty(shard.box.extent, dtype=dtype)
        self.fill(index, made)
        return made

    def fill(self, index: int, tensor: torch.Tensor) -> None:
        """Copy a slice, by its index in the layout, to a tensor on any device."""
        deque(self._filled([(index, tensor)]), maxlen=0)

    def filled(self, tensor_for: Callable[[int], torch.Tensor]) -> Generator[torch.Tensor, None, None]:
        """Copy all slices to tensors on any device, in order; see `read_tensors`.

        Args:
            tensor_for: gives the tensor for a slice by its index in the layout.
        """
        return self._filled((index, tensor_for(index)) for index in range(len(self._copies)))

    def _filled(self, targets: Iterable[tuple[int, torch.Tensor]]) -> Generator[torch.Tensor, None, None]:
        return read_tensors(map(self._checked, targets), self._memories)

    def _checked(self, target: tuple[int, torch.Tensor]) -> tuple[torch.Tensor, ShardCopies]:
        index, tensor = target
        check_target(self._layout, self._layout.placements[index], tensor)
        return tensor, self._copies[index]


class _Holder:
    """Is there as long as something of a version is."""
