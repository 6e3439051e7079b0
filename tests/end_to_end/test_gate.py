"""Does a held version exist like any other, and do live and latest skip it until it is approved?"""

from __future__ import annotations

import functools
import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from tests.support.heads import stored
from tests.support.raw_clients import (
    Arrays,
    RawClient,
    TinyModel,
    assert_equal,
    cut,
    rows_layout,
    stream_of,
    tiny_folder,
)
from tests.support.services import RunningService, running_service
from tests.support.waiting import eventually
from weighbridge import EngineClient, Gate, InvalidArgument, NotFound, TrainerClient, VersionState
from weighbridge._formats.safetensors_files import lay_out_files
from weighbridge.v1 import resources_pb2
from weighbridge_service.models import registered_model
from weighbridge_storage.documents.names import ModelName

MODEL = "acme/held"
BAD = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture
def source(tmp_path: Path) -> TinyModel:
    return tiny_folder(tmp_path / "hf")


@pytest.fixture
def service(tmp_path: Path, source: TinyModel) -> Iterator[RunningService]:
    with running_service(tmp_path / "store", {MODEL: source.files}) as running:
        yield running


@pytest.fixture
def engine(service: RunningService) -> Iterator[EngineClient]:
    with EngineClient(service.address) as client:
        yield client


@pytest.fixture
def raw(service: RunningService) -> Iterator[RawClient]:
    with RawClient(service.address) as client:
        yield client


def one_value(number: float) -> resources_pb2.MetadataValue:
    return resources_pb2.MetadataValue(number=number)


def damaged(arrays: Arrays, *values: float) -> dict[str, np.ndarray]:
    """The same weights, with these values somewhere in one tensor."""
    found = {name: array.copy() for name, array in arrays.items()}
    found[BAD][3, : len(values)] = values
    return found


@contextmanager
def following(engine: EngineClient, ref: str) -> Iterator[queue.Queue[int]]:
    """A queue of the version numbers that a follower of a ref receives."""
    taken: queue.Queue[int] = queue.Queue()

    def follow() -> None:
        with EngineClient(engine.server) as own:
            for version in own.watch(MODEL, ref):
                taken.put(version.number)
                if version.step == 99:  # the last one
                    return

    thread = threading.Thread(target=follow)
    thread.start()
    yield taken
    thread.join(60)
    assert not thread.is_alive()


def test_weights_that_a_rank_has_found_to_hold_a_nan_are_kept_and_taken_by_nobody_who_follows(
    service: RunningService, engine: EngineClient, raw: RawClient, source: TinyModel
) -> None:
    bad = damaged(source.arrays, np.nan)
    with following(engine, "live") as live, following(engine, "latest") as latest:
        raw.push_whole(MODEL, source.arrays, nonfinite=0)
        assert (live.get(timeout=30), latest.get(timeout=30)) == (1, 1)
        number = raw.open(MODEL)
        layout = rows_layout(bad, 0, 1)
        raw.push(MODEL, number, cut(stream_of(bad, layout, raw.declare(MODEL, number, layout))))
        sealed = raw.seal(MODEL, number, nonfinite=1)
        assert list(sealed.held) == ["nonfinite"]  # held before it is ready
        version = engine.wait_for(MODEL, number, VersionState.DURABLE)
        assert (version.held, version.nonfinite_elements) == (("nonfinite",), 1)
        assert engine.refs(MODEL) == {"live": 1, "latest": 1}
        assert_equal(engine, MODEL, number, bad)
        assert engine.verify(MODEL, number).problems == ()
        assert engine.verify(MODEL, number).nonfinite_elements == 1
        raw.push_whole(MODEL, source.arrays, step=99, nonfinite=0)
        assert (live.get(timeout=30), latest.get(timeout=30)) == (3, 3)


