"""Channels to the service, deadlines, and errors of the service raised as they were there."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar, cast

import grpc
import xxhash
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from weighbridge._core.pauses import DICE
from weighbridge._core.striping import STRIPE_BYTES
from weighbridge._transport import proxies
from weighbridge._transport.addresses import SERVER_VARIABLE
from weighbridge._transport.backoff import Backoff, Retry
from weighbridge._transport.credentials import (
    CA_VARIABLE,
    CERTIFICATE_VARIABLE,
    KEY_VARIABLE,
    NONE,
    SYSTEM,
    Credentials,
    async_token,
    with_token,
)
from weighbridge._transport.pieces import Carried
from weighbridge.errors import (
    BY_REASON,
    DataLoss,
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    Unavailable,
    WeighbridgeError,
)
from weighbridge.v1 import checkpoint_service_pb2, replica_service_pb2, weight_service_pb2

MESSAGE_BYTES = STRIPE_BYTES
"""Payload of one message, and its maximum: with Python's protobuf, larger messages are slower."""
MAX_MESSAGE_BYTES = 64 << 20
"""Largest message that a client accepts: the plan of some 500,000 slices, or a model's files."""
WINDOW_BYTES = 4 << 20
"""Most bytes of one stream in flight that its receiver has not requested yet.

One stream moves at most this much in a round trip: 4 GB/s where one takes a millisecond, 0.2 GB/s where it takes 20."""
CALL_SECONDS = 60.0
"""Deadline of calls that carry no weights."""

ACCEPTED = "weighbridge-accepted"
"""Key of the initial metadata that a service sends when it has accepted a stream that may stay without messages for
long.
"""

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # by default gRPC widens the windows of busy streams to some 50 MB each, outside of every budget; within a data
    # centre that is no faster
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", WINDOW_BYTES),
    # a message of weights in one frame: assembled from frames of 16 KiB, a pull takes a tenth more processor time
    # (docs/benchmarks.md)
    ("grpc.http2.max_frame_size", 2 * MESSAGE_BYTES),
    # notice a peer that vanished without closing
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.max_pings_without_data", 0),
    # clients resume calls themselves; with gRPC's own retries, a call whose connection breaks while it ends may never
    # end (1.76)
    ("grpc.enable_retries", 0),
    # a service that is restarted is back within seconds
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # a connection attempt is given up after this time and repeated: gRPC's default of 20 s is as long as clients retry
    # at all
    ("grpc.min_reconnect_backoff_ms", 5_000),
)

_HTTP1 = ("http1.x server", "Failed parsing HTTP/2")
"""gRPC's messages about a port that answers in HTTP/1."""
_CONNECTING = re.compile(
    r"^failed to connect to all addresses; last error: \w+: (?:(?:ipv4|ipv6|unix):\S+ )?"
    r"(?:Failed to connect to remote host: )?(?:connect: )?"
)
"""gRPC's words before the reason why it cannot connect."""
_TLS = (("handshake failed",), ("failed to connect", "Socket closed"))
"""gRPC's messages where only one side uses TLS, or one does not trust the other."""
_TLS_SECONDS = 3.0
"""Seconds of retries after such an error: a proxy whose service is being started looks the same."""
_REFUSED_BY_PROXY = "HTTP proxy"
"""gRPC's message when a proxy refuses to connect."""
_PROXY_FORBIDS = re.compile(r"HTTP proxy returned response code 4\d\d")
_PROXY_SECONDS = 3.0
"""Seconds of retries when a proxy forbids the connection. Other answers, 502 or 503, pass once the service is back."""
_HEALTH = "/grpc.health.v1.Health/Check"

T = TypeVar("T")


P = TypeVar(
    "P",
    checkpoint_service_pb2.RestoreResponse,
    replica_service_pb2.ReadFileResponse,
    weight_service_pb2.PullResponse,
)


