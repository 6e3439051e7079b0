"""Does the service know how a version began: how long ago the trainer had called when it was opened, and when its first
byte came?
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.raw_clients import (
    RawClient,
    TinyModel,
    cut,
    rows_layout,
    stream_of,
    tiny_folder,
    whole_layout,
)
from tests.support.reference import tiny_config, tiny_model
from tests.support.services import RunningService, running_service
from tests.support.waiting import eventually
from weighbridge import TrainerClient
from weighbridge._clients.calls import push_calls
from weighbridge._clients.calls.steps import UnaryCall
from weighbridge._clients.holding import policy
from weighbridge._core.engines.facts import EngineReport
from weighbridge.errors import DeadlineExceeded, InvalidArgument, Unavailable
from weighbridge.v1 import checkpoint_service_pb2 as pb
from weighbridge_service.catalog.snapshots import Beginning
from weighbridge_service.engines.entries import Owner
from weighbridge_service.push import opener, session
from weighbridge_storage.documents.names import ModelName

MODEL = "acme/tiny"
WAITED = 2.5
OF_AGENT = {
    "wait": 0.0, "stage": 0.2, "agree": 0.05, "pause": 0.02, "apply": 0.03, "resume": 0.01, "confirm": 0.04,
}  # fmt: skip


@pytest.fixture
def source(tmp_path: Path) -> TinyModel:
    return tiny_folder(tmp_path / "hf")


@pytest.fixture
def running(tmp_path: Path, source: TinyModel) -> Iterator[RunningService]:
    lane = str(tmp_path / "lane.sock")
    with running_service(tmp_path / "store", {MODEL: source.files}, local_socket=lane) as service:
        yield service


@pytest.fixture
def raw(running: RunningService) -> Iterator[RawClient]:
    with RawClient(running.address) as client:
        yield client


def beginning(running: RunningService, model: str, number: int) -> Beginning | None:
    found = running.service.registry.find(ModelName.parse(model), number)
    assert found is not None
    return found.snapshot.beginning


def step_of(running: RunningService, number: int, age_s: float = 1.0) -> dict[str, float]:
    """Parts of a step that an agent tells of, as the service shows them."""
    report = EngineReport(
        "e1", MODEL, "vllm", version=number, update_version=number, update_age_seconds=age_s, update_parts=OF_AGENT
    )  # fmt: skip
    return running.service.engines.report(Owner(), report).update_parts


class ServiceClock:
    """The clock by which the service says when a version was opened, and what became of it; set by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_ms = 1_700_000_000_000
        for module in (opener, session):
            monkeypatch.setattr(module, "unix_ms", lambda: self.now_ms)