def test_weights_with_a_nan_that_no_rank_has_counted_are_held_once_the_service_has(
    engine: EngineClient, raw: RawClient, source: TinyModel
) -> None:
    with following(engine, "latest") as latest:
        raw.push_whole(MODEL, source.arrays)
        assert latest.get(timeout=30) == 1
        raw.push_whole(MODEL, damaged(source.arrays, np.inf, -np.inf, np.nan))
        version = engine.wait_for(MODEL, 2, VersionState.DURABLE)
        assert (version.held, version.nonfinite_elements) == (("nonfinite",), 3)
        assert engine.refs(MODEL) == {"live": 1, "latest": 1}
        raw.push_whole(MODEL, source.arrays, step=99)
        assert latest.get(timeout=30) == 3


def test_what_was_live_without_having_been_counted_is_live_no_more_and_who_follows_goes_back(
    service: RunningService, engine: EngineClient, raw: RawClient, source: TinyModel
) -> None:
    """A version whose rank has not counted is live between ready and verified; its followers then receive the previous
    version again.
    """
    watch = engine.watch(MODEL)
    raw.push_whole(MODEL, source.arrays)
    assert next(watch).number == 1
    raw.push_whole(MODEL, damaged(source.arrays, np.nan))
    engine.wait_for(MODEL, 2, VersionState.DURABLE)
    assert engine.refs(MODEL)["live"] == 1
    raw.push_whole(MODEL, source.arrays)
    seen = [next(watch).number]
    while seen[-1] != 3:
        seen.append(next(watch).number)
    assert seen in ([3], [2, 3], [2, 1, 3])


@pytest.mark.parametrize("counted", [None, 1])
def test_with_the_switch_weights_that_are_not_finite_are_a_version_as_any_other(
    engine: EngineClient, raw: RawClient, source: TinyModel, counted: int | None
) -> None:
    bad = damaged(source.arrays, np.inf)
    raw.push_whole(MODEL, source.arrays)
    raw.push_whole(MODEL, bad, allow_nonfinite=True, nonfinite=counted)
    version = engine.wait_for(MODEL, 2, VersionState.DURABLE)
    assert (version.held, version.nonfinite_elements) == ((), 1)
    assert engine.refs(MODEL) == {"live": 2, "latest": 2}
    engine.set_gate(MODEL, Gate(allow_nonfinite=True))  # the same for all versions of the model
    raw.push_whole(MODEL, bad, nonfinite=counted)
    engine.wait_for(MODEL, 3, VersionState.DURABLE)
    assert engine.refs(MODEL) == {"live": 3, "latest": 3}


def test_approval_moves_live_and_latest_and_neither_goes_back(
    service: RunningService, engine: EngineClient, raw: RawClient, source: TinyModel
) -> None:
    with pytest.raises(NotFound, match="no versions yet, so there is no 'latest'"):
        engine.version(MODEL, "latest")
    raw.push_whole(MODEL, damaged(source.arrays, np.nan), nonfinite=1)
    engine.wait_for(MODEL, 1, VersionState.DURABLE)
    with pytest.raises(NotFound, match="its version 1 is held") as told:
        engine.version(MODEL, "latest")
    assert "weighbridge approve acme/held@1" in told.value.fix
    assert engine.refs(MODEL) == {}
    with following(engine, "latest") as latest:
        approved = engine.approve(MODEL, 1, note="looked at it", by="ann")
        assert (approved.held, approved.approved_reasons) == ((), ("nonfinite",))
        assert (approved.approved_by, approved.approved_note) == ("ann", "looked at it")
        assert approved.approved_time_ms >= approved.durable_time_ms > 0
        assert engine.refs(MODEL) == {"live": 1, "latest": 1}
        assert latest.get(timeout=30) == 1
        assert engine.approve(MODEL, 1, note="again") == approved
        raw.push_whole(MODEL, damaged(source.arrays, np.nan), nonfinite=1)
        raw.push_whole(MODEL, source.arrays, step=99, nonfinite=0)
        engine.wait_for(MODEL, 2, VersionState.DURABLE)
        assert latest.get(timeout=30) == 3
        assert engine.approve(MODEL, 2).held == ()
        assert engine.refs(MODEL) == {"live": 3, "latest": 3}


