"""A way to a server that can be closed for one process, while others on this machine go through. Linux."""

from __future__ import annotations

import contextlib
import socket
import threading
from pathlib import Path
from types import TracebackType
from typing import Self


class ProcessGate:
    """Forwards TCP connections on loopback.

    Attributes:
        address: ``host:port`` to connect to.
        refused: number of connections that were refused or ended.
    """

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._lock = threading.Lock()
        self._closed: int | None = None
        self._left: int | None = None
        self._open: dict[socket.socket, int] = {}
        self.refused = 0
        self._pids: list[int] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def tell_apart(self, pids: list[int]) -> None:
        """Name the processes that can be cut off; connections of others always go through."""
        self._pids = pids

    def open(self) -> None:
        """Let all processes through."""
        with self._lock:
            self._closed = self._left = None

    def close(self, pid: int, after: int = 0) -> None:
        """End a process's connections once so many more bytes have been answered to it, and accept no more of it."""
        with self._lock:
            self._closed, self._left = pid, after
            if not after:
                self._end(pid)

    def _accept(self) -> None:
        while True:
            try:
                client, peer = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._forward, args=(client, peer[1]), daemon=True).start()

    def _forward(self, client: socket.socket, port: int) -> None:
        pid = next((each for each in self._pids if _has_connection(each, port)), 0)
        with self._lock:
            if pid and pid == self._closed and not self._left:
                self.refused += 1
                client.close()
                return
            server = socket.create_connection(self._target)
            self._open |= {client: pid, server: pid}
        with client, server:
            asking = threading.Thread(target=self._pump, args=(client, server, 0), daemon=True)
            asking.start()
            self._pump(server, client, pid)
            asking.join()
        with self._lock:
            for end in (client, server):
                self._open.pop(end, None)

    def _pump(self, source: socket.socket, sink: socket.socket, pid: int) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 14):
                if pid:
                    self._count(pid, len(data))
                sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _count(self, pid: int, nbytes: int) -> None:
        with self._lock:
            if pid != self._closed or not self._left:
                return
            self._left = max(self._left - nbytes, 0)
            if not self._left:
                self._end(pid)

    def _end(self, pid: int) -> None:
        for end in [each for each, owner in self._open.items() if owner == pid]:
            self.refused += 1
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listener.close()
        with self._lock:
            for pid in set(self._open.values()):
                self._end(pid)


def processes_below(pid: int) -> list[int]:
    """Ids of the processes that a process has started, and of theirs."""
    found = []
    with contextlib.suppress(OSError):
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            for child in children.read_text().split():
                found += [int(child), *processes_below(int(child))]
    return found


def _has_connection(pid: int, port: int) -> bool:
    """Test whether a process has a TCP socket with this local port."""
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[1].endswith(f":{port:04X}"):
                    inodes.add(f"socket:[{fields[9]}]")
    with contextlib.suppress(OSError):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if str(descriptor.readlink()) in inodes:
                    return True
    return False