def test_parts_lie_between_the_opening_the_first_byte_of_any_rank_and_the_end_of_the_last(
    running: RunningService, raw: RawClient, source: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = ServiceClock(monkeypatch)
    number = raw.open(MODEL, ranks=2, request_id="q", call_age_seconds=0.75)
    clock.now_ms += 100
    assert raw.open(MODEL, ranks=2, request_id="q", call_age_seconds=9.0) == number, "of the other rank"
    layouts = [rows_layout(source.arrays, rank, 2) for rank in range(2)]
    with pytest.raises(DeadlineExceeded):
        raw.declare(MODEL, number, layouts[0], rank=0, seconds=0.1)
    streams = {}
    for rank in (1, 0):
        assigned = raw.declare(MODEL, number, layouts[rank], rank=rank)
        streams[rank] = cut(stream_of(source.arrays, layouts[rank], assigned))
    assert beginning(running, MODEL, number) == Beginning(0.75, 0)
    clock.now_ms += 200
    raw.push(MODEL, number, streams[1][:1], rank=1)
    assert beginning(running, MODEL, number) == Beginning(0.75, clock.now_ms)
    clock.now_ms += 4000
    for rank in (0, 1):
        raw.push(MODEL, number, streams[rank], rank=rank)
        raw.seal(MODEL, number, rank)
    parts = step_of(running, number)
    assert list(parts) == ["offer", "open", "receive", "hear", *OF_AGENT]
    assert (parts["offer"], parts["open"], parts["receive"]) == (0.75, 0.3, 4.0)


def test_of_a_client_that_does_not_tell_its_call_the_step_begins_with_the_opening(
    running: RunningService, raw: RawClient, source: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    ServiceClock(monkeypatch)
    parts = step_of(running, raw.push_whole(MODEL, source.arrays))
    assert list(parts) == ["open", "receive", "hear", *OF_AGENT]


@pytest.mark.parametrize("age", [math.nan, math.inf, -0.001, 1e12])
def test_an_age_that_cannot_be_is_refused_and_opens_nothing(raw: RawClient, age: float) -> None:
    with pytest.raises(InvalidArgument, match=f"called for {age} seconds ago"):
        raw.open(MODEL, call_age_seconds=age)
    assert raw.open(MODEL, call_age_seconds=0.0) == 1


def test_after_a_restart_receiving_lasts_from_the_opening_and_nothing_before_it_is_known(
    tmp_path: Path, source: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = ServiceClock(monkeypatch)
    with running_service(tmp_path / "store", {MODEL: source.files}) as first, RawClient(first.address) as raw:
        number = raw.open(MODEL, call_age_seconds=0.75)
        clock.now_ms += 300
        layout = whole_layout(source.arrays)
        pieces = cut(stream_of(source.arrays, layout, raw.declare(MODEL, number, layout)))
        raw.push(MODEL, number, pieces[:1])
        clock.now_ms += 4000
        raw.push(MODEL, number, pieces)
        raw.seal(MODEL, number)
        assert step_of(first, number)["receive"] == 4.0
    with running_service(tmp_path / "store") as second:
        assert step_of(second, number) == {"receive": 4.3, **OF_AGENT}


def test_only_the_replica_that_has_opened_a_version_knows_how_it_began(tmp_path: Path, source: TinyModel) -> None:
    with ExitStack() as stack:
        replicas = [
            stack.enter_context(running_service(tmp_path / "store", {MODEL: source.files}, advertise="127.0.0.1:0"))
            for _ in range(2)
        ]
        clients = [stack.enter_context(RawClient(each.address)) for each in replicas]
        numbers = {
            each.open(MODEL, ranks=2, request_id="q", call_age_seconds=age)
            for each, age in zip(clients, (0.75, 0.5), strict=True)
        }
        (number,) = numbers
        layouts = [rows_layout(source.arrays, rank, 2) for rank in range(2)]
        declare = [partial(clients[rank].declare, MODEL, number, layouts[rank], rank=rank) for rank in range(2)]
        with ThreadPoolExecutor() as pool:
            assigned = [each.result() for each in [pool.submit(each) for each in declare]]
            for rank, client in enumerate(clients):
                client.push(MODEL, number, cut(stream_of(source.arrays, layouts[rank], assigned[rank])), rank=rank)
            for each in [pool.submit(client.seal, MODEL, number, rank) for rank, client in enumerate(clients)]:
                each.result()
        eventually(lambda: all("receive" in step_of(each, number) for each in replicas))
        opened = beginning(replicas[0], MODEL, number)
        assert opened is not None
        assert opened.offer_s == 0.75
        assert beginning(replicas[1], MODEL, number) is None
        assert step_of(replicas[0], number)["offer"] == 0.75
        assert step_of(replicas[1], number).keys().isdisjoint({"offer", "open"})


def test_of_a_version_that_was_given_up_no_part_of_the_service_is_said(
    running: RunningService, raw: RawClient, source: TinyModel
) -> None:
    number = raw.open(MODEL, call_age_seconds=0.75)
    layout = whole_layout(source.arrays)
    pieces = cut(stream_of(source.arrays, layout, raw.declare(MODEL, number, layout)))
    raw.push(MODEL, number, pieces[:1])
    raw.call(raw.checkpoints.AbortVersion, pb.AbortVersionRequest(model=MODEL, number=number, reason="enough"))
    assert step_of(running, number) == OF_AGENT


class TrainerClock:
    """The trainer's clock, by which `WAITED` seconds pass between each call and its opening."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(policy, "time", SimpleNamespace(monotonic=lambda: 100.0))
        monkeypatch.setattr(push_calls, "time", SimpleNamespace(monotonic=lambda: 100.0 + WAITED))


def state_of(source: TinyModel) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(array.copy()) for name, array in source.arrays.items()}


PUSHES: dict[str, Callable[[TrainerClient, TinyModel], Any]] = {
    "tensors": lambda trainer, source: trainer.push_state_dict(MODEL, state_of(source), step=1),
    "gathered": lambda trainer, source: trainer.push_gathered(MODEL, state_of(source).items(), step=1),
    "folder": lambda trainer, source: trainer.push_folder(MODEL, source.folder, step=1),
    "import": lambda trainer, source: trainer.import_folder(MODEL, source.folder, step=1),
}


@pytest.mark.parametrize("way", PUSHES)
@pytest.mark.parametrize("lane", ["grpc", "local"])
def test_every_way_to_push_tells_how_long_ago_it_was_called(
    running: RunningService, source: TinyModel, monkeypatch: pytest.MonkeyPatch, lane: Any, way: str
) -> None:
    TrainerClock(monkeypatch)
    with TrainerClient(running.address, lane=lane) as trainer:
        handle = PUSHES[way](trainer, source)
        version = handle.wait(timeout=60)
        assert handle.report().lane == lane
    found = beginning(running, MODEL, version.number)
    assert found is not None
    assert found.offer_s == WAITED
    assert version.create_time_ms <= found.first_byte_ms <= version.ready_time_ms


def test_what_is_pushed_behind_weights_and_adapters_tell_it_too(
    running: RunningService, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    peft = pytest.importorskip("peft")
    config = tiny_config("llama", tied=False, num_hidden_layers=2, vocab_size=64)
    base = tiny_model(config, seed=1)
    base.save_pretrained(tmp_path / "base")
    adapted = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    TrainerClock(monkeypatch)
    with TrainerClient(running.address) as trainer:
        trainer.import_folder("acme/base", tmp_path / "base").wait(timeout=60)
        adapter = trainer.push_adapter("acme/alice", adapted, base="acme/base@1", step=1)
        weights = trainer.push_state_dict("acme/base", tiny_model(config, seed=2), step=1, state={"seen": 7})
        assert weights.training is not None
        for handle in (adapter, weights, weights.training):
            found = beginning(running, handle.model, handle.wait(timeout=60).number)
            assert found is not None
            assert found.offer_s == WAITED


def test_the_age_is_that_of_each_try_and_one_without_a_call_is_not_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opening = pb.OpenVersionRequest(model=MODEL, step=3)
    steps = push_calls.open_version(opening, called=40.0)
    asked = next(steps)
    assert isinstance(asked, UnaryCall)
    for now, age in ((40.0, 0.0), (41.5, 1.5), (70.0, 30.0)):
        monkeypatch.setattr(push_calls, "time", SimpleNamespace(monotonic=lambda now=now: now))
        said = pb.OpenVersionRequest.FromString(b"".join(asked.encoded))
        assert said == pb.OpenVersionRequest(model=MODEL, step=3, call_age_seconds=age)
    with pytest.raises(Unavailable):
        steps.throw(Unavailable("gone"))
    untold = next(push_calls.open_version(opening))
    assert isinstance(untold, UnaryCall)
    assert pb.OpenVersionRequest.FromString(b"".join(untold.encoded)) == opening


def test_a_call_within_another_one_has_begun_with_that(monkeypatch: pytest.MonkeyPatch) -> None:
    now = SimpleNamespace(monotonic=lambda: 100.0)
    monkeypatch.setattr(policy, "time", now)
    outer = policy.HoldPolicy(max_hold_s=60.0).begin()
    with policy.held(outer):
        monkeypatch.setattr(policy, "time", SimpleNamespace(monotonic=lambda: 107.0))
        inner = policy.HoldPolicy().begin()
    assert (outer.began, inner.began, policy.HoldPolicy().begin().began) == (100.0, 100.0, 107.0)
    assert inner.until == 160.0
