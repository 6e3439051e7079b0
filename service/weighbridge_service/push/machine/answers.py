"""Answers of a push to its callers: each function returns an answer, raises a refusal, or returns None while there is
no answer yet.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from weighbridge._core.metadata import by_trainer
from weighbridge._core.resources import HELD_CANDIDATE
from weighbridge.errors import AlreadyExists, FailedPrecondition
from weighbridge_service.plan.declarations import Agreement, Home
from weighbridge_service.plan.placed_ranges import PlacedRange
from weighbridge_service.push.machine.phases import INCOMPLETE, VISIBLE, Phase
from weighbridge_service.push.machine.shown import aborted, version_of
from weighbridge_service.push.machine.state import PushState
from weighbridge_storage.head.open_versions import Said

_RETRY_MS = (50, 2_000)
"""Minimum and maximum milliseconds before a rank asks again."""
_RETRY_MS_PER_RANK = 2
"""2 ms for each rank, so that all ranks of one push make 500 calls per second in total."""


def check_not_failed(state: PushState) -> None:
    """Raise the error that ended the version, if any has."""
    error = state.error
    if error is not None and state.phase is Phase.ABORTED:
        raise aborted(state, error)
    if error is not None and state.phase is Phase.FAILED:
        raise error.anew()


def check_incomplete(state: PushState) -> None:
    """Raise if the version cannot receive more: the error that ended it, or FailedPrecondition."""
    check_not_failed(state)
    if state.phase not in INCOMPLETE:
        raise sealed(state)


def sealed(state: PushState) -> FailedPrecondition:
    """Refusal to push more to this version, which is complete."""
    return pushed_already(state.name, state.opened.step, state.opened.run)


def pushed_already(version: str, step: int, run: str) -> FailedPrecondition:
    """Refusal to push more to a complete version. A process pushes a step of a run once.

    Another process may push the step as a new version.
    """
    of_run = f" of run {run}" if run else ""
    return FailedPrecondition(
        f"step {step}{of_run} has been pushed already, as {version}, which is complete",
        fix=(
            "push a different step, or name a different run; a restarted process may push this "
            "step again, as a new version"
        ),
    )


def is_known(state: PushState, said: Said) -> bool:
    """Whether the version already has all metadata, flags and dtypes that a rank sends when it opens it."""
    holding = state.holding
    return (
        (not said.metadata or bool(by_trainer(state.opened.metadata)))
        and (not said.candidate or HELD_CANDIDATE in holding.opened)
        and (not said.allow_nonfinite or holding.allows_nonfinite)
        and said.cast_from <= {*state.cast_from}
    )


def answer_declare(state: PushState, rank: int, client_id: str, digest: str) -> Agreement | None:
    """The answer that lists what a rank pushes; None until all ranks have declared and there is an image.

    Raises:
        AlreadyExists: another process has declared this rank.
        FailedPrecondition: the rank has declared another layout, or the version is sealed.
        WeighbridgeError: the version has failed; raises the error that ended it.
    """
    check_incomplete(state)
    state.declarations.check_rank(rank)
    state.declarations.check_same(rank, client_id, digest)
    return state.agreed if state.image and rank in state.declarations.declared else None


def answer_whole(state: PushState, rank: int, client_id: str) -> bool | None:
    """True once a rank's stream is in place. The rank can then be sealed. Raises the same errors as `answer_seal`."""
    check_not_failed(state)
    state.declarations.check_rank(rank)
    if state.phase not in INCOMPLETE:
        return True
    state.declarations.check_client(rank, client_id)
    return True if rank in state.whole else None


def answer_seal(state: PushState, rank: int) -> bool | None:
    """True once a rank is sealed.

    If no other replica receives the version, the rank that completes it waits until it is ready.

    Raises:
        WeighbridgeError: the version has failed; raises the error that ended it.
    """
    check_not_failed(state)
    if state.phase not in INCOMPLETE:
        return True
    alone = state.share is not None and state.share.alone
    if rank not in state.sealed or (state.phase is Phase.SEALED and alone):
        return None
    return True


