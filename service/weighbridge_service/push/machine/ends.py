"""Ends of a push, and their causes: the state in head.json, effects that fail, timeouts."""

from __future__ import annotations

from dataclasses import replace

from weighbridge._core.pauses import Pauses
from weighbridge._core.text.waits import ranks_have, ranks_text
from weighbridge.errors import (
    AlreadyExists,
    DataLoss,
    InvalidArgument,
    ResourceExhausted,
    VersionFailed,
    WeighbridgeError,
)
from weighbridge_service.catalog.holding import HoldReasons
from weighbridge_service.plan.declarations import Home, is_alone_elsewhere
from weighbridge_service.push.machine import effects as do
from weighbridge_service.push.machine import events as on
from weighbridge_service.push.machine.effects import Awaited, Effect
from weighbridge_service.push.machine.opening import ReceivedElsewhere
from weighbridge_service.push.machine.phases import INCOMPLETE, VISIBLE, Phase
from weighbridge_service.push.machine.shown import aborted, silent_ranks
from weighbridge_service.push.machine.state import Moment, PushState
from weighbridge_service.push.machine.wanted import LISTEN, LOOK
from weighbridge_storage.documents.entries import VersionEntry

FIRST_PAUSE = 0.5
"""Seconds before the first retry of an effect that has failed; doubled with each further failure in a row."""
LONGEST_PAUSE = 30.0
_PAUSES = Pauses(FIRST_PAUSE, LONGEST_PAUSE)
_IMAGE_PAUSE = 0.1
"""Seconds between two requests for an image."""
_UNMAP_PAUSE = 0.002

Transition = tuple[PushState, tuple[Effect, ...]]
"""The next state, and the effects to carry out."""


def publish(state: PushState, entry: VersionEntry) -> Transition:
    """End as published, by this replica or another one.

    The state gets its values from history, so that all replicas report the same values.
    """
    effects: list[Effect] = []
    if state.phase in (Phase.PLANNED, Phase.FILLING):
        effects.append(do.CloseWriter(None))
    if state.phase not in VISIBLE:
        effects.append(do.Remember(state.declarations.known_set))
    if state.image and state.superseded:
        effects.append(do.ReleaseImage())
    state = replace(
        state.to(Phase.PUBLISHED),
        image=state.image and not state.superseded,
        received_bytes=state.opened.tensor_bytes,
        opened=replace(state.opened, metadata=entry.metadata),
        holding=HoldReasons.stored(entry),
        ready_ms=entry.ready_ms,
        verified_ms=entry.verified_ms,
        durable_ms=entry.durable_ms,
        error=None,
        gave_up=False,
        settling=None,
    )
    return state, tuple(effects)


def handed_over(state: PushState, to: Home) -> Transition:
    """End as handed over: another replica has taken over this one's part."""
    state = replace(state, handed_to=to, error=None, gave_up=False, settling=None)
    return state.to(Phase.HANDED_OVER), ()


def end(state: PushState, phase: Phase, error: WeighbridgeError) -> Transition:
    """Give up the version, which was never visible or is no longer visible."""
    ended, effects = _stop(state, phase, error)
    if not state.gave_up:
        unless_claimed = not state.declarations.here
        effects += (do.GiveUp(error, unless_claimed, aborted=phase is Phase.ABORTED),)
    return ended, effects


def _leave(state: PushState, error: AlreadyExists) -> Transition:
    """Leave the version to other replicas, which write it under another agreement: this process forgets it."""
    ended, effects = _stop(state, Phase.FAILED, error)
    return ended, (*effects, do.Forget())


def _stop(state: PushState, phase: Phase, error: WeighbridgeError) -> Transition:
    effects: list[Effect] = [do.CloseWriter(aborted(state, error) if phase is Phase.ABORTED else error)]
    if state.image:
        effects.append(do.ReleaseImage())
    if not state.gave_up:
        effects.append(do.Remember(None))
    return replace(state.to(phase), error=error, image=False), tuple(effects)


def settle(state: PushState, error: WeighbridgeError) -> Transition:
    """Make no further attempt to publish.

    If an earlier attempt, or another replica's, may have succeeded, read head.json first.
    """
    share = state.share
    if state.publishing or (share is not None and not share.alone):
        return replace(state, settling=error), ()
    return _conclude(state, error)


def _conclude(state: PushState, error: WeighbridgeError) -> Transition:
    """Give up making the version durable. A visible version stays visible until a newer one is."""
    if isinstance(error, AlreadyExists):
        return _leave(state, error)
    if state.phase not in VISIBLE or state.superseded:
        return end(state, Phase.FAILED, error)
    give_up = do.GiveUp(error, unless_claimed=False)
    return replace(state, gave_up=True, settling=None, error=error), (give_up,)


def _not_found_out(state: PushState, error: WeighbridgeError, now: Moment) -> Transition:
    """Conclude that the failed publication did not take effect, as far as head.json shows: hand the version over, or
    give it up.
    """
    if state.may_be_handed_over:
        return replace(state, settling=None, hand_over_at=min(state.hand_over_at, now.seconds)), ()
    return _conclude(state, error)


def dropped(state: PushState) -> WeighbridgeError:
    """Error of a version that is dropped because a newer one needs its memory."""
    why = "" if state.error is None else f": {state.error.message}"
    return VersionFailed(
        f"{state.name} could not be made durable before its memory was needed for a newer version{why}",
        fix="check why the object store does not accept it",
    )


