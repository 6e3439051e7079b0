"""Does a version that several replicas hold together outlive those of them that leave before it is durable?"""

from __future__ import annotations

import functools
import logging
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.service.push.test_handover import NAME, handed_to, live, replicas
from tests.service.push.test_memory_promises import Service
from tests.service.replicas.test_ready_over_nodes import HeldStore, store_away
from tests.service.replicas.test_replicas import FILE_BYTES
from tests.service.replicas.test_spread_lanes import MODEL, push_all
from tests.support.raw_clients import RawClient, TinyModel, assert_equal, rows_layout, tiny_folder
from tests.support.services import RunningService, running_service
from tests.support.waiting import eventually
from weighbridge import EngineClient, TrainerClient
from weighbridge._core.resources import VersionState
from weighbridge._formats.safetensors_files import lay_out_files
from weighbridge.errors import InvalidArgument, Unavailable, VersionFailed
from weighbridge_service.models import registered_model
from weighbridge_service.plan.declarations import Home
from weighbridge_service.push.machine import events as on
from weighbridge_service.push.machine.phases import Phase
from weighbridge_service.replicas.links import Links
from weighbridge_service.replicas.takeovers import handed_from_proto, handed_to_proto


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registered_model, "lay_out_files", functools.partial(lay_out_files, max_shard_bytes=FILE_BYTES))


@pytest.fixture
def source(tmp_path: Path) -> TinyModel:
    return tiny_folder(tmp_path / "hf", seed=1)


def push(addresses: Sequence[str], source: TinyModel, step: int = 1) -> int:
    """Push a model from one rank for each address; returns when the version is ready at each of them."""
    with ExitStack() as stack:
        clients = [stack.enter_context(TrainerClient(address)) for address in addresses]
        number, _ = push_all(clients, source.arrays, rows_layout, step)
        for client in clients:
            client.wait_for(MODEL, number, VersionState.READY, timeout=20)
    return number


def home_of(running: RunningService) -> Home:
    return running.service.intake.home


def files_held(running: RunningService, number: int) -> set[str]:
    """The files of a version that are in images of a replica."""
    sessions = running.service.registry.of_version(NAME, number)
    return {file for session in sessions for file in files_named(running) if session.holds(file)}


def files_named(running: RunningService) -> list[str]:
    return list(running.service.catalog.model(NAME).files.file_sizes)


def losses(running: RunningService) -> list[Home]:
    """The replicas that this one considers lost from this call on."""
    gone: list[Home] = []
    lost = running.service.shared.lost

    def keep(replica: Home, error: VersionFailed) -> None:
        lost(replica, error)
        gone.append(replica)

    running.service.shared.lost = keep  # type: ignore[method-assign]
    return gone


def waits_no_more(running: RunningService, other: Home, gone: list[Home]) -> bool:
    """Whether a replica considers another one lost, or shares no push with it."""
    heartbeat = running.service._heartbeat
    assert heartbeat is not None
    return other in gone or other not in heartbeat._peers


def assert_pulled(running: RunningService, number: int, source: TinyModel) -> None:
    with EngineClient(running.address) as engine:
        assert_equal(engine, MODEL, number, source.arrays)


def assert_becomes_durable(running: RunningService, number: int, source: TinyModel) -> None:
    with EngineClient(running.address) as engine:
        engine.wait_for(MODEL, number, VersionState.DURABLE, timeout=60)
        assert_equal(engine, MODEL, number, source.arrays)
        assert engine.refs(MODEL) == {"live": number, "latest": number}
    assert not running.service.catalog.verify(MODEL, str(number)).problems


def end(running: RunningService) -> None:
    """Stop a drained service, as the end of its process would."""
    running.grpc.stop(0.0)


def test_the_share_of_a_replica_that_leaves_goes_to_one_that_takes_part_and_the_version_becomes_durable(
    tmp_path: Path, source: TinyModel, caplog: pytest.LogCaptureFixture
) -> None:
    with replicas(tmp_path, source, 2) as (leaving, staying):
        held = HeldStore(tmp_path / "store", source, [1])
        number = push([leaving.address, staying.address], source)
        own = files_held(staying, number)
        assert own != set(files_named(staying))
        with store_away(leaving), store_away(staying), caplog.at_level(logging.WARNING):
            assert leaving.service.intake.drain(20.0)
            assert f"handed over to {home_of(staying)}" in caplog.text
            gone = losses(staying)
            end(leaving)
            assert files_held(staying, number) == set(files_named(staying))
            assert_pulled(staying, number, source)
            eventually(lambda: waits_no_more(staying, home_of(leaving), gone))
            assert live(staying) == number
        held.release()
        assert_becomes_durable(staying, number, source)
        eventually(lambda: files_held(staying, number) == own)  # the rest is read from the store now
        assert push([staying.address], source, 2) > number


