"""HTTP proxies on loopback that record their clients' requests, in the place of a proxy that an environment names."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

_VARIABLES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy", "grpc_proxy", "no_grpc_proxy")
PROXY_VARIABLES = (*_VARIABLES, *map(str.upper, _VARIABLES))
"""Environment variables by which programs find proxies."""


@dataclass
class ConnectProxy:
    """A proxy.

    Attributes:
        address: ``host:port``.
        asked: the first line of each request.
        read: bytes that have passed it.
    """

    address: str
    asked: list[str] = field(default_factory=list)
    read: bytearray = field(default_factory=bytearray, repr=False)

    @property
    def url(self) -> str:
        """As environments name it."""
        return f"http://{self.address}"


@contextmanager
def connect_proxy(target: str | None = None) -> Iterator[ConnectProxy]:
    """A proxy that passes connections on to one address, whatever they ask for; without one it refuses them all."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        proxy = ConnectProxy(f"127.0.0.1:{listener.getsockname()[1]}")
        threading.Thread(target=_accept, args=(proxy, listener, target), daemon=True).start()
        yield proxy
        listener.shutdown(socket.SHUT_RDWR)


def _accept(proxy: ConnectProxy, listener: socket.socket, target: str | None) -> None:
    with contextlib.suppress(OSError):
        while True:
            client, _ = listener.accept()
            threading.Thread(target=_serve, args=(proxy, client, target), daemon=True).start()


def _serve(proxy: ConnectProxy, client: socket.socket, target: str | None) -> None:
    with client, contextlib.suppress(OSError):
        head = b""
        while b"\r\n\r\n" not in head:
            data = client.recv(4096)
            if not data:
                return
            head += data
        proxy.asked.append(head.split(b"\r\n")[0].decode())
        if target is None:
            client.sendall(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n")
            return
        host, _, port = target.rpartition(":")
        with socket.create_connection((host, int(port))) as server:
            client.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
            back = threading.Thread(target=_pump, args=(proxy, server, client), daemon=True)
            back.start()
            _pump(proxy, client, server)
            back.join()


def _pump(proxy: ConnectProxy, source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            proxy.read += data
            sink.sendall(data)
    for each in (source, sink):
        with contextlib.suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)
