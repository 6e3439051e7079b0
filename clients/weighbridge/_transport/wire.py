"""Conversion between the vocabulary and protobuf messages. Received messages are validated here."""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from typing import Any, TypeVar

from weighbridge._core import dtypes
from weighbridge._core.boxes import Box, Link
from weighbridge._core.json_values import JsonValue, json_value, names_of
from weighbridge._core.layouts import MAX_TENSORS, Layout, Shard, TensorSpec, check_spec
from weighbridge._core.metadata import Metadata, MetadataValue, checked_metadata
from weighbridge._core.resources import Version, VersionState
from weighbridge._core.slices import Boxes, ExpertParallel, FullTensors, LayoutRequest, TensorParallel
from weighbridge._core.striping import MOST_CALLS, WHOLE, Striping
from weighbridge._core.tensor_spaces import TensorSpace
from weighbridge.errors import FailedPrecondition, InvalidArgument, LayoutError
from weighbridge.v1 import checkpoint_service_pb2, resources_pb2, weight_service_pb2

R = TypeVar("R")

_SPACES = {
    TensorSpace.MEGATRON: resources_pb2.TENSOR_SPACE_MEGATRON,
    TensorSpace.HUGGING_FACE: resources_pb2.TENSOR_SPACE_HUGGING_FACE,
}
_SPACES_BACK: dict[int, TensorSpace] = {number: space for space, number in _SPACES.items()}

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
        InvalidArgument: there are more than any model has, or a dtype is unknown.
        LayoutError: a name, a shape or a number of axes is out of bounds.
    """
    if len(messages) > MAX_TENSORS:
        raise InvalidArgument(f"{len(messages)} tensors are more than {MAX_TENSORS}, which no model has")
    return [spec_from_proto(message) for message in messages]


def space_from_proto(number: int) -> TensorSpace:
    """The tensor space of a number in the contract. Raises InvalidArgument."""
    space = _SPACES_BACK.get(number)
    if space is None:
        raise InvalidArgument("the layout does not state to which tensor space its names belong")
    return space


def space_to_proto(space: TensorSpace) -> resources_pb2.TensorSpace.ValueType:
    """The contract's number of a tensor space."""
    return _SPACES[space]


def layout_to_proto(layout: Layout, space: TensorSpace) -> resources_pb2.Layout:
    """A stream's layout as a message."""
    numbers = {name: number for number, name in enumerate(layout.tensors)}
    return resources_pb2.Layout(
        space=_SPACES[space],
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


def links_to_proto(
    links: Iterable[Link], sources: Iterable[str], targets: Iterable[str]
) -> list[checkpoint_service_pb2.TensorLink]:
    """Links as messages, which name tensors by their indexes in ``sources`` and ``targets``."""
    numbers = {name: number for number, name in enumerate(sources)}
    target_numbers = {name: number for number, name in enumerate(targets)}
    return [
        checkpoint_service_pb2.TensorLink(
            source=numbers[link.source],
            source_offset=link.source_box.offset,
            source_extent=link.source_box.extent,
            target=target_numbers[link.target],
            target_offset=link.target_box.offset,
            target_extent=link.target_box.extent,
            axes=[0 if axis is None else axis + 1 for axis in link.axes],
        )
        for link in links
    ]


def links_from_proto(
    messages: Iterable[checkpoint_service_pb2.TensorLink], sources: Sequence[str], targets: Sequence[str]
) -> list[Link]:
    """Messages as links of these tensors. Raises LayoutError if an index is out of range."""
    links = []
    for each in messages:
        if each.source >= len(sources) or each.target >= len(targets):
            raise LayoutError(f"a link belongs to tensors number {each.source} and {each.target}")
        box = Box(tuple(each.source_offset), tuple(each.source_extent))
        target_box = Box(tuple(each.target_offset), tuple(each.target_extent))
        axes = tuple([axis - 1 if axis else None for axis in each.axes])
        links.append(Link(sources[each.source], box, targets[each.target], target_box, axes))
    return links


def request_to_proto(request: LayoutRequest) -> weight_service_pb2.LayoutRequest:
    """An engine's request as a message.

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
    """A message as an engine's request. A message without a layout means all tensors, whole."""
    kind = message.WhichOneof("layout")
    if kind == "tensor_parallel":
        return _parallel_from_proto(message.tensor_parallel)
    if kind == "boxes":
        return Boxes(tuple((box.tensor, tuple(box.offset), tuple(box.extent)) for box in message.boxes.boxes))
    return FullTensors(tuple(message.full.names))


def striping_to_proto(striping: Striping) -> checkpoint_service_pb2.Striping | None:
    """The part of a stream that a call transfers; None for all of it."""
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
            f"a stream cannot be spread over {count} calls of which this one has the number {index}",
            fix=f"ask for 1 to {MOST_CALLS} calls, numbered from 0",
        )
    return Striping(count, index)


