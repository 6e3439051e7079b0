"""Budget of bytes in flight through the service: how many there may be at one time, and whose turn it is to have more.

In flight is what has been taken out of an image or the store and not yet left, and what has come and is not yet in its place.
Streams ask for room before they bring a message into memory, and give it back when it has gone. Who finds none waits. Room goes
round: in each direction from host to host, on a host from connection to connection, and on a connection from stream to stream. No
direction, no host and no connection can take what the others need, so streams that do not get on hold their own share and leave the others
theirs; and where somebody waits, a stream whose client has neither read nor sent anything for seconds is ended, and can be resumed. Above
all, what replicas read from each other has a share of its own, and waits for nothing else: a pull may have to wait until another replica
has sent something.
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
"""What a message takes at most: it lies in our memory once and in gRPC's once."""
LEAST_BYTES = 32 << 20
"""No service gets on with less."""
_STUCK_SECONDS = 2.0
"""How long a client may leave a message unread, or unsent, while others wait for its room."""
_LOOK_SECONDS = 0.5
"""How often those that wait look for streams that do not get on."""


class Direction(StrEnum):
    """Which way weights go."""

    IN = "in"
    OUT = "out"
    REPLICAS = "replicas"
    """Read by another replica from an image of this one."""


@dataclass(frozen=True, slots=True)
class InFlight:
    """How a budget is used.

    Attributes:
        nbytes: bytes in flight, by direction.
        waiting: streams that wait for room, by direction.
    """

    nbytes: dict[Direction, int]
    waiting: dict[Direction, int]


@dataclass(eq=False, slots=True)
class _Side:
    """One direction: what its hosts and connections hold, and who waits."""

    hosts: Shares[str]
    peers: Shares[Peer]
    waiting: Turns[Reservation] = field(default_factory=Turns)

    def add(self, peer: Peer, nbytes: int) -> None:
        self.hosts.add(peer.host, nbytes)
        self.peers.add(peer, nbytes)


class ByteBudget:
    """The bytes that may be in flight. Thread-safe.

    Args:
        capacity: in bytes; at least 32 MiB.

    Raises:
        InvalidArgument: that is too little.
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
        self._holding: dict[Reservation, None] = {}  # the one that has held its room for longest stands first
        # the side that was served last stands last
        most_of_side = capacity // 8 * 3  # of three: a quarter is left when two have all they may
        self._sides = OrderedDict(
            (direction, _Side(Shares(most_of_side), Shares(most_of_side))) for direction in Direction
        )

    @property
    def in_flight(self) -> InFlight:
        """How the budget is used now."""
        with self._changed:
            return InFlight(
                {direction: self._sides[direction].hosts.held for direction in Direction},
                {direction: len(self._sides[direction].waiting) for direction in Direction},
            )

    def take(self, reservation: Reservation) -> None:
        """Wait for the room that a stream wants; see `Reservation.take`."""
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
                    f"the service has {self._nbytes} of {self.capacity} bytes of weights in flight, and no room for more",
                    fix="try again later; if that goes on, serve with a larger --byte-budget, or more replicas",
                    retry_after=RETRY_SECONDS,
                )
            stuck = self._stuck(side, now)
            if stuck:
                self._changed.release()  # what ends a stream may want to give its room back
                try:
                    for each in stuck:
                        each.end()
                finally:
                    self._changed.acquire()
            else:
                self._changed.wait(min(deadline - now, _LOOK_SECONDS))

    def _stuck(self, side: _Side, now: float) -> list[Reservation]:
        """Streams that hold room in a direction and whose clients do not get on: no more than wait there, and each once."""
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
        """A stream needs its room no more; see `Reservation.give`."""
        with self._changed:
            self._holding.pop(reservation, None)
            self._add(self._sides[reservation.direction], reservation.peer, -reservation.nbytes)
            self._grant()

    def look(self) -> None:
        """Something is different for those that wait."""
        with self._changed:
            self._changed.notify_all()

    def _add(self, side: _Side, peer: Peer, nbytes: int) -> None:
        self._nbytes += nbytes
        side.add(peer, nbytes)

    def _grant(self) -> None:
        """Give room to those whose turn it is, as long as there is some."""
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
        """Who comes next; None if nobody waits or there is no room for whoever comes next."""
        for side in self._sides.values():
            for peer, waiter in side.waiting:
                if side.peers.of.get(peer, 0) + waiter.nbytes > self._most_of_peer:
                    continue
                if self._nbytes + waiter.nbytes > self.capacity:
                    return None  # what is small does not overtake what is large
                if side.hosts.held + waiter.nbytes > side.hosts.total:
                    break
                if side.hosts.has_room(peer.host, waiter.nbytes):
                    return side, waiter
        return None


@dataclass(eq=False, slots=True)
class Reservation:
    """What one stream holds of a budget. For one thread, but for `abandon`.

    Attributes:
        budget: of which it is.
        direction: which way the stream goes.
        peer: the connection that it comes over.
        patience: for how many seconds it can wait for room now.
        end: ends the stream, from any thread, if its client does not get on while others wait.
        gone: whether the caller has gone.
        with_client_since: when the client was given a message to read, or began to be waited for, in seconds of the monotonic clock; 0 while
            the service itself is at work.
        nbytes: the room that it has, or waits for.
        granted: whether it has that.
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
        """Wait until there is room for a message with so many bytes of weights. The message before is given back first.

        Raises:
            ResourceExhausted: there was none for as long as the stream can wait; says when to try again.
            Unavailable: the caller has gone.
        """
        self.give()
        self.nbytes = MESSAGE_ROOM // rpc.MESSAGE_BYTES * data_bytes
        self.budget.take(self)

    @contextmanager
    def with_client(self) -> Iterator[None]:
        """In the block the client is waited for: to read a message, or to send one."""
        self.with_client_since = time.monotonic()
        try:
            yield
        finally:
            self.with_client_since = 0.0

    def give(self) -> None:
        """The message is not in memory any more, or nothing more comes."""
        if self.granted:
            self.granted = False
            self.budget.give(self)

    def abandon(self) -> None:
        """The caller has gone: it need not be waited for room."""
        self.gone = True
        self.budget.look()
