"""State of one push, and properties derived from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from weighbridge._core.resources import Version
from weighbridge.errors import AlreadyExists, VersionFailed, WeighbridgeError
from weighbridge_service.catalog.holding import HoldReasons
from weighbridge_service.catalog.snapshots import Beginning
from weighbridge_service.plan.declarations import Agreement, Declarations, Home, KnownSet, ReplicaShare
from weighbridge_service.push.machine.effects import Awaited
from weighbridge_service.push.machine.phases import (
    BEFORE_SEALED,
    FINAL,
    INCOMPLETE,
    TRANSITIONS,
    VISIBLE,
    Phase,
)
from weighbridge_storage.documents.entries import OpenEntry


@dataclass(frozen=True, slots=True)
class Limits:
    """Timeouts and options of a push.

    Attributes:
        receive_timeout: seconds without activity of any rank after which the push is given up.
        opening_wait: seconds that a call waits for its turn to open a version.
        image_wait: seconds that the push waits for an image.
        unmap_wait: seconds within which processes have to unmap memory on request while a rank waits; it takes them
            milliseconds.
        lease: seconds that the version stays open in head.json unless the lease is renewed.
        spreading: whether ranks may push to other replicas, too.
        sha256: whether the digests of its files include SHA-256.
    """

    receive_timeout: float = 300.0
    opening_wait: float = 10.0
    image_wait: float = 60.0
    unmap_wait: float = 5.0
    lease: float = 120.0
    spreading: bool = False
    sha256: bool = False


@dataclass(frozen=True, slots=True)
class Moment:
    """Point in time, on two clocks.

    Attributes:
        seconds: seconds of the monotonic clock.
        unix_ms: milliseconds since 1970 UTC.
    """

    seconds: float
    unix_ms: int


_NOT_HELD = HoldReasons()


@dataclass(frozen=True, slots=True)
class PushState:
    """State of one push, as one replica knows it. Immutable.

    Times are in seconds of the monotonic clock, except those in milliseconds, which count from 1970 UTC.

    Attributes:
        opened: the version as it was opened.
        limits: timeouts and options.
        declarations: declarations of its ranks, and the agreement.
        phase: the phase.
        heard_at: time of the last activity of a rank.
        renew_at: when to renew the lease in head.json.
        image_by: when the push stops waiting for an image.
        share: this replica's part, once there is an agreement.
        image: whether there is an image.
        whole, seal_asked, sealed: ranks of this replica whose bytes for it have all arrived, that have asked to be
            sealed, and that are sealed.
        sealing_at: when a rank last asked to be sealed.
        declared_ms, sealed_ms: when each rank of this replica declared and was sealed.
        filled, digested, uploaded: files of this replica that are complete, have digests, and are in the store.
        digests_uploaded: files whose block digests are in the store.
        perhaps_unchanged: files that may equal the parent version's, and are uploaded only once they have digests.
        compared: whether the sample agrees.
        holding: reasons for which ``live`` skips the version, if any.
        memory_mapped_at: when all bytes had arrived while another process could still write to the image; None if none
            can.
        claimed: whether head.json records the agreement.
        told: ranks whose declarations were sent to other replicas.
        complete_at: other replicas whose part is complete.
        stored_at: those of them whose files are in the store.
        handed_in_here: whether other replicas can read the list of files that this one has uploaded.
        handed_in: replicas whose uploaded files are known.
        leave_until: time until which the last steps are left to the replica that was the last to hand in its files.
        confirmed_at: when head.json last showed the version as open with all bytes here; None before that.
        publishing: whether this replica has ever begun to publish.
        settling: error of a publication that may have taken effect nevertheless; None if there is none to check.
        received_bytes: bytes of tensors that have arrived.
        beginning: how the version began; None if this process has not opened it.
        ready_ms, verified_ms, durable_ms: when the version became ready, verified and durable; 0 if it did not.
        ended_ms: when its last phase began; 0 if it has not ended.
        error: error that ended the push; of a visible version, why it is not durable.
        gave_up: whether a visible version is not going to be made durable.
        superseded: whether a newer version of the model is visible.
        cast_from: dtypes from which ranks cast, as last read from head.json.
        hurrying: whether the service shuts down.
        successors: replicas that may take the version over at shutdown, and have not refused.
        hand_over_at: when the first of them is asked, if the version is not durable by then.
        until: when the service ends.
        refusals: errors of replicas that did not take the version over, one line each.
        handed_to: replica that has taken the version over.
        running: awaited effects that have not been answered.
        not_before: earliest time at which each effect may start again.
        failures: number of failures of each effect since it last succeeded.
        wake_at: when the session calls `step` again if no event comes before; None if it need not.
    """

    opened: Version
    limits: Limits
    declarations: Declarations
    heard_at: float
    renew_at: float
    phase: Phase = Phase.OPEN
    image_by: float = 0.0
    share: ReplicaShare | None = None
    image: bool = False
    whole: frozenset[int] = frozenset()
    seal_asked: frozenset[int] = frozenset()
    sealed: frozenset[int] = frozenset()
    sealing_at: float = 0.0
    declared_ms: Mapping[int, int] = field(default_factory=dict)
    sealed_ms: Mapping[int, int] = field(default_factory=dict)
    filled: frozenset[str] = frozenset()
    digested: frozenset[str] = frozenset()
    uploaded: frozenset[str] = frozenset()
    digests_uploaded: frozenset[str] = frozenset()
    perhaps_unchanged: frozenset[str] = frozenset()
    compared: bool = False
    holding: HoldReasons = _NOT_HELD
    memory_mapped_at: float | None = None
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
    beginning: Beginning | None = None
    ready_ms: int = 0
    verified_ms: int = 0
    durable_ms: int = 0
    ended_ms: int = 0
    error: WeighbridgeError | None = None
    gave_up: bool = False
    superseded: bool = False
    cast_from: tuple[str, ...] = ()
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
        holding: HoldReasons = _NOT_HELD,
        beginning: Beginning | None = None,
    ) -> PushState:
        """State of a push that has just been opened.

        Args:
            opened: the version.
            home: this replica.
            limits: timeouts and options.
            known: the declarations of the previous push, if any.
            lease_left: seconds until its lease in head.json expires.
            now: the current time.
            holding: reasons for which the version is held, as far as ranks gave them at its opening.
            beginning: how the version began; None if another process has opened it.
        """
        return PushState(
            opened,
            limits,
            Declarations.of(opened, home, known),
            heard_at=now.seconds,
            renew_at=now.seconds + lease_left - limits.lease / 2,
            holding=holding,
            beginning=beginning,
        )

    @staticmethod
    def taken_over(
        opened: Version,
        declarations: Declarations,
        number: int,
        limits: Limits,
        ready_ms: int,
        now: Moment,
        holding: HoldReasons = _NOT_HELD,
    ) -> PushState:
        """State of a push whose files another replica has handed over to this one, with their bytes in an image.

        Args:
            opened: the version as it was opened.
            declarations: the declarations, with the agreement.
            number: number of the share that was handed over.
            limits: timeouts and options.
            ready_ms: when the version became ready, in milliseconds since 1970 UTC.
            now: the current time.
            holding: reasons for which the version is held, as far as the other replica knew.
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
            compared=True,  # the replica that received the pieces has compared them
            told=frozenset() if share.alone else share.ranks,  # sent by the replicas of these ranks
            complete_at=share.owners - {number},
            received_bytes=sum(share.files.values()),
            ready_ms=ready_ms,
            holding=holding,
        )

    @property
    def name(self) -> str:
        """Name of the version in messages."""
        return self.declarations.name

    @property
    def agreed(self) -> Agreement | None:
        """The agreement of all ranks; None before the plan is made."""
        return self.declarations.agreed

    @property
    def share_number(self) -> int | None:
        """Number of the share that this replica holds; None before there is an agreement."""
        return None if self.share is None else self.share.me

    @property
    def all_filled(self) -> bool:
        """Whether all bytes for this replica have arrived."""
        return self.share is not None and self.filled == self.share.files.keys()

    @property
    def complete_here(self) -> bool:
        """Whether all bytes for this replica have arrived and its ranks are sealed."""
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
        """Whether every other replica has all bytes of its files, and its ranks are sealed.

        They may have counted NaNs, so the version may be held.
        """
        share, agreed = self.share, self.agreed
        if share is None or agreed is None:
            return False
        return set(range(len(agreed.homes))) - {share.me} <= self.complete_at

    @property
    def given_up_at(self) -> float | None:
        """When the push is given up unless a rank is active first; None if it waits for none."""
        return self.heard_at + self.limits.receive_timeout if self.phase in BEFORE_SEALED else None

    @property
    def released(self) -> bool:
        """Whether ``live`` may name the version."""
        return (self.phase in VISIBLE or self.phase is Phase.PUBLISHED) and not self.holding.reasons

    def depends_on(self, replica: int) -> bool:
        """Whether the version is lost if another replica loses its memory."""
        if self.share is None or replica == self.share.me:
            return False
        if replica in self.share.owners:
            return replica not in self.stored_at
        # once its part is complete, the bytes of its ranks have arrived at the replicas that own the files
        return replica not in self.complete_at and self.phase in INCOMPLETE

    @property
    def all_handed_in(self) -> bool:
        """Whether the uploaded files of all replicas are known; True if there is only one replica."""
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
        """Whether the version is visible but cannot be made durable.

        If so, a caller may abort it, or a newer version may get its memory.
        """
        return self.phase in VISIBLE and bool(self.failures) and not self.gave_up

    @property
    def needed_here(self) -> bool:
        """Whether the version is lost if this replica ends now: no other replica can finish it."""
        share = self.share
        if self.phase in FINAL or share is None or share.alone:
            return self.phase not in FINAL
        return self.phase in INCOMPLETE or (share.me in share.owners and not self.handed_in_here)

    @property
    def may_be_handed_over(self) -> bool:
        """Whether another replica may still take over this one's part, now or once it is ready."""
        closed = isinstance(self.settling, VersionFailed | AlreadyExists)
        return bool(self.successors) and not closed and self.needed_here

    @property
    def unfinished(self) -> bool:
        """Whether there is still work to do for the push."""
        return self.phase not in FINAL and (not self.gave_up or self.may_be_handed_over)

    # --- changed copies

    def to(self, phase: Phase) -> PushState:
        """Copy in another phase. Raises AssertionError if that phase may not follow."""
        if phase not in TRANSITIONS[self.phase]:
            raise AssertionError(f"{self.phase} cannot change to {phase}")
        return replace(self, phase=phase)

    def paused(self, effect: Awaited, until: float) -> PushState:
        """Copy in which an effect is not started again before a time."""
        return replace(self, not_before={**self.not_before, effect: until})

    def at_once(self, effect: Awaited) -> PushState:
        """Copy in which an effect may start at once."""
        return replace(self, not_before={e: at for e, at in self.not_before.items() if e != effect})

    def described(self, entry: OpenEntry) -> PushState:
        """Copy with the metadata, reasons for holding and dtypes of the version's entry in head.json, which may change
        while it is open.
        """
        opened, holding = replace(self.opened, metadata=entry.metadata), self.holding.with_entry(entry)
        if (opened, holding, entry.cast_from) == (self.opened, self.holding, self.cast_from):
            return self
        return replace(self, opened=opened, holding=holding, cast_from=entry.cast_from)
