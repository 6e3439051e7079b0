"""Does the process that makes weight maps restart when it dies, and end on request in the middle of any work?"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import subprocess
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.waiting import eventually
from weighbridge.errors import InvalidArgument, Unavailable
from weighbridge_service.families.dense import Llama
from weighbridge_service.models import bridges
from weighbridge_service.models.bridge_process import _FIRST_CONFIG, BridgeProcess, bounded

CONFIG = json.dumps(_FIRST_CONFIG).encode()


@pytest.fixture
def process() -> Iterator[BridgeProcess]:
    made = BridgeProcess()
    yield made
    made.close()


@pytest.mark.process
def test_a_process_that_cannot_be_started_or_was_killed_is_told_of_and_another_one_answers(
    process: BridgeProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise BlockingIOError("no more processes")

    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", refuse)
        for _ in range(2):
            with pytest.raises(Unavailable, match="cannot be started: no more processes"):
                process.bridge(CONFIG, ())
    assert process.bridge(CONFIG, ()).megatron
    assert process._process is not None
    os.kill(process._process.pid, signal.SIGKILL)
    with pytest.raises(Unavailable, match="has ended"):
        process.bridge(CONFIG, ())
    assert process.bridge(CONFIG, ()).megatron
    with pytest.raises(InvalidArgument, match="weight map"):
        process.bridge(b'{"model_type": "none"}', ())
    # it also compares tensors with models of configs
    mistral = json.dumps({**_FIRST_CONFIG, "model_type": "mistral", "architectures": ["MistralForCausalLM"]}).encode()
    found = process.compare(mistral, {"lm_head.weight": (8, 8), "mtp.weight": (2,)})
    assert found is not None
    assert "model.embed_tokens.weight" in found.missing
    assert found.unknown == ("mtp.weight",)
    assert process.compare(b'{"model_type": "none"}', {}) is None


@pytest.mark.process
def test_a_process_that_hangs_does_not_keep_the_service_from_ending(process: BridgeProcess) -> None:
    process.start()
    assert process._process is not None
    os.kill(process._process.pid, signal.SIGSTOP)
    told: list[Unavailable] = []
    begun = threading.Event()

    def ask() -> None:
        begun.set()
        try:
            process.bridge(CONFIG, ())
        except Unavailable as error:
            told.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    assert begun.wait(60)  # it may ask before or after; either must end
    process.close()
    asking.join(60.0)
    assert not asking.is_alive()
    assert told
    with pytest.raises(Unavailable, match="shutting down"):
        process.bridge(CONFIG, ())


@pytest.mark.process
def test_whoever_starts_the_process_does_not_wait_for_a_call_that_waits_for_its_imports(
    process: BridgeProcess,
) -> None:
    asking = threading.Thread(target=suppressed, args=(process,))
    asking.start()
    eventually(lambda: process._lock.locked() and process._process is not None)
    assert process._process is not None
    os.kill(process._process.pid, signal.SIGSTOP)  # as a loaded machine, or a cold disk, would do it
    starting = threading.Thread(target=process.start, daemon=True)
    starting.start()
    starting.join(5.0)
    assert not starting.is_alive()
    assert asking.is_alive()
    process.close()
    asking.join(60.0)
    assert not asking.is_alive()


def suppressed(process: BridgeProcess) -> None:
    with contextlib.suppress(Unavailable):
        process.bridge(CONFIG, ())


@pytest.mark.process
def test_a_process_that_is_started_while_the_service_ends_is_ended(
    process: BridgeProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    popen = subprocess.Popen

    def slow(*args: Any, **more: Any) -> Any:
        process._closed.set()  # the first half of `close`, without a process to kill
        return popen(*args, **more)

    monkeypatch.setattr(subprocess, "Popen", slow)
    with pytest.raises(Unavailable, match="has ended"):
        process.bridge(CONFIG, ())


def test_a_family_without_a_parallel_plan_can_be_used_for_all_else(monkeypatch: pytest.MonkeyPatch) -> None:
    class Planless(Llama):
        def parallel_plan(self) -> dict[str, str]:
            raise NotImplementedError("no tensor parallelism yet")

    monkeypatch.setattr(bridges, "family_of", lambda _config: Planless)
    bridge = pickle.loads(pickle.dumps(bridges.make_bridge(CONFIG)))
    assert all(bridge.links(entry) for entry in bridge.megatron.values())
    with pytest.raises(InvalidArgument, match="no tensor parallelism yet"):
        bridge.parallel_plan()


def test_a_call_takes_no_more_memory_and_time_than_it_may_and_what_comes_after_it_does() -> None:
    with pytest.raises(MemoryError), bounded(64 << 20, 60.0):
        bytearray(1 << 30)
    with pytest.raises(TimeoutError, match=r"more than 0\.01 s"), bounded(1 << 30, 0.01):
        signal.pause()
    assert len(bytearray(128 << 20)) == 128 << 20
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
