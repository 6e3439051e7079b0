"""State machine of one push: `step` takes a state and an event, and gives the next state and effects.

Pure: no clock, no lock, no I/O. An event is applied to the state, then every transition that has become possible is made, and then
what is to be done in that state, and is not under way, is started (`_wanted`). So an effect that has failed, or an answer that was
lost, is made up for by the same rule that started it, and every order of events leads on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from weighbridge._core.pauses import Pauses
from weighbridge.errors import (
    AlreadyExists,
    DataLoss,
    InvalidArgument,
    ResourceExhausted,
    VersionFailed,
    WeighbridgeError,
)
from weighbridge_service.catalog.holding import Holding
from weighbridge_service.plan.declarations import Home
from weighbridge_service.push import effects as do
from weighbridge_service.push import events as on
from weighbridge_service.push.effects import Awaited, Effect
from weighbridge_service.push.state import (
    BEFORE_SEALED,
    FINAL,
    INCOMPLETE,
    TRANSITIONS,
    VISIBLE,
    Moment,
    Phase,
    PushState,
)
from weighbridge_storage.documents.entries import OpenEntry, VersionEntry

FIRST_PAUSE = 0.5
"""Seconds, doubled with each failure in a row: so long is the pause before an effect that has failed is tried again."""
LONGEST_PAUSE = 30.0
_PAUSES = Pauses(FIRST_PAUSE, LONGEST_PAUSE)
_LOOK = 1.0
"""Seconds between two looks at whether a version is still open."""
_LISTEN = 0.25
"""Seconds between two looks at what other replicas have said."""
_LEAVE_TO_OTHERS = 2.0
"""Seconds that a replica leaves the last steps to the one that came last."""
_IMAGE_PAUSE = 0.1
"""Seconds between two questions for an image."""
_UNMAP_SECONDS = 5.0
"""How long processes that were asked to unmap memory may take for it, with a rank waiting: they do it in milliseconds."""
_UNMAP_PAUSE = 0.002
_PROGRESS = 0.25
"""Seconds between two figures of what has arrived."""

_AFTER_FILLING = frozenset((Phase.SEALED, *VISIBLE))

_Effects = tuple[Effect, ...]
_Step = tuple[PushState, _Effects]


def step(state: PushState, event: on.Event, now: Moment) -> _Step:
    """The state after an event, and what is to be done.

    Args:
        state: before.
        event: what has happened. One that answers an effect which is not awaited changes nothing.
        now: when.
    """
    after, effects = _taken(state, event, now)
    if after.released and not state.released:
        effects += (do.Supersede(),)
    if _told_to_replicas(after) != _told_to_replicas(state):
        effects += (do.NotifyReplicas(),)
    return after, effects


def _told_to_replicas(state: PushState) -> tuple[Phase | None, bool, int] | None:
    """What other replicas are told of a push that they take part in: whether its part is complete, handed in, or at an end, and how many
    elements that are NaN or infinite are known here."""
    if state.share is None or state.share.alone:
        return None
    stage = None if state.phase in BEFORE_SEALED else Phase.SEALED
    return state.phase if state.phase in FINAL else stage, state.handed_in_here, state.holding.here


def _taken(state: PushState, event: on.Event, now: Moment) -> _Step:
    if state.phase in FINAL:
        return _after_the_end(state, event)
    answered = on.answered_by(event)
    if answered is not None:
        if answered not in state.running:
            return state, ()
        state = replace(state, running=state.running - {answered})
        if not isinstance(event, on.EffectFailed) and answered in state.failures:
            failures = {e: f for e, f in state.failures.items() if e != answered}
            over = not failures and state.settling is None and not state.gave_up
            state = replace(state, failures=failures, error=None if over else state.error)
    state, effects = _apply(state, event, now)
    while (moved := _advance(state, now)) is not None:
        state, more = moved
        effects += more
    if state.phase in FINAL:
        return replace(state, running=frozenset(), wake_at=None), effects
    return _start(state, effects, now)


def _after_the_end(state: PushState, event: on.Event) -> _Step:
    match event:
        case on.ImageGranted():  # it was under way
            return state, (do.ReleaseImage(),)
        case on.Superseded() if state.image:
            return replace(state, image=False, superseded=True), (do.ReleaseImage(),)
        case on.Idle() if state.image and state.phase is Phase.PUBLISHED:
            return replace(state, image=False), (do.ReleaseImage(),)
        case on.MemoryWanted() if state.image and state.phase is Phase.PUBLISHED and state.holding.reasons:
            return replace(state, image=False), (do.ReleaseImage(),)  # nobody follows it
        case on.Approved(reasons):
            return replace(state, holding=state.holding.with_approved(reasons)), ()
        case on.LeftToOthers():
            return state, (do.Forget(),)
    return state, ()


def _apply(state: PushState, event: on.Event, now: Moment) -> _Step:
    match event:
        case on.Declared() | on.HeardElsewhere() | on.Planned():
            return _declared(state, event, now)
        case on.EffectFailed(effect, error):
            return _failed(state, effect, error, now)
        case on.HeadSaid():
            return _head_said(state, event, now)
        case on.Published(entry):
            return _publish(state, entry)
        case on.Broken(error):
            return _end(state, Phase.FAILED, error)
        case on.ReplicaLost(replica, error) if state.depends_on(replica):
            return _end(state, Phase.FAILED, error)
        case on.Aborted(reason) if state.phase in INCOMPLETE:
            return _end(state, Phase.ABORTED, VersionFailed(reason))
        case on.Aborted(reason) if state.may_be_dropped:
            return _settle(state, VersionFailed(reason))
        case on.MemoryWanted() if state.superseded and state.may_be_dropped:
            return _settle(state, _dropped(state))
        case on.TimedOut(missing, heard_at):
            return _timed_out(replace(state, heard_at=max(state.heard_at, heard_at)), missing, now)
        case on.HandedOver(to) if state.phase in VISIBLE:
            return _handed_over(state, to)
        case on.ShareMoved():
            return _moved(state, event)
        case on.Superseded():
            state = replace(state, superseded=True)
            if state.gave_up and state.error is not None:
                return _end(state, Phase.FAILED, state.error)
        case on.MemoryHeld() if state.memory_held_at is None and state.phase is Phase.FILLING:
            return replace(state, memory_held_at=now.seconds), (do.RecallMemory(),)
        case on.MemoryStillHeld():
            return _still_held(state, now)
    return _noted(state, event, now), ()


def _noted(state: PushState, event: on.Event, now: Moment) -> PushState:
    """The state after an event that only adds to what is known."""
    match event:
        case on.ImageGranted():
            return replace(state, image=True)
        case on.FilesFilled(files) if state.share is not None:
            return replace(state, filled=state.filled | (files & state.share.files.keys()))
        case on.RankWhole(rank) if state.share is not None and rank in state.share.ranks:
            return replace(state, whole=state.whole | {rank})
        case on.SealAsked(rank, nonfinite) if state.share is not None and rank in state.share.ranks:
            asked, holding = state.seal_asked | {rank}, state.holding.with_counted(rank, nonfinite)
            return replace(
                state, seal_asked=asked, sealing_at=now.seconds, heard_at=now.seconds, holding=holding
            )
        case on.Described(entry):
            return _described(state, entry)
        case on.Approved(reasons):
            return replace(state, holding=state.holding.with_approved(reasons))
        case on.MemoryReleased():
            return replace(state, memory_held_at=None)
        case on.Claimed():
            return replace(state, claimed=True)
        case on.Renewed():
            return replace(state, renew_at=now.seconds + state.limits.lease / 2)
        case on.Digested(file, nonfinite):
            return replace(
                state, digested=state.digested | {file}, holding=state.holding.with_found(nonfinite)
            )
        case on.Uploaded(file):
            return replace(state, uploaded=state.uploaded | {file})
        case on.PerhapsUnchanged(file):
            return replace(state, perhaps_unchanged=state.perhaps_unchanged | {file})
        case on.DigestsUploaded(file):
            return replace(state, digests_uploaded=state.digests_uploaded | {file})
        case on.SampleCompared():
            return replace(state, compared=True)
        case on.ReplicasTold(ranks):
            return replace(state, told=state.told | ranks)
        case on.ReplicaSaid(replica, handed_in, nonfinite) if (
            state.share is not None and replica != state.share.me
        ):
            state = replace(state, holding=state.holding.with_elsewhere(replica, nonfinite))
            return _complete_elsewhere(state, frozenset((replica,)), handed_in=handed_in)
        case on.SaidPublished():
            return _at_once(state, do.LookAtHead(closing=True))
        case on.HandedIn():
            return replace(state, handed_in_here=True)
        case on.ReplicasHandedIn(replicas, nonfinite) if state.share is not None:
            holding = state.holding
            for replica in nonfinite.keys() - {state.share.me}:
                holding = holding.with_elsewhere(replica, nonfinite[replica])
            state = replace(
                state, handed_in=state.handed_in | (replicas & state.share.owners), holding=holding
            )
            state = _complete_elsewhere(state, state.handed_in, handed_in=True)
            if state.all_handed_in:
                return state
            state = replace(state, leave_until=now.seconds + _LEAVE_TO_OTHERS)
            return _pause(state, do.CollectHandIns(), now.seconds + _LISTEN)
        case on.Draining(successors, hand_over_at, until):
            failing = state.failures.keys()
            taking_part = () if state.agreed is None else state.agreed.homes
            return replace(
                state,
                hurrying=True,
                successors=tuple(
                    each
                    for each in dict.fromkeys((*taking_part, *successors))
                    if each != state.declarations.home
                ),
                hand_over_at=now.seconds if state.gave_up else hand_over_at,
                until=until,
                not_before={e: at for e, at in state.not_before.items() if e not in failing},
            )
        case on.Tick(received_bytes, heard_at):
            heard = max(state.heard_at, heard_at)
            return replace(state, heard_at=heard, received_bytes=max(state.received_bytes, received_bytes))
    return state


def _described(state: PushState, entry: OpenEntry) -> PushState:
    """What head.json says of the open version, as far as that can change."""
    opened, holding = replace(state.opened, metadata=entry.metadata), state.holding.with_entry(entry)
    if opened == state.opened and holding == state.holding:
        return state
    return replace(state, opened=opened, holding=holding)


def _pause(state: PushState, effect: Awaited, until: float) -> PushState:
    return replace(state, not_before={**state.not_before, effect: until})


def _at_once(state: PushState, effect: Awaited) -> PushState:
    return replace(state, not_before={e: at for e, at in state.not_before.items() if e != effect})


def _complete_elsewhere(state: PushState, replicas: frozenset[int], *, handed_in: bool) -> PushState:
    """The parts of other replicas are complete, and perhaps in the store."""
    state = replace(state, complete_at=state.complete_at | replicas)
    if not handed_in or replicas <= state.stored_at:
        return state
    return _at_once(replace(state, stored_at=state.stored_at | replicas), do.CollectHandIns())


def _declared(state: PushState, event: on.Event, now: Moment) -> _Step:
    declarations, problem = state.declarations, None
    match event:
        case on.Declared(rank, client_id, digest):
            planning = do.MakePlan() in state.running
            after, problem = declarations.declare(rank, client_id, digest, planning=planning)
            if after is not declarations:  # who asks again waits for others, and must not do so for ever
                state = replace(state, declarations=after, heard_at=now.seconds)
        case on.HeardElsewhere(elsewhere):
            state = _pause(state, do.HearReplicas(), now.seconds + _LISTEN)
            if elsewhere:
                after, problem = declarations.hear(elsewhere)
                state = replace(state, declarations=after)
        case on.Planned(prepared) if state.agreed is None:
            state = replace(state, declarations=declarations.agree(prepared))
    return (state, ()) if problem is None else _end(state, Phase.FAILED, problem)


def _advance(state: PushState, now: Moment) -> _Step | None:
    """The next transition that is possible, or None."""
    share = state.share
    match state.phase:
        case Phase.OPEN if state.agreed is not None:
            share = state.agreed.share_of(state.declarations.home)
            image_by = now.seconds + state.limits.image_wait
            return _to(replace(state, share=share, image_by=image_by), Phase.PLANNED), ()
        case Phase.PLANNED if state.image:
            return _to(state, Phase.FILLING), ()
        case Phase.FILLING:
            sealing = state.seal_asked & state.whole - state.sealed
            if sealing and state.memory_held_at is None:
                after = replace(state, sealed=state.sealed | sealing)
                return after, tuple(do.CloseStream(rank) for rank in sorted(sealing))
            if state.complete_here:
                return _to(state, Phase.SEALED), (do.CloseWriter(None),)
        case Phase.SEALED if state.confirmed_at is not None and now.seconds < state.confirmed_at + _LOOK:
            state = replace(state, ready_ms=now.unix_ms, received_bytes=_bytes_of(state))
            return _to(state, Phase.READY), (do.Remember(state.declarations.known_set),)
        case Phase.READY if state.verified_here and state.all_handed_in:
            return _to(replace(state, verified_ms=now.unix_ms), Phase.VERIFIED), ()
    return None


def _to(state: PushState, phase: Phase) -> PushState:
    if phase not in TRANSITIONS[state.phase]:
        raise AssertionError(f"{state.phase} leads to no {phase}")
    return replace(state, phase=phase)


def _bytes_of(state: PushState) -> int:
    """Bytes of tensors in the files of this replica."""
    return sum(state.share.files.values()) if state.share is not None else 0


# --- what is to be done --------------------------------------------------------------------------------------------------


def _start(state: PushState, effects: _Effects, now: Moment) -> _Step:
    """Start what is wanted and due; of the rest, say when."""
    begun: list[Awaited] = []
    wake = now.seconds + _PROGRESS if state.phase is Phase.FILLING else float("inf")
    for effect, at in _wanted(state):
        if effect in state.running:
            continue
        due = max(at, state.not_before.get(effect, at))
        if due <= now.seconds:
            begun.append(effect)
        else:
            wake = min(wake, due)
    wake_at = None if wake == float("inf") else wake
    if begun:
        publishing = state.publishing or do.WriteManifestAndPublish() in begun
        running = state.running.union(begun)
        state = replace(state, running=running, publishing=publishing, wake_at=wake_at)
    elif wake_at != state.wake_at:
        state = replace(state, wake_at=wake_at)
    return state, (*effects, *begun)


def _wanted(state: PushState) -> Iterator[tuple[Awaited, float]]:
    """What is to be done in this state, and from when on; first what ranks wait for."""
    share, phase = state.share, state.phase
    if _is_to_be_confirmed(state):
        yield do.Confirm(), 0.0
    # while bytes arrive, and then when ranks that wait for the version to be ready need no processor any more
    at_leisure = phase in VISIBLE or not state.all_filled
    if state.image and at_leisure:
        for file in sorted(state.filled - state.digested):
            yield do.Digest(file), 0.0
    if not state.compared and phase in VISIBLE:
        yield do.CompareSample(), 0.0
    if phase in VISIBLE and state.compared and state.may_be_handed_over:
        yield do.HandOver(state.successors[0]), state.hand_over_at
    if state.gave_up:
        return
    if state.settling is not None:
        yield do.FindOut(), 0.0
        return
    together = share is not None and not share.alone and phase in _AFTER_FILLING
    if phase in INCOMPLETE or together:
        yield do.LookAtHead(closing=together), 0.0
    if phase in BEFORE_SEALED:
        yield do.NameMissing(), state.heard_at + state.limits.receive_timeout
    if phase is Phase.OPEN and state.declarations.complete:
        yield do.MakePlan(), 0.0
    if phase is Phase.PLANNED:
        yield do.AcquireImage(), 0.0
    if not state.waits_for_others:
        yield do.Renew(), state.renew_at
    if state.limits.spreading:
        yield from _wanted_of_replicas(state)
    if share is None:
        return
    if not state.claimed:
        yield do.Claim(), 0.0
    elif at_leisure:
        for file in sorted(state.filled - state.uploaded - (state.perhaps_unchanged - state.digested)):
            yield do.Upload(file), 0.0
        for file in sorted(state.digested - state.digests_uploaded):
            yield do.UploadDigests(file), 0.0
    if state.memory_held_at is not None:
        yield do.ProbeMemory(), 0.0
    if share.alone and phase is Phase.VERIFIED and state.uploaded_here:
        yield do.WriteManifestAndPublish(), 0.0


def _is_to_be_confirmed(state: PushState) -> bool:
    """Whether head.json is to be read before the version can be ready."""
    share = state.share
    if share is None or state.gave_up or state.settling is not None:
        return False
    if state.phase is Phase.FILLING:  # ahead, so that the last rank to seal does not wait for it
        return share.alone and state.all_filled and state.confirmed_at is None
    return state.phase is Phase.SEALED and (share.alone or state.others_complete)


def _wanted_of_replicas(state: PushState) -> Iterator[tuple[Awaited, float]]:
    """What is to be done so that several replicas make one version together."""
    share = state.share
    here = state.declarations.here.keys()
    if share is None and here and not state.declarations.complete:
        yield do.HearReplicas(), 0.0
    if here - state.told and (not state.declarations.complete if share is None else not share.alone):
        yield do.TellReplicas(), 0.0
    if share is None or share.alone or state.phase not in _AFTER_FILLING:
        return
    if share.me in share.owners and not state.handed_in_here:
        if state.verified_here and state.uploaded_here:
            yield do.HandIn(), 0.0
    elif not state.all_handed_in:
        yield do.CollectHandIns(), 0.0
    elif state.claimed:
        yield do.WriteManifestAndPublish(), state.leave_until


# --- what goes wrong -----------------------------------------------------------------------------------------------------


def _failed(state: PushState, effect: Awaited, error: WeighbridgeError, now: Moment) -> _Step:
    refused = isinstance(error, VersionFailed | AlreadyExists)  # nothing that would pass
    match effect:
        case do.MakePlan():
            return _end(state, Phase.FAILED, error)
        case do.AcquireImage():
            for_now = isinstance(error, ResourceExhausted) and error.retry_after is not None
            if for_now and now.seconds < state.image_by:
                return _pause(state, effect, now.seconds + _IMAGE_PAUSE), (do.WantMemory(),)
            return _end(state, Phase.FAILED, error)
        case do.FindOut() if state.settling is not None:  # as if the store could not be read
            return _not_found_out(state, state.settling, now)
        case do.CompareSample() if isinstance(error, DataLoss):
            return _end(state, Phase.FAILED, error)
        case do.HandOver(to):
            others = tuple(each for each in state.successors if each != to)
            return replace(state, successors=others, refusals=(*state.refusals, f"{to}: {error.message}")), ()
        case do.Renew() | do.LookAtHead() if not refused:
            return _pause(state, effect, now.seconds + _LOOK), ()
        case do.HearReplicas() if isinstance(error, InvalidArgument):
            refused = True
        case do.TellReplicas() | do.HearReplicas() if not refused and state.share is None:
            return _pause(state, effect, now.seconds + _LISTEN), ()
    if refused:
        return _settle(state, error)
    if state.gave_up:  # digests are still wanted, and nobody waits for them
        return _pause(state, effect, now.seconds + LONGEST_PAUSE), ()
    times = state.failures.get(effect, 0) + 1
    state = replace(state, failures={**state.failures, effect: times}, error=error)
    if state.may_be_handed_over:
        state = replace(state, hand_over_at=min(state.hand_over_at, now.seconds))
    elif state.hurrying and state.needed_here:
        return _settle(state, error)
    # for as long as it takes: what is here is nowhere else
    return _pause(state, effect, now.seconds + _PAUSES.after(times, 1.0)), ()


def _dropped(state: PushState) -> WeighbridgeError:
    """What a version fails of whose memory a newer one needs."""
    why = "" if state.error is None else f": {state.error.message}"
    return VersionFailed(
        f"{state.name} could not be made durable before its memory was needed for a newer version{why}",
        fix="see why the object store does not take it",
    )


def _settle(state: PushState, error: WeighbridgeError) -> _Step:
    """Make no further attempt; but where one may have been made without our hearing of it, find that out first."""
    share = state.share
    if state.publishing or (share is not None and not share.alone):
        return replace(state, settling=error), ()
    return _conclude(state, error)


def _not_found_out(state: PushState, error: WeighbridgeError, now: Moment) -> _Step:
    """The publication that has failed was not made, as far as can be seen."""
    if state.may_be_handed_over:
        return replace(state, settling=None, hand_over_at=min(state.hand_over_at, now.seconds)), ()
    return _conclude(state, error)


def _conclude(state: PushState, error: WeighbridgeError) -> _Step:
    """The version will not become durable. One that is visible stays so until a newer one is."""
    if isinstance(error, AlreadyExists):
        return _leave(state, error)
    if state.phase not in VISIBLE or state.superseded:
        return _end(state, Phase.FAILED, error)
    give_up = do.GiveUp(error, unless_claimed=False)
    return replace(state, gave_up=True, settling=None, error=error), (give_up,)


def _end(state: PushState, phase: Phase, error: WeighbridgeError) -> _Step:
    """Give the version up. It was never visible, or is no more."""
    ended, effects = _stop(state, phase, error)
    if not state.gave_up:
        unless_claimed = not state.declarations.here
        effects += (do.GiveUp(error, unless_claimed, aborted=phase is Phase.ABORTED),)
    return ended, effects


def _leave(state: PushState, error: AlreadyExists) -> _Step:
    """Other replicas write the version, under another agreement: it is theirs, and nothing is known of it here any more."""
    ended, effects = _stop(state, Phase.FAILED, error)
    return ended, (*effects, do.Forget())


def _stop(state: PushState, phase: Phase, error: WeighbridgeError) -> _Step:
    effects: list[Effect] = [do.CloseWriter(error)]
    if state.image:
        effects.append(do.ReleaseImage())
    if not state.gave_up:
        effects.append(do.Remember(None))
    return replace(_to(state, phase), error=error, image=False), tuple(effects)


def _head_said(state: PushState, said: on.HeadSaid, now: Moment) -> _Step:
    agreed = state.agreed
    if said.verdict is on.Verdict.PUBLISHED:
        if agreed is not None and said.entry is not None and said.claim == agreed.claim:
            return _publish(state, said.entry)
        return _leave(
            state, AlreadyExists(f"{state.name} was published by others", fix="push the step again")
        )
    if said.verdict is on.Verdict.ABORTED and state.phase in INCOMPLETE:
        return _end(state, Phase.ABORTED, VersionFailed(said.reason, fix="push the step again"))
    if said.verdict in (on.Verdict.GIVEN_UP, on.Verdict.ABORTED):
        return _conclude(state, state.settling or VersionFailed(said.reason, fix="push the step again"))
    if agreed is not None and said.claim not in ("", agreed.claim):
        return _leave(
            state, AlreadyExists(f"{state.name} is being written by others", fix="push the step again")
        )
    if said.opened is not None:
        state = _described(state, said.opened)
    match said.effect:
        case do.Confirm():  # a store that is away is no reason not to become ready
            return replace(state, confirmed_at=now.seconds), ()
        case do.FindOut() if state.settling is not None:
            return _not_found_out(state, state.settling, now)
        case do.LookAtHead(closing):
            return _pause(state, said.effect, now.seconds + (_LISTEN if closing else _LOOK)), ()
    return state, ()


def _publish(state: PushState, entry: VersionEntry) -> _Step:
    """The version is part of history, by this replica or another one, and is what history says: so all replicas say the same."""
    effects: list[Effect] = []
    if state.phase in (Phase.PLANNED, Phase.FILLING):
        effects.append(do.CloseWriter(None))
    if state.phase not in VISIBLE:
        effects.append(do.Remember(state.declarations.known_set))
    if state.image and state.superseded:
        effects.append(do.ReleaseImage())
    state = replace(
        _to(state, Phase.PUBLISHED),
        image=state.image and not state.superseded,
        received_bytes=state.opened.tensor_bytes,
        opened=replace(state.opened, metadata=entry.metadata),
        holding=Holding.stored(entry),
        ready_ms=entry.ready_ms,
        verified_ms=entry.verified_ms,
        durable_ms=entry.durable_ms,
        error=None,
        gave_up=False,
        settling=None,
    )
    return state, tuple(effects)


def _handed_over(state: PushState, to: Home) -> _Step:
    state = replace(state, handed_to=to, error=None, gave_up=False, settling=None)
    return _to(state, Phase.HANDED_OVER), ()


def _moved(state: PushState, moved: on.ShareMoved) -> _Step:
    """Who has a share is known. If it is the one of this replica, its answer to the handover was lost."""
    before = state.agreed
    state = replace(state, declarations=state.declarations.moved(moved.replica, moved.to, moved.handovers))
    mine = state.share is not None and state.share.me == moved.replica
    if mine and state.agreed is not before and state.phase in VISIBLE and state.hurrying:
        return _handed_over(state, moved.to)
    return state, ()


def _timed_out(state: PushState, missing: tuple[str, ...], now: Moment) -> _Step:
    seconds = state.limits.receive_timeout
    if state.phase not in BEFORE_SEALED or now.seconds < state.heard_at + seconds:
        return state, ()
    error = VersionFailed(
        f"{state.name} was given up: nothing was heard of its ranks for {seconds:g} s",
        details=missing,
        fix="push the step again",
    )
    return _end(state, Phase.FAILED, error)


def _still_held(state: PushState, now: Moment) -> _Step:
    if state.memory_held_at is None:
        return state, ()
    asked_at = max(state.memory_held_at, state.sealing_at)
    if now.seconds - asked_at < _UNMAP_SECONDS:
        return _pause(state, do.ProbeMemory(), now.seconds + _UNMAP_PAUSE), ()
    if state.seal_asked - state.sealed:
        error = VersionFailed(
            f"{state.name} was given up: a process can still write to its memory, and is not known to be done with it",
            fix="end the process that lost its connection in the middle of a push, or let it close its client; push the step again",
        )
        return _end(state, Phase.FAILED, error)
    return _pause(state, do.ProbeMemory(), now.seconds + _LOOK), (do.RecallMemory(),)
