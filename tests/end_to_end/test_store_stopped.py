"""Does a service live through an object store that stops answering, and go on when it answers again?

``WEIGHBRIDGE_STORE_STOP_SECONDS=300`` stops it for as long.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import httpx2 as httpx
import numpy as np
import pytest

from tests.support.raw_clients import Arrays, TinyModel, tiny_folder
from tests.support.rounds import rounds
from tests.support.s3_server import seaweedfs
from tests.support.services import service_process
from tests.support.waiting import eventually
from weighbridge import EngineClient, FullTensors, TrainerClient
from weighbridge._clients import rank_stream
from weighbridge._core.resources import VersionState
from weighbridge.errors import DeadlineExceeded, Unavailable, WeighbridgeError

pytestmark = pytest.mark.process

MODEL = "tests/smol"
STOP_SECONDS = float(rounds("STORE_STOP_SECONDS"))
"""Least time; it is stopped until readiness says so, in any case."""
CALLS = 200
CALLERS = 16
MOST_THREADS = 150
"""Threads that may be made while the store is stopped: by far fewer than calls are made."""

T = TypeVar("T")


@contextmanager
def held_push(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[threading.Event, threading.Event]]:
    """Stop pushes after their first message; yields the event that reports this, and the one that releases them."""
    begun, go_on = threading.Event(), threading.Event()
    messages = rank_stream._messages

    def slowly(*args: Any) -> Iterator[Any]:
        for message in messages(*args):
            yield message
            begun.set()
            go_on.wait(120)

    with monkeypatch.context() as patch:
        patch.setattr(rank_stream, "_messages", slowly)
        try:
            yield begun, go_on
        finally:
            go_on.set()


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def thread_count(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/task").iterdir()))


class Times:
    """The longest time to an answer in seconds, by kind of call."""

    def __init__(self) -> None:
        self.longest: dict[str, float] = {}

    def of(self, what: str, ask: Callable[[], T]) -> T:
        begun = time.monotonic()
        try:
            return ask()
        finally:
            self.longest[what] = max(self.longest.get(what, 0.0), time.monotonic() - begun)

    @staticmethod
    def shown(longest: Mapping[str, float]) -> str:
        return ", ".join(f"{what} {seconds:.2f} s" for what, seconds in longest.items())


def is_same(engine: EngineClient, version: str, arrays: Arrays) -> bool:
    found = {name: tensor.numpy().copy() for name, tensor in engine.pull(MODEL, version, FullTensors())}
    return found.keys() == arrays.keys() and all(np.array_equal(found[name], arrays[name]) for name in found)


def said_by(ask: Callable[[], object]) -> WeighbridgeError | None:
    try:
        ask()
    except WeighbridgeError as error:
        return error
    return None


def push(trainer: TrainerClient, model: TinyModel, step: int) -> int:
    version = trainer.push_folder(MODEL, model.folder, step=step).wait(timeout=60)
    assert version.state is VersionState.DURABLE
    return version.number


@pytest.mark.timeout(300 + STOP_SECONDS)
def test_a_service_outlives_a_store_that_is_stopped(
    aws_environment: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = [tiny_folder(tmp_path / f"hf{seed}", seed=seed) for seed in range(3)]
    (tmp_path / "weed").mkdir()
    times = Times()
    log = tmp_path / "log"
    with (
        seaweedfs(tmp_path / "weed") as weed,
        log.open("w") as stderr,
        service_process(weed.location(), "--scratch", tmp_path / "scratch", stderr=stderr.fileno()) as service,
    ):
        address, url, pid = service.address, service.url, service.process.pid
        with (
            httpx.Client(base_url=url, timeout=30) as http,
            TrainerClient(address, retry_seconds=0, lane="grpc") as trainer,
            EngineClient(address, retry_seconds=0, lane="grpc") as engine,
        ):
            trainer.register_model(MODEL, models[0].folder)
            assert push(trainer, models[0], 1) == 1
            assert is_same(engine, "live", models[0].arrays)
            eventually(lambda: http.get("/readyz").status_code == 200)

            with held_push(monkeypatch) as (begun, go_on):
                second = trainer.push_folder(MODEL, models[1].folder, step=2)
                assert begun.wait(60)
                with stopped(weed.pid):
                    stop = time.monotonic()
                    go_on.set()
                    while_it_is_stopped(stop, pid, address, http, engine, models, times)
                continued = time.monotonic()
                # a version that was ready, and only in memory, becomes durable
                assert second.wait(timeout=120).state is VersionState.DURABLE
            print(f"version 2 was durable {time.monotonic() - continued:.1f} s after the store went on")
            eventually(lambda: http.get("/readyz").status_code == 200)
            print(f"ready {time.monotonic() - continued:.1f} s after the store went on")
            assert push(trainer, models[2], 3) == 3
            assert [version.number for version in trainer.versions(MODEL)] == [3, 2, 1]
            assert [model.name for model in trainer.models()] == [MODEL]
            for number, model in enumerate(models, 1):
                assert is_same(engine, str(number), model.arrays)
                assert trainer.verify(MODEL, number).problems == ()
        print("longest answers:", times.shown(times.longest))
        assert service.stop() == 0
    assert "Traceback" not in log.read_text()


def while_it_is_stopped(
    stop: float,
    pid: int,
    address: str,
    http: httpx.Client,
    engine: EngineClient,
    models: list[TinyModel],
    times: Times,
) -> None:
    before = thread_count(pid)

    def is_version_2() -> bool:
        """Whether version 2 exists; only the store shows a version that is not visible yet."""
        try:
            return times.of("live", lambda: engine.version(MODEL, "live")).number == 2
        except (Unavailable, DeadlineExceeded):
            return False

    asked: tuple[tuple[str, Callable[[EngineClient], object]], ...] = (
        ("list_models", lambda client: client.models()),
        ("latest", lambda client: client.version(MODEL, "latest")),
        ("set_ref", lambda client: client.set_ref(MODEL, "prod", 1)),
        ("versions", lambda client: client.versions(MODEL)),
    )

    def call(number: int) -> WeighbridgeError | None:
        what, ask = asked[number % len(asked)]
        with EngineClient(address, retry_seconds=0) as client:
            return times.of(what, lambda: said_by(lambda: ask(client)))

    def get(_: int) -> tuple[int, str]:
        response = times.of("GET /v1/models", lambda: http.get("/v1/models"))
        return response.status_code, response.json()["detail"]

    def ask_much() -> None:
        with ThreadPoolExecutor(2 * CALLERS) as pool:
            said = pool.map(call, range(CALLS))
            answers = pool.map(get, range(CALLS // 4))
            assert times.of("/livez", lambda: http.get("/livez")).status_code == 200
            for error in said:
                assert isinstance(error, Unavailable)
                assert "the object store has not answered for" in error.message
            for status, detail in answers:
                assert status == 503
                assert "the object store has not answered for" in detail

    ask_much()
    print(f"the first {CALLS + CALLS // 4} calls were refused {time.monotonic() - stop:.1f} s after the stop")
    # version 2 becomes ready and live without the store
    eventually(is_version_2)
    print(f"version 2 was live {time.monotonic() - stop:.1f} s after the stop")
    first, times.longest = times.longest, {}
    red, calls = 0.0, 0
    while not red or time.monotonic() - stop < STOP_SECONDS:
        ask_much()
        for version in ("2", "live"):
            assert times.of("pull", partial(is_same, engine, version, models[1].arrays))
        ready = times.of("/readyz", lambda: http.get("/readyz"))
        if not red and ready.status_code == 503:
            red = time.monotonic() - stop
        assert times.of("/metrics", lambda: http.get("/metrics")).status_code == 200
        assert thread_count(pid) - before < MOST_THREADS
        calls += CALLS + CALLS // 4
        time.sleep(1.0)
    print(f"not ready {red:.1f} s after the stop; {calls} calls refused")
    print("longest answers of the first calls:", times.shown(first))
    print(f"{before} threads before the stop, {thread_count(pid)} now")
    assert ready.status_code == 503
    assert "store-reachable" in ready.json()["detail"]
    assert "no answer for" in http.get("/readyz/store-reachable").text
