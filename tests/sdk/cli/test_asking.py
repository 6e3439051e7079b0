"""Is a token sent only to the address that was named, and are the time and memory for an answer limited?"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest

from weighbridge import Credentials
from weighbridge._cli.doctor.asking import ask, reached_at
from weighbridge.errors import Unavailable

TOKEN = Credentials(token="a-token")
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n"


@contextmanager
def answering(answer: Callable[[socket.socket], None]) -> Iterator[tuple[str, list[bytes]]]:
    """A server on loopback that answers each connection; its address, and what it was asked."""
    asked: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection, suppress(OSError):
                    asked.append(connection.recv(65_536))
                    answer(connection)

        thread = threading.Thread(target=serve)
        thread.start()
        yield "{}:{}".format(*server.getsockname()), asked
        server.shutdown(socket.SHUT_RDWR)
        thread.join()


@pytest.mark.parametrize(
    ("told", "server", "reached"),
    [
        ("0.0.0.0:8080", "node7:50051", "node7:8080"),
        ("[::]:8080", "[fd00::7]:50051", "[fd00::7]:8080"),
        ("10.0.0.7:8080", "node7:50051", "10.0.0.7:8080"),
        ("127.0.0.1:8080", "127.0.0.1:50051", "127.0.0.1:8080"),
        ("localhost:8080", "127.0.0.1:50051", "localhost:8080"),
        ("127.0.0.1:8080", "node7:50051", ""),
        ("", "node7:50051", ""),
    ],
)
def test_an_http_face_is_reached_where_the_service_says(told: str, server: str, reached: str) -> None:
    assert reached_at(told, server) == reached


def test_a_token_does_not_follow_a_redirect() -> None:
    with answering(lambda connection: connection.sendall(HEAD + b"{}")) as (other, stolen):
        to_other = f"HTTP/1.1 302 Found\r\nLocation: http://{other}/\r\nContent-Length: 0\r\n\r\n".encode()
        with answering(lambda connection: connection.sendall(to_other)) as (named, asked):
            with pytest.raises(Unavailable, match="302"):
                ask(named, "/v1/checks", 5.0, TOKEN)
            assert b"a-token" in asked[0]
    assert stolen == []


def test_no_proxy_reads_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        answering(lambda connection: connection.sendall(HEAD + b"{}")) as (proxy, stolen),
        answering(lambda connection: connection.sendall(HEAD + b"{}")) as (named, asked),
    ):
        monkeypatch.setenv("http_proxy", f"http://{proxy}")
        monkeypatch.delenv("no_proxy", raising=False)
        assert ask(named, "/v1/checks", 5.0, TOKEN).value == {}
    assert (stolen, len(asked)) == ([], 1)


def test_an_answer_without_end_is_left() -> None:
    def endless(connection: socket.socket) -> None:
        connection.sendall(HEAD)
        while True:
            connection.sendall(b" " * 65_536)

    with answering(endless) as (named, _), pytest.raises(Unavailable, match="does not answer like a service"):
        ask(named, "/v1/checks", 60.0, TOKEN)


def test_an_answer_that_trickles_is_left_in_time() -> None:
    def trickling(connection: socket.socket) -> None:
        connection.sendall(HEAD)
        while True:  # until the client closes the connection
            connection.sendall(b" ")
            time.sleep(0.05)  # the point of the test: the server is slow

    with (
        answering(trickling) as (named, _),
        pytest.raises(Unavailable, match="does not answer like a service"),
    ):
        ask(named, "/v1/checks", 0.5, TOKEN)
