"""Does a version that is ready outlive the replica that received it, if the store does not take it before the replica
leaves?
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.service.push.test_memory_promises import Service
from tests.service.replicas.test_ready_over_nodes import HeldStore, store_away
from tests.service.replicas.test_spread_lanes import MODEL
from tests.support.raw_clients import Arrays, RawClient, TinyModel, assert_equal, tiny_folder, whole_layout
from tests.support.services import RunningService, running_service
from tests.support.waiting import eventually
from weighbridge import EngineClient, TrainerClient
from weighbridge._core.resources import VersionState
from weighbridge._core.tensor_spaces import TensorSpace
from weighbridge._formats.push_sources import StagingPool, TensorSource
from weighbridge.errors import AlreadyExists, Unavailable
from weighbridge_service.plan.declarations import Home, address_in, alone_at, is_alone_elsewhere
from weighbridge_service.push.handover import HandedVersion
from weighbridge_service.push.machine import events as on
from weighbridge_service.replicas.directory import Directory, ReplicaEntry, others_of
from weighbridge_storage.documents.names import REPLICAS, ModelName
from weighbridge_storage.stores.local import LocalStore

NAME = ModelName.parse(MODEL)


@pytest.fixture
def source(tmp_path: Path) -> TinyModel:
    return tiny_folder(tmp_path / "hf", seed=1)


@contextmanager
def replicas(folder: Path, source: TinyModel, count: int, **of_last: Any) -> Iterator[list[RunningService]]:
    """Services over one store that know each other; the last one with settings of its own."""
    with ExitStack() as stack:
        running = []
        for number in range(count):
            settings: dict[str, Any] = {
                "advertise": "127.0.0.1:0",
                "scratch": folder / f"scratch{number}",
                "drain_seconds": 1.0,
                **(of_last if number == count - 1 else {}),
            }
            running.append(stack.enter_context(running_service(folder / "store", **settings)))
        homes = {each.service.intake.home for each in running}
        for each in running:
            here = each.service.intake.home
            eventually(lambda: {here, *each.service.directory.others()} == homes)  # noqa: B023
        with TrainerClient(running[0].address) as trainer:
            trainer.register_files(MODEL, source.files)
        yield running


def push(address: str, arrays: Arrays, step: int = 1) -> int:
    """Push a model from one rank; returns when the version is ready."""
    layout = whole_layout(arrays)
    tensors = [torch.from_numpy(arrays[placement.shard.tensor]) for placement in layout.placements]
    shards = TensorSource(StagingPool(), layout, tensors)
    with TrainerClient(address) as trainer:
        handle = trainer.push_shards(MODEL, layout, TensorSpace.HUGGING_FACE, shards, step=step, rank=0, world_size=1)
        handle.report(60)
        trainer.wait_for(MODEL, handle.number, VersionState.READY, timeout=20)
    return handle.number


def live(running: RunningService) -> int:
    return running.service.catalog.get_version(MODEL, "live").number


def handed_to(running: RunningService) -> list[HandedVersion]:
    """The versions that other replicas hand over to a service from this call on."""
    handed: list[HandedVersion] = []
    take_over = running.service.taking_over.take_over

    def keep(sender: Home, version: HandedVersion, *rest: Callable[..., Any]) -> None:
        handed.append(version)
        take_over(sender, version, *rest)

    running.service.taking_over.take_over = keep  # type: ignore[method-assign]
    return handed


@contextmanager
def writes_hang(running: RunningService, what: str) -> Iterator[None]:
    """Let this service's writes hang, and fail in the end: ``files`` of versions, or heads with a ``claim``, too."""
    store, go_on = running.service.catalog.store, threading.Event()
    before = store.put

    def put(key: str, data: Any, **options: Any) -> str:
        if "/versions/" in key or (what == "claim" and key == NAME.head_key and b'"claim"' in data):
            go_on.wait(60)
            raise Unavailable("the store was away")
        return before(key, data, **options)

    store.put = put  # type: ignore[method-assign]
    try:
        yield
    finally:
        go_on.set()
        store.put = before  # type: ignore[method-assign]


