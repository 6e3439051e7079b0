"""Streams of weights over gRPC: limits on the number of concurrent streams, and on their bytes in memory.

Handlers control the flow. gRPC requests the next message from a handler when the transport has accepted the previous
one, so a stream whose client does not read holds at most one message in memory. A handler reads a message of a push
from the transport when it needs it; until then HTTP/2's flow control blocks the sender. So a handler reserves capacity
for a message before it builds or requests the message, and releases the capacity when it continues with the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from functools import partial
from typing import TypeVar

from weighbridge._core.striping import WHOLE, Striping
from weighbridge._transport import pieces, rpc, wire
from weighbridge.errors import InvalidArgument
from weighbridge.v1 import checkpoint_service_pb2, weight_service_pb2
from weighbridge_service.admission.byte_budget import ByteBudget, Direction, Reservation
from weighbridge_service.admission.identity_quotas import IdentityQuotas, Streaming
from weighbridge_service.admission.quotas import HostQuota
from weighbridge_service.api.grpc.call import Call
from weighbridge_service.pull.reading import Reading
from weighbridge_storage.threads import ThreadPool

R = TypeVar("R", checkpoint_service_pb2.RestoreResponse, weight_service_pb2.PullResponse)

_NOTHING = rpc.checksum(b"")


class BulkStreams:
    """Admission of streams of weights. Thread-safe.

    Args:
        budget: budget of bytes in flight.
        most: maximum number of concurrent streams of clients, and also of concurrent streams to other replicas. Each
            stream occupies a thread.
        wait: seconds that a call without a deadline waits for capacity.
        planners: threads that plan streams. A small pool, because hundreds of concurrent plans would starve all other
            Python threads.
        quotas: quotas of identities, in streams and in bytes per second.
    """

    def __init__(
        self, budget: ByteBudget, most: int, wait: float, planners: ThreadPool, quotas: IdentityQuotas
    ) -> None:
        self._budget = budget
        own, replicas = HostQuota("streams of weights", most), HostQuota("streams to replicas", most)
        self._places = {Direction.IN: own, Direction.OUT: own, Direction.REPLICAS: replicas}
        self._wait = wait
        self._planners = planners
        self._quotas = quotas

    @contextmanager
    def admit(
        self, direction: Direction, call: Call, asked: Striping = WHOLE, *, begins: bool = False
    ) -> Iterator[Share]:
        """Admit a stream, and reserve its share of the budget while the block runs.

        Args:
            direction: direction of the stream.
            call: the call.
            asked: the part of the stream that the client requests; `Share.striping` is the part that the call actually
                carries.
            begins: whether the call is at the beginning of the stream, so that it may carry the whole stream instead of
                a part.

        Raises:
            ResourceExhausted: there are too many streams. The error states when to retry.
        """
        with (
            self._quotas.streaming(call.peer.identity, asked, whole=begins) as streaming,
            self._places[direction].taking(call.peer.host),
        ):
            reservation = Reservation(
                self._budget, direction, call.peer, lambda: call.patience(self._wait), call.cancel
            )
            call.add_callback(reservation.abandon)
            call.add_callback(streaming.end)
            try:
                yield Share(streaming, reservation)
            finally:
                reservation.give()

    def send(
        self,
        call: Call,
        request: checkpoint_service_pb2.RestoreRequest | weight_service_pb2.PullRequest,
        plan: Callable[[Striping], Reading],
        response: type[R],
        count: Callable[[int], None],
    ) -> Iterator[R | bytes]:
        """Plan a stream to a client and yield its messages.

        Args:
            call: the call.
            request: request with the requested part of the stream.
            plan: plans the reading of a part of the stream.
            response: type of the messages.
            count: called with the number of weight bytes of each message.

        Raises:
            ResourceExhausted: there are too many streams, or the budget has no capacity for the next message.
            Exception: any error of ``plan``.
        """
        asked = wire.striping_from_proto(request)
        with self.admit(Direction.OUT, call, asked, begins=not request.offset) as share:
            reading = call.wait(self._planners.submit(partial(plan, share.striping), call.peer))
            header = checkpoint_service_pb2.StreamHeader(
                version=wire.version_to_proto(reading.version),
                stream_bytes=reading.layout.nbytes,
                striped_over=reading.striping.count,
            )
            with closing(reading):
                yield response(header=header, offset=reading.offset, checksum=_NOTHING)
                for piece in reading.pieces(share.take):
                    count(len(piece.data))
                    message = pieces.encode(response(offset=piece.offset, checksum=piece.checksum), piece.data)
                    del piece  # releases the gathered bytes before gRPC has taken the message
                    with share.with_client():
                        yield message
                    del message


class Share:
    """A stream's rate limit and its share of the budget.

    A stream holds none of the budget while it waits for its rate limit.

    Args:
        streaming: rate limit of the stream's identity.
        reservation: reservation in the budget.

    Attributes:
        striping: the part of the stream that the call carries.
    """

    def __init__(self, streaming: Streaming, reservation: Reservation) -> None:
        self.striping = streaming.striping
        self._streaming = streaming
        self._reservation = reservation

    def take(self, nbytes: int) -> None:
        """Wait until a message with ``nbytes`` bytes of weights may be sent.

        Raises the same errors as `Reservation.take`.
        """
        self._reservation.give()
        self._streaming.wait(nbytes)
        self._reservation.take(nbytes)

    def take_any(self) -> None:
        """Like `take`, for an incoming message of unknown length. Call `came` with its length afterwards."""
        self._reservation.give()
        self._streaming.wait()
        self._reservation.take()

    def came(self, nbytes: int) -> None:
        """Count a received message with ``nbytes`` bytes of weights."""
        self._streaming.count(nbytes)

    def with_client(self) -> AbstractContextManager[None]:
        """See `Reservation.with_client`."""
        return self._reservation.with_client()


def received(
    messages: Iterator[pieces.Carried[checkpoint_service_pb2.PushRequest]], share: Share
) -> Iterator[tuple[int, memoryview, int]]:
    """Yield the pieces of a stream from a client, each with its offset, data and checksum.

    Args:
        messages: messages of the call after the first one.
        share: the stream's share.

    Raises:
        InvalidArgument: a message is too large.
        ResourceExhausted: the budget has no capacity for the next message.
    """
    while True:
        share.take_any()
        with share.with_client():
            message = next(messages, None)
        if message is None:
            return
        if len(message.data) > rpc.MESSAGE_BYTES:
            raise InvalidArgument(
                f"a message of {len(message.data)} bytes exceeds the limit of {rpc.MESSAGE_BYTES}",
                fix="split the stream into smaller messages",
            )
        share.came(len(message.data))
        yield message.message.offset, message.data, message.message.checksum
        del message
