"""The vocabulary as protobuf messages and back. What comes from the wire is checked here, not trusted."""

from __future__ import annotations

from collections.abc import Sequence

from weighbridge import dtypes
from weighbridge.boxes import Box
from weighbridge.collection import Collection, DeletedVersion, KeptVersion, SweptVersion, WaitingVersion
from weighbridge.errors import InvalidArgument, LayoutError
from weighbridge.layouts import MAX_TENSORS, Layout, Shard, TensorSpec, check_spec
from weighbridge.resources import Model, Retention, Version, VersionState
from weighbridge.slices import Boxes, ExpertParallel, FullTensors, LayoutRequest, TensorParallel
from weighbridge.striping import MOST_CALLS, WHOLE, Striping
from weighbridge.v1 import checkpoint_service_pb2, resources_pb2, weight_service_pb2

MEGATRON = resources_pb2.TENSOR_SPACE_MEGATRON
HUGGING_FACE = resources_pb2.TENSOR_SPACE_HUGGING_FACE

_STATES = {
    VersionState.OPEN: resources_pb2.VERSION_STATE_OPEN,
    VersionState.RECEIVING: resources_pb2.VERSION_STATE_RECEIVING,
    VersionState.READY: resources_pb2.VERSION_STATE_READY,
    VersionState.VERIFIED: resources_pb2.VERSION_STATE_VERIFIED,
    VersionState.DURABLE: resources_pb2.VERSION_STATE_DURABLE,
    VersionState.FAILED: resources_pb2.VERSION_STATE_FAILED,
    VersionState.ABORTED: resources_pb2.VERSION_STATE_ABORTED,
    VersionState.RETIRED: resources_pb2.VERSION_STATE_RETIRED,
}
_STATES_BACK = {number: state for state, number in _STATES.items()}


def spec_to_proto(spec: TensorSpec) -> resources_pb2.TensorSpec:
    """A tensor's name, dtype and shape as a message."""
    return resources_pb2.TensorSpec(name=spec.name, dtype=spec.dtype.name, shape=spec.shape)


def spec_from_proto(message: resources_pb2.TensorSpec) -> TensorSpec:
    """A message as a tensor's name, dtype and shape.

    Raises:
        InvalidArgument: there is no such dtype.
        LayoutError: its name, its shape or its number of axes is out of bounds.
    """
    spec = TensorSpec(message.name, dtypes.from_safetensors(message.dtype), tuple(message.shape))
    check_spec(spec)
    return spec


def specs_from_proto(messages: Sequence[resources_pb2.TensorSpec]) -> list[TensorSpec]:
    """The tensors of a model or of a layout.

    Raises:
        InvalidArgument: there are more than any model has, or a dtype is none.
        LayoutError: a name, a shape or a number of axes is out of bounds.
    """
    if len(messages) > MAX_TENSORS:
        raise InvalidArgument(f"{len(messages)} tensors are more than {MAX_TENSORS}, which no model has")
    return [spec_from_proto(message) for message in messages]


def layout_to_proto(layout: Layout, space: resources_pb2.TensorSpace.ValueType) -> resources_pb2.Layout:
    """A stream's layout as a message."""
    numbers = {name: number for number, name in enumerate(layout.tensors)}
    return resources_pb2.Layout(
        space=space,
        tensors=[spec_to_proto(spec) for spec in layout.tensors.values()],
        shards=[
            resources_pb2.Shard(
                tensor=numbers[p.shard.tensor],
                offset=p.shard.box.offset,
                extent=p.shard.box.extent,
                replica=not p.shard.main,
            )
            for p in layout.placements
        ],
    )


def layout_from_proto(message: resources_pb2.Layout) -> Layout:
    """A message as a stream's layout.

    Raises:
        LayoutError: it contradicts itself.
    """
    specs = specs_from_proto(message.tensors)
    shards = []
    for shard in message.shards:
        if shard.tensor >= len(specs):
            raise LayoutError(f"a shard belongs to tensor number {shard.tensor} of {len(specs)}")
        box = Box(tuple(shard.offset), tuple(shard.extent))
        shards.append(Shard(specs[shard.tensor].name, box, main=not shard.replica))
    return Layout.stream(specs, shards)


