"""Restores of the shards that a rank holds: by Megatron-core's names through a separate stream, by Hugging Face's names
through a pull.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from weighbridge._clients.calls import pull_calls, version_calls
from weighbridge._clients.calls.known_layouts import KnownLayouts
from weighbridge._clients.connection import Connection
from weighbridge._clients.engine import Pull
from weighbridge._clients.filling import fill_tensors
from weighbridge._core.layouts import Layout
from weighbridge._core.references import Reference
from weighbridge._core.resources import Version
from weighbridge._core.slices import Boxes
from weighbridge._core.striping import Striping
from weighbridge._core.tensor_spaces import TensorSpace
from weighbridge._formats.tensor_stream import StreamWriter
from weighbridge._transport import bulk, pieces, rpc, wire
from weighbridge._transport.request_parts import encoded_parts
from weighbridge.errors import DataLoss
from weighbridge.v1 import checkpoint_service_pb2 as pb

if TYPE_CHECKING:
    import torch


def megatron_shards(
    connection: Connection, meant: Reference, layout: Layout, tensor_for: Callable[[int], torch.Tensor]
) -> Iterator[tuple[Version, int]]:
    """Fill shards in Megatron-core's tensor space; see `TrainerClient.restore_layout`."""
    message = wire.layout_to_proto(layout, TensorSpace.MEGATRON)
    resolved: list[Version] = []

    def open_at(way: bulk.Way, striping: Striping, offset: int) -> Iterable[pieces.Carried[pb.RestoreResponse]]:
        # once the ref is resolved, a reopened stream uses the same version
        wanted = str(resolved[0].number) if resolved else meant.version
        request = pb.RestoreRequest(
            model=meant.model,
            version=wanted,
            layout=message,
            offset=offset,
            striping=wire.striping_to_proto(striping),
        )
        return rpc.streamed(
            way.channel,
            "/weighbridge.v1.CheckpointService/Restore",
            encoded_parts(request),
            pieces.decoder(pb.RestoreResponse),
            way.metadata,
        )

    def on_header(header: pb.StreamHeader) -> None:
        if header.stream_bytes != layout.nbytes:
            raise DataLoss(f"the stream has {header.stream_bytes} bytes, but the shards have {layout.nbytes}")
        resolved.append(wire.version_from_proto(header.version))

    writer = StreamWriter(layout, tensor_for)
    stream = bulk.StreamReceiver(
        open_at,
        connection.streams,
        nbytes=layout.nbytes,
        on_header=on_header,
        retry_seconds=connection.retry_seconds,
    )
    for data in stream:
        for index, _ in writer.feed(data):
            yield resolved[0], index


def hugging_face_shards(
    connection: Connection, meant: Reference, layout: Layout, tensors: Sequence[torch.Tensor]
) -> Version:
    """Fill shards in Hugging Face's tensor space. Elements are cast if their tensor has another floating-point dtype.

    Args:
        connection: connection of the client.
        meant: the model and the version.
        layout: the shards.
        tensors: one tensor for each shard, with the shape of its box, on any device.

    Returns:
        The version that was restored.
    """
    if not tensors:
        return connection.run(version_calls.get_version(meant.model, meant.version))
    boxes = Boxes([(shard.tensor, *shard.box) for shard, _, _, _ in layout.placements])
    plan = connection.run(pull_calls.plan_pull(KnownLayouts(), meant.model, meant.version, boxes))
    deque(fill_tensors(plan.layout, tensors, Pull(connection, plan).filled), maxlen=0)
    return plan.version
