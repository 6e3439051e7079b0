"""Streams of weights through the gRPC face: how many at one time, and how many bytes of them in memory.

Flow control is that of the handlers. A handler that yields messages is asked for the next one
when the transport has taken the one before; of a stream that is not read, one message at most is in memory. A message of a stream
that is pushed is fetched from the transport when the handler asks for it; until then the sender is held back by HTTP/2's window.
So room for a message is taken before it is made or asked for, and given back when the handler comes to the next one.
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
    """Who may stream weights. Thread-safe.

    Args:
        budget: what they may have in flight.
        most: how many there may be at one time, and how many from other replicas; each keeps a thread.
        wait: seconds that a call without a deadline waits for room.
        planners: threads that plan streams: hundreds that plan at one time would keep the interpreter from everybody else.
        quotas: of identities, in streams and in bytes a second.
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
        """A place for a call, and its share of the budget.

        Args:
            direction: which way its stream goes.
            call: the call.
            asked: which part of a stream it is to bring; `Share.striping` says which it is to bring indeed.
            begins: whether the stream begins with it, so that it may bring all of it.

        Raises:
            ResourceExhausted: no place is left; says when to try again.
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
        """The messages of a stream to a client, planned in its turn.

        Args:
            call: the call.
            request: says which part of the stream is wanted.
            plan: gives what is read for a part of it.
            response: type of the messages.
            count: is called with the bytes of weights of each message.

        Raises:
            ResourceExhausted: there is no place for the stream, or no room for the next message.
            Exception: as ``plan`` raises it.
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
                    message = pieces.encode(
                        response(offset=piece.offset, checksum=piece.checksum), piece.data
                    )
                    del piece  # what was gathered need not wait with it until gRPC has taken the message
                    with share.with_client():
                        yield message
                    del message


class Share:
    """What a stream has: its pace, and its part of the budget, of which it takes nothing while it is slowed.

    Args:
        streaming: of its identity.
        reservation: of the budget.

    Attributes:
        striping: the part of a stream that it brings.
    """

    def __init__(self, streaming: Streaming, reservation: Reservation) -> None:
        self.striping = streaming.striping
        self._streaming = streaming
        self._reservation = reservation

    def take(self, nbytes: int) -> None:
        """Wait until a message with so many bytes of weights may go. Raises as `Reservation.take`."""
        self._reservation.give()
        self._streaming.wait(nbytes)
        self._reservation.take(nbytes)

    def take_any(self) -> None:
        """As `take`, for a message whose length is not known before it comes, which `came` is told."""
        self._reservation.give()
        self._streaming.wait()
        self._reservation.take()

    def came(self, nbytes: int) -> None:
        """A message has come with so many bytes of weights."""
        self._streaming.count(nbytes)

    def with_client(self) -> AbstractContextManager[None]:
        """As `Reservation.with_client`."""
        return self._reservation.with_client()


def received(
    messages: Iterator[pieces.Carried[checkpoint_service_pb2.PushRequest]], share: Share
) -> Iterator[tuple[int, memoryview, int]]:
    """The pieces of a stream from a client: offset, data and checksum of each.

    Args:
        messages: those of the call behind the first one.
        share: what it has.

    Raises:
        InvalidArgument: a message is too large.
        ResourceExhausted: there is no room for the next message.
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
                fix="cut the stream into smaller messages",
            )
        share.came(len(message.data))
        yield message.message.offset, message.data, message.message.checksum
        del message
