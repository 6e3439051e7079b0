"""How clients talk to the service: channels, deadlines, retries, and errors as they were raised on the other side."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import grpc
import xxhash
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from weighbridge.errors import (
    BY_REASON,
    DataLoss,
    DeadlineExceeded,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    Unavailable,
    WeighbridgeError,
)
from weighbridge.pieces import Carried
from weighbridge.v1 import checkpoint_service_pb2, weight_service_pb2

DEFAULT_SERVER = "127.0.0.1:50051"
SERVER_VARIABLE = "WEIGHBRIDGE_SERVER"
MESSAGE_BYTES = 1 << 20
"""Payload of one message: with Python's protobuf, larger messages are slower."""
MAX_MESSAGE_BYTES = 64 << 20
"""Largest message either side accepts: a layout of some 500,000 shards, or a model's tokenizer."""
CALL_SECONDS = 60.0
"""Deadline of calls that carry no weights."""

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # notice a peer that vanished without closing
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.max_pings_without_data", 0),
    # a service that is restarted is back within seconds
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
)

T = TypeVar("T")


P = TypeVar("P", checkpoint_service_pb2.RestoreResponse, weight_service_pb2.PullResponse)


def server_address(server: str | None) -> str:
    """The service's address: as given, from ``WEIGHBRIDGE_SERVER``, or the default."""
    return server or os.environ.get(SERVER_VARIABLE) or DEFAULT_SERVER


def open_channel(server: str) -> grpc.Channel:
    """A channel to the service; connects when first used."""
    return grpc.insecure_channel(server, options=CHANNEL_OPTIONS)


@contextmanager
def translated_errors(server: str) -> Iterator[None]:
    """Raise the service's errors as it raised them, instead of ``grpc.RpcError``."""
    try:
        yield
    except grpc.RpcError as error:
        raise _translate(error, server) from error


def _translate(error: Any, server: str) -> WeighbridgeError:
    status = rpc_status.from_call(error)
    if status is not None:
        info = error_details_pb2.ErrorInfo()
        for detail in status.details:
            if detail.Unpack(info):
                kind = BY_REASON.get(info.reason, WeighbridgeError)
                details = [info.metadata[key] for key in sorted(info.metadata) if key.startswith("detail")]
                return kind(status.message, fix=info.metadata.get("fix", ""), details=details)
    code, text = error.code(), error.details() or ""
    if code is grpc.StatusCode.UNAVAILABLE:
        return Unavailable(
            f"the service at {server} cannot be reached: {text}",
            fix=f"start it with `weighbridge serve`, or name another with --server or {SERVER_VARIABLE}",
        )
    by_code: dict[grpc.StatusCode, type[WeighbridgeError]] = {
        grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
        grpc.StatusCode.RESOURCE_EXHAUSTED: ResourceExhausted,
        grpc.StatusCode.INVALID_ARGUMENT: InvalidArgument,
        grpc.StatusCode.NOT_FOUND: NotFound,
        grpc.StatusCode.CANCELLED: Unavailable,
    }
    kind = by_code.get(code, WeighbridgeError)
    return kind(f"the service at {server} answered {code.name}: {text}")


class Patience:
    """Growing pauses between tries, until nothing has come of them for too long.

    Args:
        seconds: how long to go on without success.
        longest: longest pause, in seconds.
    """

    def __init__(self, seconds: float, longest: float = 3.0) -> None:
        self._seconds = seconds
        self._longest = longest
        self._tries = 0
        self._failing_since = 0.0

    def renew(self) -> None:
        """A try has got on."""
        self._tries = 0

    def wait(self) -> bool:
        """Pause before the next try; False, at once, if there should be none."""
        now = time.monotonic()
        if self._tries == 0:
            self._failing_since = now
        pause = min(0.1 * 2 ** min(self._tries, 5), self._longest) * random.uniform(0.5, 1.0)
        if now + pause > self._failing_since + self._seconds:
            return False
        self._tries += 1
        time.sleep(pause)
        return True


def retried(call: Callable[[], T], *, seconds: float) -> T:
    """Repeat a call that is safe to repeat while the service cannot be reached, with growing pauses.

    Raises:
        WeighbridgeError: whatever the last try raised.
    """
    patience = Patience(seconds)
    while True:
        try:
            return call()
        except Unavailable:
            if not patience.wait():
                raise


def checksum(data: bytes | memoryview) -> int:
    """The checksum that travels with every piece: XXH3, 64 bits."""
    return xxhash.xxh3_64_intdigest(data)


def checked(piece: Carried[P], expected_offset: int) -> memoryview:
    """The data of a piece, after checking that it is the one expected and arrived whole.

    Raises:
        DataLoss: it did not.
    """
    fields, data = piece.message, piece.data
    if fields.offset != expected_offset:
        raise DataLoss(f"a piece for byte {fields.offset} came where byte {expected_offset} was due")
    if checksum(data) != fields.checksum:
        raise DataLoss(f"the piece at byte {fields.offset} does not agree with its checksum")
    return data


def resumed_stream(
    open_at: Callable[[int], Iterable[Carried[P]]],
    server: str,
    *,
    on_header: Callable[[checkpoint_service_pb2.StreamHeader], None],
    retry_seconds: float,
) -> Iterator[memoryview]:
    """The pieces of a stream from the service, in order and checked; opened again where it broke.

    Args:
        open_at: opens the stream at a byte offset.
        server: for messages.
        on_header: is called with the header of each (re)opened stream, before its first piece.
        retry_seconds: how long a stream may make no progress before its error is raised.
    """
    position = 0
    total = -1
    patience = Patience(retry_seconds)
    while total < 0 or position < total:
        try:
            with translated_errors(server):
                for piece in open_at(position):
                    if piece.message.HasField("header"):
                        total = piece.message.header.stream_bytes
                        on_header(piece.message.header)
                    data = checked(piece, position)
                    position += len(data)
                    if data:
                        patience.renew()
                    yield data
            if position < total or total < 0:
                raise DataLoss(f"the stream ended after {position} of {total} bytes")
        except (Unavailable, DataLoss):
            if not patience.wait():
                raise
