"""State machine of one push: `step` takes a state and an event, and returns the next state and effects.

Pure: no clock, no lock, no I/O. `step` applies the event to the state, makes every transition that has become possible,
and then starts the effects that the new state wants (`wanted`) and that are not running. So the rule that starts an
effect also retries it after a failure or a lost answer, and the push can continue after events in any order.
"""

from __future__ import annotations

from dataclasses import replace

from weighbridge.errors import VersionFailed
from weighbridge_service.push.machine import effects as do
from weighbridge_service.push.machine import ends
from weighbridge_service.push.machine import events as on
from weighbridge_service.push.machine.effects import Awaited, Effect
from weighbridge_service.push.machine.ends import Transition
from weighbridge_service.push.machine.phases import BEFORE_SEALED, FINAL, INCOMPLETE, VISIBLE, Phase
from weighbridge_service.push.machine.state import Moment, PushState
from weighbridge_service.push.machine.wanted import LISTEN, LOOK, wanted

_LEAVE_TO_OTHERS = 2.0
"""Seconds for which a replica leaves the last steps to the replica that was the last to hand in its files."""
_PROGRESS = 0.25
"""Seconds between two updates of the received bytes."""


def step(state: PushState, event: on.Event, now: Moment) -> Transition:
    """The state after an event, and the effects to carry out.

    Args:
        state: the state before.
        event: the event. An answer to an effect that is not running changes nothing.
        now: the time of the event.
    """
    after, effects = _taken(state, event, now)
    if after.phase in FINAL and state.phase not in FINAL:
        after = replace(after, ended_ms=now.unix_ms)
    if after.released and not state.released:
        effects += (do.Supersede(),)
    if _told_to_replicas(after) != _told_to_replicas(state):
        effects += (do.NotifyReplicas(),)
    return after, effects


def _told_to_replicas(state: PushState) -> tuple[Phase | None, bool, int] | None:
    """Progress of this replica's part that other replicas of the push receive: whether it is complete, ended, or handed
    in, and how many elements this replica knows to be NaN or infinite. None if no other replica takes part."""
    if state.share is None or state.share.alone:
        return None
    stage = None if state.phase in BEFORE_SEALED else Phase.SEALED
    return state.phase if state.phase in FINAL else stage, state.handed_in_here, state.holding.here


def _taken(state: PushState, event: on.Event, now: Moment) -> Transition:
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


def _after_the_end(state: PushState, event: on.Event) -> Transition:
    match event:
        case on.ImageGranted():  # the allocation was still running when the push ended
            return state, (do.ReleaseImage(),)
        case on.Superseded() if state.image:
            return replace(state, image=False, superseded=True), (do.ReleaseImage(),)
        case on.Idle() if state.image and state.phase is Phase.PUBLISHED:
            return replace(state, image=False), (do.ReleaseImage(),)
        case on.MemoryWanted() if state.image and state.phase is Phase.PUBLISHED and state.holding.reasons:
            return replace(state, image=False), (do.ReleaseImage(),)  # a held version has no followers
        case on.Approved(reasons):
            return replace(state, holding=state.holding.with_approved(reasons)), ()
        case on.LeftToOthers():
            return state, (do.Forget(),)
    return state, ()