def open_channel(server: str, credentials: Credentials = NONE, *, shared: bool = True) -> grpc.Channel:
    """A channel to the service; connects when first used.

    Args:
        server: its address.
        credentials: credentials that verify the service and authenticate its calls.
        shared: whether it may share a connection with other channels to this address.

    Raises:
        InvalidArgument: the credentials cannot be read, or must not be sent there.
    """
    credentials.check_address(server)
    tls = credentials.tls()
    options = _options(server, credentials)
    if not shared:
        options = (*options, ("grpc.use_local_subchannel_pool", 1))
    if tls is None:
        channel = grpc.insecure_channel(server, options=options)
    else:
        channel = grpc.secure_channel(server, tls, options=options)
    return with_token(channel, credentials)


def open_async_channel(server: str, credentials: Credentials = NONE) -> grpc.aio.Channel:
    """A channel as by `open_channel`, for asyncio; belongs to the running event loop."""
    credentials.check_address(server)
    tls, interceptors = credentials.tls(), async_token(credentials)
    options = _options(server, credentials)
    if tls is None:
        return grpc.aio.insecure_channel(server, options=options, interceptors=interceptors)
    return grpc.aio.secure_channel(server, tls, options=options, interceptors=interceptors)


def _options(server: str, credentials: Credentials) -> tuple[tuple[str, int | str], ...]:
    return (*CHANNEL_OPTIONS, *proxies.channel_options(server, tls=credentials.ca is not None))


def in_parts(channel: Any, path: str) -> Callable[..., Any]:
    """A method that takes an encoded request in parts, and returns the encoded response; for a channel of either
    kind.
    """

    def call(parts: Sequence[bytes], **options: Any) -> Any:
        if len(parts) == 1:  # the same on the wire, and cheaper
            return channel.unary_unary(path, None, None)(parts[0], **options)
        return channel.stream_unary(path, None, None)(iter(parts), **options)

    return call


def streamed(
    channel: Any,
    path: str,
    request: Sequence[bytes],
    decode: Callable[[bytes], T],
    metadata: Sequence[tuple[str, str]],
) -> Iterable[T]:
    """A call of a method that takes an encoded request in parts, and answers with a stream."""
    if len(request) == 1:
        found = channel.unary_stream(path, None, decode)(request[0], metadata=metadata)
    else:
        found = channel.stream_stream(path, None, decode)(iter(request), metadata=metadata)
    return cast("Iterable[T]", found)


def is_accepted(metadata: Iterable[tuple[str, str | bytes]] | None) -> bool:
    """Whether a stream's initial metadata has the sign that the service has accepted it; that of a failed call is
    empty.
    """
    return any(key == ACCEPTED for key, _ in metadata or ())


@contextmanager
def translated_errors(server: str, credentials: Credentials = NONE) -> Iterator[None]:
    """Raise the service's errors as they were raised there, instead of ``grpc.RpcError``.

    Args:
        server: address that was called.
        credentials: credentials of its channel.
    """
    try:
        yield
    except grpc.RpcError as error:
        proxy = proxies.proxy_of(server, tls=credentials.ca is not None)
        raise _translate(error, server, proxy) from None  # it has all the information of the gRPC error


LASTING = "lasting"
"""Key of an error's metadata: a retry will not help."""


