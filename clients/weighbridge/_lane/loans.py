"""Loans of the service's memory: the operations on it, and its release."""

from __future__ import annotations

import itertools
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np

from weighbridge._core.layouts import Layout, Placement
from weighbridge._core.range_set import RangeSet
from weighbridge._formats.gathered_shards import Passing
from weighbridge._formats.push_counts import PushCounts, encodings_of
from weighbridge._formats.push_sources import ShardSource, StagingPool, TensorSource
from weighbridge._formats.tensor_stream import check_size, check_target, written_as
from weighbridge._lane.arrival_marks import ArrivalMarks
from weighbridge._lane.connection import LaneConnection
from weighbridge._lane.plans import PlacedPlan
from weighbridge._lane.stored_files import StoredFile
from weighbridge._memory.copying import fill_tensors, has_bytes, is_pinned, read_tensors
from weighbridge._memory.cuda_copies import CopyQueue
from weighbridge._memory.mappings import MappedMemory
from weighbridge._memory.paging import prefer_huge_pages
from weighbridge._memory.passing_writes import PassingShard, PassingWriter
from weighbridge._memory.sampling import sample_of
from weighbridge._memory.strided import ShardCopies, Uncounted, count_written, is_dense, view_bytes
from weighbridge._transport import rpc
from weighbridge.errors import FailedPrecondition
from weighbridge.v1 import local_lane_pb2 as pb

if TYPE_CHECKING:
    import torch


_REPORTED_BYTES = 32 << 20
"""Least bytes of a stream that are reported together."""


class WriteLoan:
    """Memory that a rank writes its stream to; made by `LocalLane.write`.

    Attributes:
        streamed: the parts of the stream that belong elsewhere, and are sent over gRPC.
    """

    def __init__(
        self, connection: LaneConnection, number: int, memory: MappedMemory, plan: PlacedPlan, stream: Layout
    ) -> None:
        self.streamed = plan.streamed
        self._stream = stream
        self._connection = connection
        self._number = number
        self._memory: MappedMemory | None = memory
        self._copies = plan.copies
        self._sample: list[pb.SampledPiece] = []
        self._uncounted: Sequence[Uncounted] = ()

    def fill(self, source: ShardSource, nbytes: int) -> Sequence[int] | None:
        """Copy the shards to where they belong, after recording a sample of them.

        Args:
            source: the shards.
            nbytes: of their stream.

        Returns:
            Numbers of the written elements of each shard that are non-finite, without those that `count` counts. None
            if the source does not count.
        """
        if self._memory is None:
            return [0] * len(self._copies)
        try:
            self._sample = _sampled(source, nbytes, self.streamed)
            reports = _WrittenRanges(self._connection, self._number, self._stream)
            written = source.write(self._copies, [self._memory], reports.add)
            if written is None:
                return None
            self._uncounted = written.uncounted
            return written.counts
        except BaseException as error:
            traceback.clear_frames(error.__traceback__)  # they hold arrays over the memory
            raise

    @contextmanager
    def passing(self, stream: Layout, counts: PushCounts) -> Iterator[PassingFill]:
        """Copy shards to where they belong as they pass by.

        When the block ends without an error, all of them are there.

        Args:
            stream: layout of all shards of the rank.
            counts: receives the numbers of elements that are non-finite, without those that `count` counts.
        """
        memory = self._memory
        if memory is None:
            raise FailedPrecondition("the memory has been given back")
        try:
            with PassingWriter([memory]) as writer:
                yield PassingFill(stream, sample_of(stream.nbytes, self.streamed), writer, self._copies, self._sample)
        except BaseException as error:
            traceback.clear_frames(error.__traceback__)  # they hold arrays over the memory
            raise
        counts.add_of(writer.counts)
        self._uncounted = writer.uncounted

    def count(self) -> Sequence[int]:
        """Numbers of non-finite elements of each shard, among the elements that were not counted as they were written;
        called once, before `end`.
        """
        found = [0] * len(self._copies)
        uncounted, self._uncounted = self._uncounted, []
        if self._memory is not None and uncounted:
            import torch

            counts = count_written(uncounted, self._memory.bytes, torch.get_num_threads())
            for each, count in zip(uncounted, counts, strict=True):
                found[each.shard] += count
        return found

    def end(self, *, complete: bool) -> None:
        """End the writing. The mapping stays, with its registration with CUDA, for later pushes.

        Args:
            complete: whether all that belongs to the memory was written.

        Raises:
            WeighbridgeError: the version has failed, or the service is gone.
        """
        memory, self._memory = self._memory, None
        if memory is not None:
            end = pb.EndWrite(loan=self._number, complete=complete, kept=True, sample=self._sample)
            self._connection.ask(pb.LaneRequest(end_write=end))