def _apply(state: PushState, event: on.Event, now: Moment) -> Transition:
    match event:
        case on.RankDeclared() | on.HeardElsewhere() | on.Planned():
            return _declared(state, event, now)
        case on.EffectFailed(effect, error):
            return ends.failed(state, effect, error, now)
        case on.HeadSaid():
            return ends.head_said(state, event, now)
        case on.Published(entry):
            return ends.publish(state, entry)
        case on.Broken(error):
            return ends.end(state, Phase.FAILED, error)
        case on.ReplicaLost(replica, error) if state.depends_on(replica):
            return ends.end(state, Phase.FAILED, error)
        case on.Aborted(reason) if state.phase in INCOMPLETE:
            return ends.end(state, Phase.ABORTED, VersionFailed(reason))
        case on.Aborted(reason) if state.may_be_dropped:
            return ends.settle(state, VersionFailed(reason))
        case on.MemoryWanted() if state.superseded and state.may_be_dropped:
            return ends.settle(state, ends.dropped(state))
        case on.TimedOut(missing, heard_at):
            return ends.timed_out(replace(state, heard_at=max(state.heard_at, heard_at)), missing, now)
        case on.HandedOver(to) if state.phase in VISIBLE:
            return ends.handed_over(state, to)
        case on.ShareMoved():
            return _moved(state, event)
        case on.Superseded():
            state = replace(state, superseded=True)
            if state.gave_up and state.error is not None:
                return ends.end(state, Phase.FAILED, state.error)
        case on.MemoryMapped() if state.memory_mapped_at is None and state.phase is Phase.FILLING:
            return replace(state, memory_mapped_at=now.seconds), (do.RecallMemory(),)
        case on.MemoryStillMapped():
            return ends.still_mapped(state, now)
    return _noted(state, event, now), ()


def _noted(state: PushState, event: on.Event, now: Moment) -> PushState:
    """The state after an event that only records facts."""
    match event:
        case on.ImageGranted():
            return replace(state, image=True)
        case on.FirstByte() if state.beginning is not None and not state.beginning.first_byte_ms:
            return replace(state, beginning=replace(state.beginning, first_byte_ms=now.unix_ms))
        case on.FilesFilled(files) if state.share is not None:
            return replace(state, filled=state.filled | (files & state.share.files.keys()))
        case on.RankWhole(rank) if state.share is not None and rank in state.share.ranks:
            return replace(state, whole=state.whole | {rank})
        case on.SealAsked(rank, nonfinite) if state.share is not None and rank in state.share.ranks:
            asked, holding = state.seal_asked | {rank}, state.holding.with_counted(rank, nonfinite)
            return replace(state, seal_asked=asked, sealing_at=now.seconds, heard_at=now.seconds, holding=holding)
        case on.Described(entry):
            return state.described(entry)
        case on.Approved(reasons):
            return replace(state, holding=state.holding.with_approved(reasons))
        case on.MemoryUnmapped():
            return replace(state, memory_mapped_at=None)
        case on.Claimed():
            return replace(state, claimed=True)
        case on.Renewed():
            return replace(state, renew_at=now.seconds + state.limits.lease / 2)
        case on.Digested(file, nonfinite):
            return replace(state, digested=state.digested | {file}, holding=state.holding.with_found(nonfinite))
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
        case on.ReplicaSaid(replica, handed_in, nonfinite) if state.share is not None and replica != state.share.me:
            state = replace(state, holding=state.holding.with_elsewhere(replica, nonfinite))
            return _complete_elsewhere(state, frozenset((replica,)), handed_in=handed_in)
        case on.SaidPublished():
            return state.at_once(do.LookAtHead(closing=True))
        case on.HandedIn():
            return replace(state, handed_in_here=True)
        case on.ReplicasHandedIn(replicas, nonfinite) if state.share is not None:
            holding = state.holding
            for replica in nonfinite.keys() - {state.share.me}:
                holding = holding.with_elsewhere(replica, nonfinite[replica])
            state = replace(state, handed_in=state.handed_in | (replicas & state.share.owners), holding=holding)
            state = _complete_elsewhere(state, state.handed_in, handed_in=True)
            if state.all_handed_in:
                return state
            state = replace(state, leave_until=now.seconds + _LEAVE_TO_OTHERS)
            return state.paused(do.CollectHandIns(), now.seconds + LISTEN)
        case on.Staying(replicas):
            return replace(state, declarations=state.declarations.counting_on(replicas))
        case on.Draining(successors, hand_over_at, until):
            failing = state.failures.keys()
            taking_part = () if state.agreed is None else state.agreed.homes
            return replace(
                state,
                hurrying=True,
                successors=tuple(
                    each for each in dict.fromkeys((*taking_part, *successors)) if each != state.declarations.home
                ),
                hand_over_at=now.seconds if state.gave_up else hand_over_at,
                until=until,
                not_before={e: at for e, at in state.not_before.items() if e not in failing},
            )
        case on.Tick(received_bytes, heard_at):
            heard = max(state.heard_at, heard_at)
            return replace(state, heard_at=heard, received_bytes=max(state.received_bytes, received_bytes))
    return state