def failed(state: PushState, effect: Awaited, error: WeighbridgeError, now: Moment) -> Transition:
    """Retry a failed effect, or give the version up if the error is permanent."""
    refused = isinstance(error, VersionFailed | AlreadyExists)  # permanent: a retry would fail, too
    match effect:
        case do.MakePlan():
            return end(state, Phase.FAILED, error)
        case do.AcquireImage():
            for_now = isinstance(error, ResourceExhausted) and error.retry_after is not None
            if for_now and now.seconds < state.image_by:
                return state.paused(effect, now.seconds + _IMAGE_PAUSE), (do.WantMemory(),)
            return end(state, Phase.FAILED, error)
        case do.FindOut() if state.settling is not None:  # as for a store that cannot be read
            return _not_found_out(state, state.settling, now)
        case do.CompareSample() if isinstance(error, DataLoss):
            return end(state, Phase.FAILED, error)
        case do.HandOver(to):
            others = tuple(each for each in state.successors if each != to)
            return replace(state, successors=others, refusals=(*state.refusals, f"{to}: {error.message}")), ()
        case do.Renew() | do.LookAtHead() if not refused:
            return state.paused(effect, now.seconds + LOOK), ()
        case do.HearReplicas() if isinstance(error, InvalidArgument):
            refused = True
        case do.TellReplicas() | do.HearReplicas() if not refused and state.share is None:
            return state.paused(effect, now.seconds + LISTEN), ()
    if refused:
        return settle(state, error)
    if state.gave_up:  # digests are still wanted, but no rank waits for them
        return state.paused(effect, now.seconds + LONGEST_PAUSE), ()
    times = state.failures.get(effect, 0) + 1
    state = replace(state, failures={**state.failures, effect: times}, error=error)
    if state.may_be_handed_over:
        state = replace(state, hand_over_at=min(state.hand_over_at, now.seconds))
    elif state.hurrying and state.needed_here:
        return settle(state, error)
    # without a limit on retries: no other replica has these bytes
    return state.paused(effect, now.seconds + _PAUSES.after(times, 1.0)), ()


def head_said(state: PushState, said: on.HeadSaid, now: Moment) -> Transition:
    """Apply the state of the version in head.json."""
    agreed = state.agreed
    if said.verdict is on.Verdict.PUBLISHED:
        if agreed is not None and said.entry is not None and said.claim == agreed.claim:
            return publish(state, said.entry)
        return _leave(state, AlreadyExists(f"{state.name} was published by other replicas", fix="push the step again"))
    if said.verdict is on.Verdict.ABORTED and state.phase in INCOMPLETE:
        return end(state, Phase.ABORTED, VersionFailed(said.reason, fix="push the step again"))
    if said.verdict in (on.Verdict.GIVEN_UP, on.Verdict.ABORTED):
        return _conclude(state, state.settling or VersionFailed(said.reason, fix="push the step again"))
    if agreed is not None and said.claim not in ("", agreed.claim):
        return _leave(
            state,
            AlreadyExists(f"{state.name} is being written by other replicas", fix="push the step again"),
        )
    if said.opened is not None and agreed is None and is_alone_elsewhere(said.opened, state.declarations.home):
        # the ranks at that replica do not wait for those that have declared at this one
        return _leave(state, ReceivedElsewhere.of(said.opened))
    if said.opened is not None:
        state = state.described(said.opened)
    match said.effect:
        case do.Confirm():  # the version becomes ready even if the store cannot be reached
            return replace(state, confirmed_at=now.seconds), ()
        case do.FindOut() if state.settling is not None:
            return _not_found_out(state, state.settling, now)
        case do.LookAtHead(closing):
            return state.paused(said.effect, now.seconds + (LISTEN if closing else LOOK)), ()
    return state, ()


def timed_out(state: PushState, missing: tuple[str, ...], now: Moment) -> Transition:
    """Give the version up if no rank was active within the receive timeout."""
    until = state.given_up_at
    if until is None or now.seconds < until:
        return state, ()
    message = f"{state.name} was given up: no rank was active for {state.limits.receive_timeout:g} s"
    fix = "push the step again on all ranks"
    if silent := silent_ranks(state):
        undeclared = [rank for rank in silent if rank in state.declarations.absent]
        who = undeclared or silent
        missed = "declared a layout" if undeclared else "pushed everything"
        message += f", and {ranks_have(who)} not {missed}"
        fix = (
            f"find out what happened to {ranks_text(who)}: a process may have been killed, or a "
            f"push may have failed; then {fix}"
        )
    error = VersionFailed(message, details=missing, fix=fix)
    return end(state, Phase.FAILED, error)


def still_mapped(state: PushState, now: Moment) -> Transition:
    """Wait for a process that can still write to the image.

    If a rank waits to be sealed, give the version up after `Limits.unmap_wait`.
    """
    if state.memory_mapped_at is None:
        return state, ()
    asked_at = max(state.memory_mapped_at, state.sealing_at)
    if now.seconds - asked_at < state.limits.unmap_wait:
        return state.paused(do.ProbeMemory(), now.seconds + _UNMAP_PAUSE), ()
    if state.seal_asked - state.sealed:
        error = VersionFailed(
            (
                f"{state.name} was given up: a process can still write to its memory, and has not "
                "confirmed that it has finished"
            ),
            fix=(
                "end the process that lost its connection in the middle of a push, or let it "
                "close its client; push the step again"
            ),
        )
        return end(state, Phase.FAILED, error)
    return state.paused(do.ProbeMemory(), now.seconds + LOOK), (do.RecallMemory(),)