def test_a_version_that_is_held_is_so_where_it_is_handed_over_to(tmp_path: Path, source: TinyModel) -> None:
    with (
        replicas(tmp_path, source, 2) as (leaving, staying),
        RawClient(leaving.address) as raw,
        EngineClient(staying.address) as engine,
    ):
        handed, held = handed_to(staying), HeldStore(tmp_path / "store", source, [1])
        # only the rank reports elements that are not finite: the bytes themselves are finite
        number = raw.push_whole(MODEL, source.arrays, nonfinite=5)
        with store_away(leaving), store_away(staying):
            assert leaving.service.intake.drain(20.0)
            assert [version.nonfinite for version in handed] == [5]
            found = staying.service.catalog.in_memory(NAME, str(number))
            assert found is not None
            assert found.held == ("nonfinite",)
            assert staying.service.catalog.in_memory(NAME, "live") is None
        held.release()
        # a published version uses the count of its manifest, which was made from the bytes
        assert engine.wait_for(MODEL, number, VersionState.DURABLE, timeout=60).held == ()
        assert engine.refs(MODEL) == {"live": number, "latest": number}


def test_a_version_that_the_store_refuses_is_handed_over_and_pulled_and_becomes_durable(
    tmp_path: Path, source: TinyModel, caplog: pytest.LogCaptureFixture
) -> None:
    with replicas(tmp_path, source, 2) as (leaving, staying):
        held = HeldStore(tmp_path / "store", source, [1])
        number = push(leaving.address, source.arrays)
        with store_away(leaving), store_away(staying), caplog.at_level(logging.WARNING):
            assert leaving.service.intake.drain(20.0)
            assert f"handed over to {staying.service.intake.home}" in caplog.text
            assert live(staying) == number
            with EngineClient(staying.address) as engine:
                assert_equal(engine, MODEL, number, source.arrays)
                assert_equal(engine, MODEL, "live", source.arrays)
        held.release()
        with EngineClient(staying.address) as engine:
            engine.wait_for(MODEL, number, VersionState.DURABLE, timeout=60)
            assert_equal(engine, MODEL, number, source.arrays)
            assert engine.refs(MODEL) == {"live": number, "latest": number}
        assert not staying.service.catalog.verify(MODEL, str(number)).problems
        assert push(staying.address, source.arrays, 2) > number


@pytest.mark.parametrize("what", ["files", "claim"])
def test_a_version_that_hangs_in_the_store_is_handed_over_when_half_of_the_time_has_passed(
    tmp_path: Path, source: TinyModel, what: str
) -> None:
    with replicas(tmp_path, source, 2) as (leaving, staying), writes_hang(leaving, what):
        number = push(leaving.address, source.arrays)
        claim = leaving.service.catalog.head(NAME).open[number].claim
        assert bool(claim) is (what == "files")
        begun = time.monotonic()
        assert leaving.service.intake.drain(8.0)
        assert time.monotonic() - begun >= 4.0
        with EngineClient(staying.address) as engine:
            engine.wait_for(MODEL, number, VersionState.DURABLE, timeout=60)
            assert_equal(engine, MODEL, number, source.arrays)
        entry = staying.service.catalog.history(NAME).find(number)
        assert entry is not None
        assert address_in(entry.write_id) == leaving.service.intake.home.address, "under the same claim"


def test_while_a_version_is_not_durable_the_head_names_the_replica_that_holds_it_now(
    tmp_path: Path, source: TinyModel
) -> None:
    """Otherwise the old replica, restarted at its address, would give the version up."""
    with replicas(tmp_path, source, 2) as (leaving, staying):
        held = HeldStore(tmp_path / "store", source, [1])
        number = push(leaving.address, source.arrays)
        assert leaving.service.intake.drain(4.0)
        eventually(lambda: staying.service.catalog.head(NAME).open[number].holder)
        entry = staying.service.catalog.head(NAME).open[number]
        homes = [each.service.intake.home for each in (leaving, staying)]
        assert [is_alone_elsewhere(entry, home) for home in homes] == [True, False]
        assert alone_at(entry) == homes[1].address
        held.release()
        with EngineClient(staying.address) as engine:
            engine.wait_for(MODEL, number, VersionState.DURABLE, timeout=60)


