"""Loans of the service's memory: what can be done with it, and when it goes back."""

from __future__ import annotations

import traceback
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from weighbridge import rpc
from weighbridge.lane_connection import LaneConnection
from weighbridge.lane_memory import MappedMemory
from weighbridge.lane_plans import PlacedPlan
from weighbridge.layouts import Layout
from weighbridge.push_sources import ShardSource
from weighbridge.sampling import sample_of
from weighbridge.strided import ShardCopies, is_dense, read_tensor
from weighbridge.tensor_stream import check_target
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
        self._sample: list[pb.SampledPiece] = []

    def fill(self, source: ShardSource, nbytes: int) -> None:
        """Copy the shards to where they belong, and take note of a sample of them before.

        Args:
            source: the shards.
            nbytes: of their stream.
        """
        if self._memory is not None:
            try:
                self._sample = _sampled(source, nbytes, self.streamed)
                source.write(self._copies, [self._memory])
            except BaseException as error:
                traceback.clear_frames(error.__traceback__)  # they hold arrays over the memory
                raise

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


def _sampled(source: ShardSource, nbytes: int, streamed: Sequence[tuple[int, int]]) -> list[pb.SampledPiece]:
    """Checksums of parts of a stream that are going to be written: the service compares them when it verifies the version."""
    ranges = sample_of(nbytes, streamed)
    if not ranges:
        return []
    staged = source.stage(ranges)
    try:
        return [
            pb.SampledPiece(start=start, end=end, checksum=rpc.checksum(staged.read(start, end)))
            for start, end in ranges
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
        if nbytes and is_dense(copies, nbytes) and copies[0].memory_offset % dtype.itemsize == 0:
            flat = torch.frombuffer(
                self._exported[copies[0].memory],
                dtype=dtype,
                count=nbytes // dtype.itemsize,
                offset=copies[0].memory_offset,
            )
            return flat.view(shard.box.extent)
        made = torch.empty(shard.box.extent, dtype=dtype)
        self.fill(index, made)
        return made

    def fill(self, index: int, tensor: torch.Tensor) -> None:
        """Copy a slice, by its index in the layout, to a tensor on any device."""
        placement = self._layout.placements[index]
        check_target(self._layout, placement, tensor)
        if placement.nbytes:
            read_tensor(tensor, self._copies[index], self._memories)


class _Holder:
    """Is there as long as something of a version is."""
