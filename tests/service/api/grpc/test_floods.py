"""Does a client that sends frames without end, and reads no answer, keep no memory of the service?"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import suppress

import pytest

from benchmarks.http2_frames import PING, PREFACE, SETTINGS, frame
from tests.service.bad_input.bench import resident_bytes
from tests.support.services import RunningService, running_service
from weighbridge import EngineClient

MOST_FRAMES = 1_000_000
MEMORY = 100 << 20
"""A PING that is too soon, remembered as an error, takes 2.7 kB: 600 MB for each connection."""


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    with running_service(tmp_path_factory.mktemp("store"), bulk_port="0") as running:
        yield running


@pytest.mark.parametrize("port", ["control", "bulk"])
@pytest.mark.parametrize(("kind", "payload"), [(PING, b"12345678"), (SETTINGS, b"")], ids=["PING", "SETTINGS"])
def test_frames_that_want_an_answer_which_is_never_read_take_no_memory(
    service: RunningService, port: str, kind: int, payload: bytes
) -> None:
    listener = service.grpc._listener
    assert listener.bulk is not None
    frames = frame(kind, 0, 0, payload) * 1000
    before = resident_bytes()
    with socket.create_connection(("127.0.0.1", listener.bulk.port if port == "bulk" else listener.port)) as client:
        client.settimeout(3)
        client.sendall(PREFACE + frame(SETTINGS, 0, 0))
        with suppress(TimeoutError):  # the service reads no more of them
            for _ in range(MOST_FRAMES // 1000):
                client.sendall(frames)
        with EngineClient(service.address) as engine:
            assert list(engine.models()) == []
        assert resident_bytes() - before < MEMORY
