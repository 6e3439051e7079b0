"""Does a call that waits for an engine end when the engine takes no connections any more? A vLLM that shuts down waits for such calls."""

from __future__ import annotations

import socket
import threading
from contextlib import closing

import pytest

from weighbridge.follow.answers import EngineApi, abandon
from weighbridge.follow.engines import EngineFailed
from weighbridge.follow.reaching import ReachWatch


class Silent:
    """A server that takes one connection and gives no answer."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        self.taken: socket.socket | None = None
        self.ended = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        self.taken, _ = self.listener.accept()
        request = b""
        while not request.endswith(b"{}"):
            request += self.taken.recv(1 << 16)
        self.listener.close()
        while self.taken.recv(1 << 16):  # until the caller has gone
            pass
        self.ended.set()
        self.taken.close()

    def join(self) -> None:
        self._thread.join(60)


def test_a_call_ends_when_nothing_takes_connections_and_so_does_its_connection() -> None:
    server = Silent()
    with (
        closing(ReachWatch(server.url, every=0.01, gone=0.05)),
        pytest.raises(EngineFailed, match="cannot be reached"),
    ):
        EngineApi(server.url, timeout=120, other="").call("/collective_rpc", {})
    assert server.ended.wait(60), "the server is left waiting"
    server.join()


def test_calls_to_other_servers_go_on() -> None:
    server = Silent()
    found: list[Exception] = []

    def call() -> None:
        try:
            EngineApi(server.url, timeout=120, other="").call("/collective_rpc", {})
        except EngineFailed as error:
            found.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    while server.taken is None:
        assert thread.is_alive()
    abandon("http://127.0.0.1:1")
    abandon(server.url.replace("http", "https").replace("127.0.0.1", "other"))
    assert not server.ended.wait(0.05)
    abandon(server.url)
    thread.join(60)
    assert found
    server.join()
