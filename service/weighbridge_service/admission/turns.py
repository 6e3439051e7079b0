"""Order of service: whose turn comes next among those that wait.

Turns go round from host to host, and on a host from connection to connection: who asks for much waits behind his own, not before others.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Generic, TypeVar

from weighbridge_service.admission.peer import Peer

T = TypeVar("T")


class Turns(Generic[T]):
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

    def take(self) -> T:
        """What comes next; its host and its connection stand last then. Raises IndexError if there is nothing."""
        if not self._hosts:
            raise IndexError("nobody waits")
        host, connections = next(iter(self._hosts.items()))
        connection, items = next(iter(connections.items()))
        item = items.popleft()
        self._count -= 1
        connections.move_to_end(connection)
        self._hosts.move_to_end(host)
        self._drop_if_empty(host, connection)
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
