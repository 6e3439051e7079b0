"""Do all engines behind one vLLM server serve one version, whatever fails in one of them, and is a server refused of
which some are not heard?

The plug-in's part in the API server is the real one; `tests.engines.test_vllm_engines` runs all of it in vLLM.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import pytest

from tests.support.json_servers import json_server
from tests.support.vllm_engines import MODEL, FakeEngine, FakeVllm
from weighbridge._cli.following import _line
from weighbridge.errors import FailedPrecondition
from weighbridge.follow.agent import Followed, Follower
from weighbridge.follow.engines import EngineDriver
from weighbridge.follow.vllm import VllmServer

UPDATE = {"update_info": {"version": 2}}


def engines(count: int, workers: int = 1, **more: Any) -> list[FakeEngine]:
    return [FakeEngine(index, workers, **more) for index in range(count)]


@contextmanager
def driver(server: FakeVllm) -> Iterator[VllmServer]:
    with server.serving() as url:
        yield VllmServer(url, MODEL, "service:1")


def take_to(engine: EngineDriver, number: int) -> Followed:
    """One update by an agent, without a service."""
    return Follower(cast("Any", None), MODEL, engine).take_to(number)


@pytest.mark.parametrize(("count", "workers"), [(1, 1), (1, 2), (2, 1), (3, 2)])
def test_all_engines_have_the_bytes_before_they_are_paused_and_all_take_the_version(count: int, workers: int) -> None:
    server = FakeVllm(engines(count, workers))
    with driver(server) as engine:
        done = take_to(engine, 2)
    assert (done.error, done.serves, done.nbytes) == ("", 2, 5 * count * workers)
    assert server.served == [2] * count
    for each in server.engines:
        assert each.label == f"{MODEL}@2"
        steps = [step for step in each.asked if step not in ("stage 2", "discard")]
        assert steps == ["prepare 2", "/pause", "apply 2", "/resume"]


def test_a_single_engine_is_asked_no_more_than_before() -> None:
    server = FakeVllm(engines(1))
    with driver(server) as engine:
        engine.prepare(2)
        engine.apply(2, "two")
    assert server.engines[0].asked == ["prepare 2", "apply 2"]


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_an_engine_that_cannot_reach_the_service_is_named_and_none_is_paused(lost: int) -> None:
    server = FakeVllm(engines(3))
    server.engines[lost].fails = {"prepare"}
    with driver(server) as engine:
        done = take_to(engine, 2)
    assert f"engine {lost}, rank 0: the service cannot be reached" in done.error
    assert done.serves == 1
    assert server.served == [1, 1, 1]
    assert not any("/pause" in each.asked for each in server.engines)
    assert [each.prepared for each in server.engines] == [None] * 3, "the others gave it back"
    assert [each.label for each in server.engines] == ["default"] * 3


@pytest.mark.parametrize("failing", [0, 1])
def test_if_one_engine_cannot_take_the_version_the_others_go_back(failing: int) -> None:
    server = FakeVllm(engines(2))
    server.engines[failing].fails = {"apply"}
    with driver(server) as engine:
        done = take_to(engine, 2)
    assert f"engine {failing}: apply of version 2 failed" in done.error
    assert f"engine {1 - failing}: it has undone version 2" in done.error
    assert done.serves == 1
    assert server.served == [1, 1]
    assert not any(each.paused for each in server.engines)
    assert [each.label for each in server.engines] == ["default"] * 2


def test_engines_that_are_left_with_different_versions_are_named_and_stay_paused() -> None:
    server = FakeVllm(engines(2))
    server.engines[0].fails, server.engines[1].fails = {"undo"}, {"apply"}
    with driver(server) as engine:
        done = take_to(engine, 2)
        assert f"{MODEL}@1 by engine 1, rank 0; {MODEL}@2 by engine 0, rank 0" in done.error
        assert done.serves is None
        assert _line(done).startswith(f"{MODEL}@2: failed, and the engine serves different versions: ")
        assert all(each.paused for each in server.engines)
        server.engines[0].fails = server.engines[1].fails = set()
        assert take_to(engine, 2).serves == 2, "the next update brings them together"
    assert not any(each.paused for each in server.engines)


def test_an_engine_that_has_another_version_is_not_taken_for_the_first_one() -> None:
    server = FakeVllm(engines(2))
    server.engines[1].served = 7
    with driver(server) as engine:
        serving = engine.serving()
    assert serving.version is None
    assert f"{MODEL}@7 by engine 1, rank 0" in serving.broken


@pytest.mark.parametrize(
    "ask",
    [
        lambda engine: engine.connect(),
        lambda engine: engine.serving(),
        lambda engine: engine.prepare(2),
    ],
)
def test_a_server_that_answers_for_its_first_engine_alone_is_refused(
    ask: Callable[[VllmServer], object],
) -> None:
    with (
        driver(FakeVllm(engines(2), plugin=False)) as engine,
        pytest.raises(FailedPrecondition, match="1 of 2 workers of this server have responded") as refused,
    ):
        ask(engine)
    assert "API server" in refused.value.fix


def test_a_single_engine_whose_api_server_has_no_plug_in_is_updated() -> None:
    server = FakeVllm(engines(1, 2), plugin=False)
    with driver(server) as engine:
        assert take_to(engine, 2).serves == 2


@pytest.mark.parametrize("missing", ["worker", "twice", "all"])
def test_answers_that_are_not_of_each_worker_once_are_refused(missing: str) -> None:
    server = FakeVllm(engines(1, 2))
    whole = server.engines[0].answers("")
    found = {"worker": whole[:1], "twice": whole[:1] * 2, "all": []}[missing]

    def answer(path: str, _body: Any) -> tuple[int, dict[str, Any]]:
        if path == "/get_world_size":
            return 404, {}
        return 200, {"results": [{**each, "engines": 1} for each in found]}

    with (
        json_server(answer) as url,
        pytest.raises(FailedPrecondition, match="workers of this server have responded"),
    ):
        VllmServer(url, MODEL, "service:1").serving()


def test_a_server_whose_ranks_agree_with_those_of_other_servers_is_refused() -> None:
    server = FakeVllm(engines(1, 2, group=4), moe=True)
    with (
        driver(server) as engine,
        pytest.raises(FailedPrecondition, match="2 of 4 workers that take a version") as refused,
    ):
        engine.connect()
    assert "--data-parallel-external-lb" in refused.value.fix


def test_engines_that_share_experts_agree_themselves() -> None:
    server = FakeVllm(engines(2, group=2), moe=True)
    with driver(server) as engine:
        assert take_to(engine, 2).serves == 2
        asyncio.run(server.rpc("update_weights", update_info={"version": 2, "phase": "prepare"}))
        asyncio.run(server.rpc("update_weights", **UPDATE))
    for each in server.engines:
        assert [step for step in each.asked if "2" in step] == ["prepare 2", "apply 2"] * 2


def test_servers_behind_one_address_are_refused() -> None:
    servers = [FakeVllm(engines(1, instance=name)) for name in "ab"]
    turns = iter(range(100))

    def answer(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        return servers[next(turns) % 2].answer(path, body)

    with (
        json_server(answer) as url,
        pytest.raises(FailedPrecondition, match="ranks that responded are not those") as refused,
    ):
        VllmServer(url, MODEL, "service:1").prepare(2)
    assert "router" in refused.value.fix


def test_a_server_that_is_started_again_between_preparing_and_taking_a_version_is_not_believed() -> None:
    server = FakeVllm(engines(1))
    with driver(server) as engine:
        engine.prepare(2)
        server.engines = engines(1, instance="second", prepared=2)
        with pytest.raises(FailedPrecondition, match="ranks that responded are not those"):
            engine.apply(2, "two")
    assert server.engines[0].label == "default"


# -- vLLM's own calls --


def test_vllms_own_update_reaches_no_engine_if_one_cannot_get_the_bytes() -> None:
    server = FakeVllm(engines(3))
    server.engines[1].fails = {"prepare"}
    with pytest.raises(FailedPrecondition, match=r"engine 1: version 2 was not prepared"):
        asyncio.run(server.rpc("update_weights", **UPDATE))
    assert server.served == [1, 1, 1]
    assert [each.asked for each in server.engines] == [
        ["stage 2", "discard 2"],
        ["stage 2"],
        ["stage 2", "discard 2"],
    ]


def test_vllms_own_update_is_taken_back_if_one_engine_fails_late_and_that_one_is_not_asked_again() -> None:
    server = FakeVllm(engines(2))
    server.engines[1].fails = {"apply"}
    with pytest.raises(FailedPrecondition, match=r"(?s)engine 0: it has undone version 2.*engine 1: apply of"):
        asyncio.run(server.rpc("update_weights", **UPDATE))
    assert server.served == [1, 1]
    assert [each.asked[-1] for each in server.engines] == ["undo 2", "apply 2"]


def test_a_version_is_staged_on_all_engines_or_on_none() -> None:
    server = FakeVllm(engines(2))
    stage = {"update_info": {"version": 2, "phase": "stage"}}
    asyncio.run(server.rpc("update_weights", **stage))
    assert [(each.served, each.prepared) for each in server.engines] == [(1, 2)] * 2
    server.engines[0].fails = {"stage"}
    server.engines[1].prepared = None
    with pytest.raises(FailedPrecondition, match="engine 0: stage of version 2 failed"):
        asyncio.run(server.rpc("update_weights", **stage))
    assert [each.prepared for each in server.engines][1] is None


def test_vllms_own_update_with_an_entry_for_each_worker_is_an_update_too() -> None:
    server = FakeVllm(engines(2))
    server.engines[1].fails = {"apply"}
    each = {"version": 2}
    with pytest.raises(FailedPrecondition, match="engine 0: it has undone version 2"):
        asyncio.run(server.rpc("update_weights", update_info=[each, each]))
    assert server.served == [1, 1]


def test_updates_reach_the_engines_one_after_the_other() -> None:
    server = FakeVllm(engines(2))

    async def both() -> None:
        updates = [server.rpc("update_weights", update_info={"version": number}) for number in (2, 3)]
        await asyncio.gather(*updates)

    asyncio.run(both())
    first, second = (each.asked for each in server.engines)
    assert first == second == ["stage 2", "apply 2", "stage 3", "apply 3"]


@pytest.mark.parametrize("backend", ["weighbridge", "nccl"])
def test_calls_that_bring_no_weights_from_the_service_are_made_as_vllm_makes_them(backend: str) -> None:
    server = FakeVllm(engines(2))
    server.vllm_config.weight_transfer_config.backend = backend
    assert asyncio.run(server.rpc("sleep", level=1)) == ["sleep of engine 0"]
    phase = "prepare" if backend == "weighbridge" else "apply"
    info = {"version": 2, "phase": phase}
    for each in server.engines:
        each.prepared = 2
    asyncio.run(server.rpc("update_weights", update_info=info))
    assert [each.asked for each in server.engines] == [[f"{phase} 2"]] * 2
