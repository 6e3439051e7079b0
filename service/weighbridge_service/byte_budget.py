"""How many bytes of weights may be in flight through the service at one time, and whose turn is it to have more?

In flight is what has been taken out of an image or the store and not yet left, and what has come and is not yet in its place.
Streams ask for room before they bring a message into memory, and give it back when it has gone. Who finds none waits. Room goes
round: in each direction from connection to connection, and on a connection from stream to stream. No direction and no connection can
take what the others need, so streams that do not get on hold their own share and leave the others theirs. Above all, what replicas
read from each other has a share of its own, and waits for nothing else: a pull may have to wait until another replica has sent something.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from weighbridge import rpc
from weighbridge.errors import InvalidArgument, ResourceExhausted, Unavailable

MESSAGE_ROOM = 2 * rpc.MESSAGE_BYTES
"""What a message takes at most: it lies in our memory once and in gRPC's once."""
LEAST_BYTES = 32 << 20
"""No service gets on with less."""
RETRY_SECONDS = 1.0
"""After how long it is worth asking again for room that was not to be had."""


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
class _Waiter:
    nbytes: int
    granted: bool = False


@dataclass(eq=False, slots=True)
class _Side:
    """One direction: what it holds, and who waits, by connection; the one that comes next stands first."""

    direction: Direction
    nbytes: int = 0
    by_peer: dict[str, int] = field(default_factory=dict)
    waiting: OrderedDict[str, deque[_Waiter]] = field(default_factory=OrderedDict)

    def enqueue(self, peer: str, waiter: _Waiter) -> None:
        self.waiting.setdefault(peer, deque()).append(waiter)

    def dequeue(self, peer: str, waiter: _Waiter) -> None:
        """Take a waiter out; its connection has had its turn if it was granted something."""
        queue = self.waiting[peer]
        queue.remove(waiter)
        if not queue:
            del self.waiting[peer]
        elif waiter.granted:
            self.waiting.move_to_end(peer)

    def add(self, peer: str, nbytes: int) -> None:
        self.nbytes += nbytes
        left = self.by_peer.get(peer, 0) + nbytes
        if left:
            self.by_peer[peer] = left
        else:
            self.by_peer.pop(peer, None)


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
        self._most_of_side = capacity // 8 * 3  # of three: a quarter is left when two have all they may
        self._most_of_peer = capacity // 4
        self._changed = threading.Condition()
        self._nbytes = 0
        # the side that was served last stands last
        self._sides = OrderedDict((direction, _Side(direction)) for direction in Direction)

    @property
    def in_flight(self) -> InFlight:
        """How the budget is used now."""
        with self._changed:
            return InFlight(
                {direction: self._sides[direction].nbytes for direction in Direction},
                {d: sum(map(len, self._sides[d].waiting.values())) for d in Direction},
            )

    def stream(self, direction: Direction, peer: str, patience: Callable[[], float]) -> Share:
        """What one stream holds; to be closed after use.

        Args:
            direction: which way it goes.
            peer: the connection that it comes over.
            patience: for how many seconds it can wait for room now.
        """
        return Share(self, direction, peer, patience)

    def _take(self, share: Share, nbytes: int) -> None:
        side = self._sides[share.direction]
        waiter = _Waiter(nbytes)
        with self._changed:
            side.enqueue(share.peer, waiter)
            self._grant()
            if waiter.granted:
                return
            deadline = time.monotonic() + share.patience()
            while not waiter.granted:
                left = deadline - time.monotonic()
                if share.gone or left <= 0:
                    side.dequeue(share.peer, waiter)
                    self._grant()  # a smaller one behind it may fit
                    if share.gone:
                        raise Unavailable("the caller has gone")
                    error = ResourceExhausted(
                        f"the service has {self._nbytes} of {self.capacity} bytes of weights in flight, and no room for more",
                        fix="try again later; if that goes on, serve with a larger --byte-budget, or more replicas",
                    )
                    error.retry_after = RETRY_SECONDS
                    raise error
                self._changed.wait(left)

    def _give(self, share: Share, nbytes: int) -> None:
        with self._changed:
            self._add(self._sides[share.direction], share.peer, -nbytes)
            self._grant()

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _add(self, side: _Side, peer: str, nbytes: int) -> None:
        self._nbytes += nbytes
        side.add(peer, nbytes)

    def _grant(self) -> None:
        """Give room to those whose turn it is, as long as there is some."""
        granted = False
        while (found := self._next()) is not None:
            side, peer, waiter = found
            waiter.granted = granted = True
            side.dequeue(peer, waiter)
            self._add(side, peer, waiter.nbytes)
            self._sides.move_to_end(side.direction)
        if granted:
            self._changed.notify_all()

    def _next(self) -> tuple[_Side, str, _Waiter] | None:
        """Who comes next; None if nobody waits or there is no room for whoever comes next."""
        for side in self._sides.values():
            for peer, queue in side.waiting.items():
                waiter = queue[0]
                if side.by_peer.get(peer, 0) + waiter.nbytes > self._most_of_peer:
                    continue
                if self._nbytes + waiter.nbytes > self.capacity:
                    return None  # what is small does not overtake what is large
                if side.nbytes + waiter.nbytes > self._most_of_side:
                    break
                return side, peer, waiter
        return None


class Share:
    """What one stream holds of a budget. For one thread, but for `abandon`.

    Attributes:
        direction: which way the stream goes.
        peer: the connection that it comes over.
        patience: for how many seconds it can wait for room now.
        gone: whether the caller has gone.
    """

    def __init__(
        self, budget: ByteBudget, direction: Direction, peer: str, patience: Callable[[], float]
    ) -> None:
        self.direction = direction
        self.peer = peer
        self.patience = patience
        self.gone = False
        self._budget = budget
        self._held = 0

    def take(self, data_bytes: int = rpc.MESSAGE_BYTES) -> None:
        """Wait until there is room for a message with so many bytes of weights. The message before is given back first.

        Raises:
            ResourceExhausted: there was none for as long as the stream can wait; says when to try again.
            Unavailable: the caller has gone.
        """
        self.give()
        nbytes = MESSAGE_ROOM // rpc.MESSAGE_BYTES * data_bytes
        self._budget._take(self, nbytes)
        self._held = nbytes

    def give(self) -> None:
        """The message is not in memory any more."""
        if self._held:
            nbytes, self._held = self._held, 0
            self._budget._give(self, nbytes)

    def close(self) -> None:
        """Nothing more comes."""
        self.give()

    def abandon(self) -> None:
        """The caller has gone: it need not be waited for room."""
        self.gone = True
        self._budget._wake()