def test_what_was_not_known_when_a_version_was_approved_holds_it_still(
    service: RunningService, engine: EngineClient, raw: RawClient, source: TinyModel
) -> None:
    engine.set_gate(MODEL, Gate(approval_required=True))
    raw.push_whole(MODEL, damaged(source.arrays, np.inf), nonfinite=1)
    assert engine.wait_for(MODEL, 1, VersionState.DURABLE).held == ("candidate", "nonfinite")
    # a caller that looked before the elements were found approves, and repeats, the reasons that it saw
    for _ in range(2):
        found = service.service.gates.approve_version(MODEL, 1, by="ann", note="", reasons=("candidate",))
        assert (found.held, found.approved_reasons) == (("nonfinite",), ("candidate",))
    assert engine.refs(MODEL) == {}
    assert engine.approve(MODEL, 1).held == ()


def test_a_candidate_can_be_approved_before_it_is_durable_and_is_the_same_after_a_restart(
    tmp_path: Path, source: TinyModel
) -> None:
    with (
        running_service(tmp_path / "store") as running,
        EngineClient(running.address) as engine,
        TrainerClient(running.address) as trainer,
    ):
        trainer.register_files(MODEL, source.files)
        handle = trainer.push_folder(MODEL, source.folder, candidate=True)
        ready = handle.wait(VersionState.READY)
        assert ready.held == ("candidate",)
        assert "live" not in engine.refs(MODEL)
        engine.approve(MODEL, 1)
        assert engine.refs(MODEL)["live"] == 1
        before = handle.wait()
        assert (before.held, before.approved_reasons) == ((), ("candidate",))
        held = trainer.push_folder(MODEL, source.folder, candidate=True, metadata={"ok": True}).wait()
        assert engine.refs(MODEL) == {"live": 1, "latest": 1}
    with running_service(tmp_path / "store") as running, EngineClient(running.address) as engine:
        assert engine.version(MODEL, 1) == before
        assert engine.version(MODEL, 2) == held
        assert held.metadata == {"ok": True}
        assert engine.refs(MODEL) == {"live": 1, "latest": 1}
        engine.approve(MODEL, 2)
        assert engine.refs(MODEL) == {"live": 2, "latest": 2}


def test_a_model_that_wants_approval_holds_every_version_that_is_opened_from_then_on(
    engine: EngineClient, raw: RawClient, source: TinyModel
) -> None:
    raw.push_whole(MODEL, source.arrays)
    engine.wait_for(MODEL, 1, VersionState.DURABLE)
    assert engine.set_gate(MODEL, Gate(approval_required=True)) == engine.gate(MODEL)
    raw.push_whole(MODEL, damaged(source.arrays, np.nan), nonfinite=1)
    assert engine.wait_for(MODEL, 2, VersionState.DURABLE).held == ("candidate", "nonfinite")
    assert engine.refs(MODEL) == {"live": 1, "latest": 1}
    engine.set_gate(MODEL, Gate())
    raw.push_whole(MODEL, source.arrays)
    assert engine.wait_for(MODEL, 3, VersionState.DURABLE).held == ()