def answer_abort(state: PushState) -> bool | None:
    """True once a version is given up.

    Raises FailedPrecondition if it is visible, and nothing keeps it from becoming durable.
    """
    if state.phase in (Phase.FAILED, Phase.ABORTED) or state.gave_up:
        return True
    if state.phase in INCOMPLETE or state.may_be_dropped or state.settling is not None:
        return None
    raise FailedPrecondition(f"{version_of(state)} is visible already and cannot be aborted")


def check_absent(state: PushState, rank: int) -> None:
    """Raise AlreadyExists if the refused rank has declared a layout: then the caller is another process with the same
    rank, or late.
    """
    if rank in state.declarations.here:
        raise AlreadyExists(
            f"rank {rank} of {state.name} takes part already", fix="give each process a rank of its own"
        )


def check_owned(state: PushState, claim: str) -> None:
    """Raise AlreadyExists unless this replica owns the version under the claim under which another replica hands it
    over.
    """
    agreed = state.agreed
    owned = state.phase in VISIBLE or state.phase is Phase.PUBLISHED
    if agreed is not None and not agreed.alone:  # other replicas may be ready before this one
        owned = owned or state.phase in (Phase.FILLING, Phase.SEALED)
    if agreed is None or agreed.claim != claim or not owned:
        raise AlreadyExists(f"{version_of(state)} exists already, and is not the version that is handed over")


@dataclass(frozen=True, slots=True)
class Declared:
    """Answer to a declaration.

    Attributes:
        layout_needed: whether the digest is unknown: declare again, with the layout.
        assigned: indexes of the shards to push, in the order of the stream.
        stream_bytes: length of the stream.
        retry_after_ms: if above 0, there is no answer yet: retry after this many milliseconds.
        absent: ranks that have not declared, if there is no answer yet.
        routes: byte ranges of the stream to push to each replica, by the replica's address. The address of this replica
            is an empty string. There
                are no entries if the rank pushes all of the stream to this replica.
        claim: the agreement of the replicas, if there are several.
        shared: indexes of the shards whose boxes other ranks also hold, in a tensor space that does not mark replicas.
        placed: parts of the stream that do not lie in exactly one place of the files.
        shifts: number to add to each element of a tensor before it is pushed, by its name.
        push_at: address of the replica at which to declare instead; empty for this one.
    """

    layout_needed: bool = False
    assigned: Sequence[int] = ()
    stream_bytes: int = 0
    retry_after_ms: int = 0
    absent: Sequence[int] = ()
    routes: Mapping[str, Sequence[tuple[int, int]]] = field(default_factory=dict)
    claim: str = ""
    shared: Sequence[int] = ()
    placed: Sequence[PlacedRange] = ()
    shifts: Mapping[str, float] = field(default_factory=dict)
    push_at: str = ""


def to_push(agreed: Agreement, home: Home, rank: int) -> Declared:
    """Answer with the shards that a rank pushes, and the replicas to push them to.

    Args:
        agreed: the agreement of all ranks.
        home: the replica at which the rank has declared.
        rank: the rank.
    """
    prepared = agreed.prepared
    assigned, nbytes = prepared.assigned[rank], prepared.streams[rank].nbytes
    shared, placed = tuple(prepared.shared.get(rank, ())), prepared.placed.get(rank, ())
    shifts = prepared.shifts_of(rank)
    if agreed.alone:
        return Declared(assigned=assigned, stream_bytes=nbytes, shared=shared, placed=placed, shifts=shifts)
    routes = {"" if to == home else to.address: list(ranges) for to, ranges in agreed.routes(rank).items()}
    return Declared(
        assigned=assigned,
        stream_bytes=nbytes,
        routes=routes,
        claim=agreed.claim,
        shared=shared,
        placed=placed,
        shifts=shifts,
    )


def elsewhere(state: PushState, rank: int, digest: str) -> Declared | None:
    """Answer to a rank that has to declare at another replica; None if it declares at this one."""
    home = state.declarations.expected_at(rank, digest)
    return None if home is None else Declared(push_at=home.address)


def ask_again(state: PushState) -> Declared:
    """Answer to a rank whose call has waited long enough for the other ranks: retry later."""
    declarations = state.declarations
    least, most = _RETRY_MS
    retry_after_ms = min(max(_RETRY_MS_PER_RANK * declarations.ranks, least), most)
    return Declared(retry_after_ms=retry_after_ms, absent=declarations.absent)
