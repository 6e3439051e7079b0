"""Hold of a version while it is pushed: is it known in time, to everybody, and does it take no other version's
place?
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.service.push.simulated_push import FILES, LIMITS, planned
from tests.support.raw_clients import RawClient, assert_equal, tiny_folder
from tests.support.services import running_service
from weighbridge import EngineClient, TrainerClient, Version, VersionState
from weighbridge_service.catalog.holding import HoldReasons
from weighbridge_service.plan.declarations import Declaration, Home
from weighbridge_service.push.machine import effects as do
from weighbridge_service.push.machine import events as on
from weighbridge_service.push.machine.phases import Phase
from weighbridge_service.push.machine.shown import version_of
from weighbridge_service.push.machine.state import Moment, PushState
from weighbridge_service.push.machine.transitions import step
from weighbridge_storage.documents.entries import Approval, OpenEntry, VersionEntry
from weighbridge_storage.documents.names import ModelName

NOW = Moment(1000.0, 1_000_000)
MODEL = "acme/held"
OPENED = OpenEntry(1, "q", 0, "r", 1, 1, 9, "", 0)


def begun(entry: OpenEntry = OPENED, homes: tuple[int, ...] = (0,)) -> PushState:
    """A push of one rank at each replica, when all bytes are here."""
    replicas = [Home(f"host{i}:1", "boot") for i in range(max(homes) + 1)]
    limits = replace(LIMITS, spreading=len(replicas) > 1)
    opened = Version("acme/m", 1, VersionState.OPEN, ranks=len(homes))
    state = PushState.begin(opened, replicas[0], limits, None, 120.0, NOW, HoldReasons.of(entry))
    elsewhere = [(r, Declaration(f"c{r}", "d", replicas[h])) for r, h in enumerate(homes) if h]
    events: list[on.Event] = [on.RankDeclared(0, "c0", "d")]
    if elsewhere:
        events.append(on.HeardElsewhere(elsewhere))
    events += [on.Planned(planned(homes)), on.ImageGranted(), on.Claimed()]
    for event in (*events, on.FilesFilled(frozenset(FILES)), on.RankWhole(0)):
        state, _ = step(state, event, NOW)
    return state


def ready(state: PushState, nonfinite: int = 0, opened: OpenEntry = OPENED) -> tuple[PushState, list[do.Effect]]:
    """The push when its rank has sealed and counted so many, and all that led to."""
    seen: list[do.Effect] = []
    for event in (on.HeadSaid(do.Confirm(), on.Verdict.OPEN, opened=opened), on.SealAsked(0, nonfinite)):
        state, effects = step(state, event, NOW)
        seen += effects
    assert state.phase is Phase.READY
    return state, seen


def test_a_version_of_which_a_rank_has_counted_a_nan_is_held_when_it_is_ready_and_supersedes_none() -> None:
    state, effects = ready(begun(), 3)
    assert version_of(state).held == ("nonfinite",)
    assert version_of(state).nonfinite_elements == 3
    assert do.Supersede() not in effects
    assert do.Supersede() in ready(begun())[1]


def test_what_the_digests_find_first_holds_it_from_then_on() -> None:
    state, _ = ready(begun())
    assert state.released
    state, _ = step(state, on.Digested("a", 0), NOW)
    assert state.released
    state, _ = step(state, on.Digested("b", 1), NOW)
    assert version_of(state).held == ("nonfinite",)


def test_what_is_said_at_the_opening_goes_for_all_replicas_that_read_the_head() -> None:
    allowing = replace(OPENED, allow_nonfinite=True)
    assert ready(begun(allowing), 3, allowing)[0].released
    # a rank at another replica has said so since
    assert ready(begun(), 3, allowing)[0].released
    candidate = replace(OPENED, held=("candidate",), metadata={"reward": 1})
    state, effects = ready(begun(), 0, candidate)
    assert version_of(state).held == ("candidate",)
    assert version_of(state).metadata == {"reward": 1}
    assert do.Supersede() not in effects


def test_approval_releases_a_version_for_the_reasons_that_it_names() -> None:
    state, _ = ready(begun(replace(OPENED, held=("candidate",))), 0, replace(OPENED, held=("candidate",)))
    state, effects = step(state, on.Approved(("candidate",)), NOW)
    assert state.released
    assert do.Supersede() in effects
    state, _ = step(state, on.Digested("a", 1), NOW)
    assert version_of(state).held == ("nonfinite",)
    again, effects = step(state, on.Approved(("candidate",)), NOW)
    assert (again, effects) == (state, ())


def test_a_version_is_what_its_entry_in_history_says() -> None:
    state, _ = ready(begun(), 3)
    entry = VersionEntry(
        1, 0, "r", 1, 1, 1, "", "claim", ready_ms=1, verified_ms=1, durable_ms=1, nonfinite_elements=3,
        approval=Approval("ann", 5, reasons=("nonfinite",)), metadata={"reward": 1},
    )  # fmt: skip
    state = replace(state, running=state.running | {do.WriteManifestAndPublish()})
    state, effects = step(state, on.Published(entry), NOW)
    assert (version_of(state).held, version_of(state).metadata) == ((), {"reward": 1})
    assert do.Supersede() in effects


def test_a_replica_is_ready_when_the_ranks_of_all_others_have_sealed_owners_of_files_or_not() -> None:
    state = begun(homes=(0, 1, 2, 3))  # of four replicas, the last owns none of three files
    state, _ = step(state, on.SealAsked(0), NOW)
    for replica in (1, 2):
        state, effects = step(state, on.ReplicaSaid(replica, handed_in=True), NOW)
        assert do.Confirm() not in effects
    state, effects = step(state, on.ReplicaSaid(3, handed_in=False, nonfinite=2), NOW)
    assert do.Confirm() in effects
    state, effects = step(state, on.HeadSaid(do.Confirm(), on.Verdict.OPEN), NOW)
    assert state.phase is Phase.READY
    assert version_of(state).held == ("nonfinite",)
    assert do.Supersede() not in effects


def test_other_replicas_are_told_at_once_what_a_rank_has_counted_and_what_digests_find() -> None:
    state, effects = step(begun(homes=(0, 1)), on.SealAsked(0, 2), NOW)
    assert do.NotifyReplicas() in effects
    assert state.holding.here == 2
    state, effects = step(state, on.ReplicaSaid(1, handed_in=False), NOW)
    state, effects = step(state, on.HeadSaid(do.Confirm(), on.Verdict.OPEN), NOW)
    state, effects = step(state, on.Digested("a", 1), NOW)
    assert do.NotifyReplicas() not in effects, "they know of two"
    state, effects = step(state, on.Digested("c", 2), NOW)
    assert do.NotifyReplicas() in effects
    assert state.holding.here == 3


def test_what_another_replica_has_handed_in_says_what_it_has_found() -> None:
    state, _ = step(begun(homes=(0, 1)), on.SealAsked(0), NOW)
    state = replace(state, running=state.running | {do.CollectHandIns()})
    state, _ = step(state, on.ReplicasHandedIn(frozenset((1,)), {1: 4}), NOW)
    assert version_of(state).held == ("nonfinite",)


@pytest.mark.parametrize("held", [True, False])
def test_a_durable_version_that_is_held_gives_its_memory_back_when_a_newer_one_waits_for_it(
    held: bool,
) -> None:
    state, _ = ready(begun(), 3)
    entry = VersionEntry(1, 0, "r", 1, 1, 1, "", "claim", held=("nonfinite",) if held else ())
    state = replace(state, running=state.running | {do.WriteManifestAndPublish()})
    state, _ = step(state, on.Published(entry), NOW)
    assert state.image
    _, effects = step(state, on.MemoryWanted(), NOW)
    assert (do.ReleaseImage() in effects) is held


def test_versions_that_are_held_one_after_another_take_no_more_memory_and_keep_the_good_one(
    tmp_path: Path,
) -> None:
    source = tiny_folder(tmp_path / "hf")
    bad = {name: array.copy() for name, array in source.arrays.items()}
    bad["model.norm.weight"][0] = np.nan
    with running_service(tmp_path / "store") as service, TrainerClient(service.address) as trainer:
        trainer.register_files(MODEL, source.files)
        nbytes = trainer.warm(MODEL).image_bytes
    settings = {"memory_budget": 2 * nbytes, "spill_budget": 0, "image_wait": 10.0}
    with (
        running_service(tmp_path / "store", **settings) as service,
        RawClient(service.address) as raw,
        EngineClient(service.address) as engine,
    ):
        raw.push_whole(MODEL, source.arrays, nonfinite=0)
        engine.wait_for(MODEL, 1, VersionState.DURABLE)
        for number in (2, 3, 4):
            raw.push_whole(MODEL, bad, nonfinite=1)
            engine.wait_for(MODEL, number, VersionState.DURABLE)
        snapshots = service.service.catalog.snapshots.of_model(ModelName.parse(MODEL))
        assert [number for number, each in snapshots.items() if each.readable] == [1, 4]
        assert engine.refs(MODEL) == {"live": 1, "latest": 1}
        assert_equal(engine, MODEL, 2, bad)


@pytest.mark.parametrize("at_its_own_replica", [True, False])
def test_a_version_that_was_approved_keeps_its_memory_and_the_one_before_it_does_not(
    tmp_path: Path, at_its_own_replica: bool
) -> None:
    source = tiny_folder(tmp_path / "hf")
    bad = {name: array.copy() for name, array in source.arrays.items()}
    bad["model.norm.weight"][0] = np.nan
    with (
        running_service(tmp_path / "store") as other,
        EngineClient(other.address) as elsewhere,
        TrainerClient(other.address) as trainer,
    ):
        trainer.register_files(MODEL, source.files)
        settings = {
            "memory_budget": 2 * trainer.warm(MODEL).image_bytes,
            "spill_budget": 0,
            "image_wait": 10.0,
        }
        with (
            running_service(tmp_path / "store", **settings) as service,
            RawClient(service.address) as raw,
            EngineClient(service.address) as engine,
        ):
            raw.push_whole(MODEL, source.arrays, nonfinite=0)
            engine.wait_for(MODEL, 1, VersionState.DURABLE)
            raw.push_whole(MODEL, bad, nonfinite=1)
            engine.wait_for(MODEL, 2, VersionState.DURABLE)
            (engine if at_its_own_replica else elsewhere).approve(MODEL, 2)
            raw.push_whole(MODEL, bad, nonfinite=1)
            engine.wait_for(MODEL, 3, VersionState.DURABLE)
            snapshots = service.service.catalog.snapshots.of_model(ModelName.parse(MODEL))
            assert [number for number, each in snapshots.items() if each.readable] == [2, 3]
            assert engine.refs(MODEL) == {"live": 2, "latest": 2}
