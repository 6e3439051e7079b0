"""Streams of weights over connections of their own, several for a large stream, each resumed where it broke.

Calls without weights use another connection (`rpc.open_channel`), so they never queue behind a megabyte.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import grpc

from weighbridge._core.pauses import DICE
from weighbridge._core.striping import MOST_CALLS, STRIPE_BYTES, WHOLE, Striping, calls_for
from weighbridge._tracing import spans
from weighbridge._transport import bulk_entry, rpc
from weighbridge._transport.addresses import Addresses
from weighbridge._transport.backoff import Backoff
from weighbridge._transport.credentials import NONE, Credentials
from weighbridge._transport.outages import Outage
from weighbridge._transport.pieces import Carried
from weighbridge._transport.processes import OwnProcess
from weighbridge.errors import DataLoss, DeadlineExceeded, InvalidArgument, Unavailable, WeighbridgeError
from weighbridge.v1 import checkpoint_service_pb2, weight_service_pb2

log = logging.getLogger(__name__)

_MOST_BROKEN = 3
_AHEAD = 4
"""Most messages of one call that wait to be put in order."""

P = TypeVar("P", checkpoint_service_pb2.RestoreResponse, weight_service_pb2.PullResponse)
OpenStream = Callable[["Way", Striping, int], Iterable[Carried[P]]]
"""Opens a part of a stream at a byte offset, over this connection."""
OnHeader = Callable[[checkpoint_service_pb2.StreamHeader], None]


@dataclass(frozen=True, slots=True)
class Way:
    """A connection for one stream.

    Attributes:
        server: the service's address for its other calls.
        channel: the connection.
        metadata: metadata of the call.
    """

    server: str
    channel: grpc.Channel
    metadata: bulk_entry.Metadata


class Connections:
    """Connections of one client to the service: some for weights only, and one for all other calls. Each is made when
    first used. Thread-safe.

    Args:
        addresses: the service's; connections go to the one in use.
        most: most connections for weights to one address; 1 to 16.
        credentials: credentials of all connections.

    Raises:
        InvalidArgument: ``most`` is out of range.
    """

    def __init__(self, addresses: Addresses, most: int, credentials: Credentials = NONE) -> None:
        if not 0 < most <= MOST_CALLS:
            raise InvalidArgument(f"connections={most} is out of range", fix=f"use 1 to {MOST_CALLS}")
        self.addresses = addresses
        self.most = most
        self.credentials = credentials
        self._process = OwnProcess()
        self._lock = threading.Lock()
        self._asking = threading.Lock()
        self._entry: bulk_entry.BulkEntry | None = None
        self._broken = 0  # streams, one after another
        self.closed = False
        self._channels: dict[tuple[str, int | None, tuple[int, ...]], grpc.Channel] = {}

    def control(self, server: str) -> grpc.Channel:
        """A channel for calls without weights, to one of the addresses.

        Clients of one process may share its connection.
        """
        return self._channel(server, None)

    def way(self, index: int) -> Way:
        """The connection with this number, from 0; each number has its own.

        Raises:
            WeighbridgeError: the service does not report its port for weights.
        """
        self._process.check()
        with self._asking:
            entry, server = self._entry, self.addresses.current
            if entry is None or entry.server != server or entry.until < time.monotonic():
                entry = self._ask(server)
                if self._broken >= _MOST_BROKEN and entry.address != server:
                    log.warning("streams to %s break: weights go over %s", entry.address, server)
                    entry = replace(entry, address=server, metadata=())
                self._entry = entry
        return Way(entry.server, self._channel(entry.address, index), entry.metadata)

    def _channel(self, address: str, index: int | None) -> grpc.Channel:
        """The connection with this number to an address; the one without a number is for calls without weights."""
        self._process.check()
        with self._lock:
            if self.closed:
                raise Unavailable("the client has been closed")
            key = address, index, self.credentials.stamp()
            channel = self._channels.get(key)
            if channel is None:
                channel = self._channels[key] = rpc.open_channel(address, self.credentials, shared=index is None)
            return channel

    def _ask(self, server: str) -> bulk_entry.BulkEntry:
        while True:
            try:
                return bulk_entry.ask(self.control(server), server, self.credentials)
            except (Unavailable, DeadlineExceeded) as error:
                if self.closed:
                    raise
                if not self.addresses.failed(server):
                    if isinstance(error, Unavailable):
                        raise
                    raise Unavailable(error.message, fix=error.fix) from None
                server = self.addresses.current

    def renew(self) -> None:
        """Note that a stream has broken: the client requests the port for weights again before the next one.

        If several break in a row, streams use the known port: behind a proxy, another server may answer at the port for
        weights.
        """
        self._broken += 1
        self._entry = None

    def proved(self) -> None:
        """Note that a stream has begun, or was received."""
        self._broken = 0

    def close(self) -> None:
        """Close all connections: calls in flight fail, and no further connection is made."""
        with self._lock:
            self.closed = True
            for channel in self._channels.values():
                channel.close()


class StreamReceiver:
    """A stream from the service, in order and verified; a part that breaks is resumed there.

    Iterate over it once, to get pieces of 1 MiB at most.

    Args:
        open_at: opens a part of the stream at a byte offset.
        connections: connections to use; a small stream uses one.
        nbytes: length of the stream in bytes, as far as known in advance.
        on_header: called with the header of each (re)opened part, before its first piece; for parts other than the
            first, from other threads, and only after the call for the first.
        retry_seconds: how long a part may make no progress before its error is raised.
    """

    def __init__(
        self,
        open_at: OpenStream[P],
        connections: Connections,
        *,
        nbytes: int,
        on_header: OnHeader,
        retry_seconds: float,
    ) -> None:
        count = calls_for(nbytes, connections.most)
        outage = Outage(str(connections.addresses))
        self._parts = [
            _ReceivedPart(open_at, connections, Striping(count, index), on_header, retry_seconds, outage)
            for index in range(count)
        ]

    def __iter__(self) -> Iterator[memoryview]:
        try:
            yield from self._pieces()
        except _Stopped:
            raise Unavailable("the stream was stopped: its client has been closed") from None
        finally:
            self.stop()

    def stop(self) -> None:
        """End all calls.

        May be called from any thread: the iterating one gets `Unavailable`, unless it is at the end.
        """
        for part in self._parts:
            part.stop()

    def _pieces(self) -> Iterator[memoryview]:
        parts = self._parts
        if len(parts) == 1:
            yield from parts[0].pieces()
            return
        parts[0].start()
        if parts[0].wait_begun():
            for part in parts[1:]:
                part.start()
        else:  # the service has too few slots for streams: everything comes over the first connection
            parts = parts[:1]
        position, index = 0, 0
        while (data := parts[index].take()) is not None:
            yield data
            position += len(data)
            index = position // STRIPE_BYTES % len(parts)


class _Stopped(Exception):
    """The consumer has stopped the stream."""


class _ReceivedPart:
    """Part of a stream that one of several calls receives, in a thread of its own, a few messages ahead of the
    consumer.
    """

    def __init__(
        self,
        open_at: OpenStream[P],
        connections: Connections,
        striping: Striping,
        on_header: OnHeader,
        retry_seconds: float,
        outage: Outage,
    ) -> None:
        self._open_at: Callable[[Way, Striping, int], Iterable[Carried[Any]]] = open_at
        self._connections = connections
        self._asked = self._striping = striping
        self._on_header = on_header
        self._retry_seconds = retry_seconds
        self._outage = outage
        self._changed = threading.Condition()
        self._received: deque[memoryview] = deque()
        self._error: BaseException | None = None
        self._begun = self._ended = self._stopped = False
        self._call: Any = None

    def pieces(self) -> Iterator[memoryview]:
        """The pieces of this part, in order and verified; the call is retried where it breaks.

        Raises:
            WeighbridgeError: there was no progress for too long, or the service refuses.
        """
        position, total = self._asked.after(0), -1
        backoff = Backoff(self._retry_seconds)
        while total < 0 or position < total:
            server = self._connections.addresses.current
            try:
                way = self._connections.way(self._asked.index)
                server = way.server
                with rpc.translated_errors(server, self._connections.credentials):
                    for piece in self._open(way, position):
                        if piece.message.HasField("header"):
                            total = self._begin(piece.message.header)
                        data = rpc.checked(piece, position)
                        position = self._striping.after(position + len(data))
                        if data:
                            backoff = backoff.renewed()
                            self._outage.over()
                        yield data
                if position < total or total < 0:
                    raise DataLoss(f"the stream ended after {position} of {total} bytes")
            except (
                WeighbridgeError,
                ValueError,
            ) as error:  # grpc raises ValueError for a closed channel
                if self._stopped:
                    raise _Stopped from None
                if self._connections.closed:
                    raise Unavailable("the client has been closed") from None
                if not isinstance(error, WeighbridgeError):
                    raise
                if isinstance(error, Unavailable):
                    self._connections.addresses.failed(server, error)
                retry = backoff.after_error(error, time.monotonic(), DICE.random())
                if retry is None:
                    raise
                backoff = retry.backoff
                self._outage.failed(error, backoff.left(time.monotonic()))
                self._connections.renew()
                self._wait(retry.pause)

    def _wait(self, seconds: float) -> None:
        with self._changed:
            if self._changed.wait_for(lambda: self._stopped, seconds):
                raise _Stopped

    def _open(self, way: Way, position: int) -> Iterable[Carried[Any]]:
        with self._changed:
            if self._stopped:
                raise _Stopped
            self._call = self._open_at(way, self._striping, position)
            return self._call  # type: ignore[no-any-return]

    def _begin(self, header: checkpoint_service_pb2.StreamHeader) -> int:
        if header.striped_over != self._asked.count:
            # once this part has begun, other calls bring the rest of the stream
            if self._asked.index or (self._begun and self._striping is self._asked):
                raise DataLoss(f"the service has not spread the stream over {self._asked.count} calls")
            self._striping = WHOLE
        self._connections.proved()
        self._on_header(header)
        with self._changed:
            self._begun = True
            self._changed.notify_all()
        return int(header.stream_bytes)

    def start(self) -> None:
        """Begin to receive."""
        threading.Thread(target=self._run, name="receive", daemon=True).start()

    def wait_begun(self) -> bool:
        """Wait until the stream has begun or cannot. Returns whether it is spread over calls as requested."""
        with self._changed:
            self._changed.wait_for(lambda: self._begun or self._ended)
            return self._begun and self._striping is self._asked

    def take(self) -> memoryview | None:
        """The next piece; None after the last one. Raises as `pieces`, once all earlier pieces are taken."""
        with self._changed:
            self._changed.wait_for(lambda: self._received or self._ended)
            if self._received:
                self._changed.notify_all()
                return self._received.popleft()
            if self._stopped:
                raise _Stopped
            if self._error is not None:
                raise self._error
            return None

    def stop(self) -> None:
        """Stop receiving, and drop the pieces that wait."""
        with self._changed:
            self._stopped = True
            self._received.clear()
            self._changed.notify_all()
            if self._call is not None:
                self._call.cancel()

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            for data in self.pieces():
                with self._changed:
                    self._changed.wait_for(lambda: self._stopped or len(self._received) < _AHEAD)
                    if self._stopped:
                        return
                    self._received.append(data)
                    self._changed.notify_all()
        except BaseException as raised:  # raised to the consumer by `take`
            error = raised
        finally:
            with self._changed:
                self._ended, self._error = True, error
                self._changed.notify_all()


def send(
    path: str,
    messages: Callable[[Striping], Iterator[bytes]],
    connections: Connections,
    nbytes: int,
    most: int,
) -> None:
    """Send a stream to a method that takes its pieces in any order. Returns when all parts were answered.

    Args:
        path: path of the method, whose response is ignored.
        messages: returns the serialised messages of a part of the stream; called for each part, and the iterators are
            read in several threads.
        connections: connections to use; a small stream uses one.
        nbytes: number of bytes to send.
        most: most connections to use.

    Raises:
        grpc.RpcError: a part broke; the others were cancelled.
        WeighbridgeError: the service does not report its port for weights.
        Exception: any error that ``messages`` raises.
    """
    count, headers = calls_for(nbytes, most), spans.headers()
    calls: list[Any] = []
    parts: list[_Messages] = []
    try:
        for index in range(count):
            way = connections.way(index)
            method = way.channel.stream_unary(path, request_serializer=None, response_deserializer=None)
            parts.append(_Messages(messages(Striping(count, index))))
            calls.append(method.future(parts[-1], metadata=(*way.metadata, *headers)))
        for call in calls:
            call.result()
        connections.proved()
    except grpc.RpcError:
        for part in parts:
            if part.failure is not None:
                raise part.failure from None
        connections.renew()
        raise
    finally:
        for call in calls:
            call.cancel()


class _Messages:
    """Messages of a part of a stream. Keeps the error that ended them: gRPC only reports that there was an exception.

    Attributes:
        failure: the error that was raised instead of the next message.
    """

    def __init__(self, messages: Iterator[bytes]) -> None:
        self._messages = messages
        self.failure: Exception | None = None

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        try:
            return next(self._messages)
        except StopIteration:
            raise
        except Exception as error:
            self.failure = error
            raise