class _WrittenRanges:
    """Reports of the ranges of a stream that a rank has written, for engines that read them before the version is
    ready.

    Args:
        connection: to the service.
        loan: number of the grant.
        stream: layout of the rank's shards.
    """

    def __init__(self, connection: LaneConnection, loan: int, stream: Layout) -> None:
        self._connection = connection
        self._loan = loan
        self._placements = stream.placements
        self._ranges = RangeSet()

    def add(self, shards: Sequence[int]) -> None:
        """Record shards, by index, as written, and report them from 32 MB on; the end of the grant covers the rest."""
        for index in shards:
            placement = self._placements[index]
            self._ranges.add(placement.offset, placement.offset + placement.nbytes)
        if self._ranges.size >= _REPORTED_BYTES:
            report = pb.ReportWritten(loan=self._loan)
            for start, end in self._ranges:
                report.ranges.add(start=start, end=end)
            self._connection.tell(pb.LaneRequest(report_written=report))
            self._ranges = RangeSet()


class PassingFill:
    """Shards on their way to granted memory; made by `WriteLoan.passing`."""

    def __init__(
        self,
        stream: Layout,
        ranges: Sequence[tuple[int, int]],
        writer: PassingWriter,
        copies: Sequence[ShardCopies],
        sample: list[pb.SampledPiece],
    ) -> None:
        self._stream = stream
        self._ranges = ranges
        self._writer = writer
        self._copies = copies
        self._sample = sample
        self._encodings = encodings_of(stream)

    def take(self, passing: Passing, staging: StagingPool) -> None:
        """Copy shards, after recording the parts of them that are in the sample.

        They may change afterwards, on a GPU in stream order.

        Args:
            passing: the shards.
            staging: where buffers for the sample come from.
        """
        sampled = _within(self._ranges, self._stream, passing.indexes)
        if sampled:
            source = TensorSource(staging, self._stream.select(passing.indexes), passing.tensors)
            self._sample += _pieces(source, sampled)
        for index, tensor in zip(passing.indexes, passing.tensors, strict=True):
            placement = self._stream.placements[index]
            dtype = written_as(self._stream.tensors[placement.shard.tensor], tensor)
            check_size(placement, tensor, dtype)
            self._writer.write(PassingShard(index, tensor, dtype, self._copies[index], self._encodings[index]))


class _Sampled(NamedTuple):
    """A range of a rank's stream that is sampled.

    Attributes:
        start, end: in the stream of the rank.
        at: where it begins in the stream of the source.
    """

    start: int
    end: int
    at: int


def _within(ranges: Sequence[tuple[int, int]], stream: Layout, part: Sequence[int]) -> list[_Sampled]:
    """Parts of the ranges that lie in some of the shards, whose concatenation is the stream of a source."""
    found, at = [], 0
    for index in part:
        placement = stream.placements[index]
        for start, end in ranges:
            first, last = max(start, placement.offset), min(end, placement.offset + placement.nbytes)
            if first < last:
                found.append(_Sampled(first, last, at + first - placement.offset))
        at += placement.nbytes
    return found


def _sampled(source: ShardSource, nbytes: int, streamed: Sequence[tuple[int, int]]) -> list[pb.SampledPiece]:
    """Checksums of parts of a stream that are going to be written: the service compares them when it verifies the
    version.
    """
    return _pieces(source, [_Sampled(start, end, start) for start, end in sample_of(nbytes, streamed)])


def _pieces(source: ShardSource, sampled: Sequence[_Sampled]) -> list[pb.SampledPiece]:
    if not sampled:
        return []
    staged = source.stage(sorted((at, at + end - start) for start, end, at in sampled))
    try:
        return [
            pb.SampledPiece(start=start, end=end, checksum=rpc.checksum(staged.read(at, at + end - start)))
            for start, end, at in sampled
        ]
    finally:
        if staged is not source:
            staged.release()


class GrantedMemory(NamedTuple):
    """Shared memory that is granted for reading.

    Attributes:
        private: mapping for this loan, of which tensors are views.
        kept: mapping to copy from, in this loan and in later ones.
    """

    private: MappedMemory
    kept: MappedMemory


Granted: TypeAlias = GrantedMemory | StoredFile


_LARGE_BYTES = 4 << 20
"""Bytes of a new tensor above which a system call before its first touch pays off."""


