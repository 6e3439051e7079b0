"""Valid requests of every kind, for a small model that is registered under two names: what fuzzed calls are made
from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from google.protobuf.message import Message
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from tests.support.raw_clients import TinyModel, cut, rows_layout, stream_of, whole_layout
from weighbridge._core import dtypes
from weighbridge._core.slices import Boxes, FullTensors, TensorParallel
from weighbridge._core.tensor_spaces import TensorSpace
from weighbridge._transport import rpc, wire
from weighbridge.v1 import checkpoint_service_pb2 as checkpoints
from weighbridge.v1 import engine_service_pb2 as engines
from weighbridge.v1 import model_service_pb2 as models
from weighbridge.v1 import replica_service_pb2 as replicas
from weighbridge.v1 import resources_pb2 as resources
from weighbridge.v1 import weight_service_pb2 as weights
from weighbridge_service.models.model_tensors import ModelTensors
from weighbridge_service.models.registered_model import RegisteredModel
from weighbridge_service.push.handover import HandedVersion
from weighbridge_service.replicas.takeovers import handed_to_proto
from weighbridge_storage.documents.entries import OpenEntry
from weighbridge_storage.documents.names import ModelName

FUZZED, UNTOUCHED = "fuzz/model", "acme/untouched"


def handed_over(source: TinyModel, sender: replicas.Replica, number: int) -> Message:
    """Request by which a leaving replica hands over a version that this service does not know."""
    model = RegisteredModel(
        ModelName.parse(FUZZED), source.files["config.json"], ModelTensors(dtypes.parse("fp32")), "files", ()
    )
    entry = OpenEntry(number, "id", 1, "r", 1, 1, 2, "files", 0, "claim")
    request = handed_to_proto(HandedVersion(model, entry, "claim", 1, [("fuzz-client", "digest")], None), 1.0)
    request.sender.CopyFrom(sender)
    return request


def examples(source: TinyModel) -> Mapping[str, Sequence[Message]]:
    """Valid requests, by the name of their type."""
    whole, half = whole_layout(source.arrays), rows_layout(source.arrays, 0, 2)
    layouts = [wire.layout_to_proto(each, TensorSpace.HUGGING_FACE) for each in (whole, half)]
    stream = stream_of(source.arrays, whole, range(len(whole.placements)))
    tensor = next(iter(source.arrays))
    asked = [
        wire.request_to_proto(each)
        for each in (FullTensors(), FullTensors((tensor,)), TensorParallel(2, 1), Boxes(((tensor, (0, 0), (1, 8)),)))
    ]  # fmt: skip
    files = [resources.ModelFile(name=name, content=content) for name, content in source.files.items()]
    client, numbers = "fuzz-client", (1, 2, 4, 5, 6)
    header = {"model": FUZZED, "rank": 0, "client_id": client}
    sender = replicas.Replica(address="127.0.0.1:1", boot="boot")
    found: list[Message] = [
        models.RegisterModelRequest(model="fuzz/other", files=files),
        models.RegisterModelRequest(model=FUZZED, files=files),
        models.WatchRefsRequest(refs=[models.WatchedRef(model=FUZZED, ref="live")] * 2),
        models.WatchRefsRequest(refs=[models.WatchedRef(model=FUZZED, ref="latest", after=3)]),
        models.SetRefRequest(model=FUZZED, ref="prod", version="2"),
        models.DeleteRefRequest(model=FUZZED, ref="prod"),
        models.ListModelsRequest(page_size=3),
        models.VerifyVersionRequest(model=FUZZED, version="latest"),
        models.SetRetentionRequest(model=FUZZED, retention=resources.Retention(keep_last=3)),
        models.CollectVersionsRequest(model=FUZZED, dry_run=True),
        models.CollectVersionsRequest(model=FUZZED),
        models.WarmModelRequest(model=FUZZED),
        models.GetVersionRequest(model=FUZZED, version="3", wait_for=resources.VERSION_STATE_DURABLE),
        models.GetVersionRequest(model=FUZZED, version="4", wait_for=resources.VERSION_STATE_READY),
        *(kind(model=FUZZED) for kind in (models.GetModelRequest, models.ListRefsRequest)),
        *(kind(model=FUZZED) for kind in (models.GetRetentionRequest, models.ListVersionsRequest)),
        models.GetModelFilesRequest(model=FUZZED, version="1"),
        *(models.DeleteVersionRequest(model=FUZZED, number=number) for number in (1, 4)),
        *(
            checkpoints.OpenVersionRequest(
                model=FUZZED, step=7, run="r", ranks=ranks, request_id=f"id-{ranks}-{n}", client_id=client
            )
            for ranks in (1, 2)
            for n in range(3)
        ),
        *(
            checkpoints.DeclareLayoutRequest(number=number, digest=layout.digest, layout=message, **header)
            for number in numbers
            for layout, message in zip((whole, half), layouts, strict=True)
        ),
        *(
            checkpoints.PushRequest(
                header=checkpoints.PushHeader(number=number, **header),
                offset=offset,
                data=data,
                checksum=rpc.checksum(data),
            )
            for number in numbers
            for offset, data in cut(stream, 30_000)
        ),
        *(checkpoints.GetPushStateRequest(model=FUZZED, number=number) for number in numbers),
        *(checkpoints.SealRankRequest(number=number, **header) for number in numbers),
        checkpoints.AbortVersionRequest(model=FUZZED, number=6, reason="fuzzed"),
        *(
            checkpoints.RestoreRequest(
                model=FUZZED, version="latest", layout=wire.layout_to_proto(each, TensorSpace.MEGATRON)
            )
            for each in (whole, half)
        ),
        checkpoints.DescribeShardsRequest(
            model=FUZZED, tensor_parallel_size=2, tensor_parallel_rank=1, pipeline_parallel_size=1
        ),
        *(weights.PlanPullRequest(model=FUZZED, version="latest", layout=each) for each in asked),
        *(weights.PullRequest(model=FUZZED, version="latest", layout=each) for each in asked),
        engines.ReportEngineRequest(
            report=engines.EngineReport(
                engine_id="fuzzed",
                kind="vllm",
                address="http://node7:8000",
                model=FUZZED,
                ref="live",
                version=1,
                state="serving",
                beat=1,
            )
        ),
        engines.ListEnginesRequest(model=FUZZED, page_size=1),
        replicas.ExchangeRequest(
            sender=sender, versions=[replicas.VersionProgress(model=FUZZED, number=4, claim="claim")]
        ),
        replicas.ReadFileRequest(model=FUZZED, number=3, file="model.safetensors", length=100),
        replicas.TakeOverRequest(sender=sender, model=FUZZED, entry=b"{}", claim="claim"),
        *(handed_over(source, sender, number) for number in (4, 1000)),
        health_pb2.HealthCheckRequest(service="weighbridge.v1.ModelService"),
        reflection_pb2.ServerReflectionRequest(list_services="x"),
        reflection_pb2.ServerReflectionRequest(file_containing_symbol="weighbridge.v1.ModelService"),
    ]
    by_type: dict[str, list[Message]] = {}
    for each in found:
        by_type.setdefault(each.DESCRIPTOR.full_name, []).append(each)
    return by_type