def request_to_proto(request: LayoutRequest) -> weight_service_pb2.LayoutRequest:
    """What an engine asks for, as a message.

    Raises:
        InvalidArgument: it fits no model.
    """
    match request:
        case FullTensors(names=names):
            return weight_service_pb2.LayoutRequest(full=weight_service_pb2.FullTensors(names=names))
        case TensorParallel():
            return weight_service_pb2.LayoutRequest(tensor_parallel=_parallel_to_proto(request))
        case Boxes(boxes=boxes):
            messages = [
                weight_service_pb2.BoxRequest(tensor=name, offset=offset, extent=extent)
                for name, offset, extent in boxes
            ]
            return weight_service_pb2.LayoutRequest(boxes=weight_service_pb2.Boxes(boxes=messages))


def _parallel_to_proto(request: TensorParallel) -> weight_service_pb2.TensorParallel:
    request.check()
    message = weight_service_pb2.TensorParallel(size=request.size, rank=request.rank)
    if request.experts is not None:
        experts = request.experts
        message.experts.size, message.experts.rank = experts.size, experts.rank
        message.experts.tp_size, message.experts.tp_rank = experts.tp_size, experts.tp_rank
    if request.layers is not None:
        message.layers.first, message.layers.end = request.layers
    if request.vocab_multiple != 1:
        message.vocab_multiple = request.vocab_multiple
    return message


def _parallel_from_proto(message: weight_service_pb2.TensorParallel) -> TensorParallel:
    experts = message.experts
    return TensorParallel(
        message.size,
        message.rank,
        experts=(
            ExpertParallel(
                experts.size,
                experts.rank,
                experts.tp_size if experts.HasField("tp_size") else 1,
                experts.tp_rank,
            )
            if message.HasField("experts")
            else None
        ),
        layers=(message.layers.first, message.layers.end) if message.HasField("layers") else None,
        vocab_multiple=message.vocab_multiple if message.HasField("vocab_multiple") else 1,
    )


def request_from_proto(message: weight_service_pb2.LayoutRequest) -> LayoutRequest:
    """A message as what an engine asks for. No layout at all means all tensors, whole."""
    kind = message.WhichOneof("layout")
    if kind == "tensor_parallel":
        return _parallel_from_proto(message.tensor_parallel)
    if kind == "boxes":
        return Boxes(tuple((box.tensor, tuple(box.offset), tuple(box.extent)) for box in message.boxes.boxes))
    return FullTensors(tuple(message.full.names))


def striping_to_proto(striping: Striping) -> checkpoint_service_pb2.Striping | None:
    """The part of a stream that a call brings; None for all of it."""
    if striping == WHOLE:
        return None
    return checkpoint_service_pb2.Striping(count=striping.count, index=striping.index)


def striping_from_proto(
    request: weight_service_pb2.PullRequest | checkpoint_service_pb2.RestoreRequest,
) -> Striping:
    """The part of a stream that a request is for.

    Raises:
        InvalidArgument: there is no such part.
    """
    if not request.HasField("striping"):
        return WHOLE
    count, index = request.striping.count, request.striping.index
    if not index < count <= MOST_CALLS:
        raise InvalidArgument(
            f"no stream is spread over {count} calls of which one has the number {index}",
            fix=f"ask for 1 to {MOST_CALLS} calls, numbered from 0",
        )
    return Striping(count, index)


def state_to_proto(state: VersionState) -> resources_pb2.VersionState.ValueType:
    """A state's number in the contract."""
    return _STATES[state]


def state_from_proto(number: int) -> VersionState | None:
    """A state from its number in the contract; None if unspecified or unknown."""
    return _STATES_BACK.get(number)  # type: ignore[call-overload, no-any-return]