def test_metadata_is_kept_shown_and_filtered_and_ranks_do_not_contradict_each_other(
    service: RunningService, engine: EngineClient, source: TinyModel
) -> None:
    with TrainerClient(service.address) as trainer:
        for step, reward in enumerate((0.5, 0.7, 0.9)):
            said = {"reward": reward, "note": "x", "ok": reward > 0.6, "epoch": step}
            assert trainer.push_folder(MODEL, source.folder, step=step, metadata=said).wait().metadata == said
        with pytest.raises(InvalidArgument, match="nan"):
            trainer.push_folder(MODEL, source.folder, metadata={"reward": float("nan")})
    assert [version.number for version in engine.versions(MODEL, where=["reward>=0.7"])] == [3, 2]
    assert [v.number for v in engine.versions(MODEL, where=["reward>=0.7", "epoch=1"])] == [2]
    assert engine.versions(MODEL, where=["loss<1"]) == []
    with RawClient(service.address) as one, RawClient(service.address) as other:
        first = one.open(MODEL, ranks=2, request_id="shared")
        wanted = {"reward": one_value(0.1)}
        assert other.open(MODEL, ranks=2, request_id="shared", metadata=wanted) == first
        assert one.open(MODEL, ranks=2, request_id="shared") == first
        with pytest.raises(InvalidArgument, match="different metadata") as refused:
            one.open(MODEL, ranks=2, request_id="shared", metadata={"reward": one_value(0.2)})
        assert refused.value.details == ("reward: 0.1 and 0.2",)
        [receiving] = [v for v in engine.versions(MODEL, include_invisible=True) if v.number == first]
        assert receiving.metadata == {"reward": 0.1}


@pytest.mark.parametrize("counted", [True, False])
def test_over_two_replicas_a_nan_at_one_holds_the_version_at_both(
    tmp_path: Path, source: TinyModel, monkeypatch: pytest.MonkeyPatch, counted: bool
) -> None:
    monkeypatch.setattr(registered_model, "lay_out_files", functools.partial(lay_out_files, max_shard_bytes=20_000))
    store, bad = tmp_path / "store", damaged(source.arrays, np.nan)
    seen: list[set[int]] = [set(), set()]
    with (
        running_service(store, advertise="127.0.0.1:0") as one,
        running_service(store, advertise="127.0.0.1:0") as two,
        EngineClient(one.address) as at_one,
        EngineClient(two.address) as at_two,
        RawClient(one.address) as rank_0,
        RawClient(two.address) as rank_1,
    ):
        with TrainerClient(one.address) as trainer:
            trainer.register_files(MODEL, source.files)
        for step, arrays in enumerate((source.arrays, bad), start=1):
            ranks = (rank_0, rank_1)
            layouts = [rows_layout(arrays, rank, 2) for rank in range(2)]
            numbers = {each.open(MODEL, ranks=2, step=step, request_id=f"push-{step}") for each in ranks}
            (number,) = numbers
            threads = [
                threading.Thread(target=each.declare, args=(MODEL, number, layouts[rank]), kwargs={"rank": rank})
                for rank, each in enumerate(ranks)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            for rank, each in enumerate(ranks):
                assigned = list(each.answers[number, rank].assigned)
                each.push(MODEL, number, cut(stream_of(arrays, layouts[rank], assigned)), rank=rank)
            # the first half of each tensor is rank 0's: the NaN is in it
            found = 1 if step == 2 else 0
            rank_1.seal(MODEL, number, rank=1, nonfinite=0 if counted else None)
            rank_0.seal(MODEL, number, rank=0, nonfinite=found if counted else None)
            for engine, refs in zip((at_one, at_two), seen, strict=True):
                engine.wait_for(MODEL, number, VersionState.READY)
                if counted:
                    refs.add(engine.refs(MODEL)["live"])
            for engine in (at_one, at_two):
                version = engine.wait_for(MODEL, number, VersionState.DURABLE)
                assert version.held == (("nonfinite",) if step == 2 else ())
                eventually(lambda: at_one.refs(MODEL) == at_two.refs(MODEL) == {"live": 1, "latest": 1})
        if counted:
            assert seen == [{1}, {1}]
        assert [each.service.gates.held for each in (one, two)] == [1, 1]
        at_two.approve(MODEL, 2)
        assert [each.service.gates.held for each in (one, two)] == [0, 0]
        eventually(lambda: at_one.refs(MODEL) == at_two.refs(MODEL) == {"live": 2, "latest": 2})
        entry = stored(one.service.catalog.store, ModelName.parse(MODEL)).find(2)
        assert entry is not None
        assert entry.approval is not None
