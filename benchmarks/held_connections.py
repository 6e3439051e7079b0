"""Thousands of open connections in one thread, which mostly sleeps: each sends what it has to, and reads what comes.

Attackers are made of them, and watchers that cost little. The standard library is enough, so that a process of them
starts at once.
"""

from __future__ import annotations

import contextlib
import resource
import selectors
import socket
import sys
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks import http2_frames as h2

_ZEROS = memoryview(bytes(1 << 20))
_READ_BYTES = 1 << 16
_SMALL_BUFFER = 4096
_IP_BIND_ADDRESS_NO_PORT = 24
"""Linux's number of the option; ip(7)."""


@dataclass
class Counts:
    """Counts of the connections of one part.

    Attributes:
        name: name of the part.
        connected: connections that were made.
        failed: connections that could not be made.
        closed: connections that were made and that the service has closed.
        calls: calls that were opened.
        ended: calls that the service has ended, those of closed connections included.
        sent: bytes that the kernel has taken.
    """

    name: str
    connected: int = 0
    failed: int = 0
    closed: int = 0
    calls: int = 0
    ended: int = 0
    sent: int = 0

    @property
    def standing(self) -> int:
        """Connections that are open."""
        return self.connected - self.closed


class Connection:
    """One connection that sends its opening, then zeros, and stays open.

    Args:
        part: part of the attack that it belongs to.
        counts: counts of that part.
    """

    def __init__(self, part: Mapping[str, Any], counts: Counts) -> None:
        self.part = part
        self.counts = counts
        self.wants_to_send = True
        self._connected = False
        self._outgoing: deque[memoryview] = deque()
        self.socket, where = _socket_to(part["door"])
        if part["deaf"]:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SMALL_BUFFER)
        self.socket.setblocking(False)
        self.socket.connect_ex(where)
        self.begin()

    def begin(self) -> None:
        """Queue the first bytes to send."""
        self._left: int = self.part["withheld"]
        self.say(bytes.fromhex(self.part["opening"]))

    def say(self, data: bytes | memoryview) -> None:
        """Send these bytes when there is room."""
        if data:
            self._outgoing.append(memoryview(data))
            self.wants_to_send = True

    def writable(self) -> None:
        """Send what there is room for. Raises OSError if the connection is gone."""
        if not self._connected:
            error = self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if error:
                raise OSError(error, "cannot connect")
            self._connected = True
            self.counts.connected += 1
        try:
            while self._outgoing or self.more():
                taken = self.socket.send(self._outgoing[0])
                self.counts.sent += taken
                rest = self._outgoing.popleft()[taken:]
                if rest:
                    self._outgoing.appendleft(rest)
        except BlockingIOError:
            return
        self.wants_to_send = False

    def more(self) -> bool:
        """Put more of what is withheld behind what is going to be sent, if there is something."""
        take = min(self._left, len(_ZEROS))
        self._left -= take
        self.say(_ZEROS[:take])
        return take > 0

    def readable(self) -> bool:
        """Read what has come; returns whether the connection is still open. Raises OSError if it is gone."""
        with contextlib.suppress(BlockingIOError):
            while data := self.socket.recv(_READ_BYTES):
                self.received(data)
            return False
        return True

    def received(self, data: bytes) -> None:
        """Handle received bytes."""

    def closed(self) -> None:
        """Handle that the connection has ended, or could not be made."""
        if self._connected:
            self.counts.closed += 1
        else:
            self.counts.failed += 1
        self.socket.close()


@dataclass
class _Call:
    window: int
    left: int
    ended: bool = False


@dataclass
class _Peer:
    """Limits that the service has announced."""

    window: int = h2.DEFAULT_WINDOW
    frame: int = h2.DEFAULT_FRAME
    connection: int = h2.DEFAULT_WINDOW
    calls: dict[int, _Call] = field(default_factory=dict)


