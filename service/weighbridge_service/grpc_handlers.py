"""The gRPC face: each handler translates its request, calls one method of the service, and translates back."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import grpc

from weighbridge import pieces, wire
from weighbridge.errors import InvalidArgument, ResourceExhausted
from weighbridge.v1 import (
    checkpoint_service_pb2,
    checkpoint_service_pb2_grpc,
    local_lane_pb2,
    local_lane_pb2_grpc,
    model_service_pb2,
    model_service_pb2_grpc,
    weight_service_pb2,
    weight_service_pb2_grpc,
)
from weighbridge_service.bulk_streams import BulkStreams, received, sent
from weighbridge_service.byte_budget import Direction
from weighbridge_service.lane_server import LaneServer
from weighbridge_service.megatron_layouts import TrainerRank
from weighbridge_service.service import Weighbridge
from weighbridge_service.tensor_spaces import MEGATRON, space_of

_PAGE = 100
_LARGEST_PAGE = 1000
_MOST_DECLARATIONS = 64
"""Ranks that wait for others at one time; all others are told to ask again."""
_MOST_NAMED = 20
_SEAL_SECONDS = 60.0
_MARGIN = 0.25
"""Seconds by which a wait ends before the caller's deadline, so that the answer says what was missing."""


def _page(size: int) -> int:
    return min(size, _LARGEST_PAGE) if size > 0 else _PAGE


