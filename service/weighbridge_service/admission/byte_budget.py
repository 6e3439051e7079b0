"""Budget of bytes in flight through the service, and the order in which streams get capacity from it.

Outgoing bytes are in flight from when they are read out of an image or the store until they are sent; incoming bytes
from when they are received until they are stored. A stream reserves capacity before it brings a message into memory,
and releases it once the message has left. Without capacity it waits. Room is granted round-robin: within a direction
from host to host, on a host from connection to connection, and on a connection from stream to stream. Each direction,
host and connection has a maximum share, so stalled streams occupy only their own share. While streams wait, a stream
whose client has neither read nor sent anything for some seconds is ended; its client can resume it. Reads between
replicas have a share of their own and wait for no other direction, because a pull may depend on another replica's read.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum

from weighbridge._transport import rpc
from weighbridge.errors import InvalidArgument, ResourceExhausted, Unavailable
from weighbridge_service.access.peer import Peer
from weighbridge_service.admission.quotas import RETRY_SECONDS, Shares
from weighbridge_service.admission.turns import Turns

MESSAGE_ROOM = 2 * rpc.MESSAGE_BYTES
"""Maximum capacity of a message, which is held once by the service and once by gRPC."""
LEAST_BYTES = 32 << 20
"""Smallest capacity that a service can work with."""
_STUCK_SECONDS = 2.0
"""Seconds that a client may leave a message unread, or unsent, while other streams wait for capacity."""
_LOOK_SECONDS = 0.5
"""Interval at which a waiting stream looks for stalled streams."""


class Direction(StrEnum):
    """Direction of a transfer of weights, seen from this service."""

    IN = "in"
    OUT = "out"
    REPLICAS = "replicas"
    """Read by another replica from an image of this one."""


@dataclass(frozen=True, slots=True)
class InFlight:
    """Usage of a budget.

    Attributes:
        nbytes: bytes in flight, by direction.
        waiting: streams that wait for capacity, by direction.
    """

    nbytes: dict[Direction, int]
    waiting: dict[Direction, int]


@dataclass(eq=False, slots=True)
class _Side:
    """One direction: the capacity that its hosts and connections hold, and its waiting streams."""

    hosts: Shares[str]
    peers: Shares[Peer]
    waiting: Turns[Reservation] = field(default_factory=Turns)

    def add(self, peer: Peer, nbytes: int) -> None:
        self.hosts.add(peer.host, nbytes)
        self.peers.add(peer, nbytes)


class ByteBudget:
    """Budget of bytes in flight. Thread-safe.

    Args:
        capacity: capacity in bytes; at least 32 MiB.

    Raises:
        InvalidArgument: the capacity is too small.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < LEAST_BYTES:
            raise InvalidArgument(
                f"a budget of {capacity} bytes in flight is too small", fix=f"allow {LEAST_BYTES} or more"
            )
        self.capacity = capacity
        self._most_of_peer = capacity // 4
        self._changed = threading.Condition()
        self._nbytes = 0
        self._holding: dict[Reservation, None] = {}  # in the order in which they got their capacity
        # the side that was served last is moved to the end
        most_of_side = capacity // 8 * 3  # two sides at their maximum leave a quarter for the third one
        self._sides = OrderedDict(
            (direction, _Side(Shares(most_of_side), Shares(most_of_side))) for direction in Direction
        )

    @property
    def in_flight(self) -> InFlight:
        """Current usage of the budget."""
        with self._changed:
            return InFlight(
                {direction: self._sides[direction].hosts.held for direction in Direction},
                {direction: len(self._sides[direction].waiting) for direction in Direction},
            )

    def take(self, reservation: Reservation) -> None:
        """Wait for the capacity that a stream asks for; see `Reservation.take`."""
        side = self._sides[reservation.direction]
        with self._changed:
            side.waiting.add(reservation.peer, reservation)
            self._grant()
            if not reservation.granted:
                self._wait(side, reservation)
            self._holding[reservation] = None

    def _wait(self, side: _Side, reservation: Reservation) -> None:
        deadline = time.monotonic() + reservation.patience()
        while not reservation.granted:
            now = time.monotonic()
            if reservation.gone or now >= deadline:
                side.waiting.discard(reservation.peer, reservation)
                self._grant()  # a smaller one behind it may fit
                if reservation.gone:
                    raise Unavailable("the caller has gone")
                raise ResourceExhausted(
                    (
                        f"the service has {self._nbytes} of {self.capacity} bytes of weights in "
                        "flight, and no room for more"
                    ),
                    fix="try again later; if that goes on, serve with a larger --byte-budget, or more replicas",
                    retry_after=RETRY_SECONDS,
                )
            stuck = self._stuck(side, now)
            if stuck:
                self._changed.release()  # ending a stream may release its capacity, which takes this lock
                try:
                    for each in stuck:
                        each.end()
                finally:
                    self._changed.acquire()
            else:
                self._changed.wait(min(deadline - now, _LOOK_SECONDS))

    def _stuck(self, side: _Side, now: float) -> list[Reservation]:
        """Stalled streams that hold capacity in a direction: at most as many as wait there.

        Each stall is reported once.
        """
        found: list[Reservation] = []
        for reservation in self._holding:
            if len(found) == len(side.waiting):
                break
            since = reservation.with_client_since
            if self._sides[reservation.direction] is side and since and now - since > _STUCK_SECONDS:
                reservation.with_client_since = 0.0
                found.append(reservation)
        return found

    def give(self, reservation: Reservation) -> None:
        """Release the capacity of a stream; see `Reservation.give`."""
        with self._changed:
            self._holding.pop(reservation, None)
            self._add(self._sides[reservation.direction], reservation.peer, -reservation.nbytes)
            self._grant()

    def look(self) -> None:
        """Wake waiting streams to check their state again."""
        with self._changed:
            self._changed.notify_all()

    def _add(self, side: _Side, peer: Peer, nbytes: int) -> None:
        self._nbytes += nbytes
        side.add(peer, nbytes)

    def _grant(self) -> None:
        """Grant capacity to waiting streams in turn until no more fits."""
        granted = False
        while (found := self._next()) is not None:
            side, reservation = found
            reservation.granted = granted = True
            side.waiting.take_of(reservation.peer)
            self._add(side, reservation.peer, reservation.nbytes)
            self._sides.move_to_end(reservation.direction)
        if granted:
            self._changed.notify_all()

    def _next(self) -> tuple[_Side, Reservation] | None:
        """The next stream to get capacity, with its side; None if none waits or the next one does not fit."""
        for side in self._sides.values():
            for peer, waiter in side.waiting:
                if side.peers.of.get(peer, 0) + waiter.nbytes > self._most_of_peer:
                    continue
                if self._nbytes + waiter.nbytes > self.capacity:
                    return None  # small requests must not overtake, or they would starve large ones
                if side.hosts.held + waiter.nbytes > side.hosts.total:
                    break
                if side.hosts.has_room(peer.host, waiter.nbytes):
                    return side, waiter
        return None