class ReadLoan:
    """Version that is read where it lies; made by `LocalLane.read`.

    It is held until all tensors over shared memory are gone, too.

    Args:
        layout: of the slices.
        copies: positions of the bytes of each slice.
        granted: the memories that ``copies`` name by number.
        end: ends the loan at the service.
        arrivals: which slices may be read, of a version that is still being received; None of one that is ready.

    Attributes:
        layout, arrivals: as given.
    """

    def __init__(
        self,
        layout: Layout,
        copies: list[ShardCopies],
        granted: Sequence[Granted],
        end: Callable[[], None],
        arrivals: ArrivalMarks | None = None,
    ) -> None:
        self.arrivals = arrivals
        self.layout = layout
        self._copies = copies
        self._granted = granted
        self._exported = [each.private.exported() if isinstance(each, GrantedMemory) else None for each in granted]
        self._holder = _Holder()
        # not at the interpreter's exit: tensors may be in use until the process ends, and then the loan does, too
        weakref.finalize(self._holder, end).atexit = False
        for exported in self._exported:
            if exported is not None:
                exported.holder = self._holder  # an object that keeps one of them keeps the loan

    def tensor(self, index: int) -> torch.Tensor:
        """A slice, by its index in the layout: a view of the version if it lies in shared memory in one run, a copy
        otherwise.
        """
        import torch

        shard = self.layout.placements[index].shard
        dtype = self.layout.tensors[shard.tensor].dtype.torch
        copies, nbytes = self._copies[index], self.layout.placements[index].nbytes
        if nbytes and is_dense(copies, nbytes) and copies[0].file_offset % dtype.itemsize == 0:
            exported = self._exported[copies[0].file]
            if exported is not None:
                count = nbytes // dtype.itemsize
                flat = torch.frombuffer(exported, dtype=dtype, count=count, offset=copies[0].file_offset)
                return flat.view(shard.box.extent)
        made = torch.empty(shard.box.extent, dtype=dtype, device="cpu")
        if nbytes >= _LARGE_BYTES:
            prefer_huge_pages(made.data_ptr(), nbytes)
        self.fill([(index, made)])
        return made

    def pin(self) -> None:
        """Register the memory with CUDA, which takes 30 ms for each GB, and plan the copies, so that `fill` need
        not.
        """
        memories = self._memories()
        if memories is not None and is_pinned(itertools.chain.from_iterable(self._copies), memories):
            for copies in self._copies:
                _ = copies.steps

    def queue(self) -> CopyQueue:
        """A queue of copies from the memory to GPUs, for `fill`."""
        return CopyQueue(self.addresses)

    def fill(self, targets: Iterable[tuple[int, torch.Tensor]], queue: CopyQueue | None = None) -> None:
        """Copy slices to tensors, as `Slices.fill`.

        Args:
            targets: index and tensor of each.
            queue: queue of the same loan that receives copies to GPUs. It reports when they are complete; they are not
                waited for here.

        Raises:
            DataLoss: of a file, bytes cannot be read, or a whole tensor does not agree with its digest.
        """
        memories = self._memories()
        if memories is not None:
            fill_tensors(map(self._checked, targets), memories, queue)
        else:
            deque(self._filled(targets), maxlen=0)

    @property
    def copies(self) -> Sequence[ShardCopies]:
        """Copies that fill each slice from memory. Versions with the same plan in the same memory share one object."""
        return self._copies

    @property
    def addresses(self) -> Sequence[int]:
        """Address of each memory that `copies` name by number, while the loan is held; empty if a part of the version
        lies in files.
        """
        return [memory.address for memory in self._memories() or ()]

    def filled(self, tensor_for: Callable[[int], torch.Tensor]) -> Generator[torch.Tensor, None, None]:
        """Copy all slices to tensors on any device, in order; see `read_tensors`.

        Args:
            tensor_for: gives the tensor for a slice by its index in the layout.

        Raises:
            DataLoss: as `fill`.
        """
        return self._filled((index, tensor_for(index)) for index in range(len(self._copies)))

    def _filled(self, targets: Iterable[tuple[int, torch.Tensor]]) -> Generator[torch.Tensor, None, None]:
        memories = self._memories()
        if memories is not None:
            yield from read_tensors(map(self._checked, targets), memories)
            return
        for target in targets:
            tensor, copies = self._checked(target)
            self._read(self.layout.placements[target[0]], tensor, copies)
            yield tensor

    def _memories(self) -> Sequence[MappedMemory] | None:
        """Memories that hold the version; None if part of the version lies in files."""
        memories = [each.kept for each in self._granted if isinstance(each, GrantedMemory)]
        return memories if len(memories) == len(self._granted) else None

    def _checked(self, target: tuple[int, torch.Tensor]) -> tuple[torch.Tensor, ShardCopies]:
        index, tensor = target
        check_target(self.layout, self.layout.placements[index], tensor)
        return tensor, self._copies[index]

    def _read(self, placement: Placement, tensor: torch.Tensor, copies: ShardCopies) -> None:
        """Copy a slice some of whose bytes lie in files."""
        import torch

        target = tensor.detach()
        host = target if has_bytes(target) else torch.empty(target.shape, dtype=target.dtype, device="cpu")
        data = host.reshape(-1).view(torch.uint8).numpy()
        if sum(copy.nbytes for copy in copies) < placement.nbytes:
            data[:] = 0
        for copy in copies:
            granted = self._granted[copy.file]
            if isinstance(granted, StoredFile):
                granted.read(copy, data, placement.shard.tensor)
            else:
                np.copyto(
                    view_bytes(data, copy.stream_offset, copy.extent, copy.stream_strides),
                    view_bytes(granted.kept.bytes, copy.file_offset, copy.extent, copy.file_strides),
                )
        if host is not target:
            target.copy_(host)


class _Holder:
    """Object that lives as long as anything over a version's memory."""