def version_to_proto(version: Version) -> resources_pb2.Version:
    """A version as a message."""
    return resources_pb2.Version(
        model=version.model,
        number=version.number,
        state=_STATES[version.state],
        step=version.step,
        run=version.run,
        ranks=version.ranks,
        sealed_ranks=version.sealed_ranks,
        tensor_bytes=version.tensor_bytes,
        received_bytes=version.received_bytes,
        nonfinite_elements=version.nonfinite_elements,
        create_time_ms=version.create_time_ms,
        ready_time_ms=version.ready_time_ms,
        verified_time_ms=version.verified_time_ms,
        durable_time_ms=version.durable_time_ms,
        error=version.error,
        error_details=version.error_details,
    )


def version_from_proto(message: resources_pb2.Version) -> Version:
    """A message as a version."""
    return Version(
        model=message.model,
        number=message.number,
        state=_STATES_BACK[message.state],
        step=message.step,
        run=message.run,
        ranks=message.ranks,
        sealed_ranks=message.sealed_ranks,
        tensor_bytes=message.tensor_bytes,
        received_bytes=message.received_bytes,
        nonfinite_elements=message.nonfinite_elements,
        create_time_ms=message.create_time_ms,
        ready_time_ms=message.ready_time_ms,
        verified_time_ms=message.verified_time_ms,
        durable_time_ms=message.durable_time_ms,
        error=message.error,
        error_details=tuple(message.error_details),
    )


def model_to_proto(model: Model) -> resources_pb2.Model:
    """A model as a message."""
    return resources_pb2.Model(
        name=model.name,
        model_type=model.model_type,
        dtype=model.dtype,
        tensor_count=model.tensor_count,
        tensor_bytes=model.tensor_bytes,
        files=model.files,
        refs=model.refs,
    )


def model_from_proto(message: resources_pb2.Model) -> Model:
    """A message as a model."""
    return Model(
        name=message.name,
        model_type=message.model_type,
        dtype=message.dtype,
        tensor_count=message.tensor_count,
        tensor_bytes=message.tensor_bytes,
        files=tuple(message.files),
        refs=dict(message.refs),
    )


def retention_to_proto(retention: Retention) -> resources_pb2.Retention:
    """Which versions are kept, as a message."""
    return resources_pb2.Retention(**retention.to_json())


def retention_from_proto(message: resources_pb2.Retention) -> Retention:
    """A message as which versions are kept. Raises InvalidArgument if a number is out of bounds."""
    return Retention(message.keep_last, message.keep_every, message.keep_younger_s)


def collection_to_proto(report: Collection) -> resources_pb2.Collection:
    """What a collection did, as a message."""
    return resources_pb2.Collection(
        model=report.model,
        dry_run=report.dry_run,
        kept=[resources_pb2.KeptVersion(number=v.number, rules=v.rules, refs=v.refs) for v in report.kept],
        retired=report.retired,
        waiting=[
            resources_pb2.WaitingVersion(number=v.number, until_ms=v.until_ms, readers=v.readers)
            for v in report.waiting
        ],
        deleted=[resources_pb2.DeletedVersion(number=v.number, nbytes=v.nbytes) for v in report.deleted],
        given_up=report.given_up,
        swept=[resources_pb2.SweptVersion(number=v.number, objects=v.objects) for v in report.swept],
        uploads_discarded=report.uploads_discarded,
        leases_removed=report.leases_removed,
        problems=report.problems,
    )


def collection_from_proto(message: resources_pb2.Collection) -> Collection:
    """A message as what a collection did."""
    return Collection(
        model=message.model,
        dry_run=message.dry_run,
        kept=tuple(KeptVersion(v.number, tuple(v.rules), tuple(v.refs)) for v in message.kept),
        retired=tuple(message.retired),
        waiting=tuple(WaitingVersion(v.number, v.until_ms, v.readers) for v in message.waiting),
        deleted=tuple(DeletedVersion(v.number, v.nbytes) for v in message.deleted),
        given_up=tuple(message.given_up),
        swept=tuple(SweptVersion(v.number, v.objects) for v in message.swept),
        uploads_discarded=message.uploads_discarded,
        leases_removed=message.leases_removed,
        problems=tuple(message.problems),
    )