def state_to_proto(state: VersionState) -> resources_pb2.VersionState.ValueType:
    """A state's number in the contract."""
    return _STATES[state]


def state_from_proto(number: int) -> VersionState | None:
    """A state from its number in the contract; None if unspecified or unknown."""
    return _STATES_BACK.get(number)  # type: ignore[call-overload, no-any-return]


def _known_state(number: int) -> VersionState:
    state = state_from_proto(number)
    if state is None:
        raise FailedPrecondition(
            f"the service reports that a version is in state {number}, which this client does not know",
            fix="use the client of the same release as the service",
        )
    return state


def version_to_proto(version: Version) -> resources_pb2.Version:
    """A version as a message."""
    return resources_pb2.Version(**fields_of(version))


def fields_of(value: JsonValue) -> dict[str, Any]:
    """A value's fields as the fields of its message."""
    kind: Any = type(value)
    return {
        name: getattr(value, name) if write is None else write(getattr(value, name))
        for name, _read, write in _fields(kind)
    }


def written(value: Any) -> Any:
    """A value, or a list of values, as the field of a message."""
    match value:
        case JsonValue():
            return fields_of(value)
        case tuple() | list():
            return [written(each) for each in value]
    return json_value(value)


def version_from_proto(message: resources_pb2.Version) -> Version:
    """A message as a version.

    Raises:
        FailedPrecondition: it is in a state that this release does not know.
        InvalidArgument: its metadata is invalid.
    """
    return read(Version, message)


def metadata_to_proto(metadata: Mapping[str, object]) -> dict[str, resources_pb2.MetadataValue]:
    """Metadata as messages, by key. Raises InvalidArgument."""
    return {key: _value_to_proto(value) for key, value in checked_metadata(metadata).items()}


def _value_to_proto(value: MetadataValue) -> resources_pb2.MetadataValue:
    match value:
        case bool():
            return resources_pb2.MetadataValue(flag=value)
        case int():
            return resources_pb2.MetadataValue(integer=value)
        case float():
            return resources_pb2.MetadataValue(number=value)
    return resources_pb2.MetadataValue(text=value)


def metadata_from_proto(messages: Mapping[str, resources_pb2.MetadataValue]) -> Metadata:
    """Messages as metadata.

    Raises:
        InvalidArgument: a key or a value is invalid, or there is too much.
    """
    return checked_metadata({key: _value_from_proto(message) for key, message in messages.items()})


def _value_from_proto(message: resources_pb2.MetadataValue) -> MetadataValue | None:
    kind = message.WhichOneof("value")
    return None if kind is None else getattr(message, kind)


def write(kind: Callable[..., R], value: JsonValue) -> R:
    """A dataclass as the message of this type, whose fields have the same names."""
    return kind(**fields_of(value))


def read(kind: Callable[..., R], message: Any) -> R:
    """A message as the dataclass with the same field names. Raises the dataclass's errors for values out of bounds."""
    return kind(
        *[
            getattr(message, name) if convert is None else convert(getattr(message, name))
            for name, convert, _write in _fields(kind)
        ]
    )


_Convert = Callable[[Any], Any] | None


@functools.cache
def _fields(kind: Any) -> list[tuple[str, _Convert, _Convert]]:
    """The name of each field of a dataclass, and its converters from and to a message's field; None where they are
    equal.
    """
    hints = typing.get_type_hints(kind)
    return [(name, *_converters(hints[name])) for name in names_of(kind)]


def _converters(hint: Any) -> tuple[_Convert, _Convert]:
    inner = next(iter(typing.get_args(hint)), None)
    if hint is VersionState:
        return _known_state, _STATES.__getitem__
    if hint == Metadata:
        return metadata_from_proto, metadata_to_proto
    if dataclasses.is_dataclass(hint):
        return functools.partial(read, typing.cast("type", hint)), fields_of
    if inner is not None and dataclasses.is_dataclass(inner):
        return functools.partial(_read_all, typing.cast("type", inner)), written
    if isinstance(hint, type) and issubclass(hint, Enum):
        return None, json_value
    containers: dict[Any, _Convert] = {tuple: tuple, Mapping: _sorted}
    return containers.get(typing.get_origin(hint)), None


def _sorted(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Entries of a message by key: a map on the wire has no order of its own."""
    return dict(sorted(entries.items()))


def _read_all(kind: Callable[..., R], messages: Iterable[Any]) -> tuple[R, ...]:
    return tuple(read(kind, each) for each in messages)
