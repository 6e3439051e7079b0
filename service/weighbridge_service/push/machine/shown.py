"""Views of a push: the version as readers see it, what it waits for, and why it is lost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from weighbridge._core.resources import Version, VersionState
from weighbridge._core.text.counts import counted
from weighbridge._core.text.waits import ranks_text
from weighbridge.errors import VersionFailed, WeighbridgeError
from weighbridge_service.push.machine.effects import LookAtHead, ProbeMemory
from weighbridge_service.push.machine.phases import FINAL, Phase
from weighbridge_service.push.machine.state import PushState

_SHOWN = {
    Phase.OPEN: VersionState.OPEN,
    Phase.PLANNED: VersionState.OPEN,
    Phase.FILLING: VersionState.RECEIVING,
    Phase.SEALED: VersionState.RECEIVING,
    Phase.READY: VersionState.READY,
    Phase.VERIFIED: VersionState.VERIFIED,
    Phase.PUBLISHED: VersionState.DURABLE,
    Phase.HANDED_OVER: VersionState.READY,
    Phase.FAILED: VersionState.FAILED,
    Phase.ABORTED: VersionState.ABORTED,
}


def version_of(state: PushState) -> Version:
    """The version as readers see it."""
    error, message = state.error, ""
    if error is not None:
        message = error.message if state.phase in FINAL else f"not durable yet: {error.message}"
    shown = _SHOWN[state.phase]
    if state.phase is Phase.HANDED_OVER and state.verified_ms:
        shown = VersionState.VERIFIED
    return replace(
        state.opened,
        state=shown,
        sealed_ranks=len(state.sealed),
        received_bytes=state.received_bytes,
        nonfinite_elements=state.holding.found if state.verified_ms else state.holding.known,
        held=state.holding.reasons,
        ready_time_ms=state.ready_ms,
        verified_time_ms=state.verified_ms,
        durable_time_ms=state.durable_ms,
        error=message,
        error_details=() if error is None else error.details,
    )


def waits_for(state: PushState) -> Iterator[str]:
    """Names of the things that the push waits for; none if it has ended."""
    if state.phase in FINAL:
        return
    if state.gave_up:
        yield "a newer version"
    share = state.share
    if state.agreed is None and not state.declarations.complete:
        yield f"{ranks_text(state.declarations.absent)} to declare"
    if share is not None and state.phase is Phase.FILLING:
        if len(state.sealed) < len(share.ranks):
            yield f"{ranks_text(sorted(share.ranks - state.sealed))} to push and seal"
        if len(state.filled) < len(share.files):
            yield f"bytes of {counted(len(share.files) - len(state.filled), 'file')}"
    if state.memory_mapped_at is not None:
        yield "processes to unmap the image"
    if state.waits_for_others:
        yield "other replicas"
    yield from (str(effect) for effect in state.running if not isinstance(effect, LookAtHead | ProbeMemory))


def silent_ranks(state: PushState) -> list[int]:
    """Ranks that a push waits for, as far as this replica knows: those that have not declared; after the plan, those
    not sealed.
    """
    if state.agreed is None:
        return sorted(state.declarations.absent)
    return [] if state.share is None else sorted(state.share.ranks - state.sealed)


def why_lost(state: PushState) -> str:
    """Reason for which a version that is visible and not durable is lost when this process ends."""
    durable = state.error.message if state.error is not None else f"waits for {', '.join(waits_for(state))}"
    if state.refusals:
        handed = "; ".join(state.refusals)
    elif state.successors:
        handed = f"{state.successors[0]} has not read all of it in time"
    else:
        handed = "no other replica is known"
    return f"not durable: {durable}; not handed over: {handed}"


def aborted(state: PushState, error: WeighbridgeError) -> VersionFailed:
    """Error that ranks get for a version that was given up for this reason."""
    return VersionFailed(
        f"{state.name} was given up: {error.message}",
        details=error.details,
        fix=error.fix or "push the step again on all ranks, when the cause is gone",
    )
