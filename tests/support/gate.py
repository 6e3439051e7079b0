"""A way to a server that can be closed in the middle of an answer, and opened again."""

from __future__ import annotations

import contextlib
import socket
import threading
from types import TracebackType
from typing import Literal, Self

State = Literal["open", "held", "cut"]


class Gate:
    """Forwards TCP connections on loopback.

    Attributes:
        address: ``host:port`` to connect to.
    """

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._changed = threading.Condition()
        self._state: State = "open"
        self._next: tuple[int, State] | None = None
        self._sockets: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def open(self) -> None:
        """Let everything through."""
        with self._changed:
            self._state, self._next = "open", None
            self._changed.notify_all()

    def hold_after(self, nbytes: int) -> None:
        """Let nothing more through when so many more bytes have been answered; connections stay."""
        with self._changed:
            self._next = (nbytes, "held")

    def cut_after(self, nbytes: int) -> None:
        """End all connections when so many more bytes have been answered, and accept no more."""
        with self._changed:
            self._next = (nbytes, "cut")

    def wait_closed(self, seconds: float = 60.0) -> None:
        """Return when so many bytes have been answered."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._state != "open", seconds)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if self._state == "cut":
                client.close()
                continue
            try:
                server = socket.create_connection(self._target)
            except OSError:
                client.close()
                continue
            self._sockets |= {client, server}
            threading.Thread(target=self._pump, args=(client, server, False), daemon=True).start()
            threading.Thread(target=self._pump, args=(server, client, True), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, answers: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if answers and not self._passes(len(data)):
                    break
                sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def _passes(self, nbytes: int) -> bool:
        with self._changed:
            if self._next is not None:
                left, state = self._next
                self._next = (left - nbytes, state)
                if left <= nbytes:
                    self._state, self._next = state, None
                    self._changed.notify_all()
                    if state == "cut":
                        self._end_all()
            self._changed.wait_for(lambda: self._state != "held")
            return self._state == "open"

    def _end_all(self) -> None:
        for end in list(self._sockets):  # more may come meanwhile
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listener.close()
        self.open()
        self._end_all()