def test_without_another_replica_the_version_that_is_lost_is_named_with_the_reason(
    tmp_path: Path, source: TinyModel, caplog: pytest.LogCaptureFixture
) -> None:
    with replicas(tmp_path, source, 1) as (leaving,):
        HeldStore(tmp_path / "store", source, [1])
        number = push(leaving.address, source.arrays)
        with caplog.at_level(logging.WARNING):
            assert not leaving.service.intake.drain(2.0)
    assert f"{MODEL}@{number}" in caplog.text
    assert "is lost: not durable: " in caplog.text
    assert "no other replica is known" in caplog.text


def test_a_replica_without_memory_is_passed_over_for_the_next_one_and_named_if_there_is_none(
    tmp_path: Path, source: TinyModel, caplog: pytest.LogCaptureFixture
) -> None:
    with replicas(tmp_path, source, 3, memory_budget=0, spill_budget=0) as (leaving, staying, full):
        held = HeldStore(tmp_path / "store", source, [1])
        number = push(leaving.address, source.arrays)
        asked = leaving.service.directory.others()
        in_order = [home for home in asked if home == full.service.intake.home]
        in_order += [home for home in asked if home not in in_order]
        leaving.service.directory.others = lambda: tuple(in_order)  # type: ignore[method-assign]
        assert leaving.service.intake.drain(10.0)
        assert live(staying) == number
        staying.service.directory.others = lambda: (full.service.intake.home,)  # type: ignore[method-assign]
        with caplog.at_level(logging.WARNING):
            assert not staying.service.intake.drain(3.0)
        assert "is lost: " in caplog.text
        assert full.service.intake.home.address in caplog.text
        assert full.service.images.holdings() == []
        held.release()


def test_a_replica_that_leaves_itself_refuses(
    tmp_path: Path, source: TinyModel, caplog: pytest.LogCaptureFixture
) -> None:
    with replicas(tmp_path, source, 2) as (leaving, other):
        HeldStore(tmp_path / "store", source, [1])
        push(leaving.address, source.arrays)
        assert other.service.intake.drain(1.0)
        with caplog.at_level(logging.WARNING):
            assert not leaving.service.intake.drain(3.0)
        assert "the service is shutting down" in caplog.text


def test_a_replica_that_ends_during_the_handover_is_named(
    tmp_path: Path, source: TinyModel, caplog: pytest.LogCaptureFixture
) -> None:
    with replicas(tmp_path, source, 2) as (leaving, dying):
        HeldStore(tmp_path / "store", source, [1])
        number = push(leaving.address, source.arrays)
        take_over, stopped = dying.service.taking_over.take_over, threading.Event()

        def die(sender: Home, version: HandedVersion, *rest: Callable[..., Any]) -> None:
            threading.Thread(target=dying.grpc.stop, args=(0.0,)).start()
            stopped.wait(30)
            take_over(sender, version, *rest)

        dying.service.taking_over.take_over = die  # type: ignore[method-assign]
        with caplog.at_level(logging.WARNING):
            assert not leaving.service.intake.drain(4.0)
        assert "is lost: " in caplog.text
        assert dying.service.intake.home.address in caplog.text
        stopped.set()
        # its heartbeats had ended when the other one gave up, and it takes nothing
        eventually(lambda: not dying.service.images.holdings())
        assert dying.service.catalog.snapshots.get(NAME, number) is None


def test_a_version_that_was_given_up_before_is_handed_over_and_stays_live(tmp_path: Path, source: TinyModel) -> None:
    with replicas(tmp_path, source, 2) as (leaving, staying):
        HeldStore(tmp_path / "store", source, [1])
        number = push(leaving.address, source.arrays)
        with TrainerClient(leaving.address) as trainer:
            eventually(lambda: leaving.service.catalog.snapshots.not_durable)
            trainer.abort(MODEL, number, "not wanted")
        eventually(lambda: leaving.service.catalog.snapshots.get(NAME, number).abandoned)  # type: ignore[union-attr]
        assert leaving.service.intake.drain(4.0)
        eventually(lambda: live(staying) == number)
        with EngineClient(staying.address) as engine:
            assert_equal(engine, MODEL, "live", source.arrays)


