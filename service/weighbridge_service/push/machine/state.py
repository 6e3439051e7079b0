"""State of one push, and what can be told from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from weighbridge._core.resources import Version
from weighbridge.errors import AlreadyExists, VersionFailed, WeighbridgeError
from weighbridge_service.catalog.holding import HoldReasons
from weighbridge_service.catalog.snapshots import Beginning
from weighbridge_service.plan.declarations import Agreement, Declarations, Home, KnownSet, Share
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
    """What a push goes by.

    Attributes:
        receive_timeout: seconds without a word from any rank after which it is given up.
        opening_wait: seconds that a call waits for its turn to open a version.
        image_wait: seconds that it waits for an image.
        unmap_wait: seconds that processes that were asked to unmap memory may take for it, with a rank waiting: they do it in milliseconds.
        lease: seconds that it stays open in head.json unless that is renewed.
        spreading: whether ranks may push to other replicas, too.
        sha256: whether digests of its files are made by SHA-256 as well.
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
    """A point in time.

    Attributes:
        seconds: of the monotonic clock.
        unix_ms: milliseconds since 1970 UTC.
    """

    seconds: float
    unix_ms: int


_NOT_HELD = HoldReasons()


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
        declared_ms, sealed_ms: when each rank of this replica has declared and was sealed, in milliseconds since 1970 UTC.
        filled, digested, uploaded: files of this replica that are complete, have digests, and are in the store.
        digests_uploaded: those whose block digests are in the store.
        perhaps_unchanged: those that are uploaded only when they have digests: they may be the same in the version before.
        compared: whether the sample agrees.
        holding: why ``live`` passes it by, if it does.
        memory_mapped_at: since when another process can still write to the image although everything is here; None if none can.
        claimed: whether head.json records the agreement.
        told: ranks of whose declarations other replicas were told.
        complete_at: other replicas whose part is complete.
        stored_at: those of them whose files are in the store.
        handed_in_here: whether other replicas can read what this one has uploaded.
        handed_in: replicas whose uploaded files are known.
        leave_until: until when the last steps are left to the replica that came last.
        confirmed_at: when head.json last said, with all bytes here, that the version was still open; None before that.
        publishing: whether a publication was ever begun by this replica.
        settling: the error of a publication of which it is not known yet whether it was made all the same.
        received_bytes: of tensors that have come.
        beginning: how the version began; None if this process has not opened it.
        ready_ms, verified_ms, durable_ms: when it became so, in milliseconds since 1970 UTC; 0 if it did not.
        ended_ms: when its last phase began, likewise.
        error: what ended it; of a visible version, why it is not durable.
        gave_up: of a visible version, that no further attempt is made.
        superseded: whether a newer version of the model is visible.
        cast_from: dtypes from which ranks cast, as far as head.json was read.
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
        """A push that has just been opened.

        Args:
            opened: the version.
            home: this replica.
            limits: what it goes by.
            known: the declarations of the push before, if any.
            lease_left: seconds until its lease in head.json expires.
            now: the time.
            holding: why it is held, as far as that was said at its opening.
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
    def given_up_at(self) -> float | None:
        """When it is given up unless a rank is heard of before; None if it does not wait for any."""
        return self.heard_at + self.limits.receive_timeout if self.phase in BEFORE_SEALED else None

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

    # --- a step on

    def to(self, phase: Phase) -> PushState:
        """In another phase. Raises AssertionError if that may not follow."""
        if phase not in TRANSITIONS[self.phase]:
            raise AssertionError(f"{self.phase} leads to no {phase}")
        return replace(self, phase=phase)

    def paused(self, effect: Awaited, until: float) -> PushState:
        """With an effect that is not started again before some time."""
        return replace(self, not_before={**self.not_before, effect: until})

    def at_once(self, effect: Awaited) -> PushState:
        """With an effect that waits for no time."""
        return replace(self, not_before={e: at for e, at in self.not_before.items() if e != effect})

    def described(self, entry: OpenEntry) -> PushState:
        """With what head.json says of the open version, as far as that can change."""
        opened, holding = replace(self.opened, metadata=entry.metadata), self.holding.with_entry(entry)
        if (opened, holding, entry.cast_from) == (self.opened, self.holding, self.cast_from):
            return self
        return replace(self, opened=opened, holding=holding, cast_from=entry.cast_from)
