"""Order of service: whose turn comes next among those that wait.

Turns go round from host to host, and on a host from connection to connection: who asks for much waits behind his own, not before others.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from typing import TypeVar

from weighbridge_service.access.peer import Peer
from weighbridge_storage.threads import Line

T = TypeVar("T")


class Turns(Line[T]):
    """A queue of what peers wait for. Not thread-safe."""

    def __init__(self) -> None:
        self._hosts: OrderedDict[str, OrderedDict[str, deque[T]]] = OrderedDict()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, peer: Peer, item: T) -> None:
        """Something that a peer waits for."""
        self._hosts.setdefault(peer.host, OrderedDict()).setdefault(peer.connection, deque()).append(item)
        self._count += 1

    def __iter__(self) -> Iterator[tuple[Peer, T]]:
        """What comes next of each connection, in the order of their turns."""
        for host, connections in self._hosts.items():
            for connection, items in connections.items():
                yield Peer(host, connection), items[0]

    def take(self) -> T:
        """What comes next; it has had its turn. Raises IndexError if there is nothing."""
        for peer, _ in self:
            return self.take_of(peer)
        raise IndexError("nobody waits")

    def take_of(self, peer: Peer) -> T:
        """What comes next of one connection; it and its host stand last then. Raises KeyError if there is nothing."""
        connections = self._hosts[peer.host]
        item = connections[peer.connection].popleft()
        self._count -= 1
        connections.move_to_end(peer.connection)
        self._hosts.move_to_end(peer.host)
        self._drop_if_empty(peer.host, peer.connection)
        return item

    def discard(self, peer: Peer, item: T) -> bool:
        """A peer does not wait for this any more; whether it did."""
        connections = self._hosts.get(peer.host)
        items = connections and connections.get(peer.connection)
        if not items or item not in items:
            return False
        items.remove(item)
        self._count -= 1
        self._drop_if_empty(peer.host, peer.connection)
        return True

    def _drop_if_empty(self, host: str, connection: str) -> None:
        connections = self._hosts[host]
        if not connections[connection]:
            del connections[connection]
        if not connections:
            del self._hosts[host]
