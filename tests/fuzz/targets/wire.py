"""Targets that are messages: what clients and services send each other, and how it is framed."""

from __future__ import annotations

import contextlib
import itertools
import random
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from google.rpc import error_details_pb2

from tests.fuzz import mutators
from tests.fuzz.target import Bounds, Mutator, Target, stateless
from tests.support.grpc_fuzzing import Messages
from weighbridge._core import dtypes
from weighbridge._core.boxes import Box
from weighbridge._core.layouts import Layout, Shard, TensorSpec
from weighbridge._core.reports.collection import Collection
from weighbridge._core.resources import Model, Version, VersionState
from weighbridge._core.slices import Boxes, ExpertParallel, FullTensors, TensorParallel
from weighbridge._core.tensor_spaces import TensorSpace
from weighbridge._lane import plans, protocol
from weighbridge._transport import pieces, request_parts, wire
from weighbridge._transport.varints import write_varint
from weighbridge.errors import WeighbridgeError
from weighbridge.v1 import (
    checkpoint_service_pb2,
    local_lane_pb2,
    model_service_pb2,
    replica_service_pb2,
    resources_pb2,
    weight_service_pb2,
)
from weighbridge_service.api.grpc import errors
from weighbridge_service.api.grpc.asking import named
from weighbridge_service.replicas.progress import home_from_proto, progress_from_proto

_REFUSALS = (WeighbridgeError, DecodeError)


def _layout() -> Layout:
    specs = [
        TensorSpec("a", dtypes.parse("bf16"), (4, 8)),
        TensorSpec("b", dtypes.parse("fp32"), (3,)),
        TensorSpec("c", dtypes.parse("fp8_e4m3"), ()),
    ]
    shards = [
        Shard("a", Box((0, 0), (2, 8))),
        Shard("a", Box((2, 0), (2, 8)), main=False),
        Shard("b", Box((0,), (3,))),
        Shard("c", Box((), ())),
    ]
    return Layout.stream(specs, shards)


def _version() -> Version:
    return Version(
        "acme/smol", 17, VersionState.READY, step=1, run="r", metadata={"a": 1, "b": "x", "c": 0.5, "d": True}
    )


def _read_layout(message: resources_pb2.Layout) -> None:
    layout = wire.layout_from_proto(message)
    _ = layout.digest, layout.nbytes, layout.by_tensor
    wire.layout_to_proto(layout, TensorSpace.MEGATRON)


def _read_request(message: weight_service_pb2.PullRequest) -> None:
    wire.request_from_proto(message.layout)
    wire.striping_from_proto(message)
    list(named(message))


def _read_exchange(message: replica_service_pb2.ExchangeRequest) -> None:
    for each in message.versions:
        progress_from_proto(each)
    home_from_proto(message.sender)


def _read_version(message: resources_pb2.Version) -> None:
    wire.version_to_proto(wire.version_from_proto(message))


def _read_error(message: error_details_pb2.ErrorInfo) -> None:
    """As a service tells of what was sent to it: the texts of errors quote it."""
    error = WeighbridgeError(
        message.reason, fix=message.domain, details=[*message.metadata, *message.metadata.values()]
    )
    status = errors.to_status(error)
    assert len(status.details) < 10_000
    assert sum(len(value) for _, value in status.trailing_metadata) < 8000


_READ: Mapping[type[Message], Callable[[Any], object]] = {
    resources_pb2.Layout: _read_layout,
    weight_service_pb2.PullRequest: _read_request,
    checkpoint_service_pb2.OpenVersionRequest: lambda message: wire.metadata_from_proto(message.metadata),
    model_service_pb2.RegisterModelRequest: lambda message: wire.specs_from_proto(message.tensors),
    model_service_pb2.WatchRefsRequest: lambda message: list(named(message)),
    replica_service_pb2.ExchangeRequest: _read_exchange,
    resources_pb2.Version: _read_version,
    resources_pb2.Model: lambda message: wire.read(Model, message),
    resources_pb2.Collection: lambda message: wire.read(Collection, message),
    error_details_pb2.ErrorInfo: _read_error,
}
"""Readers of messages, of both sides."""
_KINDS = tuple(_READ)


