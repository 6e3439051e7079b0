"""Connections of the HTTP face: who says nothing is cut off, and there are only so many."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx2 as httpx
import pytest
import uvicorn
from starlette.types import Receive, Scope, Send

from tests.support.identities import Authority
from tests.support.waiting import eventually
from weighbridge_service.access.certificates import Certificates
from weighbridge_service.api.http.connections import connections
from weighbridge_service.server import HttpServer

PATIENCE = 0.5


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with what came, after as long as the path says."""
    await asyncio.sleep(float(scope["path"].strip("/") or 0))
    body = (await receive()).get("body", b"")
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": body})


@contextmanager
def serving(most: int, certificates: Certificates | None = None) -> Iterator[tuple[str, int]]:
    server = HttpServer("127.0.0.1:0", most, PATIENCE, certificates)
    server.start(app)
    host, port = server.address.split(":")
    try:
        yield host, int(port)
    finally:
        server.stop()


def is_cut_off(connection: socket.socket) -> bool:
    connection.settimeout(60)
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


@pytest.mark.parametrize("said", [b"", b"GET / HT", b"GET / HTTP/1.1\r\nHost: x\r\n"])
def test_a_client_that_does_not_say_what_it_wants_is_cut_off(said: bytes) -> None:
    with serving(100) as where, socket.create_connection(where) as silent:
        silent.sendall(said)
        assert is_cut_off(silent)


def test_a_client_that_says_it_byte_by_byte_is_cut_off() -> None:
    with serving(100) as where, socket.create_connection(where) as slow:
        begun = time.monotonic()
        with contextlib.suppress(OSError):
            while time.monotonic() - begun < 60:
                slow.sendall(b"x")
                time.sleep(PATIENCE / 10)
        assert time.monotonic() - begun < 60


def test_a_slow_answer_and_a_second_request_are_not_cut_off() -> None:
    with serving(100) as (host, port), httpx.Client(base_url=f"http://{host}:{port}") as http:
        for pause in (0, 3 * PATIENCE, 0):
            assert http.post(f"/{pause}", content=b"hello", timeout=30).content == b"hello"


@pytest.mark.parametrize("said", [b"", b"\x16\x03\x01", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"])
def test_a_client_that_does_not_come_to_the_end_of_its_handshake_is_cut_off(said: bytes, authority: Authority) -> None:
    certificates = Certificates(authority.tls())
    with serving(100, certificates) as where, socket.create_connection(where) as silent:
        begun = time.monotonic()
        silent.sendall(said)
        while not is_cut_off(silent):
            pass
        assert time.monotonic() - begun < 50, "asyncio gives it a minute"


def test_clients_in_their_handshakes_are_only_so_many_and_room_comes_back(authority: Authority) -> None:
    trusted = ssl.create_default_context(cafile=str(authority.ca))
    with serving(20, Certificates(authority.tls())) as (host, port), ExitStack() as stack:
        for _ in range(20):
            stack.enter_context(socket.create_connection((host, port)))
        with socket.create_connection((host, port)) as one_too_many:
            assert is_cut_off(one_too_many)

        def answered() -> bool:
            with contextlib.suppress(httpx.HTTPError):
                return httpx.get(f"https://{host}:{port}/", timeout=5, verify=trusted).status_code == 200
            return False

        eventually(answered)
        for _ in range(30):  # nor does one that was served keep its place
            eventually(answered)


def test_there_are_only_so_many_and_room_comes_back() -> None:
    with serving(20) as (host, port):
        silent = [socket.create_connection((host, port)) for _ in range(20)]
        with socket.create_connection((host, port)) as one_too_many:
            assert is_cut_off(one_too_many)

        def answered() -> bool:
            with contextlib.suppress(httpx.HTTPError):
                return httpx.get(f"http://{host}:{port}/", timeout=5).status_code == 200
            return False

        eventually(answered)
        for connection in silent:
            assert is_cut_off(connection)
            connection.close()


def test_the_protocol_is_one_that_uvicorn_takes() -> None:
    config = uvicorn.Config(app, http=connections(1.0))
    config.load()
    assert config.http_protocol_class.__mro__[1].__name__ == "H11Protocol"
