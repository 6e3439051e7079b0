"""State of one push, and what can be told from it: what everybody sees, what it waits for, what its ranks are answered."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from weighbridge._core.resources import HELD_CANDIDATE, Version, VersionState
from weighbridge._core.text.waits import ranks_text
from weighbridge.errors import (
    AlreadyExists,
    DeadlineExceeded,
    FailedPrecondition,
    VersionFailed,
    WeighbridgeError,
)
from weighbridge_service.catalog.holding import Holding
from weighbridge_service.plan.declarations import Agreement, Declarations, Home, KnownSet, Share
from weighbridge_service.push.effects import Awaited, LookAtHead, ProbeMemory
from weighbridge_storage.head.head_changes import Said

_NAMED = 20
"""Lines that an error lists at most."""


class Phase(enum.Enum):
    """Where a push is."""

    OPEN = "open"
    """The number is given; not all ranks have declared."""
    PLANNED = "planned"
    """All ranks have declared and the plan is made; there is no image yet."""
    FILLING = "filling"
    """Bytes arrive."""
    SEALED = "sealed"
    """All bytes of this replica's files are here, nobody can write to them, and its ranks have sealed."""
    READY = "ready"
    """All bytes of all files are in images of live replicas, and the version was not given up meanwhile."""
    VERIFIED = "verified"
    """The digests of all files were made from the images, and a sample was compared with what ranks sent."""
    PUBLISHED = "published"
    """Part of history."""
    HANDED_OVER = "handed over"
    """Another replica has all bytes that were here and goes on with them: this one leaves."""
    FAILED = "failed"
    ABORTED = "aborted"


TRANSITIONS: Mapping[Phase, frozenset[Phase]] = {
    Phase.OPEN: frozenset((Phase.PLANNED, Phase.FAILED, Phase.ABORTED)),
    Phase.PLANNED: frozenset((Phase.FILLING, Phase.PUBLISHED, Phase.FAILED, Phase.ABORTED)),
    Phase.FILLING: frozenset((Phase.SEALED, Phase.PUBLISHED, Phase.FAILED, Phase.ABORTED)),
    Phase.SEALED: frozenset((Phase.READY, Phase.PUBLISHED, Phase.FAILED, Phase.ABORTED)),
    Phase.READY: frozenset((Phase.VERIFIED, Phase.PUBLISHED, Phase.HANDED_OVER, Phase.FAILED)),
    Phase.VERIFIED: frozenset((Phase.PUBLISHED, Phase.HANDED_OVER, Phase.FAILED)),
    Phase.PUBLISHED: frozenset(),
    Phase.HANDED_OVER: frozenset(),
    Phase.FAILED: frozenset(),
    Phase.ABORTED: frozenset(),
}
"""All transitions there are. PUBLISHED follows on earlier phases where another replica has published: it does so only when every
owner of files has handed in what it has digested, compared and uploaded."""
INCOMPLETE = frozenset((Phase.OPEN, Phase.PLANNED, Phase.FILLING, Phase.SEALED))
BEFORE_SEALED = INCOMPLETE - {Phase.SEALED}
VISIBLE = frozenset((Phase.READY, Phase.VERIFIED))
FINAL = frozenset((Phase.PUBLISHED, Phase.HANDED_OVER, Phase.FAILED, Phase.ABORTED))

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


@dataclass(frozen=True, slots=True)
class Limits:
    """What a push goes by.

    Attributes:
        receive_timeout: seconds without a word from any rank after which it is given up.
        image_wait: seconds that it waits for an image.
        lease: seconds that it stays open in head.json unless that is renewed.
        spreading: whether ranks may push to other replicas, too.
    """

    receive_timeout: float = 300.0
    image_wait: float = 60.0
    lease: float = 120.0
    spreading: bool = False


@dataclass(frozen=True, slots=True)
class Moment:
    """A point in time.

    Attributes:
        seconds: of the monotonic clock.
        unix_ms: milliseconds since 1970 UTC.
    """

    seconds: float
    unix_ms: int


_NOT_HELD = Holding()