def _examples() -> Mapping[str, Sequence[Message]]:
    layout = wire.layout_to_proto(_layout(), TensorSpace.MEGATRON)
    asked = (
        FullTensors(), FullTensors(("a",)), TensorParallel(4, 1, experts=ExpertParallel(2, 1, 2, 0), layers=(0, 3), vocab_multiple=64),
        Boxes((("a", (0, 0), (1, 2)), ("b", (0,), (1,)))),
    )  # fmt: skip
    version = wire.version_to_proto(_version())
    found: list[Message] = [
        layout,
        *(
            weight_service_pb2.PullRequest(model="acme/smol", version="latest", layout=wire.request_to_proto(each), striping={"count": 2, "index": 1})
            for each in asked
        ),
        checkpoint_service_pb2.OpenVersionRequest(model="acme/smol", step=1, ranks=2, metadata=version.metadata),
        model_service_pb2.RegisterModelRequest(model="acme/smol", files=[{"name": "config.json", "content": b"{}"}], tensors=layout.tensors),
        model_service_pb2.WatchRefsRequest(refs=[{"model": "acme/smol", "ref": "live"}] * 3),
        replica_service_pb2.ExchangeRequest(
            sender={"address": "127.0.0.1:1", "boot": "b"}, versions=[{"model": "acme/smol", "number": 1, "claim": "c", "stage": 2, "written": b"{}"}]
        ),
        version,
        resources_pb2.Model(name="acme/smol", model_type="llama", dtype="bf16", tensor_count=2, refs={"live": 1}, weight_map=True),
        resources_pb2.Collection(),
        error_details_pb2.ErrorInfo(reason="模型" * 50, domain="fix", metadata={"a": "é" * 300, "b": "x" * 3000}),
    ]  # fmt: skip
    by_type: dict[str, list[Message]] = {}
    for each in found:
        by_type.setdefault(each.DESCRIPTOR.full_name, []).append(each)
    return by_type


_EXAMPLES = _examples()


def messages(kinds: Sequence[Any], examples: Mapping[str, Sequence[Message]]) -> Mutator:
    """Changes of messages behind a first byte that says which of some types they are of: fields and bytes of them, or
    another one.

    Args:
        kinds: the types, by number.
        examples: valid messages.
    """

    def mutate(choose: random.Random, data: bytes) -> bytes:
        number = data[0] % len(kinds) if data else 0
        source = Messages(choose, examples)
        if choose.random() < 0.15:
            number = choose.randrange(len(kinds))
            return bytes([number]) + source.encoded(kinds[number].DESCRIPTOR)
        if choose.random() < 0.3:
            return bytes([number]) + source.damaged(data[1:])
        message = GetMessageClass(kinds[number].DESCRIPTOR)()
        try:
            message.ParseFromString(data[1:])
        except DecodeError:
            return bytes([number]) + source.encoded(kinds[number].DESCRIPTOR)
        source.change(message)
        return bytes([number]) + message.SerializeToString()

    return mutate


def numbered(kinds: Sequence[Any], examples: Mapping[str, Sequence[Message]]) -> list[bytes]:
    """Valid messages behind the number of their type."""
    return [
        bytes([number]) + example.SerializeToString()
        for number, kind in enumerate(kinds)
        for example in examples.get(kind.DESCRIPTOR.full_name, ())
    ]


def _message(data: bytes) -> None:
    kind = _KINDS[data[0] % len(_KINDS)] if data else _KINDS[0]
    _READ[kind](kind.FromString(data[1:]))


def _heavy_messages() -> list[bytes]:
    """As large as a request may be in parts, or a tenth of it, with as many things in it as fit."""
    tensor = resources_pb2.TensorSpec(name="a", dtype="F32", shape=[0])
    many = {
        resources_pb2.Layout: [
            resources_pb2.Layout(
                space=1, tensors=[tensor], shards=[resources_pb2.Shard(offset=[0], extent=[0])] * 300_000
            ),
            resources_pb2.Layout(
                space=1, tensors=[resources_pb2.TensorSpec(name="a", dtype="F32", shape=[0] * 1_000_000)]
            ),
            resources_pb2.Layout(
                space=1,
                tensors=[tensor],
                shards=[resources_pb2.Shard(offset=[2**63 - 1] * 300_000, extent=[2**63 - 1] * 300_000)],
            ),
            resources_pb2.Layout(space=1, tensors=[tensor] * 300_000),
        ],
        model_service_pb2.WatchRefsRequest: [
            model_service_pb2.WatchRefsRequest(refs=[model_service_pb2.WatchedRef(ref="x")] * 500_000)
        ],
        checkpoint_service_pb2.OpenVersionRequest: [
            checkpoint_service_pb2.OpenVersionRequest(
                metadata={str(n): resources_pb2.MetadataValue() for n in range(100_000)}
            ),
            checkpoint_service_pb2.OpenVersionRequest(
                metadata={"a": resources_pb2.MetadataValue(text="x" * 3_000_000)}
            ),
        ],
        error_details_pb2.ErrorInfo: [
            error_details_pb2.ErrorInfo(reason="x" * 3_000_000, metadata={str(n): "y" * 30 for n in range(50_000)})
        ],
        weight_service_pb2.PullRequest: [
            weight_service_pb2.PullRequest(
                layout={
                    "boxes": {"boxes": [weight_service_pb2.BoxRequest(tensor="a", offset=[0], extent=[1])] * 300_000}
                }
            )
        ],
    }
    return [bytes([_KINDS.index(kind)]) + each.SerializeToString() for kind, found in many.items() for each in found]


