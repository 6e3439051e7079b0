"""A proxy in front of a service that dies, for its clients, when so many bytes have gone through."""

from __future__ import annotations

import contextlib
import socket
import threading


class MortalProxy:
    """Forwards connections to a service, until its time has come: then all are cut, and none is made any more.

    Args:
        target: the service's address.
        port: its own; 0 for any.

    Attributes:
        address: address for clients.
        brought: bytes that have gone to clients.
    """

    def __init__(self, target: str, port: int = 0) -> None:
        host, _, target_port = target.partition(":")
        self._target = (host, int(target_port))
        self.brought = 0
        self._lock = threading.Lock()
        self._left: int | None = None
        self._sockets: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", port))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def die_after(self, nbytes: int) -> None:
        """Let so many bytes more through, both ways together."""
        self._left = nbytes

    def close(self) -> None:
        """Cut everything."""
        for each in (self._listener, *self._sockets):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._target)
                self._sockets += [client, server]
                threading.Thread(target=self._pump, args=(client, server, False), daemon=True).start()
                threading.Thread(target=self._pump, args=(server, client, True), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, to_client: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(16384):
                if to_client:
                    with self._lock:
                        self.brought += len(data)
                if self._left is not None:
                    self._left -= len(data)
                    if self._left < 0:
                        self.close()
                        return
                sink.sendall(data)
            sink.shutdown(socket.SHUT_RDWR)
