"""Is a truncated answer, or one that no engine gives, an error of the engine that the agent survives?"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from weighbridge.follow.engines import EngineDriver, EngineFailed
from weighbridge.follow.sglang import SglangServer
from weighbridge.follow.vllm import VllmServer

DRIVERS: dict[str, Callable[[str], EngineDriver]] = {
    "vllm": lambda url: VllmServer(url, "acme/tiny", "127.0.0.1:1", timeout=30.0),
    "sglang": lambda url: SglangServer(url, "127.0.0.1:1", "acme/tiny", timeout=30.0),
}
BROKEN_OFF = {
    "content": b'HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{"results',
    "content of an error": b"HTTP/1.1 500 Oops\r\nContent-Length: 100\r\n\r\nTrace",
    "status": b"HTT\r\n\r\n",
    "all": b"",
}
OTHERS = {"a page": b"<html>", "a list": b"[]", "a number": b"1", "nulls": b'{"results": [null], "message": "null"}',
          "a list of numbers": b'{"results": [1], "message": "{\\"ranks\\": [1]}"}', "depth": b"[" * 200_000}  # fmt: skip


@contextmanager
def answering(answer: bytes) -> Iterator[str]:
    """The URL of a server that answers one request."""

    def run() -> None:
        connection, _ = listener.accept()
        with connection, connection.makefile("rb") as request:
            length = 0
            while (line := request.readline().lower()) not in (b"\r\n", b""):
                if line.startswith(b"content-length:"):
                    length = int(line.partition(b":")[2])
            request.read(length)
            connection.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=run)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread.join()


@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize("part", BROKEN_OFF)
def test_an_engine_that_ends_while_it_answers_cannot_be_reached(driver: str, part: str) -> None:
    with (
        answering(BROKEN_OFF[part]) as url,
        pytest.raises(EngineFailed, match="cannot be reached"),
    ):
        DRIVERS[driver](url).serving()


@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize("other", OTHERS)
def test_an_answer_in_another_form_is_an_error_that_names_its_url(driver: str, other: str) -> None:
    content = OTHERS[other]
    head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(content)}\r\n\r\n".encode()
    with (
        answering(head + content) as url,
        pytest.raises(EngineFailed, match=f"{url}/.* unexpected response"),
    ):
        DRIVERS[driver](url).serving()