def test_the_share_goes_to_a_replica_that_takes_no_part_if_the_others_have_no_memory(
    tmp_path: Path, source: TinyModel
) -> None:
    whole = sum(array.nbytes for array in source.arrays.values())
    with replicas(tmp_path, source, 3, memory_budget=whole, spill_budget=0) as (leaving, third, full):
        held = HeldStore(tmp_path / "store", source, [1])
        number = push([leaving.address, full.address], source)
        assert third.service.catalog.snapshots.get(NAME, number) is None
        assert leaving.service.intake.drain(20.0)
        end(leaving)
        assert files_held(third, number).isdisjoint(files_held(full, number))
        for each in (third, full):  # each reads from the other one what it does not have
            assert live(each) == number
            assert_pulled(each, number, source)
        held.release()
        for each in (third, full):
            assert_becomes_durable(each, number, source)


def test_what_was_taken_over_is_handed_on_with_the_share_of_the_one_that_has_it(
    tmp_path: Path, source: TinyModel
) -> None:
    with replicas(tmp_path, source, 3) as running:
        held = HeldStore(tmp_path / "store", source, [1])
        number = push([each.address for each in running], source)
        left = list(running)
        while len(left) > 1:
            leaving = left.pop(0)
            assert leaving.service.intake.drain(20.0)
            end(leaving)
            for each in left:
                assert live(each) == number
                assert_pulled(each, number, source)
        assert files_held(left[0], number) == set(files_named(left[0]))
        held.release()
        assert_becomes_durable(left[0], number, source)