def _complete_elsewhere(state: PushState, replicas: frozenset[int], *, handed_in: bool) -> PushState:
    """Record that the parts of other replicas are complete, and in the store if ``handed_in``."""
    state = replace(state, complete_at=state.complete_at | replicas)
    if not handed_in or replicas <= state.stored_at:
        return state
    return replace(state, stored_at=state.stored_at | replicas).at_once(do.CollectHandIns())


def _declared(state: PushState, event: on.Event, now: Moment) -> Transition:
    declarations, problem = state.declarations, None
    match event:
        case on.RankDeclared(rank, client_id, digest):
            planning = do.MakePlan() in state.running
            after, problem = declarations.declare(rank, client_id, digest, planning=planning)
            if after is not declarations:  # a waiting rank repeats it; that is no sign of life
                times = {**state.declared_ms, rank: now.unix_ms}
                state = replace(state, declarations=after, heard_at=now.seconds, declared_ms=times)
        case on.HeardElsewhere(elsewhere):
            state = state.paused(do.HearReplicas(), now.seconds + LISTEN)
            if elsewhere:
                after, problem = declarations.hear(elsewhere)
                state = replace(state, declarations=after)
        case on.Planned(prepared) if state.agreed is None:
            opened = replace(state.opened, tensor_bytes=sum(prepared.fills.values()))
            state = replace(state, opened=opened, declarations=declarations.agree(prepared))
    return (state, ()) if problem is None else ends.end(state, Phase.FAILED, problem)


def _moved(state: PushState, moved: on.ShareMoved) -> Transition:
    """Record which replica holds a share. If the share is this replica's, the answer to its handover was lost."""
    before = state.agreed
    state = replace(state, declarations=state.declarations.moved(moved.replica, moved.to, moved.handovers))
    mine = state.share is not None and state.share.me == moved.replica
    if mine and state.agreed is not before and state.phase in VISIBLE and state.hurrying:
        return ends.handed_over(state, moved.to)
    return state, ()


def _advance(state: PushState, now: Moment) -> Transition | None:
    """The next possible transition, or None."""
    share = state.share
    match state.phase:
        case Phase.OPEN if state.agreed is not None:
            share = state.agreed.share_of(state.declarations.home)
            image_by = now.seconds + state.limits.image_wait
            return replace(state, share=share, image_by=image_by).to(Phase.PLANNED), ()
        case Phase.PLANNED if state.image:
            return state.to(Phase.FILLING), ()
        case Phase.FILLING:
            sealing = state.seal_asked & state.whole - state.sealed
            if sealing and state.memory_mapped_at is None:
                times = {**state.sealed_ms, **dict.fromkeys(sealing, now.unix_ms)}
                after = replace(state, sealed=state.sealed | sealing, sealed_ms=times)
                return after, tuple(do.CloseStream(rank) for rank in sorted(sealing))
            if state.complete_here:
                return state.to(Phase.SEALED), (do.CloseWriter(None),)
        case Phase.SEALED if state.confirmed_at is not None and now.seconds < state.confirmed_at + LOOK:
            state = replace(state, ready_ms=now.unix_ms, received_bytes=_bytes_of(state))
            return state.to(Phase.READY), (do.Remember(state.declarations.known_set),)
        case Phase.READY if state.verified_here and state.all_handed_in:
            return replace(state, verified_ms=now.unix_ms).to(Phase.VERIFIED), ()
    return None


def _bytes_of(state: PushState) -> int:
    """Number of bytes of tensors in the files of this replica."""
    return sum(state.share.files.values()) if state.share is not None else 0


def _start(state: PushState, effects: tuple[Effect, ...], now: Moment) -> Transition:
    """Start the wanted effects that are due, and set `wake_at` to the earliest time of the others."""
    begun: list[Awaited] = []
    wake = now.seconds + _PROGRESS if state.phase is Phase.FILLING else float("inf")
    for effect, at in wanted(state):
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
