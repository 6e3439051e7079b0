"""Does every gRPC call with random input fail with a fitting error, and leave nothing behind?

``WEIGHBRIDGE_FUZZ_CALLS=20000`` makes as many calls; ``WEIGHBRIDGE_SEED`` chooses other ones.
"""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.grpc_examples import FUZZED, UNTOUCHED, examples
from tests.support.grpc_fuzzing import Calls, run
from tests.support.raw_clients import (
    TinyModel,
    assert_equal,
    tiny_folder,
)
from tests.support.rounds import first_seed, rounds
from tests.support.services import RunningService, running_service
from tests.support.tracebacks import tracebacks
from weighbridge import EngineClient, TrainerClient
from weighbridge._transport import bulk_entry, rpc

CALLS = rounds("FUZZ_CALLS")
SEED = first_seed()
pytestmark = pytest.mark.timeout(300 + CALLS)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return tiny_folder(tmp_path_factory.mktemp("fuzzing") / "hf")


@pytest.fixture
def service(tmp_path: Path, source: TinyModel) -> Iterator[RunningService]:
    with running_service(tmp_path / "store", bulk_port="0", receive_timeout=30.0) as running:
        with TrainerClient(running.address, lane="grpc") as trainer:
            for model in (FUZZED, UNTOUCHED):
                trainer.register_files(model, source.files)
                for step in (1, 2, 3):
                    trainer.push_folder(model, source.folder, step=step).wait(timeout=60)
        yield running


def tasks(service: RunningService) -> int:
    """Tasks on the loop of control calls."""
    return len(asyncio.all_tasks(service.grpc._listener.loop.loop))


def settles(condition: Callable[[], bool], seconds: float = 30.0) -> bool:
    """Whether a condition becomes true in time."""
    deadline = time.monotonic() + seconds
    while not (found := condition()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return found


def test_fuzzed_calls_are_refused_by_name_and_leave_nothing_behind(
    service: RunningService, source: TinyModel, capfd: pytest.CaptureFixture[str]
) -> None:
    with rpc.open_channel(service.address) as channel:
        entry = bulk_entry.ask(channel, service.address)
    ticket = dict(entry.metadata)[bulk_entry.TICKET]
    assert isinstance(ticket, str)
    threads, waiting = threading.active_count(), tasks(service)

    with tracebacks() as logged:
        outcome = run(iter(Calls(SEED, examples(source), ticket)), CALLS, service.address, entry.address)
        gc.collect()  # asyncio logs an exception that was never retrieved when it collects the task

    assert outcome.codes.total() == CALLS
    assert not outcome.failures, outcome.failures[:5]
    assert not logged, "\n".join(logged[:5])
    assert "Traceback" not in capfd.readouterr().err
    assert settles(lambda: threading.active_count() <= threads + 8), sorted(
        thread.name for thread in threading.enumerate()
    )
    assert settles(lambda: tasks(service) <= waiting + 8)
    with EngineClient(service.address, lane="grpc") as engine:
        assert_equal(engine, UNTOUCHED, "latest", source.arrays)
    with TrainerClient(service.address, lane="grpc") as trainer:
        trainer.push_folder(UNTOUCHED, source.folder, step=4).wait(timeout=60)
    print(dict(outcome.codes))
