"""Answers of a push to its callers: each function gives one, raises a refusal, or gives None as long as there is none yet."""

from __future__ import annotations

from weighbridge._core.resources import HELD_CANDIDATE
from weighbridge.errors import AlreadyExists, DeadlineExceeded, FailedPrecondition
from weighbridge_service.plan.declarations import Agreement
from weighbridge_service.push.machine.phases import INCOMPLETE, VISIBLE, Phase
from weighbridge_service.push.machine.shown import version_of
from weighbridge_service.push.machine.state import PushState
from weighbridge_storage.head.head_changes import Said

_NAMED = 20
"""Lines that an error lists at most."""


def check_not_failed(state: PushState) -> None:
    """Raise what the version has failed of, if it has."""
    error = state.error
    if error is not None and state.phase in (Phase.FAILED, Phase.ABORTED):
        raise error.anew()


def check_incomplete(state: PushState) -> None:
    """Raise if nothing more can be received: what the version has failed of, or FailedPrecondition."""
    check_not_failed(state)
    if state.phase not in INCOMPLETE:
        raise sealed(state)


def sealed(state: PushState) -> FailedPrecondition:
    """What those are told who would push more to a version that is complete."""
    return FailedPrecondition(f"{state.name} is sealed", fix="push a new version: another step or run")


def is_known(state: PushState, said: Said) -> bool:
    """Whether all that a rank says of a version when it opens it was said before."""
    holding = state.holding
    return (
        (not said.metadata or bool(state.opened.metadata))
        and (not said.candidate or HELD_CANDIDATE in holding.opened)
        and (not said.allow_nonfinite or holding.allows_nonfinite)
    )


def answer_declare(state: PushState, rank: int, client_id: str, digest: str) -> Agreement | None:
    """What a rank that has declared is to push.

    Raises:
        AlreadyExists: another process has declared this rank.
        FailedPrecondition: the rank has declared another layout, or the version is sealed.
        WeighbridgeError: what the version has failed of.
    """
    check_incomplete(state)
    state.declarations.check_rank(rank)
    state.declarations.check_same(rank, client_id, digest)
    return state.agreed if state.image and rank in state.declarations.declared else None


def not_all_declared(state: PushState) -> DeadlineExceeded:
    """What a rank is told that has waited for the others in vain."""
    absent = state.declarations.absent
    return DeadlineExceeded(
        f"{state.name}: {len(absent)} of {state.declarations.ranks} ranks have not declared their layout",
        details=[f"rank {rank}" for rank in absent[:_NAMED]],
        fix="every rank calls push with the same step, run and world_size; if they push to several replicas "
        "of the service, serve each of these with --advertise",
    )


def answer_whole(state: PushState, rank: int, client_id: str) -> bool | None:
    """Whether a rank's stream is in place, so that it can be sealed: True. Raises as `answer_seal`."""
    check_not_failed(state)
    state.declarations.check_rank(rank)
    if state.phase not in INCOMPLETE:
        return True
    state.declarations.check_client(rank, client_id)
    return True if rank in state.whole else None


def answer_seal(state: PushState, rank: int) -> bool | None:
    """Whether a rank is sealed: True. The rank that completes a version which no other replica receives waits until it is ready.

    Raises:
        WeighbridgeError: what the version has failed of.
    """
    check_not_failed(state)
    if state.phase not in INCOMPLETE:
        return True
    alone = state.share is not None and state.share.alone
    if rank not in state.sealed or (state.phase is Phase.SEALED and alone):
        return None
    return True


def answer_abort(state: PushState) -> bool | None:
    """Whether a version is given up: True. Raises FailedPrecondition if it is visible, and nothing keeps it from becoming durable."""
    if state.phase in (Phase.FAILED, Phase.ABORTED) or state.gave_up:
        return True
    if state.phase in INCOMPLETE or state.may_be_dropped or state.settling is not None:
        return None
    raise FailedPrecondition(f"{version_of(state)} is visible already and cannot be aborted")


def check_owned(state: PushState, claim: str) -> None:
    """Raise AlreadyExists if a version that another replica hands over under this claim is known here, and is not held."""
    agreed = state.agreed
    held = state.phase in VISIBLE or state.phase is Phase.PUBLISHED
    if agreed is not None and not agreed.alone:  # the others may be ready before this one
        held = held or state.phase in (Phase.FILLING, Phase.SEALED)
    if agreed is None or agreed.claim != claim or not held:
        raise AlreadyExists(f"{version_of(state)} is there already, and is not what is handed over")