def _translate(error: Any, server: str, proxy: str) -> WeighbridgeError:
    status = rpc_status.from_call(error)
    if status is not None:
        info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
        for detail in status.details:
            detail.Unpack(retry)
        for detail in status.details:
            if detail.Unpack(info):
                kind = BY_REASON.get(info.reason, WeighbridgeError)
                details = [info.metadata[key] for key in sorted(info.metadata) if key.startswith("detail")]
                known = kind(status.message, fix=info.metadata.get("fix", ""), details=details)
                if isinstance(known, ResourceExhausted) and retry.HasField("retry_delay"):
                    known.retry_after = retry.retry_delay.ToTimedelta().total_seconds()
                if isinstance(known, DataLoss) and info.metadata.get(LASTING):
                    known.worth_retrying = 0.0
                return known
    code, text = error.code(), error.details() or ""
    if code is grpc.StatusCode.UNAVAILABLE and any(sign in text for sign in _HTTP1):
        return Unavailable(
            f"what answers at {server} speaks HTTP, not gRPC",
            fix="name the service's gRPC port, which is 50051 if --grpc has not set another; its first line names both",
            worth_retrying=0.0,
        )
    if code is grpc.StatusCode.UNAVAILABLE and _REFUSED_BY_PROXY in text:
        return _not_by_proxy(server, proxy, text)
    if code is grpc.StatusCode.UNAVAILABLE and any(all(s in text for s in signs) for signs in _TLS):
        return Unavailable(
            f"the service at {server} cannot be reached: the two sides do not agree on TLS: {text}",
            fix=f"if it speaks TLS, set {CA_VARIABLE} to the authority of its certificate, a file or "
            f"{SYSTEM}, and unset that if not; if it requires a client's certificate, name one "
            f"({CERTIFICATE_VARIABLE}, {KEY_VARIABLE})",
            worth_retrying=_TLS_SECONDS,
        )
    if code is grpc.StatusCode.UNAVAILABLE and proxy:
        return _not_by_proxy(server, proxy, text)
    if code is grpc.StatusCode.UNAVAILABLE:
        return Unavailable(
            f"the service at {server} cannot be reached: {_CONNECTING.sub('', text)}",
            fix=f"start it with `weighbridge serve`, or name another with --server or {SERVER_VARIABLE}",
        )
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return FailedPrecondition(
            f"the service at {server} does not know this call",
            fix="update the service to this client's version",
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


def _not_by_proxy(server: str, proxy: str, text: str) -> Unavailable:
    host = server.rpartition(":")[0]
    return Unavailable(
        f"the service at {server} cannot be reached through the proxy {proxy}: {_CONNECTING.sub('', text)}",
        fix=(
            f"let the proxy pass connections to {server}, or bypass it: add {host} to no_proxy, or "
            f"unset {proxies.PROXY_VARIABLE} if that names it"
        ),
        worth_retrying=_PROXY_SECONDS if _PROXY_FORBIDS.search(text) else math.inf,
    )


class Patience:
    """Pauses between retries in a thread that may sleep.

    Args:
        seconds: how long to retry without success.
    """

    def __init__(self, seconds: float) -> None:
        self._backoff = Backoff(seconds)

    def renew(self) -> None:
        """Note progress."""
        self._backoff = self._backoff.renewed()

    def wait(self) -> bool:
        """Sleep until the next retry; returns False, at once, if there should be none."""
        return self._sleep(self._backoff.after_failure(time.monotonic(), DICE.random()))

    def wait_after(self, error: WeighbridgeError) -> bool:
        """Sleep until the retry after an error of a stream; returns False, at once, if there should be none."""
        return self._sleep(self._backoff.after_error(error, time.monotonic(), DICE.random()))

    def _sleep(self, retry: Retry | None) -> bool:
        if retry is None:
            return False
        self._backoff = retry.backoff
        time.sleep(retry.pause)
        return True


def connect_within(channel: grpc.Channel, seconds: float) -> None:
    """Pause in which a channel may connect: it only does so while a thread polls it, and calls that fail at once poll
    too briefly.
    """
    until = time.monotonic() + seconds
    with suppress(grpc.RpcError, ValueError):  # the latter if the channel has been closed
        channel.unary_unary(_HEALTH, None, None)(b"", timeout=seconds, wait_for_ready=True)
    time.sleep(max(until - time.monotonic(), 0.0))


def checksum(data: bytes | memoryview) -> int:
    """The checksum of a piece: XXH3, 64 bits."""
    return xxhash.xxh3_64_intdigest(data)


def checked(piece: Carried[P], expected_offset: int) -> memoryview:
    """The data of a piece, after checking its offset and its checksum.

    Raises:
        DataLoss: one of them is wrong.
    """
    fields, data = piece.message, piece.data
    if fields.offset != expected_offset:
        raise DataLoss(f"a piece for byte {fields.offset} came where byte {expected_offset} was due")
    if checksum(data) != fields.checksum:
        raise DataLoss(f"the piece at byte {fields.offset} does not agree with its checksum")
    return data