_PIECES = (
    checkpoint_service_pb2.PushRequest,
    weight_service_pb2.PullResponse,
    replica_service_pb2.ReadFileResponse,
)


def _piece(data: bytes) -> None:
    kind = _PIECES[data[0] % len(_PIECES)] if data else _PIECES[0]
    theirs: Any = None
    with contextlib.suppress(DecodeError):
        theirs = kind.FromString(data[1:])
    carried = pieces.decoder(kind)(data[1:])
    if theirs is not None:
        assert bytes(carried.data) == theirs.data
    assert pieces.decoder(kind)(pieces.encode(carried.message, carried.data)).data == carried.data


def _piece_samples() -> list[bytes]:
    header = checkpoint_service_pb2.PushHeader(model="acme/smol", number=1, client_id="c")
    return [
        bytes([0]) + pieces.encode(checkpoint_service_pb2.PushRequest(header=header, offset=5, checksum=7), b"weights"),
        bytes([1]) + pieces.encode(weight_service_pb2.PullResponse(offset=5, checksum=7), b""),
        bytes([2]) + pieces.encode(replica_service_pb2.ReadFileResponse(offset=2**60, checksum=7), b"x" * 300),
    ]


def _part(data: bytes) -> None:
    """A request is cut between its fields, by what cuts our own: joined again it is the same."""
    most = 16 + (data[1] if len(data) > 1 else 0)
    kind = _KINDS[data[0] % len(_KINDS)] if data else _KINDS[0]
    message = kind.FromString(data[2:])
    cut = request_parts.encoded_parts(message, most)
    again = kind.FromString(b"".join(cut))
    if isinstance(again, model_service_pb2.RegisterModelRequest):  # a file goes on in one of the same name
        assert _contents(again) == _contents(message)
        again.ClearField("files")
        message.ClearField("files")
    assert again.SerializeToString(deterministic=True) == message.SerializeToString(deterministic=True)


def _contents(request: model_service_pb2.RegisterModelRequest) -> list[tuple[str, bytes]]:
    """Names and contents of files, those that follow each other under one name together."""
    groups = itertools.groupby(request.files, key=lambda file: file.name)
    return [(name, b"".join(file.content for file in group)) for name, group in groups]


def _parts_mutate(choose: random.Random, data: bytes) -> bytes:
    changed = messages(_KINDS, _EXAMPLES)(choose, data[:1] + data[2:])
    return changed[:1] + choose.choice((data[1:2], choose.randbytes(1))) + changed[1:]


class _Room:
    def take(self, nbytes: int) -> None:
        """There is room."""

    def give(self, nbytes: int) -> None:
        """Take room back; nothing to do."""