@dataclass(frozen=True, slots=True)
class PushState:
    """One push, as one replica knows it. Immutable.

    Attributes:
        opened: the version as it was opened.
        limits: what it goes by.
        declarations: of its ranks, and the agreement.
        phase: where it is.
        heard_at: when a rank was last heard of; seconds of the monotonic clock, as all times here that are not in milliseconds.
        renew_at: when the lease in head.json is to be renewed.
        image_by: when it stops waiting for an image.
        share: this replica's part, once there is an agreement.
        image: whether there is an image.
        whole, seal_asked, sealed: ranks of this replica of whose stream all is here that belongs here, that have asked to be sealed,
            and that are.
        sealing_at: when a rank last asked.
        filled, digested, uploaded: files of this replica that are complete, have digests, and are in the store.
        digests_uploaded: those whose block digests are in the store.
        perhaps_unchanged: those that are uploaded only when they have digests: they may be the same in the version before.
        compared: whether the sample agrees.
        holding: why ``live`` passes it by, if it does.
        memory_held_at: since when another process can still write to the image although everything is here; None if none can.
        claimed: whether head.json records the agreement.
        told: ranks of whose declarations other replicas were told.
        complete_at: other replicas whose part is complete.
        stored_at: those of them whose files are in the store.
        handed_in_here: whether other replicas can read what this one has uploaded.
        handed_in: replicas whose uploaded files are known.
        leave_until: until when the last steps are left to the replica that came last.
        confirmed_at: when head.json last said, with all bytes here, that the version was still open; None before that.
        publishing: whether a publication was ever begun by this replica.
        settling: what a publication has failed of, as long as it is not known whether it was made all the same.
        received_bytes: of tensors that have come.
        ready_ms, verified_ms, durable_ms: when it became so, in milliseconds since 1970 UTC; 0 if it did not.
        error: what it has failed of; of a visible version, why it is not durable.
        gave_up: of a visible version, that no further attempt is made.
        superseded: whether a newer version of the model is visible.
        hurrying: whether the service shuts down.
        successors: replicas that may take it over then, and have not refused.
        hand_over_at: when the first of them is asked, if it is not durable by then.
        until: when the service ends.
        refusals: why others did not take it over, a line for each.
        handed_to: who has taken it over.
        running: effects that are awaited.
        not_before: when an effect may be started again.
        failures: how often effects have failed since they last succeeded.
        wake_at: when something is to be done even if nothing happens; None if there is no such time.
    """

    opened: Version
    limits: Limits
    declarations: Declarations
    heard_at: float
    renew_at: float
    phase: Phase = Phase.OPEN
    image_by: float = 0.0
    share: Share | None = None
    image: bool = False
    whole: frozenset[int] = frozenset()
    seal_asked: frozenset[int] = frozenset()
    sealed: frozenset[int] = frozenset()
    sealing_at: float = 0.0
    filled: frozenset[str] = frozenset()
    digested: frozenset[str] = frozenset()
    uploaded: frozenset[str] = frozenset()
    digests_uploaded: frozenset[str] = frozenset()
    perhaps_unchanged: frozenset[str] = frozenset()
    compared: bool = False
    holding: Holding = _NOT_HELD
    memory_held_at: float | None = None
    claimed: bool = False
    told: frozenset[int] = frozenset()
    complete_at: frozenset[int] = frozenset()
    stored_at: frozenset[int] = frozenset()
    handed_in_here: bool = False
    handed_in: frozenset[int] = frozenset()
    leave_until: float = 0.0
    confirmed_at: float | None = None
    publishing: bool = False
    settling: WeighbridgeError | None = None
    received_bytes: int = 0
    ready_ms: int = 0
    verified_ms: int = 0
    durable_ms: int = 0
    error: WeighbridgeError | None = None
    gave_up: bool = False
    superseded: bool = False
    hurrying: bool = False
    successors: tuple[Home, ...] = ()
    hand_over_at: float = 0.0
    until: float = 0.0
    refusals: tuple[str, ...] = ()
    handed_to: Home | None = None
    running: frozenset[Awaited] = frozenset()
    not_before: Mapping[Awaited, float] = field(default_factory=dict)
    failures: Mapping[Awaited, int] = field(default_factory=dict)
    wake_at: float | None = None

    @staticmethod
    def begin(
        opened: Version,
        home: Home,
        limits: Limits,
        known: KnownSet | None,
        lease_left: float,
        now: Moment,
        holding: Holding = _NOT_HELD,
    ) -> PushState:
        """A push that has just been opened.

        Args:
            opened: the version.
            home: this replica.
            limits: what it goes by.
            known: the declarations of the push before, if any.
            lease_left: seconds until its lease in head.json expires.
            now: the time.
            holding: why it is held, as far as that was said at its opening.
        """
        return PushState(
            opened,
            limits,
            Declarations.of(opened, home, known),
            heard_at=now.seconds,
            renew_at=now.seconds + lease_left - limits.lease / 2,
            holding=holding,
        )

    @staticmethod
    def taken_over(
        opened: Version,
        declarations: Declarations,
        number: int,
        limits: Limits,
        ready_ms: int,
        now: Moment,
        holding: Holding = _NOT_HELD,
    ) -> PushState:
        """A push whose files another replica has handed over to this one, with their bytes in an image.

        Args:
            opened: the version as it was opened.
            declarations: with the agreement.
            number: of the share that was handed over.
            limits: what it goes by.
            ready_ms: when it became ready, in milliseconds since 1970 UTC.
            now: the time.
            holding: why it is held, as far as the other one knew.
        """
        if declarations.agreed is None:
            raise AssertionError(f"{declarations.name} is not agreed on")
        share = declarations.agreed.share(number)
        return PushState(
            opened,
            limits,
            declarations,
            heard_at=now.seconds,
            renew_at=now.seconds,
            phase=Phase.READY,
            share=share,
            image=True,
            whole=share.ranks,
            seal_asked=share.ranks,
            sealed=share.ranks,
            filled=frozenset(share.files),
            compared=True,  # by the replica that has received the pieces
            told=frozenset() if share.alone else share.ranks,  # by the replicas where they have declared
            complete_at=share.owners - {number},
            received_bytes=sum(share.files.values()),
            ready_ms=ready_ms,
            holding=holding,
        )

    @property
    def name(self) -> str:
        """The version in messages."""
        return self.declarations.name

    @property
    def agreed(self) -> Agreement | None:
        """What all ranks have agreed on."""
        return self.declarations.agreed

    @property
    def share_number(self) -> int | None:
        """The number of the replica whose part this is; None before there is an agreement."""
        return None if self.share is None else self.share.me

    @property
    def all_filled(self) -> bool:
        """Whether all bytes that this replica is to receive are here."""
        return self.share is not None and self.filled == self.share.files.keys()

    @property
    def complete_here(self) -> bool:
        """Whether all that this replica is to receive is here and its ranks have sealed."""
        return self.share is not None and self.all_filled and len(self.sealed) == len(self.share.ranks)

    @property
    def verified_here(self) -> bool:
        """Whether all files of this replica have digests, and its sample agrees."""
        return self.share is not None and self.digested == self.share.files.keys() and self.compared

    @property
    def uploaded_here(self) -> bool:
        """Whether all files of this replica are in the store, with their block digests."""
        return self.share is not None and self.uploaded == self.digests_uploaded == self.share.files.keys()

    @property
    def others_complete(self) -> bool:
        """Whether every other replica has all bytes of its files, and its ranks have sealed: they may have counted what holds the version."""
        share, agreed = self.share, self.agreed
        if share is None or agreed is None:
            return False
        return set(range(len(agreed.homes))) - {share.me} <= self.complete_at

    @property
    def released(self) -> bool:
        """Whether ``live`` may name it."""
        return (self.phase in VISIBLE or self.phase is Phase.PUBLISHED) and not self.holding.reasons

    def depends_on(self, replica: int) -> bool:
        """Whether the version is lost if another replica loses what it has in memory."""
        if self.share is None or replica == self.share.me:
            return False
        if replica in self.share.owners:
            return replica not in self.stored_at
        # what its ranks had to push has arrived once its part is complete
        return replica not in self.complete_at and self.phase in INCOMPLETE

    @property
    def all_handed_in(self) -> bool:
        """Whether the uploaded files of all replicas are known; so it is where there is only one."""
        return self.share is not None and (self.share.alone or self.handed_in == self.share.owners)

    @property
    def waits_for_others(self) -> bool:
        """Whether this replica has done its part, and the others have not."""
        share = self.share
        if share is None or share.alone or self.phase in (Phase.OPEN, Phase.PLANNED, Phase.FILLING):
            return False
        return (self.handed_in_here or share.me not in share.owners) and not self.all_handed_in

    @property
    def may_be_dropped(self) -> bool:
        """Whether it is visible, and what would make it durable fails: it may be given up if somebody says so."""
        return self.phase in VISIBLE and bool(self.failures) and not self.gave_up

    @property
    def needed_here(self) -> bool:
        """Whether the version is lost if this replica ends now: nobody else has what it has."""
        share = self.share
        if self.phase in FINAL or share is None or share.alone:
            return self.phase not in FINAL
        return self.phase in INCOMPLETE or (share.me in share.owners and not self.handed_in_here)

    @property
    def may_be_handed_over(self) -> bool:
        """Whether another replica may still take over what is here, at once or when it is ready."""
        closed = isinstance(self.settling, VersionFailed | AlreadyExists)
        return bool(self.successors) and not closed and self.needed_here

    @property
    def unfinished(self) -> bool:
        """Whether something is to be done for it yet."""
        return self.phase not in FINAL and (not self.gave_up or self.may_be_handed_over)


def version_of(state: PushState) -> Version:
    """The version as everybody sees it."""
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
    """What the push waits for, by name; nothing if it has ended."""
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
            yield f"bytes of {len(share.files) - len(state.filled)} files"
    if state.memory_held_at is not None:
        yield "processes to unmap the image"
    if state.waits_for_others:
        yield "other replicas"
    yield from (str(effect) for effect in state.running if not isinstance(effect, LookAtHead | ProbeMemory))


def why_lost(state: PushState) -> str:
    """Why a version that is visible and not durable ends with this process."""
    durable = state.error.message if state.error is not None else f"waits for {', '.join(waits_for(state))}"
    if state.refusals:
        handed = "; ".join(state.refusals)
    elif state.successors:
        handed = f"{state.successors[0]} has not read all of it in time"
    else:
        handed = "no other replica is known"
    return f"not durable: {durable}; not handed over: {handed}"


# --- what callers are answered -------------------------------------------------------------------------------------------
# Each function gives an answer, raises a refusal, or gives None as long as there is none yet.


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
