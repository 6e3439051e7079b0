"""Do calls to an unreachable service fail soon, and at once where a retry cannot help?"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.support.ports import reserved_port
from weighbridge import AsyncEngineClient, Credentials, EngineClient, TrainerClient, Unavailable
from weighbridge._clients import client as client_module
from weighbridge._core.text import waits
from weighbridge._transport import outages, rpc
from weighbridge._transport.addresses import Addresses

MODEL = "acme/tiny"


@contextmanager
def http_server() -> Iterator[str]:
    """An address that answers in HTTP/1."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            while True:
                try:
                    peer, _ = listening.accept()
                except OSError:
                    return
                with peer:
                    peer.recv(4096)
                    peer.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")

        threading.Thread(target=serve, daemon=True).start()
        yield f"127.0.0.1:{listening.getsockname()[1]}"
        listening.shutdown(socket.SHUT_RDWR)


def model_of(client: Any) -> None:
    client.model(MODEL)


def push(client: TrainerClient) -> None:
    client.push_state_dict(MODEL, {}, step=1, rank=0, world_size=1)


def watch(client: TrainerClient) -> None:
    next(client.watch(MODEL))


@pytest.mark.parametrize("call", [model_of, push, watch])
def test_a_port_that_speaks_http_is_told_at_once(call: Callable[[TrainerClient], None]) -> None:
    with http_server() as address, TrainerClient(address, retry_seconds=600.0) as client:
        begun = time.monotonic()
        with pytest.raises(Unavailable, match="speaks HTTP, not gRPC") as caught:
            call(client)
    assert time.monotonic() - begun < 60.0
    assert caught.value.__cause__ is None, "what gRPC says of it adds nothing"


def test_an_event_loop_is_told_at_once_as_well() -> None:
    async def ask(address: str) -> None:
        async with AsyncEngineClient(address, retry_seconds=600.0) as client:
            await client.model(MODEL)

    with http_server() as address, pytest.raises(Unavailable, match="speaks HTTP, not gRPC"):
        asyncio.run(asyncio.wait_for(ask(address), 60.0))


def test_a_handshake_that_is_refused_is_not_tried_again_for_long() -> None:
    with (
        http_server() as address,
        EngineClient(address, retry_seconds=600.0, credentials=Credentials(ca="system")) as client,
    ):
        begun = time.monotonic()
        with pytest.raises(Unavailable, match="do not agree on TLS"):
            client.model(MODEL)
    assert time.monotonic() - begun < 60.0


def test_an_address_that_has_answered_or_is_not_the_only_one_is_tried_for_as_long_as_any() -> None:
    def doubtful() -> Unavailable:
        return Unavailable("TLS", worth_retrying=3.0)

    addresses = Addresses(["a:1", "b:1"])
    first, second, third = doubtful(), doubtful(), doubtful()
    assert addresses.failed("a:1", first)
    assert not addresses.failed("b:1", second)
    assert (first.worth_retrying, second.worth_retrying) == (float("inf"), 3.0)
    addresses.answered("b:1")
    addresses.failed("a:1")
    assert not addresses.failed("b:1", third)
    assert third.worth_retrying == float("inf")


@pytest.mark.parametrize("on_loop", [False, True])
def test_a_call_that_waits_for_the_service_says_so_and_for_how_long(
    on_loop: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(outages, "_FIRST_SECONDS", 0.1)
    monkeypatch.setattr(waits, "REMIND_SECONDS", 0.1)
    caplog.set_level(logging.WARNING)
    address = f"127.0.0.1:{reserved_port()}"

    async def ask() -> None:
        async with AsyncEngineClient(address, retry_seconds=2.0) as client:
            await client.model(MODEL)

    def wait() -> None:
        with EngineClient(address, retry_seconds=2.0) as client:
            client.model(MODEL)

    with pytest.raises(Unavailable):
        asyncio.run(ask()) if on_loop else wait()
    said = [each for each in caplog.messages if f"the service at {address} cannot be reached" in each]
    assert said
    assert all("retrying for another" in each for each in said)


@pytest.mark.parametrize("on_loop", [False, True])
def test_a_watch_of_a_service_that_was_never_there_says_how_to_start_it_and_not_that_it_is_away(
    on_loop: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(outages, "_FIRST_SECONDS", 0.1)
    monkeypatch.setattr(waits, "REMIND_SECONDS", 0.1)
    caplog.set_level(logging.WARNING)
    address = f"127.0.0.1:{reserved_port()}"

    async def ask() -> None:
        async with AsyncEngineClient(address, retry_seconds=1.5) as client:
            await anext(client.watch(MODEL))

    def wait() -> None:
        with EngineClient(address, retry_seconds=1.5) as client:
            next(client.watch(MODEL))

    with pytest.raises(Unavailable):
        asyncio.run(ask()) if on_loop else wait()
    first, *others = [each for each in caplog.messages if address in each]
    assert f"the service at {address} cannot be reached" in first
    assert "retrying for another" in first
    assert "start it with `weighbridge serve`" in first
    assert others
    assert not any("has been away" in each or "weighbridge serve" in each for each in others)


def test_a_model_is_not_said_to_be_registered_where_nobody_has_heard_of_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(client_module, "_SLOW_SECONDS", 0.2)
    address = f"127.0.0.1:{reserved_port()}"
    with TrainerClient(address, retry_seconds=1.0) as client, pytest.raises(Unavailable):
        client.register_files(MODEL, {"config.json": b"{}"})
    assert "is being registered" not in caplog.text


def test_what_answers_again_is_away_no_longer() -> None:
    addresses = Addresses(["127.0.0.1:1"])
    assert not addresses.away
    addresses.failed("127.0.0.1:1")
    assert addresses.away
    addresses.answered("127.0.0.1:1")
    assert not addresses.away


def test_why_it_cannot_be_reached_is_said_in_a_few_words() -> None:
    address = f"127.0.0.1:{reserved_port()}"
    with TrainerClient(address, retry_seconds=0.0) as client, pytest.raises(Unavailable) as error:
        client.model(MODEL)
    said = error.value.message.removesuffix(" (111)")  # of grpcio 1.76, and not of 1.85
    assert said == f"the service at {address} cannot be reached: Connection refused"


def test_a_watch_connects_while_it_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    # a connection makes no progress while no thread polls its channel: a refused one would only be noticed at its time
    # limit of 5 s
    paused: list[float] = []

    def connect_within(_channel: object, seconds: float) -> None:
        paused.append(seconds)
        if len(paused) == 3:
            client.close()

    monkeypatch.setattr(rpc, "connect_within", connect_within)
    with EngineClient(f"127.0.0.1:{reserved_port()}") as client:
        with pytest.raises(Unavailable):
            next(client.watch(MODEL, "latest"))
        assert len(paused) == 3
