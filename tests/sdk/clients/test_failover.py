"""Does a client with several addresses fail over to another replica when the one in use is gone?"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.support.killable_service import KillableService
from tests.support.ports import reserved_port
from tests.support.raw_clients import TinyModel, assert_equal, tiny_folder
from weighbridge import AsyncEngineClient, EngineClient, InvalidArgument, TrainerClient, Unavailable
from weighbridge._clients import pushing
from weighbridge._core.tensor_spaces import TensorSpace
from weighbridge._transport.addresses import Addresses
from weighbridge.v1 import checkpoint_service_pb2 as pb

MODEL = "acme/tiny"


@pytest.fixture
def source(tmp_path: Path) -> TinyModel:
    return tiny_folder(tmp_path / "hf", hidden_size=8192)


@pytest.fixture
def replicas(tmp_path: Path, source: TinyModel) -> Iterator[list[KillableService]]:
    """Two services over one store, in which a version is durable."""
    started = [KillableService(tmp_path / "store") for _ in range(2)]
    try:
        for each in started:
            each.start()
        with TrainerClient(started[0].address, lane="grpc") as trainer:
            trainer.register_files(MODEL, source.files)
            trainer.push_folder(MODEL, source.folder, step=1).wait(timeout=60)
        yield started
    finally:
        for each in started:
            each.kill()


def both(replicas: list[KillableService]) -> str:
    return ",".join(each.address for each in replicas)


def test_calls_go_to_the_first_replica_that_can_be_reached_without_a_pause(
    replicas: list[KillableService],
) -> None:
    nobody = f"127.0.0.1:{reserved_port()}"
    with EngineClient(f"{nobody}, {replicas[1].address}", retry_seconds=0.0) as engine:
        assert engine.version(MODEL).number == 1
        assert engine.refs(MODEL)["latest"] == 1


def test_a_pull_goes_on_at_another_replica_where_it_broke(replicas: list[KillableService], source: TinyModel) -> None:
    with EngineClient(both(replicas), lane="grpc", connections=1) as engine:
        pull = iter(engine.pull(MODEL, 1))
        found = [next(pull)]
        replicas[0].kill()
        found += pull
        assert engine._connection.addresses.current == replicas[1].address
    assert {name: tensor.numpy().tobytes() for name, tensor in found} == {
        name: array.tobytes() for name, array in source.arrays.items()
    }


def test_pushes_after_the_end_of_a_replica_go_to_another_one(
    replicas: list[KillableService], source: TinyModel
) -> None:
    with TrainerClient(both(replicas), lane="grpc") as trainer, EngineClient(both(replicas)) as engine:
        assert trainer.push_folder(MODEL, source.folder, step=2).wait(timeout=60).number == 2
        replicas[0].kill()
        assert trainer.push_folder(MODEL, source.folder, step=3).wait(timeout=60).number == 3
        assert_equal(engine, MODEL, 3, source.arrays)


def test_a_watch_hears_of_versions_from_another_replica(replicas: list[KillableService], source: TinyModel) -> None:
    with EngineClient(both(replicas)) as engine, TrainerClient(replicas[1].address) as trainer:
        watch = engine.watch(MODEL, "latest")
        assert next(watch).number == 1
        replicas[0].kill()
        trainer.push_folder(MODEL, source.folder, step=2).wait(timeout=60)
        assert next(watch).number == 2


def test_the_asyncio_client_goes_on_with_another_replica(replicas: list[KillableService], source: TinyModel) -> None:
    async def calls() -> dict[str, bytes]:
        async with AsyncEngineClient(both(replicas), lane="grpc") as engine:
            assert (await engine.version(MODEL)).number == 1
            replicas[0].kill()
            assert (await engine.version(MODEL)).number == 1
            return {name: tensor.numpy().tobytes() async for name, tensor in engine.pull(MODEL, 1)}

    assert asyncio.run(calls()) == {name: array.tobytes() for name, array in source.arrays.items()}


def test_when_no_replica_can_be_reached_the_error_names_one_and_comes_in_time() -> None:
    nobody = f"127.0.0.1:{reserved_port()},127.0.0.1:{reserved_port()}"
    with EngineClient(nobody, retry_seconds=1.0) as engine:
        begun = time.monotonic()
        with pytest.raises(Unavailable, match=r"the service at 127\.0\.0\.1:\d+ cannot be reached"):
            engine.version(MODEL)
        assert time.monotonic() - begun < 60.0, "it tries for a second; without a limit it would for ever"
        assert engine.server == nobody


def test_every_address_has_its_turn_and_one_that_answers_is_kept() -> None:
    addresses = Addresses.of("a:1, b:2,,c:3,a:1")
    assert addresses.all == ("a:1", "b:2", "c:3")
    assert addresses.current == "a:1"
    moves = [("a:1", True, "b:2"), ("a:1", True, "b:2")]  # a repeated failure moves no further
    for address, at_once, then in moves:
        assert (addresses.failed(address), addresses.current) == (at_once, then)
    addresses.answered("b:2")
    # once all have failed a pause is due, and the next round is complete again
    for address, at_once, then in [("b:2", True, "c:3"), ("c:3", True, "a:1"), ("a:1", False, "b:2")]:
        assert (addresses.failed(address), addresses.current) == (at_once, then)


@pytest.mark.parametrize(
    "server",
    ["host:0", "good:1,host:70000", ",", " , ", "host", "http://host:50051", "grpc://host", ":50051"],
)
def test_an_address_that_cannot_be_is_refused(server: str) -> None:
    with pytest.raises(InvalidArgument):
        EngineClient(server)


def test_pulls_that_are_left_early_or_read_whole_stay_with_their_replica(
    replicas: list[KillableService], source: TinyModel
) -> None:
    with EngineClient(both(replicas), lane="grpc") as engine:
        for _ in range(3):
            next(iter(engine.pull(MODEL, 1)))
            assert len(dict(engine.pull(MODEL, 1))) == len(source.arrays)
            assert engine._connection.addresses.current == replicas[0].address


def test_a_closed_client_ends_its_pulls_and_watches_whatever_replicas_there_are(
    replicas: list[KillableService],
) -> None:
    engine = EngineClient(both(replicas), lane="grpc", connections=1)
    heard: list[object] = []

    def watch() -> None:
        try:
            heard.extend(engine.watch(MODEL, "latest"))
        except Unavailable as error:
            heard.append(error)

    watching = threading.Thread(target=watch, daemon=True)
    watching.start()
    pull = iter(engine.pull(MODEL, 1))
    next(pull)
    engine.close()
    with pytest.raises(Unavailable, match="closed"):
        list(pull)
    watching.join(60.0)
    assert not watching.is_alive()


def test_a_failure_is_forgotten_once_another_address_has_answered_and_foreign_ones_do_not_count() -> None:
    addresses = Addresses(["a:1", "b:2"])
    assert not addresses.failed("c:3"), "a replica that the service has named"
    assert addresses.failed("a:1")
    addresses.answered("b:2")
    assert addresses.failed("b:2"), "the first may be back"
    assert addresses.current == "a:1"


def test_a_rank_that_is_sent_to_another_replica_waits_there_for_what_is_left_of_its_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    left = iter((5.0, 2.0))
    hold = SimpleNamespace()
    monkeypatch.setattr(pushing.push_calls, "declare", lambda *_, within, meanwhile: within)
    waits = []

    def run(steps: float, *, at: str, retry_seconds: float | None) -> pb.DeclareLayoutResponse:
        waits.append((at, steps))
        return pb.DeclareLayoutResponse(push_at="" if at == "b:1" else "b:1")

    class Terms:
        agreement = None

        @property
        def hold(self) -> SimpleNamespace:
            hold.left = next(left)
            return hold

    addresses = Addresses(["a:1", "b:1"])
    pusher = pushing.Pusher(cast(Any, SimpleNamespace(run=run, addresses=addresses)))
    _, at = pusher._declare(pb.PushHeader(), cast(Any, None), TensorSpace.MEGATRON, cast(Any, Terms()), "a:1")
    assert waits == [("a:1", 5.0), ("b:1", 2.0)]
    assert (at, addresses.current) == ("b:1", "b:1")
