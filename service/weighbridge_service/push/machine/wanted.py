"""Effects that a push needs in a state, and the earliest time of each.

A failed effect, or one whose answer was lost, is wanted again.
"""

from __future__ import annotations

from collections.abc import Iterator

from weighbridge_service.push.machine import effects as do
from weighbridge_service.push.machine.effects import Awaited
from weighbridge_service.push.machine.phases import INCOMPLETE, VISIBLE, Phase
from weighbridge_service.push.machine.state import PushState

LOOK = 1.0
"""Seconds between two checks whether a version is still open."""
LISTEN = 0.25
"""Seconds between two reads of messages from other replicas."""
_AFTER_FILLING = frozenset((Phase.SEALED, *VISIBLE))


def wanted(state: PushState) -> Iterator[tuple[Awaited, float]]:
    """Effects to carry out in this state, each with its earliest time; those that ranks wait for come first."""
    share, phase = state.share, state.phase
    if _is_to_be_confirmed(state):
        yield do.Confirm(), 0.0
    # while bytes arrive, and again once the version is ready: between them, waiting ranks need the processor
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
    if state.given_up_at is not None:
        yield do.NameMissing(), state.given_up_at
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
    if state.memory_mapped_at is not None:
        yield do.ProbeMemory(), 0.0
    if share.alone and phase is Phase.VERIFIED and state.uploaded_here:
        yield do.WriteManifestAndPublish(), 0.0


def _is_to_be_confirmed(state: PushState) -> bool:
    """Whether head.json has to be read before the version can become ready."""
    share = state.share
    if share is None or state.gave_up or state.settling is not None:
        return False
    if state.phase is Phase.FILLING:  # early, so that the last rank to seal does not wait for the read
        return share.alone and state.all_filled and state.confirmed_at is None
    return state.phase is Phase.SEALED and (share.alone or state.others_complete)


def _wanted_of_replicas(state: PushState) -> Iterator[tuple[Awaited, float]]:
    """Effects with which several replicas assemble one version together."""
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
