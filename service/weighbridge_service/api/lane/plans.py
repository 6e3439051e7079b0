"""Plans of the local lane as messages: the places of a stream's shards in the files of a version.

A rank writes to shared memory only the bytes of files that its own replica of the service holds. The plan of its grant
omits the rest of its stream. It lists the ranges that the rank must send over gRPC, to this replica or to others.
"""

from __future__ import annotations

from weighbridge._core.layouts import Layout
from weighbridge._core.range_set import RangeSet
from weighbridge.v1 import local_lane_pb2 as pb
from weighbridge_service.plan.transfers import Transfer


def fill_plan(
    reply: pb.WriteLoan | pb.ReadLoan,
    known: str,
    transfer: Transfer,
    stream: Layout,
    buffer: str,
    parts: RangeSet,
) -> None:
    """Put a plan into a reply, unless the client already has the plan.

    Args:
        reply: receives the plan and its name.
        known: name of the plan that the client has; empty if none.
        transfer: maps bytes of the stream to places in files.
        stream: layout of the stream.
        buffer: name of the stream in the transfer. The same name always has the same ``parts``.
        parts: the ranges of the stream that are copied.
    """
    reply.plan_id = f"{transfer.identity}/{buffer}"
    if reply.plan_id != known:
        reply.plan.CopyFrom(plan_to_proto(transfer, stream, buffer, parts))


def plan_to_proto(transfer: Transfer, stream: Layout, buffer: str, parts: RangeSet) -> pb.LanePlan:
    """The places of parts of a stream in files, as a message. Arguments as for `fill_plan`."""
    plan = pb.LanePlan()
    numbers: dict[str, int] = {}
    for shard in stream.placements:
        copies = plan.shards.add()
        for start, stop in parts.within(shard.offset, shard.offset + shard.nbytes):
            for piece in transfer.pieces(start, stop, buffer):
                copies.copies.add(
                    extent=piece.extent,
                    shard_offset=start - shard.offset + piece.stream_offset,
                    shard_strides=piece.stream_strides,
                    file=numbers.setdefault(piece.file, len(numbers)),
                    file_offset=piece.file_offset,
                    file_strides=piece.file_strides,
                )
    plan.files.extend(numbers)
    for start, stop in parts.gaps(0, stream.nbytes):
        plan.streamed.add(start=start, end=stop)
    return plan