class Http2Connection(Connection):
    """Connection that speaks HTTP/2, opens gRPC calls, and answers pings and settings as a live client does."""

    def begin(self) -> None:
        """See `Connection`."""
        self._frames = h2.FrameReader()
        self._peer = _Peer()
        part = self.part
        door, opening = part["door"], bytes.fromhex(part["opening"])
        said = [h2.preface(part["window"])]
        for number in range(part["calls"]):
            stream, path = 2 * number + 1, part["paths"][number % len(part["paths"])]
            said.append(h2.call(stream, path, door["address"], map(tuple, door["metadata"])))
            if opening:
                said.append(h2.frame(h2.DATA, h2.END_STREAM if part["ends"] else 0, stream, opening))
            self._peer.connection -= len(opening)
            self._peer.calls[stream] = _Call(self._peer.window - len(opening), part["withheld"])
        self.say(b"".join(said))

    def writable(self) -> None:
        """See `Connection`."""
        first = not self._connected
        super().writable()
        if first:
            self.counts.calls += len(self._peer.calls)

    def more(self) -> bool:
        """See `Connection`: as much as the windows allow."""
        peer, before = self._peer, len(self._outgoing)
        for stream, call in peer.calls.items():
            take = min(call.left, call.window, peer.connection, peer.frame, len(_ZEROS))
            if take <= 0 or call.ended:
                continue
            call.left, call.window = call.left - take, call.window - take
            peer.connection -= take
            self.say(h2.head(h2.DATA, 0, stream, take))
            self.say(_ZEROS[:take])
        return len(self._outgoing) > before

    def received(self, data: bytes) -> None:
        """See `Connection`."""
        for each in self._frames.feed(data):
            self.came(each)

    def came(self, each: h2.Frame) -> None:
        """Do what a frame asks for, as a client that is alive does."""
        peer, call = self._peer, self._peer.calls.get(each.stream)
        if each.kind == h2.SETTINGS and not each.flags & h2.ACK:
            settings = each.settings
            wider = settings.get(h2.INITIAL_WINDOW_SIZE, peer.window) - peer.window
            peer.window += wider
            peer.frame = settings.get(h2.MAX_FRAME_SIZE, peer.frame)
            for one in peer.calls.values():
                one.window += wider
            self.say(h2.frame(h2.SETTINGS, h2.ACK, 0))
        elif each.kind == h2.PING and not each.flags & h2.ACK:
            self.say(h2.frame(h2.PING, h2.ACK, 0, each.payload))
        elif each.kind == h2.WINDOW_UPDATE:
            if call is not None:
                call.window += each.increment
            elif not each.stream:
                peer.connection += each.increment
            self.wants_to_send = True
        elif each.ends_stream and call is not None and not call.ended:
            call.ended = True
            self.counts.ended += 1

    def closed(self) -> None:
        """See `Connection`."""
        super().closed()
        if self._connected:
            self.counts.ended += sum(not call.ended for call in self._peer.calls.values())


def _socket_to(door: Mapping[str, Any]) -> tuple[socket.socket, Any]:
    address = door["address"]
    if address.startswith("/"):
        return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM), address
    host, _, port = address.rpartition(":")
    made = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if door["source"]:
        # the port is chosen when it connects: it needs to be free for this destination only
        made.setsockopt(socket.IPPROTO_IP, _IP_BIND_ADDRESS_NO_PORT, 1)
        made.bind((door["source"], 0))
    return made, (host, int(port))


class Standing:
    """Connections that stand, and the lines of standard input that come meanwhile.

    Attributes:
        moved: when something last went over one of them, on the machine's monotonic clock.
    """

    def __init__(self) -> None:
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        self.moved = time.monotonic()
        self._selector = selectors.DefaultSelector()
        self._selector.register(sys.stdin, selectors.EVENT_READ)
        self._done: list[Connection] = []  # deaf, and with nothing more to say: kept open
        self._again: deque[tuple[float, Connection]] = deque()

    def add(self, connection: Connection) -> None:
        """Let one more stand."""
        self._selector.register(connection.socket, _interest(connection), connection)

    def turn(self, pause: float) -> str | None:
        """Serve what can be served, or wait for it for so many seconds; a line that came, or None at their end."""
        line: str | None = ""
        for key, events in self._selector.select(pause):
            if key.data is None:
                line = sys.stdin.readline() or None
            else:
                self.moved = time.monotonic()
                self._serve(key.data, events)
        while self._again and self._again[0][0] <= time.monotonic():
            _, closed = self._again.popleft()
            self.add(type(closed)(closed.part, closed.counts))
        return line

    def _serve(self, connection: Connection, events: int) -> None:
        try:
            goes_on = not events & selectors.EVENT_READ or connection.readable()
            if goes_on and connection.wants_to_send:
                connection.writable()
        except OSError:
            goes_on = False
        if not goes_on:
            self._selector.unregister(connection.socket)
            connection.closed()
            if connection.part["again"]:
                self._again.append((time.monotonic() + connection.part["again"], connection))
        elif wanted := _interest(connection):
            self._selector.modify(connection.socket, wanted, connection)
        else:
            self._selector.unregister(connection.socket)
            self._done.append(connection)


def _interest(connection: Connection) -> int:
    wanted = selectors.EVENT_WRITE if connection.wants_to_send else 0
    return wanted if connection.part["deaf"] else wanted | selectors.EVENT_READ
