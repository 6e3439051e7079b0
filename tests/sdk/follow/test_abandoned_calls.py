"""Does a call that waits for an engine end when the engine takes no connections any more? A vLLM that shuts down waits
for such calls.
"""

from __future__ import annotations

import socket
import threading
from contextlib import closing

import pytest

from tests.support.waiting import eventually
from weighbridge.follow import reaching
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


def test_a_call_ends_however_the_name_of_the_host_is_spelled() -> None:
    server = Silent()
    url = server.url.replace("127.0.0.1", "LocalHost")
    with (
        closing(ReachWatch(url, every=0.01, gone=0.05)),
        pytest.raises(EngineFailed, match=r"cannot be reached: (?!.*timed out)"),
    ):
        EngineApi(url, timeout=10, other="").call("/collective_rpc", {})
    assert server.ended.wait(60)
    server.join()


def test_calls_go_on_at_a_server_that_is_too_busy_to_take_more_connections(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks, look = list[str](), reaching._reason
    monkeypatch.setattr(reaching, "_CONNECT_SECONDS", 0.02)
    monkeypatch.setattr(reaching, "_reason", lambda problems: looks.append(look(problems)) or looks[-1])
    listener = socket.create_server(("127.0.0.1", 0), backlog=0)
    host, port = listener.getsockname()
    url = f"http://{host}:{port}"
    answered: list[object] = []
    call = threading.Thread(
        target=lambda: answered.append(EngineApi(url, timeout=120, other="").call("/collective_rpc", {}))
    )
    call.start()
    taken, _ = listener.accept()
    with (
        listener,
        taken,
        closing(socket.create_connection((host, port))),  # no place is left
        closing(ReachWatch(url, every=0.005, gone=0.01)),
    ):
        eventually(lambda: looks[-5:] == ["timed out"] * 5)
        assert call.is_alive()
        taken.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
        call.join(60)
    assert answered == [{}]


REFUSED, LATE = ConnectionRefusedError(111, "Connection refused"), TimeoutError("timed out")
UNUSED = OSError(99, "Cannot assign requested address")


@pytest.mark.parametrize(
    ("problems", "refused"),
    [
        ([], False),
        ([REFUSED], True),
        ([UNUSED, REFUSED], True),
        ([REFUSED, REFUSED], True),
        ([LATE], False),
        ([REFUSED, LATE], False),
        ([LATE, REFUSED], False),
        ([UNUSED], False),
        ([socket.gaierror(-2, "Name or service not known")], False),
    ],
)
def test_a_server_is_gone_if_an_address_of_its_host_refuses_connections_and_none_may_still_take_them(
    problems: list[Exception], refused: bool
) -> None:
    assert reaching._is_refused(problems) is refused
