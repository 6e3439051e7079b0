"""Transitions of a push: which effects does each event have, at once, later, or never?"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.service.push.simulated_push import FILES, LIMITS, planned
from weighbridge._core.resources import Version, VersionState
from weighbridge.errors import DataLoss, FailedPrecondition, ResourceExhausted, Unavailable, VersionFailed
from weighbridge_service.catalog.snapshots import Beginning
from weighbridge_service.plan.declarations import Declaration, Home
from weighbridge_service.push.machine import effects as do
from weighbridge_service.push.machine import events as on
from weighbridge_service.push.machine.answers import answer_abort
from weighbridge_service.push.machine.ends import LONGEST_PAUSE
from weighbridge_service.push.machine.phases import Phase
from weighbridge_service.push.machine.shown import version_of
from weighbridge_service.push.machine.state import Limits, Moment, PushState
from weighbridge_service.push.machine.transitions import step


def spread_push(homes: tuple[int, ...]) -> PushState:
    """A push of one rank at each replica, of which the first is this one, when everything is here and sealed."""
    replicas = [Home(f"host{i}:1", "boot") for i in range(max(homes) + 1)]
    opened = Version("acme/m", 1, VersionState.OPEN, ranks=len(homes))
    limits = replace(LIMITS, spreading=True)
    state = PushState.begin(opened, replicas[0], limits, None, 120.0, NOW)
    elsewhere = [(r, Declaration(f"c{r}", "d", replicas[h])) for r, h in enumerate(homes) if h]
    state, _ = step(state, on.RankDeclared(0, "c0", "d"), NOW)
    state, _ = step(state, on.HeardElsewhere(elsewhere), NOW)
    for event in (
        on.Planned(planned(homes)), on.ImageGranted(), on.Claimed(), on.FilesFilled(frozenset(FILES)), on.RankWhole(0),
        on.SealAsked(0),
    ):  # fmt: skip
        state, _ = step(state, event, NOW)
    assert state.phase is Phase.SEALED
    return state


NOW = Moment(1000.0, 1_000_000)
GONE = VersionFailed("host1:1 is gone")


def test_the_first_byte_came_when_it_is_first_told_of_a_version_that_this_process_has_opened() -> None:
    opened, home = Version("acme/m", 1, VersionState.OPEN, ranks=1), Home("host0:1", "boot0")
    begun = PushState.begin(opened, home, LIMITS, None, 120.0, NOW, beginning=Beginning(0.5))
    for at_ms in (1_000_700, 1_000_900):
        begun, _ = step(begun, on.FirstByte(), Moment(NOW.seconds, at_ms))
    assert begun.beginning == Beginning(0.5, 1_000_700)
    joined = PushState.begin(opened, home, LIMITS, None, 120.0, NOW)
    joined, _ = step(joined, on.FirstByte(), NOW)
    assert joined.beginning is None, "another machine's clock says when it was opened"
    ended, _ = step(begun, on.Aborted("enough"), NOW)
    assert (ended.phase, ended.beginning) == (Phase.ABORTED, Beginning(0.5, 1_000_700))


def test_a_push_over_replicas_is_ready_when_every_owner_has_said_that_its_files_are_complete() -> None:
    state = spread_push((0, 1, 2))
    state, effects = step(state, on.ReplicaSaid(1, handed_in=False), NOW)
    assert do.Confirm() not in effects
    state, effects = step(state, on.ReplicaSaid(1, handed_in=False), NOW)
    assert do.Confirm() not in effects
    state, effects = step(state, on.ReplicaSaid(2, handed_in=True), NOW)
    assert do.Confirm() in effects
    state, effects = step(state, on.HeadSaid(do.Confirm(), on.Verdict.OPEN), NOW)
    assert state.phase is Phase.READY
    assert do.NotifyReplicas() not in effects, "they have heard that this part is complete"


def test_other_replicas_are_told_at_once_when_a_part_is_complete_and_when_it_ends() -> None:
    replicas = [Home("host0:1", "boot"), Home("host1:1", "boot")]
    opened = Version("acme/m", 1, VersionState.OPEN, ranks=2)
    state = PushState.begin(opened, replicas[0], replace(LIMITS, spreading=True), None, 120.0, NOW)
    told = []
    for event in (
        on.RankDeclared(0, "c0", "d"),
        on.HeardElsewhere([(1, Declaration("c1", "d", replicas[1]))]),
        on.Planned(planned((0, 1))),
        on.ImageGranted(),
        on.FilesFilled(frozenset(FILES)),
        on.RankWhole(0),
        on.SealAsked(0),
        on.Broken(DataLoss("bytes were lost")),
    ):
        state, effects = step(state, event, NOW)
        if do.NotifyReplicas() in effects:
            told.append(type(event))
    # the first one makes the replicas known to each other
    assert told == [on.Planned, on.SealAsked, on.Broken]


@pytest.mark.parametrize("ready", [False, True])
def test_the_loss_of_an_owner_fails_a_version_unless_its_files_are_in_the_store(ready: bool) -> None:
    def before(handed_in: bool) -> PushState:
        state = spread_push((0, 1))
        if ready or handed_in:
            state, _ = step(state, on.ReplicaSaid(1, handed_in=handed_in), NOW)
        if ready:
            state, _ = step(state, on.HeadSaid(do.Confirm(), on.Verdict.OPEN), NOW)
            assert state.phase is Phase.READY
        return state

    state, effects = step(before(False), on.ReplicaLost(1, GONE), NOW)
    assert version_of(state).state is VersionState.FAILED
    assert "host1:1 is gone" in version_of(state).error
    assert any(isinstance(effect, do.GiveUp) for effect in effects)
    state, _ = step(before(True), on.ReplicaLost(1, GONE), NOW)
    assert state.phase is not Phase.FAILED


def test_the_loss_of_a_replica_that_owns_nothing_matters_as_long_as_it_has_bytes_to_pass_on() -> None:
    state = spread_push((0, 1, 2, 3))  # of four replicas, the last owns none of three files
    lost, _ = step(state, on.ReplicaLost(3, GONE), NOW)
    assert lost.phase is Phase.FAILED
    state, _ = step(state, on.ReplicaSaid(3, handed_in=False), NOW)
    kept, _ = step(state, on.ReplicaLost(3, GONE), NOW)
    assert kept.phase is Phase.SEALED


def test_a_replica_that_hears_that_a_version_is_published_looks_at_the_head_at_once() -> None:
    state = spread_push((0, 1))
    look = do.LookAtHead(closing=True)
    if look not in state.running:
        state, _ = step(state, on.Tick(), Moment(NOW.seconds + 10, NOW.unix_ms))
    state, _ = step(state, on.HeadSaid(look, on.Verdict.OPEN), NOW)
    assert look not in state.running
    state, effects = step(state, on.SaidPublished(), NOW)
    assert look in effects


def filled_alone(limits: Limits = LIMITS) -> tuple[PushState, tuple[do.Effect, ...]]:
    """A version of which one replica alone has got all bytes from one rank, which has not sealed; and what that has led
    to.
    """
    home = Home("host0:1", "boot0")
    opened = Version("acme/m", 1, VersionState.OPEN, ranks=1, create_time_ms=1)
    state = PushState.begin(opened, home, limits, None, 120.0, NOW)
    for event in (
        on.RankDeclared(0, "c0", "d0"),
        on.Planned(planned((0,))),
        on.ImageGranted(),
        on.RankWhole(0),
    ):
        state, _ = step(state, event, NOW)
    return step(state, on.FilesFilled(frozenset(FILES)), NOW)


def ready_alone(limits: Limits = LIMITS) -> PushState:
    """A version that one replica alone has received from one rank."""
    state, _ = filled_alone(limits)
    for event in (on.HeadSaid(do.Confirm(), on.Verdict.OPEN), on.SealAsked(0)):
        state, _ = step(state, event, NOW)
    assert state.phase is Phase.READY
    return state


def test_a_rank_that_seals_soon_after_the_last_byte_does_not_wait_for_the_store() -> None:
    state, effects = filled_alone()
    assert do.Confirm() in effects
    state, _ = step(state, on.HeadSaid(do.Confirm(), on.Verdict.OPEN), NOW)
    assert state.phase is Phase.FILLING
    state, effects = step(state, on.SealAsked(0), NOW)
    assert state.phase is Phase.READY
    assert do.Confirm() not in effects


def test_what_the_head_said_long_before_the_last_rank_seals_does_not_count() -> None:
    state, _ = filled_alone()
    state, _ = step(state, on.HeadSaid(do.Confirm(), on.Verdict.OPEN), NOW)
    later = Moment(NOW.seconds + 2, NOW.unix_ms + 2000)
    state, effects = step(state, on.SealAsked(0), later)
    assert state.phase is Phase.SEALED
    assert do.Confirm() in effects
    state, _ = step(state, on.HeadSaid(do.Confirm(), on.Verdict.OPEN), later)
    assert state.phase is Phase.READY


def test_what_is_left_when_all_bytes_are_here_waits_until_ranks_need_not_wait_any_more() -> None:
    state, _ = filled_alone()
    state, effects = step(state, on.Claimed(), NOW)
    assert not [effect for effect in effects if isinstance(effect, do.Upload | do.Digest)]
    ready = ready_alone()
    assert {do.Digest(file) for file in FILES} <= ready.running
    _, effects = step(ready, on.Claimed(), NOW)
    assert {do.Upload(file) for file in FILES} <= set(effects)


def test_a_file_is_uploaded_beside_its_digests_unless_these_are_needed_to_tell_whether_it_has_changed() -> None:
    state, effects = step(ready_alone(), on.Claimed(), NOW)
    assert {do.Upload(file) for file in FILES} <= set(effects)
    state, effects = step(state, on.PerhapsUnchanged("a"), NOW)
    assert do.Upload("a") not in effects
    state, effects = step(state, on.Uploaded("b"), NOW)
    assert do.UploadDigests("b") not in effects
    state, effects = step(state, on.Digested("a", 0), NOW)
    assert {do.Upload("a"), do.UploadDigests("a")} <= set(effects)


def test_what_went_wrong_for_a_while_is_not_said_any_more_when_it_is_over() -> None:
    away = Unavailable("the store is away")
    state, _ = step(ready_alone(), on.EffectFailed(do.Claim(), away), NOW)
    assert version_of(state).error == "not durable yet: the store is away"
    state, _ = step(state, on.EffectFailed(do.Digest("a"), away), NOW)
    later = Moment(NOW.seconds + 1000, NOW.unix_ms)
    state, _ = step(state, on.Tick(), later)
    state, _ = step(state, on.Claimed(), later)
    assert version_of(state).error, "the other one is not over"
    state, _ = step(state, on.Digested("a", 0), later)
    assert version_of(state).error == ""


def test_a_version_that_is_visible_is_tried_to_be_made_durable_for_days() -> None:
    state, now = ready_alone(), NOW
    assert do.Claim() in state.running
    tries = []
    while now.seconds < NOW.seconds + 3 * 86_400:
        state, effects = step(state, on.EffectFailed(do.Claim(), Unavailable("the store is away")), now)
        assert state.phase is Phase.READY
        assert version_of(state).error == "not durable yet: the store is away"
        assert state.wake_at is not None
        now = Moment(max(state.not_before[do.Claim()], now.seconds), now.unix_ms)
        state, effects = step(state, on.Tick(), now)
        assert do.Claim() in effects
        tries.append(now.seconds)
    assert tries[1] - tries[0] < 5 < tries[-1] - tries[-2] <= LONGEST_PAUSE


def test_memory_of_a_version_that_cannot_be_made_durable_goes_to_a_newer_one_when_that_waits_for_it() -> None:
    state, _ = step(ready_alone(), on.MemoryWanted(), NOW)
    assert state.phase is Phase.READY
    failing, _ = step(state, on.EffectFailed(do.Claim(), Unavailable("the store is away")), NOW)
    kept, _ = step(failing, on.MemoryWanted(), NOW)
    assert kept.phase is Phase.READY, "it is the newest that is visible"
    superseded, _ = step(failing, on.Superseded(), NOW)
    assert superseded.phase is Phase.READY, "nobody needs its memory"
    ended, effects = step(superseded, on.MemoryWanted(), NOW)
    assert ended.phase is Phase.FAILED
    assert do.ReleaseImage() in effects
    assert "its memory was needed for a newer version: the store is away" in version_of(ended).error


def test_a_version_that_waits_for_memory_says_so_to_older_ones() -> None:
    opened = Version("acme/m", 2, VersionState.OPEN, ranks=1)
    state = PushState.begin(opened, Home("host0:1", "boot0"), LIMITS, None, 120.0, NOW)
    state, _ = step(state, on.RankDeclared(0, "c0", "d0"), NOW)
    state, _ = step(state, on.Planned(planned((0,))), NOW)
    full = ResourceExhausted("no room")
    full.retry_after = 1.0
    state, effects = step(state, on.EffectFailed(do.AcquireImage(), full), NOW)
    assert do.WantMemory() in effects
    assert state.phase is Phase.PLANNED


def test_a_visible_version_can_be_given_up_only_if_something_keeps_it_from_becoming_durable() -> None:
    state = ready_alone()
    after, _ = step(state, on.Aborted("not wanted"), NOW)
    assert not after.gave_up
    with pytest.raises(FailedPrecondition, match="visible already"):
        answer_abort(after)
    failing, _ = step(state, on.EffectFailed(do.Claim(), Unavailable("the store is away")), NOW)
    after, effects = step(failing, on.Aborted("not wanted"), NOW)
    assert after.gave_up
    assert after.phase is Phase.READY, "it stays visible until a newer one is"
    assert answer_abort(after) is True
    assert any(isinstance(effect, do.GiveUp) for effect in effects)


def test_a_push_that_cannot_find_out_how_it_ended_does_not_ask_for_ever() -> None:
    state = replace(ready_alone(), hurrying=True)
    for event in (
        on.Claimed(),
        on.SampleCompared(),
        *(on.Digested(file, 0) for file in FILES),
        *(on.Uploaded(file) for file in FILES),
        *(on.DigestsUploaded(file) for file in FILES),
        on.EffectFailed(do.WriteManifestAndPublish(), Unavailable("the store is away")),
    ):
        state, effects = step(state, event, NOW)
    assert do.FindOut() in effects
    state, effects = step(state, on.EffectFailed(do.FindOut(), Unavailable("it cannot be read")), NOW)
    assert state.gave_up
    assert version_of(state).error == "not durable yet: the store is away"
    assert do.FindOut() not in effects
