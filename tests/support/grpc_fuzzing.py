"""Fuzzed gRPC calls: a seeded generator of what a faulty or hostile client may send, and what makes the calls.

Half of the messages are random bytes or valid messages that were damaged on the wire; the others are well-formed, with
values in their fields that no client should send. Streams have too few, too many and torn messages, stay open, or are
left in the middle.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import grpc
from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor, ServiceDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from weighbridge._transport import bulk_entry, request_parts
from weighbridge._transport.varints import write_varint
from weighbridge.v1 import (
    bulk_service_pb2,
    checkpoint_service_pb2,
    local_lane_pb2,
    model_service_pb2,
    replica_service_pb2,
    weight_service_pb2,
)

SERVICES: tuple[ServiceDescriptor, ...] = tuple(
    service
    for module in (
        bulk_service_pb2,
        checkpoint_service_pb2,
        local_lane_pb2,
        model_service_pb2,
        replica_service_pb2,
        weight_service_pb2,
        health_pb2,
        reflection_pb2,
    )
    for service in module.DESCRIPTOR.services_by_name.values()
)
_STREAMS_OF_WEIGHTS = ("Push", "Restore", "Pull", "ReadFile")
_WAITING = ("WatchRefs", "Watch", "DeclareLayout", "SealRank", "AbortVersion", "TakeOver", "GetVersion")
"""Methods that may wait for long, by the contract: called with short deadlines."""
_TEXTS = (
    "", "1", "2", "0", "-1", "3", "live", "latest", "prod", "9" * 30, "٣", "..", "../../etc/passwd", "a/b", "acme/x", "a/b/c", "/",
    "\0", "a\0b", "x" * 300, "y" * 70_000, "模型/权重", "🚂", "config.json", "model.safetensors", "F32", "BF16", "bf16", "nonsense",
    "127.0.0.1:1", "localhost:99999", "%00%ff", "{}", "[]", "null", "weighbridge.v1.Layout", "weighbridge/v1/resources.proto",
)  # fmt: skip
_NUMBERS = (
    0, 1, 2, 3, 7, 16, 127, 128, 65_535, 2**31 - 1, 2**31, 2**32 - 1, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1,
)  # fmt: skip
_BLOBS = (
    b"", b"{}", b"[" * 5000, b'{"a":' * 3000, b"\xff" * 40, b"\x80" * 20, b'{"model_type": 5}', b"\0" * 70_000,
)  # fmt: skip
_DEEPEST = 5
_INTEGERS = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
    FieldDescriptor.CPPTYPE_ENUM: (-(2**31), 2**31 - 1),
}


@dataclass(frozen=True)
class FuzzedCall:
    """Messages and metadata of one call, and when it is cancelled.

    Attributes:
        method: full path of the method.
        messages: encoded messages.
        metadata: metadata of the call.
        seconds: deadline of the call.
        weights: whether it goes to the port for streams of weights.
        half_closed: whether the client half-closes the call after its messages; otherwise it is silent until the call
            ends.
        most_responses: after so many the call is cancelled; None to read all.
        cancelled_after: seconds after which it is cancelled; None if it is not.
    """

    method: str
    messages: tuple[bytes, ...]
    metadata: tuple[tuple[str, str | bytes], ...]
    seconds: float
    weights: bool
    half_closed: bool
    most_responses: int | None
    cancelled_after: float | None


class Messages:
    """A source of encoded messages: valid ones, with values that no client should send, damaged, nested too deep, and
    no messages at all.

    Args:
        choose: source of chance.
        examples: valid messages, by the full name of their type.
    """

    def __init__(self, choose: random.Random, examples: Mapping[str, Sequence[Message]]) -> None:
        self._random = choose
        self._examples = examples

    def encoded(self, kind: Descriptor) -> bytes:
        """A message of this type, or what is none."""
        choose = self._random
        way = choose.random()
        if way < 0.07:
            return choose.randbytes(choose.choice((0, 1, 3, 20, 200, 5000)))
        if way < 0.10:
            return self._nested(kind)
        if way < 0.105:
            return bytes(choose.choice(((2 << 20) - 4, 2 << 20, (2 << 20) + 1)))
        examples = self._examples.get(kind.full_name, ())
        if examples and way < 0.7:
            message = GetMessageClass(kind)()
            message.CopyFrom(choose.choice(examples))
            for _ in range(choose.choice((0, 0, 1, 1, 2, 5))):
                self.change(message)
        else:
            message = self._random_message(kind, 0)
        raw = message.SerializeToString()
        return self.damaged(raw) if choose.random() < 0.25 else raw

    def _nested(self, kind: Descriptor) -> bytes:
        """Fields nested far deeper than any message needs, or groups that are never closed."""
        field = self._random.choice(kind.fields).number if kind.fields else 1
        if self._random.random() < 0.3:
            return bytes([field << 3 & 0x7F | 3]) * 3000
        raw = b""
        for _ in range(self._random.choice((90, 110, 3000))):
            raw = write_varint(field << 3 | 2) + write_varint(len(raw)) + raw
        return raw

    def damaged(self, raw: bytes) -> bytes:
        """An encoded message with other bytes."""
        choose = self._random
        data = bytearray(raw)
        for _ in range(choose.choice((1, 1, 2, 10))):
            where = choose.randrange(len(data) + 1)
            match choose.randrange(6):
                case 0 if where < len(data):
                    data[where] ^= 1 << choose.randrange(8)
                case 1:
                    del data[where : where + choose.randrange(9)]
                case 2:
                    data[where:where] = choose.randbytes(choose.randrange(9))
                case 3:
                    data[where:where] = data[: choose.randrange(200)]
                case 4:
                    data[where : where + 1] = b"\xff" * choose.randrange(12)
                case _:
                    data[where:where] = write_varint(choose.choice(_NUMBERS))
        return bytes(data)

    def _random_message(self, kind: Descriptor, depth: int) -> Message:
        message = GetMessageClass(kind)()
        for each in kind.fields:
            if self._random.random() < 0.7:
                self._set(message, each, depth)
        return message

    def change(self, message: Message, depth: int = 0) -> None:
        """Give one field, somewhere in a message, another value."""
        fields = message.DESCRIPTOR.fields
        if not fields:
            return
        each = self._random.choice(fields)
        inner = each.message_type is not None and not each.is_repeated and message.HasField(each.name)
        if inner and self._random.random() < 0.8:
            self.change(getattr(message, each.name), depth + 1)
        elif self._random.random() < 0.15:
            message.ClearField(each.name)
        elif each.is_repeated and each.message_type and len(getattr(message, each.name)) and not _is_map(each):
            items = getattr(message, each.name)
            if self._random.random() < 0.3:
                items.add().CopyFrom(self._random.choice(items))
            else:
                self.change(self._random.choice(items), depth + 1)
        else:
            self._set(message, each, depth)

    def _set(self, message: Message, each: FieldDescriptor, depth: int) -> None:
        many = self._random.choice((0, 1, 1, 2, 3, 40))
        if _is_map(each):
            entry = each.message_type.fields_by_name
            for _ in range(min(many, 3)):
                key, value = self._scalar(entry["key"]), entry["value"]
                if value.message_type is None:
                    getattr(message, each.name)[key] = self._scalar(value)
                elif depth < _DEEPEST:
                    inner = self._random_message(value.message_type, depth + 1)
                    getattr(message, each.name)[key].CopyFrom(inner)
        elif each.message_type is not None:
            if depth >= _DEEPEST:
                return
            if each.is_repeated:
                for _ in range(min(many, 3)):
                    getattr(message, each.name).append(self._random_message(each.message_type, depth + 1))
            else:
                getattr(message, each.name).CopyFrom(self._random_message(each.message_type, depth + 1))
        elif each.is_repeated:
            getattr(message, each.name).extend(self._scalar(each) for _ in range(many))
        else:
            setattr(message, each.name, self._scalar(each))

    def _scalar(self, each: FieldDescriptor) -> Any:
        choose = self._random
        if each.cpp_type in _INTEGERS:
            least, most = _INTEGERS[each.cpp_type]
            number = choose.choice(_NUMBERS) * choose.choice((1, 1, 1, -1))
            return min(max(number, least), most)
        if each.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
            return choose.random() < 0.5
        if each.cpp_type in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
            return choose.choice((0.0, -1.0, float("inf"), float("nan")))
        if each.type == FieldDescriptor.TYPE_BYTES:
            return choose.choice(_BLOBS) if choose.random() < 0.7 else choose.randbytes(choose.randrange(300))
        return choose.choice(_TEXTS)


class Calls:
    """A seeded source of calls.

    Args:
        seed: the same seed gives the same calls.
        examples: valid requests, by the full name of their type.
        ticket: ticket for streams of weights.
    """

    def __init__(self, seed: int, examples: Mapping[str, Sequence[Message]], ticket: str) -> None:
        self._random = random.Random(seed)
        self._messages = Messages(self._random, examples)
        self._ticket = ticket
        self._methods = [method for service in SERVICES for method in service.methods]

    def __iter__(self) -> Iterator[FuzzedCall]:
        while True:
            yield self._call()

    def _call(self) -> FuzzedCall:
        choose = self._random
        method = choose.choice(self._methods)
        weights = choose.random() < (0.5 if method.name in _STREAMS_OF_WEIGHTS else 0.03)
        half_closed = choose.random() < 0.95
        waits = method.name in _WAITING or not half_closed
        seconds = choose.choice((0.001, 0.02, 0.05, 0.2) if waits else (0.001, 0.2, 20.0, 20.0, 20.0, 20.0))
        path = f"/{method.containing_service.full_name}/{method.name}"
        if choose.random() < 0.01:
            path = choose.choice(("/", "//", "/x", path + "x", path + "/", "/weighbridge.v1.None/Pull", "/é/é"))
        return FuzzedCall(
            method=path,
            messages=tuple(self._sent(method)),
            metadata=tuple(self._metadata(weights)),
            seconds=seconds,
            weights=weights,
            half_closed=half_closed,
            most_responses=choose.choice((0, 1, 2)) if choose.random() < 0.1 else None,
            cancelled_after=choose.random() * 0.02 if choose.random() < 0.1 else None,
        )

    def _metadata(self, weights: bool) -> Iterator[tuple[str, str | bytes]]:
        choose = self._random
        key = bulk_entry.TICKET
        if weights and choose.random() < 0.85:
            yield key, self._ticket
        elif choose.random() < 0.1:
            yield (
                key,
                choose.choice(("", "x", "=", "A" * 5000, self._ticket[:-1], self._ticket[::-1], "A" * 400 + "=")),
            )
        if choose.random() < 0.05:
            yield choose.choice(
                ((key + "-bin", choose.randbytes(40)), ("x-bin", b""), ("user-agent", "x"), ("x", "v" * 7000),
                 ("x", "v" * 20_000), ("traceparent", "00-" + "f" * 90), ("grpc-encoding-x", "gzip"), (key, "twice"))
            )  # fmt: skip

    def _sent(self, method: MethodDescriptor) -> Iterator[bytes]:
        choose = self._random
        kind = choose.random()
        if kind < 0.03:
            return
        first = self._messages.encoded(method.input_type)
        if kind < 0.25:  # in parts that are cut anywhere
            cuts = sorted(choose.randrange(len(first) + 1) for _ in range(choose.randrange(1, 5)))
            for start, end in zip([0, *cuts], [*cuts, len(first)], strict=True):
                yield first[start:end]
        elif kind < 0.35:  # in parts that are cut between fields
            with suppress(Exception):  # what is no message has no fields
                yield from request_parts.encoded_parts(
                    GetMessageClass(method.input_type).FromString(first), choose.randrange(16, 400)
                )
        else:
            yield first
            for _ in range(choose.choice((0, 0, 0, 0, 1, 2, 30))):
                yield self._messages.encoded(method.input_type)


def _is_map(each: FieldDescriptor) -> bool:
    return each.message_type is not None and each.message_type.GetOptions().map_entry


@dataclass
class Outcome:
    """Outcomes of calls. Thread-safe.

    Attributes:
        codes: number of calls that ended with each status, by name.
        failures: calls that ended with a status that none may end with, and that status with its details.
    """

    codes: Counter[str] = field(default_factory=Counter)
    failures: list[tuple[FuzzedCall, str]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, call: FuzzedCall, code: str, details: str) -> None:
        """Record the end of a call."""
        with self._lock:
            self.codes[code] += 1
            if code in ("INTERNAL", "UNKNOWN"):
                self.failures.append((call, f"{code}: {details}"))


def run(calls: Iterator[FuzzedCall], count: int, known: str, bulk: str, threads: int = 2) -> Outcome:
    """Make so many calls, some at a time, and return their outcomes.

    Args:
        calls: calls to make.
        count: number of calls.
        known: address of the port for all calls.
        bulk: address of the port for streams of weights.
        threads: number of calls at a time.
    """
    outcome = Outcome()
    source = islice(calls, count)
    lock = threading.Lock()

    def work() -> None:
        with grpc.insecure_channel(known) as all_calls, grpc.insecure_channel(bulk) as of_weights:
            while True:
                with lock:
                    call = next(source, None)
                if call is None:
                    return
                outcome.add(call, *_made(of_weights if call.weights else all_calls, call))

    workers = [threading.Thread(target=work, name="fuzz") for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return outcome


def _made(channel: grpc.Channel, call: FuzzedCall) -> tuple[str, str]:
    """The status of a call, and what it says."""
    ended = threading.Event()

    def requests() -> Iterator[bytes]:
        yield from call.messages
        if not call.half_closed:
            ended.wait()

    method: Callable[..., Any] = channel.stream_stream(call.method)
    responses = method(requests(), timeout=call.seconds, metadata=call.metadata)
    timer = threading.Timer(call.cancelled_after or 0.0, responses.cancel)
    timer.daemon = True
    if call.cancelled_after is not None:
        timer.start()
    try:
        for _ in islice(responses, call.most_responses):
            pass
        if call.most_responses is not None:
            responses.cancel()
        return responses.code().name, responses.details() or ""
    except grpc.RpcError as error:
        return error.code().name, error.details() or ""  # type: ignore[attr-defined]
    except grpc.FutureCancelledError:
        return "CANCELLED", ""
    finally:
        timer.cancel()
        ended.set()
