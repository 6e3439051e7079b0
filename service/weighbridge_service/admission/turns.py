"""Order of service: a queue that is fair between hosts and connections.

It serves hosts round-robin, and on each host its connections: a peer with many requests delays its own requests, not
those of others.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from typing import TypeVar

from weighbridge_service.access.peer import Peer
from weighbridge_storage.threads import Line

T = TypeVar("T")


class Turns(Line[T]):
    """A queue of items that peers wait for. Not thread-safe."""

    def __init__(self) -> None:
        self._hosts: OrderedDict[str, OrderedDict[str, deque[T]]] = OrderedDict()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, peer: Peer, item: T) -> None:
        """Add an item that a peer waits for."""
        self._hosts.setdefault(peer.host, OrderedDict()).setdefault(peer.connection, deque()).append(item)
        self._count += 1

    def __iter__(self) -> Iterator[tuple[Peer, T]]:
        """Iterate over the next item of each connection, host by host in the order of the hosts' turns."""
        for host, connections in self._hosts.items():
            for connection, items in connections.items():
                yield Peer(host, connection), items[0]

    def take(self) -> T:
        """Remove the next item. Raises IndexError if the queue is empty."""
        for peer, _ in self:
            return self.take_of(peer)
        raise IndexError("the queue is empty")

    def take_of(self, peer: Peer) -> T:
        """Remove the next item of one connection, and move the connection and its host to the end.

        Raises KeyError if it has none.
        """
        connections = self._hosts[peer.host]
        item = connections[peer.connection].popleft()
        self._count -= 1
        connections.move_to_end(peer.connection)
        self._hosts.move_to_end(peer.host)
        self._drop_if_empty(peer.host, peer.connection)
        return item

    def discard(self, peer: Peer, item: T) -> bool:
        """Remove an item that a peer does not wait for any more. Returns whether it was in the queue."""
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
