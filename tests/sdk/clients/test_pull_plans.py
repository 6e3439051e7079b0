"""Do the streams of a planned pull read nothing from the store again, and is a known layout not sent again?"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.raw_clients import tiny_folder
from tests.support.services import RunningService, running_service
from tests.support.waiting import eventually
from weighbridge import EngineClient, FullTensors, TensorParallel, TrainerClient, VersionState
from weighbridge._clients.calls import pull_calls
from weighbridge._clients.calls.known_layouts import KnownLayouts
from weighbridge._clients.calls.pull_calls import PullPlan
from weighbridge._clients.calls.steps import UnaryCall, take
from weighbridge._core.boxes import Box
from weighbridge._core.dtypes import parse
from weighbridge._core.layouts import Layout, Shard, TensorSpec
from weighbridge._core.tensor_spaces import TensorSpace
from weighbridge._transport import wire
from weighbridge.aio import AsyncEngineClient
from weighbridge.errors import DataLoss
from weighbridge.v1 import resources_pb2, weight_service_pb2
from weighbridge_storage.documents.names import ModelName

MODEL = "acme/tiny"


@pytest.fixture(params=["grpc", "local"])
def lane(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def running(tmp_path: Path) -> Iterator[RunningService]:
    with running_service(tmp_path / "store", local_socket=str(tmp_path / "lane.sock")) as service:
        yield service


def test_the_streams_of_a_pull_do_not_ask_the_store_again_for_what_its_plan_has_read(
    running: RunningService, tmp_path: Path, lane: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tiny_folder(tmp_path / "hf", seed=0)
    with TrainerClient(running.address) as trainer, EngineClient(running.address, lane=lane) as engine:
        trainer.register_files(MODEL, source.files)
        trainer.push_folder(MODEL, source.folder, step=1).report(60)
        # not by a watch, which may read the head once more when it has ended
        eventually(lambda: trainer.version(MODEL, 1).state is VersionState.DURABLE)
        heads, reads = running.service.catalog.heads, Counter[str]()
        read = heads.read

        def counted(model: ModelName) -> Any:
            reads["head"] += 1
            return read(model)

        monkeypatch.setattr(heads, "read", counted)
        for version in ("live", "latest", 1):
            reads.clear()
            pulled = {name: tensor.numpy() for name, tensor in engine.pull(MODEL, version)}
            assert pulled.keys() == source.arrays.keys()
            assert all(np.array_equal(pulled[name], each) for name, each in source.arrays.items())
            assert reads["head"] == 1, version


@pytest.fixture
def layouts_sent(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Digests of the layouts that services of this process put into their answers."""
    sent: list[str] = []
    encode = wire.layout_to_proto

    def noted(layout: Layout, *rest: Any) -> Any:
        sent.append(layout.digest)
        return encode(layout, *rest)

    monkeypatch.setattr(wire, "layout_to_proto", noted)
    return sent


def test_a_layout_is_sent_once_for_each_thing_that_a_client_asks_for(
    running: RunningService, tmp_path: Path, layouts_sent: list[str]
) -> None:
    first, second = (tiny_folder(tmp_path / f"hf{seed}", seed=seed) for seed in (0, 1))
    asked = [(FullTensors(), None), (FullTensors(), "bf16"), (TensorParallel(2, 0), None), (TensorParallel(2, 1), None)]  # fmt: skip
    with TrainerClient(running.address, lane="grpc") as trainer, EngineClient(running.address) as engine:
        trainer.register_files(MODEL, first.files)
        trainer.push_folder(MODEL, first.folder, step=1).wait(timeout=60)
        layouts_sent.clear()
        plans = [engine.pull(MODEL, "live", request, dtype=dtype).layout for request, dtype in asked]
        assert layouts_sent == [layout.digest for layout in plans]
        assert len({*layouts_sent}) == len(asked)
        trainer.push_folder(MODEL, second.folder, step=2).wait(timeout=60)
        layouts_sent.clear()
        for (request, dtype), layout in zip(asked, plans, strict=True):
            pull = engine.pull(MODEL, "live", request, dtype=dtype)
            assert (pull.version.number, pull.layout) == (2, layout)
        pulled = {name: tensor.numpy() for name, tensor in engine.pull(MODEL, "live")}
        assert all(np.array_equal(pulled[name], each) for name, each in second.arrays.items())
        assert not layouts_sent


