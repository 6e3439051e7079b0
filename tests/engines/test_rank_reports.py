"""Does an engine that no agent stands beside report itself, by its first rank, and leave that to an agent that
reports?
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.reference import tiny_config, tiny_model
from tests.support.services import RunningService, running_service
from tests.support.traced import Traced, ids, turn_on
from tests.support.waiting import eventually
from weighbridge import Engine, EngineClient, TrainerClient
from weighbridge.errors import WeighbridgeError
from weighbridge.integrations.engine_rank import rank as engine_ranks
from weighbridge.integrations.transformers import from_weighbridge, live_model, update

MODEL = "tests/llama"


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Traced:
    found = Traced()
    turn_on(monkeypatch, found)
    return found


@pytest.fixture
def running(tmp_path: Path) -> Iterator[RunningService]:
    folder = tmp_path / "hf"
    tiny_model(tiny_config("llama", tied=False), 1).save_pretrained(folder)
    with running_service(tmp_path / "store", report_every=0.5) as service:
        with TrainerClient(service.address) as trainer:
            trainer.register_model(MODEL, folder)
            for step in (1, 2):
                trainer.push_folder(MODEL, folder, step=step).wait(timeout=60)
        yield service


@pytest.fixture
def client(running: RunningService) -> Iterator[EngineClient]:
    with EngineClient(running.address) as found:
        yield found


def only(client: EngineClient) -> Engine:
    (found,) = client.engines(MODEL)
    return found


def test_a_transformers_model_reports_what_it_serves_and_what_it_could_not_be_taken_to(
    running: RunningService, client: EngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_ranks, "_AGENT_SECONDS", 0.0)
    model = from_weighbridge(f"{MODEL}@1", running.address)
    eventually(lambda: client.engines(MODEL) and only(client).version == 1)
    found = only(client)
    assert (found.kind, found.state, found.standing) == ("transformers", "serving", "pinned")
    assert client.collect(MODEL, dry_run=True).kept[0].engines == (found.label,)
    update(model, 2)
    eventually(lambda: only(client).version == 2)
    assert only(client).update_version == 2
    assert only(client).update_bytes == live_model(model).nbytes
    assert list(only(client).update_parts) == [
        "offer",
        "open",
        "receive",
        "agree",
        "apply",
    ]  # it stands still by other means
    with pytest.raises(WeighbridgeError):
        live_model(model).rank.apply(9)
    eventually(lambda: only(client).state == "failing")
    assert (only(client).version, only(client).target) == (2, 0)
    assert "9" in only(client).error
    live_model(model).rank.end_reports()
    eventually(lambda: only(client).standing == "gone")


def test_an_engine_that_has_lost_its_version_in_its_sleep_does_not_report_that_it_serves_it(
    running: RunningService, client: EngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_ranks, "_AGENT_SECONDS", 0.0)
    model = from_weighbridge(f"{MODEL}@1", running.address)
    rank = live_model(model).rank
    eventually(lambda: client.engines(MODEL) and only(client).version == 1)
    rank.wake(lost=True, last=False)  # its caller may still update it
    rank.wake(lost=False, last=True)
    eventually(lambda: only(client).state == "failing")
    assert (only(client).version, only(client).error) == (
        0,
        f"{MODEL}@1 was discarded while the engine slept",
    )
    rank.apply(1)
    eventually(lambda: (only(client).state, only(client).version) == ("serving", 1))


def test_an_engine_that_updates_itself_reports_its_span_in_the_trace_of_the_push(
    traced: Traced, running: RunningService, client: EngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_ranks, "_AGENT_SECONDS", 0.0)
    model = from_weighbridge(f"{MODEL}@1", running.address)
    update(model, 2)
    eventually(lambda: client.engines(MODEL) and only(client).update_version == 2)
    push, ended = client.version(f"{MODEL}@2").traceparent, traced.ended()
    trace, parent = (int(each, 16) for each in push.split("-")[1:3])
    updated, filled = ended["weighbridge.rank_update"], ended["weighbridge.fill"]
    assert ids(updated) == (trace, parent)
    assert updated.attributes == {
        "weighbridge.model": MODEL,
        "weighbridge.version": 2,
        "weighbridge.rank": 0,
    }
    assert updated.context is not None
    assert ids(filled) == ids(ended["weighbridge.agree"]) == (trace, updated.context.span_id)
    assert only(client).traceparent == f"00-{trace:032x}-{updated.context.span_id:016x}-01"
    with pytest.raises(WeighbridgeError):
        live_model(model).rank.apply(9)
    eventually(lambda: only(client).state == "failing")
    failed = traced.ended()["weighbridge.rank_update"]
    assert failed.context is not None
    assert not failed.status.is_ok
    assert f"{failed.context.trace_id:032x}" in only(client).traceparent


def test_an_engine_that_an_agent_reports_in_time_reports_nothing_itself(
    running: RunningService, client: EngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_ranks, "_AGENT_SECONDS", 60.0)
    model = from_weighbridge(f"{MODEL}@1", running.address)
    rank = live_model(model).rank
    reporter = rank._reporter
    assert reporter is not None
    rank.end_reports()
    reporter._thread.join(30)
    assert not reporter._thread.is_alive()
    update(model, 2)
    assert client.engines(MODEL) == []


def test_an_engine_that_is_no_more_reports_no_more(
    running: RunningService, client: EngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_ranks, "_AGENT_SECONDS", 0.0)
    model = from_weighbridge(f"{MODEL}@1", running.address)
    eventually(lambda: client.engines(MODEL))
    del model

    def gone() -> bool:
        gc.collect()
        return only(client).standing == "gone"

    eventually(gone)
