"""Whatever comes in over HTTP: is every request answered, and never by a failure of the service?

Requests are written as bytes, so that they need not be HTTP. ``WEIGHBRIDGE_FUZZ_REQUESTS=20000`` makes as many;
``WEIGHBRIDGE_SEED`` chooses other ones.
"""

from __future__ import annotations

import re
import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path

import httpx2 as httpx
import pytest

from tests.support.http_fuzzing import MODEL, requests
from tests.support.raw_clients import TinyModel, tiny_folder
from tests.support.rounds import first_seed, rounds
from tests.support.services import running_service
from tests.support.tracebacks import tracebacks
from weighbridge import TrainerClient
from weighbridge_service.api.http.app import create_app
from weighbridge_service.exports.jobs import Exports
from weighbridge_service.server import HttpServer

REQUESTS = rounds("FUZZ_REQUESTS")
SEED = first_seed()
SECONDS = 20.0
LONGEST_ANSWER = 1 << 20
PATIENCE = 0.3
"""Seconds for which an answer is waited for: requests that are not complete get none."""
pytestmark = pytest.mark.timeout(300 + REQUESTS)


def status_of(address: str, request: bytes) -> str:
    """The status that a request is answered with; empty if it is not complete, or the connection ends without an
    answer.
    """
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=SECONDS) as connection:
        answer = b""
        with suppress(ConnectionError, TimeoutError):  # it was refused before it was read; or it is not complete
            connection.sendall(request)
            connection.settimeout(PATIENCE)
            while len(answer) < LONGEST_ANSWER and (part := connection.recv(1 << 16)):
                answer += part
    found = re.match(rb"HTTP/1\.1 (\d{3}) ", answer)
    assert found or not answer, answer[:200]
    return found[1].decode() if found else ""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return tiny_folder(tmp_path_factory.mktemp("http-fuzzing") / "hf")


@pytest.fixture
def http(tmp_path: Path, source: TinyModel) -> Iterator[str]:
    """The address of an HTTP face."""
    with running_service(tmp_path / "store") as running:
        with TrainerClient(running.address, lane="grpc") as trainer:
            trainer.register_files(MODEL, source.files)
            for step in (1, 2):
                trainer.push_folder(MODEL, source.folder, step=step).wait(timeout=60)
        running.health.start()
        exports = Exports(running.service)
        server = HttpServer("127.0.0.1:0", 1024)
        server.start(create_app(running.service, exports, running.metrics, running.health))
        yield server.address
        server.stop()
        exports.close()


def test_fuzzed_requests_are_answered_and_none_by_a_failure(http: str, capfd: pytest.CaptureFixture[str]) -> None:
    statuses: Counter[str] = Counter()
    with tracebacks() as found:
        for request in islice(requests(SEED), REQUESTS):
            status = status_of(http, request)
            statuses[status] += 1
            assert not status.startswith("5"), request[:2000]
            assert not found, (request[:2000], found)
    assert "Traceback" not in capfd.readouterr().err
    assert httpx.get(f"http://{http}/v1/models/{MODEL}").status_code == 200
    print(dict(statuses))