def test_an_asyncio_client_is_sent_a_layout_once(
    running: RunningService, tmp_path: Path, layouts_sent: list[str]
) -> None:
    source = tiny_folder(tmp_path / "hf", seed=0)
    with TrainerClient(running.address, lane="grpc") as trainer:
        trainer.register_files(MODEL, source.files)
        trainer.push_folder(MODEL, source.folder, step=1).wait(timeout=60)
    layouts_sent.clear()

    async def main() -> None:
        async with AsyncEngineClient(running.address) as engine:
            for _ in range(3):
                pulled = {name: tensor.numpy() async for name, tensor in engine.pull(MODEL)}
                assert all(np.array_equal(pulled[name], each) for name, each in source.arrays.items())

    asyncio.run(main())
    assert len(layouts_sent) == 1


def _layout(rows: int) -> Layout:
    spec = TensorSpec("weight", parse("fp32"), (rows, 2))
    return Layout.stream([spec], [Shard("weight", Box((0, 0), (rows, 2)))])


def _planned(layouts: KnownLayouts, answer: weight_service_pb2.PlanPullResponse, known: str = "") -> PullPlan:
    """The plan that a client makes of an answer after it has announced a known layout."""

    def call(step: UnaryCall) -> bytes:
        request = weight_service_pb2.PlanPullRequest.FromString(b"".join(step.request))
        assert request.known_layout == known
        return answer.SerializeToString()

    return take(pull_calls.plan_pull(layouts, MODEL, "live", None, None), call)


def test_the_layout_that_a_service_sends_anew_takes_the_place_of_the_known_one() -> None:
    layouts = KnownLayouts()

    def answer(rows: int, digest: str, *, sent: bool) -> weight_service_pb2.PlanPullResponse:
        layout = wire.layout_to_proto(_layout(rows), TensorSpace.HUGGING_FACE) if sent else None
        version = resources_pb2.Version(model=MODEL, number=1, state=resources_pb2.VERSION_STATE_READY)
        return weight_service_pb2.PlanPullResponse(version=version, layout=layout, layout_digest=digest)

    assert _planned(layouts, answer(1, "one", sent=True)).layout == _layout(1)
    assert _planned(layouts, answer(1, "one", sent=False), "one").layout == _layout(1)
    assert _planned(layouts, answer(2, "two", sent=True), "one").layout == _layout(2)
    assert _planned(layouts, answer(2, "two", sent=False), "two").layout == _layout(2)


def test_an_answer_that_counts_on_a_layout_which_the_client_never_had_is_refused() -> None:
    layouts = KnownLayouts()
    with pytest.raises(DataLoss, match="does not have"):
        _planned(layouts, weight_service_pb2.PlanPullResponse(layout_digest="one"))
    layouts.keep(*_key_of_full_pull(), "one", _layout(1))
    with pytest.raises(DataLoss, match="does not have"):
        _planned(layouts, weight_service_pb2.PlanPullResponse(layout_digest="two"), "one")


def _key_of_full_pull() -> list[Any]:
    full = wire.request_to_proto(FullTensors())
    return [(MODEL, full.SerializeToString(), "")]


def test_layouts_that_were_not_asked_for_lately_make_room() -> None:
    layouts = KnownLayouts(most_placements=3)
    for name in "abc":
        layouts.keep(name, name, _layout(1))
    assert layouts.find("a")
    layouts.keep("d", "d", _layout(1))
    assert [name for name in "abcd" if layouts.find(name)] == ["a", "c", "d"]
    layouts.keep("a", "again", _layout(2))
    assert [name for name in "abcd" if layouts.find(name)] == ["a", "c", "d"]
    many = Layout.stream([TensorSpec("w", parse("fp32"), (4,))], [Shard("w", Box((i,), (1,))) for i in range(4)])
    layouts.keep("many", "many", many)
    assert [name for name in ("a", "many") if layouts.find(name)] == ["a"]
