"""Delivery of a rank's shards.

They are copied to the service's memory if the service grants some, otherwise to buffers for gRPC.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from weighbridge._core.layouts import Layout
from weighbridge._formats.gathered_shards import GatheredShards
from weighbridge._formats.passing_chunks import PassingChunks, Send
from weighbridge._formats.push_counts import PushCounts
from weighbridge._formats.push_sources import ShardSource, StagingPool, StreamSource
from weighbridge._formats.tensor_stream import Ranges
from weighbridge._lane.loans import WriteLoan
from weighbridge._lane.local_lane import GRPC, LOCAL, MIXED, LocalLane
from weighbridge.errors import WeighbridgeError
from weighbridge.v1 import checkpoint_service_pb2 as pb


@dataclass(frozen=True, slots=True)
class Granted:
    """Grant of memory to a rank for its stream.

    Attributes:
        loan: the memory; None if there is none.
        streamed: parts of the stream that are sent over gRPC.
        why_not_local: reason why the whole stream uses gRPC, if the local lane was requested.
    """

    loan: WriteLoan | None
    streamed: Ranges
    why_not_local: str = ""

    @property
    def lane(self) -> str:
        """Lane of the stream: ``local``, ``grpc`` or ``mixed``."""
        if self.loan is None:
            return GRPC
        return MIXED if self.streamed else LOCAL

    def give_back(self) -> None:
        """Return the memory without filling it. Does nothing if the memory has already been returned."""
        if self.loan is not None:
            with contextlib.suppress(WeighbridgeError):
                self.loan.end(complete=False)


@dataclass(frozen=True, slots=True)
class Delivery:
    """Shards that have been copied and are being delivered.

    Attributes:
        granted: grant of the memory to which shards were written.
        staged: copy of the shards that must still be sent over gRPC; None if there are none.
        local_bytes: number of bytes that were written to the memory.
    """

    granted: Granted
    staged: StreamSource | None
    local_bytes: int

    def release(self) -> None:
        """Release all buffers and return the memory. This does not affect shards that have been delivered."""
        if self.staged is not None:
            self.staged.release()
        self.granted.give_back()


def ask_memory(lane: LocalLane, header: pb.PushHeader, stream: Layout) -> Granted:
    """Request a grant of memory for a rank's stream, if the local lane is requested and available."""
    everything = [(0, stream.nbytes)]
    if not lane.wanted or not stream.nbytes:
        return Granted(None, everything)
    try:
        loan = lane.write(header.model, header.number, header.rank, stream)
    except WeighbridgeError as error:
        return Granted(None, everything, lane.refused(error, f"push of {header.model}@{header.number}"))
    return Granted(loan, loan.streamed)


def copy_out(granted: Granted, stream: Layout, source: ShardSource, counts: PushCounts) -> Delivery:
    """Copy shards from the trainer's tensors: into the granted memory if possible, otherwise into a buffer."""
    staged: StreamSource | None = None
    try:
        if granted.loan is None or granted.streamed:
            staged = source.stage(granted.streamed)
        if granted.loan is not None:
            counts.add(granted.loan.fill(source, stream.nbytes))
    except BaseException:
        Delivery(granted, staged, 0).release()
        raise
    finally:
        if staged is not source:
            source.release()
    return Delivery(granted, staged, _local_bytes(granted, stream))


def take_passing(
    granted: Granted,
    stream: Layout,
    passing: GatheredShards,
    send: Send,
    buffer_bytes: int,
    counts: PushCounts,
    staging: StagingPool,
) -> Delivery:
    """Copy shards as a generator yields them. When this returns, the shards that are sent over gRPC have arrived.

    Args:
        granted: grant of memory for the shards.
        stream: layout of the shards.
        passing: the shards.
        send: sends a part of the stream.
        buffer_bytes: bytes of host memory for shards that are being sent.
        counts: receives the counts of the written bytes.
        staging: pool of buffers.
    """
    try:
        with contextlib.ExitStack() as stack:
            chunks = stack.enter_context(PassingChunks(stream, granted.streamed, staging, buffer_bytes, send))
            fill = None if granted.loan is None else stack.enter_context(granted.loan.passing(stream, counts))
            for part in passing.parts():
                chunks.take(part)
                if fill is not None:
                    fill.take(part, staging)
                del part  # frees its tensors before the next ones are gathered
            chunks.finish()
    except BaseException:
        granted.give_back()
        raise
    return Delivery(granted, None, _local_bytes(granted, stream))


def _local_bytes(granted: Granted, stream: Layout) -> int:
    return stream.nbytes - sum(stop - start for start, stop in granted.streamed)