def test_a_stream_that_reads_from_a_replica_that_leaves_goes_on_with_the_one_that_has_its_share(
    tmp_path: Path, source: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    with replicas(tmp_path, source, 3) as (leaving, staying, third):
        held = HeldStore(tmp_path / "store", source, [1])
        number = push([leaving.address, staying.address], source)
        third.service.intake.opener.leaving = on.Draining(
            (), 0.0, 0.0
        )  # so that the share goes to the other one that takes part
        begun, go_on, read_file = threading.Event(), threading.Event(), Links.read_file

        def read(self: Links, owner: Home, key: Any, file: str, offset: int, length: int) -> bytes:
            pulls = self.home == home_of(staying) and not leaving.service.draining  # else it takes over
            if pulls and owner == home_of(leaving) and not go_on.is_set():
                begun.set()
                go_on.wait(60)
            return read_file(self, owner, key, file, offset, length)

        monkeypatch.setattr(Links, "read_file", read)
        failed: list[BaseException] = []

        def pull() -> None:
            try:
                assert_pulled(staying, number, source)
            except BaseException as error:
                failed.append(error)

        pulling = threading.Thread(target=pull)
        pulling.start()
        assert begun.wait(20)
        assert leaving.service.intake.drain(20.0)
        end(leaving)
        go_on.set()
        pulling.join(60)
        assert not failed
        held.release()
        assert_becomes_durable(staying, number, source)


def test_a_replica_whose_files_are_in_the_store_leaves_the_rest_to_the_others(
    tmp_path: Path, source: TinyModel
) -> None:
    with replicas(tmp_path, source, 2) as (leaving, staying):
        put, go_on = staying.service.catalog.store.put, threading.Event()

        def slow(key: str, data: Any, **options: Any) -> str:
            if "/versions/" in key:
                go_on.wait(60)
            return put(key, data, **options)

        staying.service.catalog.store.put = slow  # type: ignore[method-assign]
        number = push([leaving.address, staying.address], source)
        [session] = leaving.service.registry.of_version(NAME, number)
        eventually(lambda: session.state.handed_in_here)
        assert leaving.service.intake.drain(6.0), "nothing is lost with it"
        assert session.state.phase is not Phase.HANDED_OVER
        gone = losses(staying)
        end(leaving)
        eventually(lambda: home_of(leaving) in gone)
        assert live(staying) == number
        go_on.set()
        assert_becomes_durable(staying, number, source)


def test_a_share_that_nobody_takes_is_named_with_the_reasons_and_the_others_learn_of_its_end(
    tmp_path: Path, source: TinyModel, caplog: pytest.LogCaptureFixture
) -> None:
    with replicas(tmp_path, source, 2) as (leaving, staying):
        HeldStore(tmp_path / "store", source, [1])
        number = push([leaving.address, staying.address], source)
        staying.service.intake.opener.leaving = on.Draining((), 0.0, 0.0)
        with caplog.at_level(logging.WARNING):
            assert not leaving.service.intake.drain(6.0)
        assert f"{MODEL}@{number}" in caplog.text
        assert "is lost: not durable: " in caplog.text
        assert f"not handed over: {home_of(staying)}: the service is shutting down" in caplog.text
        end(leaving)
        catalog = staying.service.catalog
        eventually(lambda: catalog.get_version(MODEL, str(number)).state is VersionState.FAILED)
        assert home_of(leaving).address in catalog.get_version(MODEL, str(number)).error


def test_the_directory_being_empty_does_not_keep_replicas_that_take_part_from_being_asked(
    tmp_path: Path, source: TinyModel
) -> None:
    with replicas(tmp_path, source, 2) as (leaving, staying):
        held = HeldStore(tmp_path / "store", source, [1])
        number = push([leaving.address, staying.address], source)
        leaving.service.directory.others = tuple  # type: ignore[method-assign,assignment]
        assert leaving.service.intake.drain(20.0)
        end(leaving)
        held.release()
        assert_becomes_durable(staying, number, source)


# --- answers that are lost, and memory that is waited for ----------------------------------------------------------------


@contextmanager
def answers_lost(running: RunningService, times: int) -> Iterator[list[int]]:
    """Let a replica take over versions while the answers to the first calls are lost; counts the calls."""
    links, calls = running.service.links, [0]
    take_over = links.take_over

    def ask(*arguments: Any) -> None:
        calls[0] += 1
        take_over(*arguments)
        if calls[0] <= times:
            raise Unavailable("the connection was cut")

    links.take_over = ask  # type: ignore[method-assign]
    try:
        yield calls
    finally:
        links.take_over = take_over  # type: ignore[method-assign]


@pytest.mark.parametrize("together", [False, True])
def test_a_replica_whose_answer_is_lost_is_asked_again_and_nothing_is_reported_as_lost(
    tmp_path: Path, source: TinyModel, together: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with replicas(tmp_path, source, 2) as (leaving, staying), answers_lost(leaving, 2) as calls:
        held = HeldStore(tmp_path / "store", source, [1])
        number = push([each.address for each in ((leaving, staying) if together else (leaving,))], source)
        with caplog.at_level(logging.WARNING):
            assert leaving.service.intake.drain(60.0)
        assert calls == [3]
        assert "is lost" not in caplog.text
        end(leaving)
        held.release()
        assert_becomes_durable(staying, number, source)


@pytest.mark.parametrize("together", [False, True])
def test_a_replica_that_is_not_heard_any_more_is_known_to_have_taken_over_from_elsewhere(
    tmp_path: Path, source: TinyModel, together: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """head.json names the new owner of a version that one replica held alone; the new owner of a share reports
    itself.
    """
    with replicas(tmp_path, source, 2) as (leaving, staying), answers_lost(leaving, 1000):
        held = HeldStore(tmp_path / "store", source, [1])
        number = push([each.address for each in ((leaving, staying) if together else (leaving,))], source)
        with caplog.at_level(logging.WARNING):
            assert leaving.service.intake.drain(20.0)
        assert f"handed over to {home_of(staying)}" in caplog.text
        assert "is lost" not in caplog.text
        end(leaving)
        held.release()
        assert_becomes_durable(staying, number, source)


@pytest.mark.parametrize("freed", [True, False])
def test_memory_that_others_use_is_waited_for_within_the_time_that_the_one_that_leaves_has(
    tmp_path: Path, source: TinyModel, freed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    whole = sum(array.nbytes for array in source.arrays.values()) + (1 << 16)
    with replicas(tmp_path, source, 2, memory_budget=whole, spill_budget=0) as (leaving, staying):
        held = HeldStore(tmp_path / "store", source, [1])
        number = push([leaving.address], source)
        with RawClient(staying.address) as raw, TrainerClient(staying.address) as trainer:
            other = raw.open(MODEL, step=99, request_id="another")
            raw.declare(MODEL, other, rows_layout(source.arrays, 0, 1))  # its image is all that there is room for
            take_over, asked = staying.service.taking_over.take_over, threading.Event()

            def ask(*arguments: Any) -> None:
                asked.set()
                take_over(*arguments)

            staying.service.taking_over.take_over = ask  # type: ignore[method-assign]
            drained: list[bool] = []
            with caplog.at_level(logging.WARNING):
                draining = threading.Thread(
                    target=lambda: drained.append(leaving.service.intake.drain(20.0 if freed else 8.0))
                )
                draining.start()
                assert asked.wait(60)
                eventually(staying.service.images.waiting)
                assert drained == []
                if freed:
                    trainer.abort(MODEL, other, "it is in the way")
                draining.join(60)
            assert drained == [freed]
            if not freed:
                assert "is lost: " in caplog.text
                assert "found no room" in caplog.text
                return
        end(leaving)
        held.release()
        with EngineClient(staying.address) as engine:
            engine.wait_for(MODEL, number, VersionState.DURABLE, timeout=60)
            assert_equal(engine, MODEL, number, source.arrays)


def test_a_share_is_sent_as_it_is_and_refused_if_it_is_of_other_files_or_of_no_replica_that_is_named(
    tmp_path: Path, source: TinyModel
) -> None:
    with replicas(tmp_path, source, 2) as (leaving, staying):
        held = HeldStore(tmp_path / "store", source, [1])
        push([leaving.address, staying.address], source)
        sent = handed_to(staying)
        assert leaving.service.intake.drain(20.0)
        [version] = sent
        assert version.share is not None
        assert set(version.files) == {f for f, n in version.share.owners.items() if n == version.share.number}
        message = handed_to_proto(version, 1.5)
        assert message.memory_wait_ms == 1500
        assert handed_from_proto(message).share == version.share
        for spoil in (
            lambda m: m.share.owners.update({"another.safetensors": 0}),
            lambda m: m.share.owners.update(dict.fromkeys(m.share.owners, 7)),
            lambda m: setattr(m.share, "number", 2),
            lambda m: m.share.ClearField("homes"),
            lambda m: setattr(m.share.homes[0], "address", "nowhere"),
            lambda m: setattr(m, "entry", b"[" * 5000),
            lambda m: setattr(m.registration, "tensors", b'{"a":' * 5000),
        ):
            spoilt = type(message).FromString(message.SerializeToString())
            spoil(spoilt)
            with pytest.raises(InvalidArgument):
                handed_from_proto(spoilt)
        held.release()


# --- processes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("refused", [False, True])
def test_sigterm_ends_with_zero_if_the_share_was_handed_over_and_with_one_if_it_is_lost(
    tmp_path: Path, source: TinyModel, refused: bool
) -> None:
    store, program = tmp_path / "store", ("-m", "benchmarks.many_files", str(FILE_BYTES))
    with ExitStack() as stack:
        staying = stack.enter_context(running_service(store, advertise="127.0.0.1:0", scratch=tmp_path / "scratch"))
        with TrainerClient(staying.address) as trainer:
            trainer.register_files(MODEL, source.files)
        leaving = Service(store, "--advertise", "127.0.0.1:0", "--drain-seconds", "10", program=program)
        stack.enter_context(leaving.process)
        stack.callback(leaving.process.kill)
        held = HeldStore(store, source, [1])
        number = push([leaving.grpc, staying.address], source)
        if refused:
            staying.service.intake.opener.leaving = on.Draining((), 0.0, 0.0)
        [session] = staying.service.registry.sessions_of(NAME)
        assert session.state.agreed is not None
        [leaving_home] = {*session.state.agreed.homes} - {home_of(staying)}
        gone = losses(staying)
        leaving.process.send_signal(signal.SIGTERM)
        assert leaving.process.wait(60) == (1 if refused else 0)
        said = leaving.log.read_text()
        if refused:
            assert f"{MODEL}@{number}" in said
            assert "is lost: " in said
        else:
            assert f"handed over to {home_of(staying)}" in said
            eventually(lambda: waits_no_more(staying, leaving_home, gone))
            assert live(staying) == number
            held.release()
            assert_becomes_durable(staying, number, source)
