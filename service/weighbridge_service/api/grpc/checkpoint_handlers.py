"""Handlers of `CheckpointService`.

Each converts its request, calls one method of the service, and converts the result.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from weighbridge._core import dtypes
from weighbridge._core.layouts import Layout
from weighbridge._core.megatron_rank import MegatronRank
from weighbridge._core.resources import Version
from weighbridge._core.tensor_spaces import TensorSpace
from weighbridge._tracing.traceparent import canonical, parse
from weighbridge._transport import pieces, wire
from weighbridge.errors import InvalidArgument
from weighbridge.v1 import checkpoint_service_pb2
from weighbridge_service.admission.byte_budget import Direction
from weighbridge_service.api.grpc.bulk_streams import BulkStreams, received
from weighbridge_service.api.grpc.call import Call
from weighbridge_service.api.grpc.method import streamed
from weighbridge_service.api.grpc.methods import Methods
from weighbridge_service.core import Core
from weighbridge_service.plan.relations import WeightMap
from weighbridge_service.push.machine.answers import Declared
from weighbridge_service.push.pending import Pending
from weighbridge_service.push.replica_checksums import ReplicaChecksum
from weighbridge_storage.head.open_versions import Said

T = TypeVar("T")

_MOST_NAMED = 20
_SEAL_SECONDS = 60.0


class CheckpointHandlers:
    """`CheckpointService`."""

    def __init__(self, service: Core, methods: Methods, streams: BulkStreams) -> None:
        self._methods = methods
        self._streams = streams
        self._intake = service.intake
        self._serving = service.serving

    def OpenVersion(
        self, request: checkpoint_service_pb2.OpenVersionRequest, call: Call
    ) -> checkpoint_service_pb2.OpenVersionResponse:
        version = self._intake.opener.open_version(
            request.model,
            step=request.step,
            run=request.run,
            ranks=request.ranks,
            request_id=request.request_id,
            client_id=request.client_id,
            said=Said(
                candidate=request.candidate,
                allow_nonfinite=request.allow_nonfinite,
                metadata=wire.metadata_from_proto(request.metadata),
                cast_from=frozenset(dtypes.from_safetensors(name).name for name in request.cast_from),
                traceparent=canonical(parse(request.traceparent)),
            ),
            by=call.peer,
            at_least=request.at_least,
            call_age_s=request.call_age_seconds if request.HasField("call_age_seconds") else None,
        )
        return checkpoint_service_pb2.OpenVersionResponse(version=wire.version_to_proto(version))

    async def DeclareLayout(
        self, request: checkpoint_service_pb2.DeclareLayoutRequest, call: Call
    ) -> checkpoint_service_pb2.DeclareLayoutResponse:
        def declare() -> Pending[Declared]:
            layout = wire.layout_from_proto(request.layout) if request.HasField("layout") else None
            return self._intake.declare_layout(
                request.model,
                request.number,
                request.rank,
                request.client_id,
                request.digest,
                layout,
                wire.space_from_proto(request.layout.space) if layout else TensorSpace.MEGATRON,
                call.patience(float("inf")),
            )

        declared = await self._answered(call, declare)
        return checkpoint_service_pb2.DeclareLayoutResponse(
            layout_needed=declared.layout_needed,
            assigned=declared.assigned,
            stream_bytes=declared.stream_bytes,
            retry_after_ms=declared.retry_after_ms,
            absent_ranks=declared.absent[:_MOST_NAMED],
            routes=[
                checkpoint_service_pb2.PushRoute(address=address, ranges=_to_proto(ranges))
                for address, ranges in declared.routes.items()
            ],
            claim=declared.claim,
            shared=declared.shared,
            placed=[
                checkpoint_service_pb2.PlacedRange(start=each.start, end=each.end, places=each.places)
                for each in declared.placed
            ],
            shifts=declared.shifts,
            push_at=declared.push_at,
        )

    async def _answered(self, call: Call, ask: Callable[[], Pending[T]]) -> T:
        """Send a request to a push, and wait for its answer without occupying a thread."""
        asked = self._methods.begin(call, ask)
        try:
            pending = await asyncio.wrap_future(asked)
        except asyncio.CancelledError:  # a thread may be asking now
            asked.add_done_callback(_leave)
            raise
        answer = asyncio.wrap_future(pending.future)
        try:
            done, _ = await asyncio.wait([answer], timeout=pending.seconds)
        finally:
            answer.cancel()  # `finish` raises its errors
            pending.leave()
        if pending.in_memory:
            return pending.finish(bool(done))
        return await self._methods.run(call, partial(pending.finish, bool(done)))

    @streamed
    def Push(
        self,
        requests: Iterator[pieces.Carried[checkpoint_service_pb2.PushRequest]],
        call: Call,
    ) -> checkpoint_service_pb2.PushResponse:
        first = next(requests, None)
        if first is None or not first.message.HasField("header"):
            raise InvalidArgument("the first message of a push has no header")
        header = first.message.header
        with self._streams.admit(Direction.IN, call) as share:
            data = received(requests, share)
            if header.claim:
                count = self._intake.write_of_other(header.model, header.number, header.rank, header.claim, data)
            else:
                count = self._intake.write(header.model, header.number, header.rank, header.client_id, data)
        return checkpoint_service_pb2.PushResponse(received_bytes=count)

    def GetPushState(
        self, request: checkpoint_service_pb2.GetPushStateRequest, call: Call
    ) -> checkpoint_service_pb2.GetPushStateResponse:
        ranges, total, sealed = self._intake.push_state(request.model, request.number, request.rank)
        return checkpoint_service_pb2.GetPushStateResponse(
            received=_to_proto(ranges), stream_bytes=total, sealed=sealed
        )

    async def SealRank(
        self, request: checkpoint_service_pb2.SealRankRequest, call: Call
    ) -> checkpoint_service_pb2.SealRankResponse:
        def seal() -> Pending[Version]:
            patience = call.patience(_SEAL_SECONDS)
            replicas = [ReplicaChecksum(each.shard, each.start, each.end, each.checksum) for each in request.replicas]
            return self._intake.seal_rank(
                request.model,
                request.number,
                request.rank,
                request.client_id,
                patience,
                replicas,
                request.nonfinite_elements,
            )

        version = await self._answered(call, seal)
        return checkpoint_service_pb2.SealRankResponse(version=wire.version_to_proto(version))

    async def AbortVersion(
        self, request: checkpoint_service_pb2.AbortVersionRequest, call: Call
    ) -> checkpoint_service_pb2.AbortVersionResponse:
        def abort() -> Pending[Version]:
            patience = call.patience(_SEAL_SECONDS)
            return self._intake.abort_version(
                request.model,
                request.number,
                request.reason,
                patience,
                request.client_id,
                request.refused_rank if request.HasField("refused_rank") else None,
            )

        version = await self._answered(call, abort)
        return checkpoint_service_pb2.AbortVersionResponse(version=wire.version_to_proto(version))

    def Restore(
        self, request: checkpoint_service_pb2.RestoreRequest, call: Call
    ) -> Iterator[checkpoint_service_pb2.RestoreResponse | bytes]:
        if wire.space_from_proto(request.layout.space) != TensorSpace.MEGATRON:
            raise InvalidArgument("a layout to restore is in Megatron-core's tensor space")
        layout = wire.layout_from_proto(request.layout)
        plan = partial(self._serving.restore, request.model, request.version, layout, request.offset)
        response = checkpoint_service_pb2.RestoreResponse
        yield from self._streams.send(call, request, plan, response, self._serving.count)

    def DescribeShards(
        self, request: checkpoint_service_pb2.DescribeShardsRequest, call: Call
    ) -> checkpoint_service_pb2.DescribeShardsResponse:
        space = wire.space_from_proto(request.space) if request.space else TensorSpace.MEGATRON
        if space == TensorSpace.HUGGING_FACE:
            layout = self._serving.describe_tensors(request.model)
            return checkpoint_service_pb2.DescribeShardsResponse(layout=wire.layout_to_proto(layout, space))
        if request.HasField("tensors"):
            declared = wire.layout_from_proto(request.tensors)
            if request.with_links:
                return _linked(self._serving.weight_map(request.model, declared))
            layout = self._serving.registered_tensors(request.model, declared)
            return checkpoint_service_pb2.DescribeShardsResponse(layout=wire.layout_to_proto(layout, space))
        layout = self._serving.describe_shards(
            request.model,
            MegatronRank(
                (request.tensor_parallel_rank, request.tensor_parallel_size),
                (request.pipeline_parallel_rank, request.pipeline_parallel_size),
                (request.expert_parallel_rank, request.expert_parallel_size or 1),
                (request.expert_tensor_parallel_rank, request.expert_tensor_parallel_size or 1),
            ),
        )
        return checkpoint_service_pb2.DescribeShardsResponse(layout=wire.layout_to_proto(layout, space))


def _linked(weight_map: WeightMap) -> checkpoint_service_pb2.DescribeShardsResponse:
    """A trainer's tensors, the model's tensors that contain their elements, and the links between them. Omits links to
    tensors whose axes differ in the files."""
    links = [link for link in weight_map.links if link.target not in weight_map.seen]
    targets = {link.target: weight_map.hugging_face[link.target] for link in links}
    held = Layout.stream(weight_map.megatron.values(), [])
    there = Layout.stream(targets.values(), [])
    return checkpoint_service_pb2.DescribeShardsResponse(
        layout=wire.layout_to_proto(held, TensorSpace.MEGATRON),
        targets=wire.layout_to_proto(there, TensorSpace.HUGGING_FACE),
        links=wire.links_to_proto(links, held.tensors, there.tensors),
    )


def _leave(asked: Future[Pending[Any]]) -> None:
    """Stop waiting for the answer of a cancelled call."""
    if not asked.cancelled() and asked.exception() is None:
        asked.result().leave()


def _to_proto(ranges: Iterable[tuple[int, int]]) -> list[checkpoint_service_pb2.ByteRange]:
    return [checkpoint_service_pb2.ByteRange(start=start, end=end) for start, end in ranges]