class Places:
    """How many calls may wait at one time: each keeps a thread, and others must be left to answer the rest.

    Args:
        workers: threads in all.
    """

    def __init__(self, workers: int) -> None:
        self.waits = threading.BoundedSemaphore(max(workers // 2, 1))
        self.declarations = threading.BoundedSemaphore(min(max(workers // 4, 1), _MOST_DECLARATIONS))
        self.watches = threading.BoundedSemaphore(max(workers // 4, 1))

    @contextmanager
    def waiting(self, context: grpc.ServicerContext, without: float) -> Iterator[float]:
        """How long a call may wait for something; 0 if too many are waiting already: it can come again."""
        free = self.waits.acquire(blocking=False)
        try:
            yield patience(context, without) if free else 0.0
        finally:
            if free:
                self.waits.release()

    @contextmanager
    def declaring(self) -> Iterator[bool]:
        """Whether a call may wait for the declarations of other ranks; if not, it is told when to come again."""
        free = self.declarations.acquire(blocking=False)
        try:
            yield free
        finally:
            if free:
                self.declarations.release()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """A place for a watch.

        Raises:
            ResourceExhausted: there is none left.
        """
        if not self.watches.acquire(blocking=False):
            raise ResourceExhausted(
                "there are too many watches on this service", fix="end some, or serve with more gRPC workers"
            )
        try:
            yield
        finally:
            self.watches.release()


def patience(context: grpc.ServicerContext, without: float) -> float:
    """How long a call may wait: almost until its deadline, or ``without`` one."""
    left: float | None = context.time_remaining()  # None without a deadline, whatever the stubs say
    return without if left is None or left > without else max(left - _MARGIN, 0.0)


class ModelHandlers(model_service_pb2_grpc.ModelServiceServicer):
    """`ModelService`."""

    def __init__(self, service: Weighbridge, places: Places) -> None:
        self._catalog = service.catalog
        self._collecting = service.collecting
        self._places = places

    def RegisterModel(
        self, request: model_service_pb2.RegisterModelRequest, context: grpc.ServicerContext
    ) -> model_service_pb2.RegisterModelResponse:
        files = {file.name: file.content for file in request.files}
        found = wire.specs_from_proto(request.tensors)
        model = self._catalog.register_model(request.model, files, request.dtype, found)
        return model_service_pb2.RegisterModelResponse(model=wire.model_to_proto(model))

    def GetModel(
        self, request: model_service_pb2.GetModelRequest, context: grpc.ServicerContext
    ) -> model_service_pb2.GetModelResponse:
        return model_service_pb2.GetModelResponse(
            model=wire.model_to_proto(self._catalog.get_model(request.model))
        )

    def ListModels(
        self, request: model_service_pb2.ListModelsRequest, context: grpc.ServicerContext
    ) -> model_service_pb2.ListModelsResponse:
        size = _page(request.page_size)
        models = self._catalog.list_models(request.page_token, size)
        return model_service_pb2.ListModelsResponse(
            models=map(wire.model_to_proto, models),
            next_page_token=models[-1].name if len(models) == size else "",
        )

    def GetModelFiles(
        self, request: model_service_pb2.GetModelFilesRequest, context: grpc.ServicerContext
    ) -> model_service_pb2.GetModelFilesResponse:
        files = self._catalog.model_files(request.model, request.version)
        response = model_service_pb2.GetModelFilesResponse()
        for name, content in files.items():
            response.files.add(name=name, content=content)
        return response

    def GetVersion(
        self, request: model_service_pb2.GetVersionRequest, context: grpc.ServicerContext
    ) -> model_service_pb2.GetVersionResponse:
        wanted = wire.state_from_proto(request.wait_for)
        if wanted is None:
            version = self._catalog.get_version(request.model, request.version)
        else:
            with self._places.waiting(context, 60.0) as seconds:
                version = self._catalog.get_version(request.model, request.version, wanted, seconds)
        return model_service_pb2.GetVersionResponse(version=wire.version_to_proto(version))

    def ListVersions(
        self, request: model_service_pb2.ListVersionsRequest, context: grpc.ServicerContext
    ) -> model_service_pb2.ListVersionsResponse:
        size = _page(request.page_size)
        before = request.page_token or "0"
        if not before.isascii() or not before.isdigit() or len(before) > 12:
            raise InvalidArgument(f"{before[:40]!r} is no page token", fix="pass on what the last page gave")
        versions = self._catalog.list_versions(
            request.model, before=int(before), limit=size, include_invisible=request.include_invisible
        )
        return model_service_pb2.ListVersionsResponse(
            versions=map(wire.version_to_proto, versions),
            next_page_token=str(versions[-1].number) if len(versions) == size else "",
        )

    def WatchRef(
        self, request: model_service_pb2.WatchRefRequest, context: grpc.ServicerContext
    ) -> Iterator[model_service_pb2.WatchRefResponse]:
        active = threading.Event()
        active.set()
        context.add_callback(active.clear)
        with self._places.watching():
            for version in self._catalog.watch_ref(request.model, request.ref, request.after, active):
                yield model_service_pb2.WatchRefResponse(version=wire.version_to_proto(version))

    def SetRef(
        self, request: model_service_pb2.SetRefRequest, context: grpc.ServicerContext
    ) -> model_service_pb2.SetRefResponse:
        version = self._catalog.set_ref(request.model, request.ref, request.version)
        return model_service_pb2.SetRefResponse(version=wire.version_to_proto(version))

    def DeleteRef(
        self, request: model_service_pb2.DeleteRefRequest, context: grpc.ServicerContext
    ) -> model_service_pb2.DeleteRefResponse:
        self._catalog.delete_ref(request.model, request.ref)
        return model_service_pb2.DeleteRefResponse()

    def ListRefs(
        self, request: model_service_pb2.ListRefsRequest, context: grpc.ServicerContext
    ) -> model_service_pb2.ListRefsResponse:
        return model_service_pb2.ListRefsResponse(refs=self._catalog.refs(request.model))

    def VerifyVersion(
        self, request: model_service_pb2.VerifyVersionRequest, context: grpc.ServicerContext
    ) -> model_service_pb2.VerifyVersionResponse:
        found = self._catalog.verify(request.model, request.version)
        return model_service_pb2.VerifyVersionResponse(
            number=found.number,
            tensors_checked=found.tensors_checked,
            bytes_checked=found.bytes_checked,
            problems=found.problems,
        )

    def GetRetention(
        self, request: model_service_pb2.GetRetentionRequest, context: grpc.ServicerContext
    ) -> model_service_pb2.GetRetentionResponse:
        retention = self._collecting.retention(request.model)
        return model_service_pb2.GetRetentionResponse(retention=wire.retention_to_proto(retention))

    def SetRetention(
        self, request: model_service_pb2.SetRetentionRequest, context: grpc.ServicerContext
    ) -> model_service_pb2.SetRetentionResponse:
        asked = wire.retention_from_proto(request.retention)
        retention = self._collecting.set_retention(request.model, asked)
        return model_service_pb2.SetRetentionResponse(retention=wire.retention_to_proto(retention))

    def DeleteVersion(
        self, request: model_service_pb2.DeleteVersionRequest, context: grpc.ServicerContext
    ) -> model_service_pb2.DeleteVersionResponse:
        version = self._collecting.delete_version(request.model, request.number)
        return model_service_pb2.DeleteVersionResponse(version=wire.version_to_proto(version))

    def CollectVersions(
        self, request: model_service_pb2.CollectVersionsRequest, context: grpc.ServicerContext
    ) -> model_service_pb2.CollectVersionsResponse:
        report = self._collecting.collect(request.model, dry_run=request.dry_run)
        return model_service_pb2.CollectVersionsResponse(collection=wire.collection_to_proto(report))


class CheckpointHandlers(checkpoint_service_pb2_grpc.CheckpointServiceServicer):
    """`CheckpointService`."""

    def __init__(self, service: Weighbridge, places: Places, streams: BulkStreams) -> None:
        self._places = places
        self._streams = streams
        self._intake = service.intake
        self._serving = service.serving

    def OpenVersion(
        self, request: checkpoint_service_pb2.OpenVersionRequest, context: grpc.ServicerContext
    ) -> checkpoint_service_pb2.OpenVersionResponse:
        version = self._intake.open_version(
            request.model,
            step=request.step,
            run=request.run,
            ranks=request.ranks,
            request_id=request.request_id,
            client_id=request.client_id,
        )
        return checkpoint_service_pb2.OpenVersionResponse(version=wire.version_to_proto(version))

    def DeclareLayout(
        self, request: checkpoint_service_pb2.DeclareLayoutRequest, context: grpc.ServicerContext
    ) -> checkpoint_service_pb2.DeclareLayoutResponse:
        layout = wire.layout_from_proto(request.layout) if request.HasField("layout") else None
        with self._places.declaring() as may_wait:
            declared = self._intake.declare_layout(
                request.model,
                request.number,
                request.rank,
                request.client_id,
                request.digest,
                layout,
                space_of(request.layout.space) if layout else MEGATRON,
                patience(context, float("inf")),
                may_wait=may_wait,
            )
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
        )

    def Push(  # type: ignore[override]
        self,
        request_iterator: Iterator[pieces.Carried[checkpoint_service_pb2.PushRequest]],
        context: grpc.ServicerContext,
    ) -> checkpoint_service_pb2.PushResponse:
        first = next(request_iterator, None)
        if first is None or not first.message.HasField("header"):
            raise InvalidArgument("the first message of a push has no header")
        header = first.message.header
        with self._streams.admit(Direction.IN, context) as share:
            data = received(request_iterator, share)
            if header.claim:
                count = self._intake.write_of_other(
                    header.model, header.number, header.rank, header.claim, data
                )
            else:
                count = self._intake.write(header.model, header.number, header.rank, header.client_id, data)
        return checkpoint_service_pb2.PushResponse(received_bytes=count)

    def GetPushState(
        self, request: checkpoint_service_pb2.GetPushStateRequest, context: grpc.ServicerContext
    ) -> checkpoint_service_pb2.GetPushStateResponse:
        ranges, total, sealed = self._intake.push_state(request.model, request.number, request.rank)
        return checkpoint_service_pb2.GetPushStateResponse(
            received=_to_proto(ranges), stream_bytes=total, sealed=sealed
        )

    def SealRank(
        self, request: checkpoint_service_pb2.SealRankRequest, context: grpc.ServicerContext
    ) -> checkpoint_service_pb2.SealRankResponse:
        version = self._intake.seal_rank(
            request.model, request.number, request.rank, request.client_id, patience(context, _SEAL_SECONDS)
        )
        return checkpoint_service_pb2.SealRankResponse(version=wire.version_to_proto(version))

    def AbortVersion(
        self, request: checkpoint_service_pb2.AbortVersionRequest, context: grpc.ServicerContext
    ) -> checkpoint_service_pb2.AbortVersionResponse:
        version = self._intake.abort_version(
            request.model, request.number, request.reason, patience(context, _SEAL_SECONDS)
        )
        return checkpoint_service_pb2.AbortVersionResponse(version=wire.version_to_proto(version))

    def Restore(  # type: ignore[override]
        self, request: checkpoint_service_pb2.RestoreRequest, context: grpc.ServicerContext
    ) -> Iterator[checkpoint_service_pb2.RestoreResponse | bytes]:
        if space_of(request.layout.space) != MEGATRON:
            raise InvalidArgument("a layout to restore is in Megatron-core's tensor space")
        layout, striping = wire.layout_from_proto(request.layout), wire.striping_from_proto(request)
        with self._streams.admit(Direction.OUT, context) as share:
            reading = self._serving.restore(request.model, request.version, layout, request.offset, striping)
            yield from sent(reading, checkpoint_service_pb2.RestoreResponse, share, self._serving.count)

    def DescribeShards(
        self, request: checkpoint_service_pb2.DescribeShardsRequest, context: grpc.ServicerContext
    ) -> checkpoint_service_pb2.DescribeShardsResponse:
        layout = self._serving.describe_shards(
            request.model,
            TrainerRank(
                (request.tensor_parallel_rank, request.tensor_parallel_size),
                (request.pipeline_parallel_rank, request.pipeline_parallel_size),
                (request.expert_parallel_rank, request.expert_parallel_size or 1),
                (request.expert_tensor_parallel_rank, request.expert_tensor_parallel_size or 1),
            ),
        )
        return checkpoint_service_pb2.DescribeShardsResponse(
            layout=wire.layout_to_proto(layout, wire.MEGATRON)
        )


def _to_proto(ranges: Iterable[tuple[int, int]]) -> list[checkpoint_service_pb2.ByteRange]:
    return [checkpoint_service_pb2.ByteRange(start=start, end=end) for start, end in ranges]


class WeightHandlers(weight_service_pb2_grpc.WeightServiceServicer):
    """`WeightService`."""

    def __init__(self, service: Weighbridge, streams: BulkStreams) -> None:
        self._serving = service.serving
        self._streams = streams

    def PlanPull(
        self, request: weight_service_pb2.PlanPullRequest, context: grpc.ServicerContext
    ) -> weight_service_pb2.PlanPullResponse:
        version, layout = self._serving.plan_pull(
            request.model, request.version, wire.request_from_proto(request.layout), request.dtype
        )
        return weight_service_pb2.PlanPullResponse(
            version=wire.version_to_proto(version),
            layout=wire.layout_to_proto(layout, wire.HUGGING_FACE),
            stream_bytes=layout.nbytes,
        )

    def Pull(  # type: ignore[override]
        self, request: weight_service_pb2.PullRequest, context: grpc.ServicerContext
    ) -> Iterator[weight_service_pb2.PullResponse | bytes]:
        layout, striping = wire.request_from_proto(request.layout), wire.striping_from_proto(request)
        with self._streams.admit(Direction.OUT, context) as share:
            reading = self._serving.pull(
                request.model, request.version, layout, request.offset, request.dtype, striping
            )
            yield from sent(reading, weight_service_pb2.PullResponse, share, self._serving.count)


class LocalLaneHandlers(local_lane_pb2_grpc.LocalLaneServiceServicer):
    """`LocalLaneService`."""

    def __init__(self, lane: LaneServer) -> None:
        self._lane = lane

    def GetLocalLane(
        self, request: local_lane_pb2.GetLocalLaneRequest, context: grpc.ServicerContext
    ) -> local_lane_pb2.GetLocalLaneResponse:
        return local_lane_pb2.GetLocalLaneResponse(
            socket=self._lane.path,
            service_id=self._lane.service_id,
            unavailable=self._lane.unavailable,
            private=self._lane.private,
        )