def test_a_handover_that_is_repeated_changes_nothing_and_another_push_of_the_number_is_refused(
    tmp_path: Path, source: TinyModel
) -> None:
    with replicas(tmp_path, source, 2) as (leaving, staying):
        held = HeldStore(tmp_path / "store", source, [1])
        number = push(leaving.address, source.arrays)
        sent = handed_to(staying)
        assert leaving.service.intake.drain(4.0)
        (version,) = sent
        held_now = staying.service.images.holdings()
        home = leaving.service.intake.home

        def never(*_files: object) -> bool:
            raise AssertionError("it is there")

        take_over = staying.service.taking_over.take_over
        take_over(home, version, never, never)
        with pytest.raises(AlreadyExists):
            take_over(home, replace(version, claim="another"), never, never)
        assert len(staying.service.images.holdings()) == len(held_now) == 1
        held.release()
        with EngineClient(staying.address) as engine:
            engine.wait_for(MODEL, number, VersionState.DURABLE, timeout=60)


@pytest.mark.parametrize("alone", [False, True])
def test_sigterm_ends_with_zero_after_a_handover_and_with_one_if_a_version_is_lost(
    tmp_path: Path, source: TinyModel, alone: bool
) -> None:
    with ExitStack() as stack:
        store = tmp_path / "store"
        staying = stack.enter_context(running_service(store, advertise="127.0.0.1:0", scratch=tmp_path / "scratch"))
        with TrainerClient(staying.address) as trainer:
            trainer.register_files(MODEL, source.files)
        leaving = Service(store, "--advertise", "127.0.0.1:0", "--drain-seconds", "4")
        stack.enter_context(leaving.process)
        stack.callback(leaving.process.kill)
        if alone:
            staying.service.intake.opener.leaving = on.Draining((), 0.0, 0.0)
        eventually(staying.service.directory.others)
        held = HeldStore(store, source, [1])
        number = push(leaving.grpc, source.arrays)
        leaving.process.send_signal(signal.SIGTERM)
        assert leaving.process.wait(60) == (1 if alone else 0)
        said = leaving.log.read_text()
        if alone:
            assert f"{MODEL}@{number}" in said
            assert "is lost: " in said
        else:
            assert f"handed over to {staying.service.intake.home}" in said
            assert live(staying) == number
        held.release()


# --- the directory -------------------------------------------------------------------------------------------------------


def test_replicas_that_have_ended_or_were_started_again_are_not_asked_twice() -> None:
    me, other, again, old = Home("a:1", "1"), Home("b:1", "2"), Home("b:1", "3"), Home("c:1", "4")
    said = [ReplicaEntry(me, 900), ReplicaEntry(other, 500), ReplicaEntry(again, 800), ReplicaEntry(old, 99)]
    assert others_of(me, said, 100) == (again,)
    assert others_of(me, said, 99) == (again, old)
    assert others_of(old, said, 100) == (me, again)


def test_what_is_known_of_others_survives_the_store_and_an_entry_goes_with_its_replica(
    tmp_path: Path,
) -> None:
    store = LocalStore(tmp_path)
    now_ms = 1_000_000
    first, second = Home("a:1", "b1"), Home("b:1", "b2")
    directory = Directory(store, first, lambda _home: None, lambda: now_ms)
    other = Directory(store, second, lambda _home: None, lambda: now_ms)
    other.refresh()
    directory.refresh()
    assert directory.others() == (second,)
    assert other.others() == ()
    other.met(first)
    assert other.others() == (first,)
    store.put(REPLICAS + "damaged", b"[", mode="overwrite")
    directory.refresh()
    assert directory.others() == (second,)
    now_ms += 600_000
    directory.refresh()
    assert directory.others() == ()
    now_ms += 2 * 86_400_000
    directory.refresh()
    assert set(store.list(REPLICAS)) == {REPLICAS + "b1", REPLICAS + "damaged"}
    directory.start()
    directory.close()
    assert set(store.list(REPLICAS)) == {REPLICAS + "damaged"}


def test_a_replica_that_calls_while_the_others_are_looked_up_is_known_afterwards(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    first, second = Home("10.0.0.1:1", "a"), Home("10.0.0.2:1", "b")
    directory = Directory(store, first, lambda _home: None)
    listed = store.list

    def list_and_call(prefix: str) -> Iterator[str]:
        keys = list(listed(prefix))
        directory.met(second)
        return iter(keys)

    store.list = list_and_call  # type: ignore[method-assign]
    directory.refresh()
    assert directory.others() == (second,)