def _frame(data: bytes) -> None:
    """Bytes that come over a Unix socket, read as either side reads them."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sender = threading.Thread(target=_sent, args=(theirs, data), daemon=True)
        sender.start()
        try:
            while (found := protocol.receive(ours, _Room(), 5.0)) is not None:
                raw, descriptors = found
                protocol.close_all(descriptors)
                for kind in (local_lane_pb2.LaneRequest, local_lane_pb2.LaneResponse):
                    message = kind.FromString(raw)
                    if isinstance(message, local_lane_pb2.LaneResponse) and message.HasField("error"):
                        str(protocol.error_from_proto(message.error))
        finally:
            ours.close()
            sender.join()


def _sent(connection: socket.socket, data: bytes) -> None:
    try:
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
    except OSError:
        pass


def _frame_samples() -> list[bytes]:
    found: list[Message] = [
        local_lane_pb2.LaneRequest(id=1, hello={"client_id": "c"}),
        local_lane_pb2.LaneRequest(id=2, begin_read={"model": "acme/smol", "version": "1", "layout": {"full": {}}}),
        local_lane_pb2.LaneResponse(id=3, error={"reason": "NOT_FOUND", "message": "no", "details": ["x"]}),
        local_lane_pb2.LaneResponse(recall={"key": "k"}),
    ]
    return [
        mutators.framed([each.SerializeToString() for each in found]),
        *(mutators.framed([each.SerializeToString()]) for each in found),
    ]


def _frames_mutate(choose: random.Random, parts: list[bytes]) -> None:
    kinds = (local_lane_pb2.LaneRequest, local_lane_pb2.LaneResponse)
    source = Messages(choose, {})
    where = choose.randrange(len(parts) + 1)
    if where == len(parts) or choose.random() < 0.3:
        parts.insert(where, source.encoded(choose.choice(kinds).DESCRIPTOR))
    elif choose.random() < 0.2:
        del parts[where]
    else:
        parts[where] = source.damaged(parts[where])


_STREAM = _layout()
_PLACES = {"model.safetensors": (0, 64), "other.safetensors": (1, 0)}


def _lane_plan(data: bytes) -> None:
    """Plan of a service for the shards' places: no copy may go beyond a shard or a memory."""
    plan = local_lane_pb2.LanePlan.FromString(data[1:])
    sizes = (256, 128)
    for shard, placement in zip(plans.placed_copies(plan, _STREAM, _PLACES, sizes), _STREAM.placements, strict=True):
        assert shard.packed.size or not shard
        for copy in shard:
            assert copy.nbytes <= placement.nbytes
            last = [n - 1 for n in copy.extent]
            for strides, base, limit in (
                (copy.stream_strides, copy.stream_offset, placement.nbytes), (copy.file_strides, copy.file_offset, sizes[copy.file]),
            ):  # fmt: skip
                assert strides[-1] == 1 or copy.extent[-1] == 1
                assert base + sum(n * stride for n, stride in zip(last, strides, strict=True)) < limit
    plans._streamed(plan, _STREAM)


def _lane_plan_samples() -> list[bytes]:
    plan = local_lane_pb2.LanePlan(files=list(_PLACES))
    for n, placement in enumerate(_STREAM.placements):
        plan.shards.add().copies.add(
            extent=[2, placement.nbytes // 2] if n < 2 else [placement.nbytes], shard_strides=[placement.nbytes // 2, 1] if n < 2 else [1],
            file_strides=[placement.nbytes // 2, 1] if n < 2 else [1], file=n % 2, file_offset=8 * n,
        )  # fmt: skip
    plan.streamed.add(start=1, end=2)
    return [b"\0" + plan.SerializeToString()]


TARGETS = (
    Target(
        "messages", stateless(_message), lambda: numbered(_KINDS, _EXAMPLES), messages(_KINDS, _EXAMPLES), _REFUSALS, _heavy_messages,
        Bounds(seconds_per_mb=8.0, times=96.0),
    ),
    Target(
        "pieces", stateless(_piece), _piece_samples, messages(_PIECES, {}), _REFUSALS,
        lambda: [b"\0" + b"\x08\x01" * 1_000_000, b"\0" + b"\x1a\0" * 1_000_000, b"\0" + b"\x1a" + write_varint(2**63), b"\0" + b"\x80" * 1_000_000],
    ),
    Target(
        "request-parts", stateless(_part), lambda: [each[:1] + b"\x40" + each[1:] for each in numbered(_KINDS, _EXAMPLES)], _parts_mutate, _REFUSALS,
    ),
    Target(
        "lane-frames", stateless(_frame), _frame_samples, mutators.one_of(mutators.of_frames(_frames_mutate), mutators.raw), (*_REFUSALS, OSError),
        lambda: [b"\xff\xff\xff\x03" + bytes(1000), b"\xff\xff\xff\xff", b"\0\0\0\0" * 50_000, mutators.framed([b"\x0a" * 3_000_000])], weight=0.1,
    ),
    Target(
        "lane-plans", stateless(_lane_plan), _lane_plan_samples, messages((local_lane_pb2.LanePlan,), {}), _REFUSALS,
        lambda: [b"\0" + local_lane_pb2.LanePlan(files=["a"] * 500_000, shards=[{"copies": [{"extent": [1] * 300_000}]}] * 4).SerializeToString()],
        Bounds(times=96.0),
    ),
)  # fmt: skip
