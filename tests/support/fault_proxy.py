"""A proxy on loopback that spoils some of the requests between a client and an HTTP server."""

from __future__ import annotations

import contextlib
import http.client
import random
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal, TypeAlias
from urllib.parse import urlsplit

Fault: TypeAlias = Literal["none", "slow", "refused", "slow-down", "reset", "lost", "lost-500", "late", "truncated"]
FAULTS: tuple[Fault, ...] = (
    "slow", "refused", "slow-down", "reset", "lost", "lost-500", "late", "truncated",
)  # fmt: skip
"""``slow``: after a pause. ``refused`` and ``slow-down``: 500 and 503, not carried out. ``reset``: not carried out, and
the connection is cut. ``lost`` and ``lost-500``: carried out, and then the connection is cut or 500 is answered.
``late``: the connection is cut, and the request is carried out some time after that. ``truncated``: the response's body
ends in its middle.
"""
_HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding"}
_ERROR = b"<?xml version='1.0'?><Error><Code>%s</Code><Message>made up</Message></Error>"


class FaultProxy(ThreadingHTTPServer):
    """Forwards to a server, and spoils requests at random or by a script.

    Attributes:
        endpoint: URL to send requests to.
        rate: the share of requests that are spoilt by chance.
        script: faults of the next requests, before chance decides.
        done: number of requests by fault.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, upstream: str, seed: int) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.upstream = urlsplit(upstream).netloc
        self.endpoint = f"http://127.0.0.1:{self.server_address[1]}"
        self.rate = 0.0
        self.script: list[Fault] = []
        self.done: Counter[str] = Counter()
        self.dice = random.Random(seed)
        self._open = 0
        self._changed = threading.Condition()

    def draw(self) -> Fault:
        """Draw the fault of the next request."""
        with self._changed:
            if self.script:
                fault = self.script.pop(0)
            else:
                fault = self.dice.choice(FAULTS) if self.dice.random() < self.rate else "none"
            self.done[fault] += 1
            return fault

    @contextmanager
    def working(self) -> Iterator[None]:
        """For as long as a request may still be carried out."""
        with self._changed:
            self._open += 1
        try:
            yield
        finally:
            with self._changed:
                self._open -= 1
                self._changed.notify_all()

    def wait_until_quiet(self) -> None:
        """Return when nothing is under way any more, late requests included."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._open == 0, timeout=60)

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients go away; that is what this is for."""


class _Handler(BaseHTTPRequestHandler):
    server: FaultProxy
    protocol_version = "HTTP/1.1"
    # headers and body are two writes: the second would wait for the client's delayed acknowledgement, 40 ms
    disable_nagle_algorithm = True

    def handle_one_request(self) -> None:
        self.raw_requestline = self.rfile.readline(65537)
        if not self.raw_requestline or not self.parse_request():
            self.close_connection = True
            return
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        with self.server.working():
            self._spoil(self.server.draw(), body)
        self.wfile.flush()

    def log_message(self, *args: object) -> None:
        pass

    def _spoil(self, fault: Fault, body: bytes) -> None:
        if fault == "slow":
            time.sleep(self.server.dice.uniform(0, 0.2))
        elif fault == "refused":
            self._answer(500, [], _ERROR % b"InternalError")
            return
        elif fault == "slow-down":
            self._answer(503, [], _ERROR % b"SlowDown")
            return
        elif fault in ("reset", "late"):
            self._cut()
            if fault == "reset":
                return
            time.sleep(self.server.dice.uniform(0, 0.5))
        status, headers, content = self._forward(body)
        if fault == "lost":
            self._cut()
        elif fault == "lost-500":
            self._answer(500, [], _ERROR % b"InternalError")
        elif fault == "truncated" and content:
            self._answer(status, headers, content, cut=len(content) // 2)
        elif fault != "late":
            self._answer(status, headers, content)

    def _forward(self, body: bytes) -> tuple[int, Sequence[tuple[str, str]], bytes]:
        connection = http.client.HTTPConnection(self.server.upstream, timeout=60)
        try:
            headers = {name: value for name, value in self.headers.items() if name.lower() not in _HOP_BY_HOP}
            connection.request(self.command, self.path, body=body, headers=headers)
            response = connection.getresponse()
            return response.status, response.getheaders(), response.read()
        finally:
            connection.close()

    def _answer(self, status: int, headers: Sequence[tuple[str, str]], content: bytes, cut: int | None = None) -> None:
        self.send_response_only(status)
        length = str(len(content))
        for name, value in headers:
            if name.lower() == "content-length":
                length = value  # a HEAD has one, and no content
            elif name.lower() not in _HOP_BY_HOP:
                self.send_header(name, value)
        if status != 204:
            self.send_header("Content-Length", length)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content[:cut])
        if cut is not None:
            self.wfile.flush()
            self.close_connection = True

    def _cut(self) -> None:
        self.close_connection = True
        with contextlib.suppress(OSError):
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            # a reset, now: whatever holds the socket open besides us
            self.connection.shutdown(socket.SHUT_RDWR)


@contextmanager
def fault_proxy(upstream: str, seed: int = 0) -> Iterator[FaultProxy]:
    """A proxy in front of a server, ended in the end."""
    proxy = FaultProxy(upstream, seed)
    thread = threading.Thread(target=proxy.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield proxy
    finally:
        proxy.shutdown()
        proxy.server_close()
        thread.join()