@dataclass(eq=False, slots=True)
class Reservation:
    """Capacity of one stream in a budget. Not thread-safe, except for `abandon`.

    Attributes:
        budget: the budget.
        direction: direction of the stream.
        peer: peer of the stream's connection.
        patience: returns the number of seconds that the stream can still wait for capacity.
        end: ends the stream, from any thread, if its client stalls while other streams wait.
        gone: whether the caller has disconnected.
        with_client_since: start of the current wait for the client to read or send a message, in seconds of the
            monotonic clock; 0 while the service itself is working.
        nbytes: bytes of capacity that the stream has, or waits for.
        granted: whether the capacity was granted.
    """

    budget: ByteBudget
    direction: Direction
    peer: Peer
    patience: Callable[[], float]
    end: Callable[[], object] = lambda: None
    gone: bool = False
    with_client_since: float = 0.0
    nbytes: int = 0
    granted: bool = False

    def take(self, data_bytes: int = rpc.MESSAGE_BYTES) -> None:
        """Release the capacity of the previous message, then wait for capacity for a message with `data_bytes` bytes of
        weights.

        Raises:
            ResourceExhausted: there was no capacity for as long as the stream can wait. The error states when to retry.
            Unavailable: the caller has disconnected.
        """
        self.give()
        self.nbytes = MESSAGE_ROOM // rpc.MESSAGE_BYTES * data_bytes
        self.budget.take(self)

    @contextmanager
    def with_client(self) -> Iterator[None]:
        """Mark the block as a wait for the client to read a message, or to send one."""
        self.with_client_since = time.monotonic()
        try:
            yield
        finally:
            self.with_client_since = 0.0

    def give(self) -> None:
        """Release the capacity, once the message is not in memory any more or the stream has ended."""
        if self.granted:
            self.granted = False
            self.budget.give(self)

    def abandon(self) -> None:
        """Stop a wait for capacity, because the caller has disconnected. May be called from any thread."""
        self.gone = True
        self.budget.look()
