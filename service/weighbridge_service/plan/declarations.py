"""Declarations of one push: what each rank holds, to which replica it pushes, and the agreement that follows. Pure values."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from weighbridge._core.range_set import RangeSet
from weighbridge._core.resources import Version
from weighbridge._core.text.counts import counted
from weighbridge.errors import (
    AlreadyExists,
    FailedPrecondition,
    InvalidArgument,
    VersionFailed,
    WeighbridgeError,
)
from weighbridge_service.plan.push_plan import PreparedPush
from weighbridge_service.plan.replica_placement import numbered
from weighbridge_storage.documents.entries import OpenEntry


@dataclass(frozen=True, slots=True)
class Home:
    """A process of the service.

    Attributes:
        address: ``host:port`` under which other replicas reach its gRPC face.
        boot: tells this start of the process from others at the same address.
    """

    address: str
    boot: str

    def __str__(self) -> str:
        return f"{self.address} ({self.boot[:8]})"


@dataclass(frozen=True, slots=True)
class Declaration:
    """What one rank holds, and its replica.

    Attributes:
        client_id: the declaring process.
        digest: of its layout.
        home: the replica where it has declared.
    """

    client_id: str
    digest: str
    home: Home

    def same_shards(self, other: Declaration) -> bool:
        """Whether both push the same shards to the same replica."""
        return (self.digest, self.home) == (other.digest, other.home)


@dataclass(frozen=True, slots=True)
class KnownSet:
    """The declarations of a model's last push, by rank, and the plan that they led to."""

    declarations: Mapping[int, Declaration]
    prepared: PreparedPush

    def is_of(self, homes: frozenset[Home]) -> bool:
        """Whether no rank pushed to another replica than these."""
        return {each.home for each in self.declarations.values()} <= homes


@dataclass(frozen=True, slots=True)
class Share:
    """One replica's part in a push.

    Attributes:
        me: the replica's number.
        files: that it puts together and uploads, with the bytes of tensors that go into each.
        ranks: that push to it.
        owners: the numbers of all replicas that put files together.
        alone: whether it is the only replica in the push.
    """

    me: int
    files: Mapping[str, int]
    ranks: frozenset[int]
    owners: frozenset[int]
    alone: bool


@dataclass(frozen=True, slots=True)
class Agreement:
    """What the declarations of all ranks lead to.

    Attributes:
        prepared: who pushes what, and where every byte goes.
        homes: who has the share of each replica, by the replicas' numbers in `Spread`; at first these themselves.
        claim: names this agreement in head.json. Replicas that derive the same agreement derive the same claim; another process
            at one of their addresses derives another. It stays the same when a share is handed over.
        handovers: how often each share was handed over, by number; those that never were are not there.
        layouts: SHA-256 over the digests of all ranks' layouts (`layouts_digest`): who pushes by the same layouts has the same.
    """

    prepared: PreparedPush
    homes: Sequence[Home]
    claim: str
    handovers: Mapping[int, int] = field(default_factory=dict)
    layouts: str = ""

    def routes(self, rank: int) -> Mapping[Home, RangeSet]:
        """Which parts of a rank's stream are pushed to which replica; a part may be wanted by several."""
        spread = self.prepared.spread
        if spread is None:
            return {self.homes[0]: RangeSet([(0, self.prepared.streams[rank].nbytes)])}
        return {self.homes[number]: meant for number, meant in spread.routes.get(rank, {}).items()}

    def share_of(self, home: Home) -> Share:
        """The part of one replica that none has handed anything over to."""
        return self.share(self.homes.index(home))

    def share(self, me: int) -> Share:
        """The part of the replica with this number."""
        spread = self.prepared.spread
        if spread is None:
            ranks = frozenset(self.prepared.streams)
            return Share(0, dict(self.prepared.fills), ranks, frozenset((0,)), alone=True)
        files = {file: self.prepared.fills[file] for file in spread.files_of(me)}
        ranks = frozenset(rank for rank, number in enumerate(spread.homes) if number == me)
        return Share(me, files, ranks, frozenset(spread.owners.values()), alone=False)

    def moved(self, number: int, to: Home, handovers: int) -> Agreement:
        """After a share was handed over; the same if that was known, or a later handover is.

        Args:
            number: whose share.
            to: who has it now.
            handovers: how often it was handed over by then.
        """
        if not 0 <= number < len(self.homes) or handovers <= self.handovers.get(number, 0):
            return self
        homes = tuple(to if each == number else home for each, home in enumerate(self.homes))
        return replace(self, homes=homes, handovers={**self.handovers, number: handovers})

    def check_claim(self, claim: str) -> None:
        """Raise FailedPrecondition if a rank of another replica pushes under another agreement, or where there are no others."""
        if self.prepared.spread is None or claim != self.claim:
            raise FailedPrecondition(
                "two replicas do not agree on who pushes what", fix="push the step again"
            )

    @property
    def alone(self) -> bool:
        """Whether all ranks push to one replica."""
        return len(self.homes) == 1


@dataclass(frozen=True, slots=True)
class Declarations:
    """What the ranks of one version have declared, as far as one replica knows.

    Attributes:
        name: of the version, in messages.
        ranks: how many ranks push it.
        created_ms: when it was opened; part of the claim.
        home: this replica.
        known: the declarations of the push before, if they are of as many ranks.
        declared: by rank.
        here: those of ranks that push to this replica.
        agreed: the agreement, once there is one.
    """

    name: str
    ranks: int
    created_ms: int
    home: Home
    known: KnownSet | None = None
    declared: Mapping[int, Declaration] = field(default_factory=dict)
    here: Mapping[int, Declaration] = field(default_factory=dict)
    agreed: Agreement | None = None

    @staticmethod
    def of(opened: Version, home: Home, known: KnownSet | None) -> Declarations:
        """Those of a version that has just been opened."""
        if known is not None and len(known.declarations) != opened.ranks:
            known = None
        return Declarations(
            f"{opened.model}@{opened.number}", opened.ranks, opened.create_time_ms, home, known
        )

    @staticmethod
    def taken_over(
        opened: Version, home: Home, ranks: Sequence[tuple[str, str]], agreed: Agreement
    ) -> Declarations:
        """Those of a version that another replica hands over to this one, or its share of.

        Args:
            opened: the version.
            home: this replica, to which its ranks belong from now on.
            ranks: client and layout digest of each.
            agreed: under which the version was pushed, with a plan in which nothing is pushed any more.
        """
        declared = {rank: Declaration(client, digest, home) for rank, (client, digest) in enumerate(ranks)}
        return replace(
            Declarations.of(opened, home, None),
            declared=declared,
            here=declared,
            agreed=agreed,
        )

    def counting_on(self, replicas: frozenset[Home]) -> Declarations:
        """Those of a version whose ranks can push to these other replicas. An agreement stays as it is."""
        known = self.known
        if self.agreed is not None or known is None or known.is_of(replicas | {self.home}):
            return self
        return replace(self, known=None)

    def moved(self, number: int, to: Home, handovers: int) -> Declarations:
        """After a share was handed over; see `Agreement.moved`."""
        return self if self.agreed is None else replace(self, agreed=self.agreed.moved(number, to, handovers))

    @property
    def complete(self) -> bool:
        """Whether all ranks have declared, here or at other replicas."""
        return len(self.declared) == self.ranks

    @property
    def absent(self) -> list[int]:
        """Ranks that have not declared, as far as is known here."""
        return [rank for rank in range(self.ranks) if rank not in self.declared]

    @property
    def known_set(self) -> KnownSet | None:
        """What the next push can count on; None before there is an agreement."""
        if self.agreed is None:
            return None
        if not self.complete:
            return self.known  # declarations at other replicas were not waited for
        return KnownSet(self.declared, self.agreed.prepared)

    def check_rank(self, rank: int) -> None:
        """Raise InvalidArgument if there is no such rank."""
        if rank >= self.ranks:
            raise InvalidArgument(
                f"{self.name} has {counted(self.ranks, 'rank')}; rank {rank} does not exist"
            )

    def check_client(self, rank: int, client_id: str) -> None:
        """Raise if a rank has not declared (FailedPrecondition), or belongs to another process (AlreadyExists)."""
        self.check_rank(rank)
        there = self.declared.get(rank)
        if there is None:
            raise FailedPrecondition(f"rank {rank} of {self.name} has not declared its layout")
        if there.client_id != client_id:
            raise AlreadyExists(f"rank {rank} of {self.name} belongs to another process")

    def check_same(self, rank: int, client_id: str, digest: str) -> None:
        """Compare a declaration with the one that is recorded for its rank, if there is one.

        Raises:
            AlreadyExists: another process has declared this rank, or at another replica.
            FailedPrecondition: the rank has declared another layout.
        """
        there = self.declared.get(rank)
        if there is None:
            return
        if there.client_id != client_id:
            raise AlreadyExists(
                f"rank {rank} of {self.name} has been declared by another process",
                fix="if two trainers push this step, give each its own run name; if the trainer was restarted, "
                f"abort version {self.name.rpartition('@')[2]} or wait until it times out, and push again",
            )
        if there.home != self.home:
            raise AlreadyExists(f"rank {rank} of {self.name} pushes to another replica, {there.home}")
        if there.digest != digest:
            raise FailedPrecondition(f"rank {rank} of {self.name} has declared another layout before")

    def declare(
        self, rank: int, client_id: str, digest: str, *, planning: bool
    ) -> tuple[Declarations, WeighbridgeError | None]:
        """Record what a rank declares to this replica; a rank that has declared stays as it is.

        Args:
            rank: which rank.
            client_id: the declaring process.
            digest: of its layout.
            planning: whether a plan is being made from all declarations, so that those of the push before are not asked.

        Returns:
            The declarations with this one, agreed on if it repeats the push before, and what the version fails of, if it does.
        """
        if rank in self.declared or rank >= self.ranks:
            return self, None
        declaration = Declaration(client_id, digest, self.home)
        known = self.known
        if known is not None and known.declarations[rank] == declaration:
            declaration = known.declarations[rank]  # one object, however often the same is pushed
        after = replace(
            self,
            declared={**self.declared, rank: declaration},
            here={**self.here, rank: declaration},
        )
        if known is None:
            return after, None
        if self.agreed is None:
            repeats = (
                not planning
                and known.declarations[rank] == declaration
                and all(known.declarations[r].same_shards(there) for r, there in after.declared.items())
            )
            return (after._agreed_on(known.declarations, known.prepared) if repeats else after), None
        if self.agreed.prepared is not known.prepared or known.declarations[rank].same_shards(declaration):
            return after, None
        if self.expected_at(rank, digest) is not None:
            return self, None
        # others already push what they were assigned on the strength of this rank's former layout
        return after, VersionFailed(
            f"rank {rank} of {self.name} holds other shards than in the push before",
            fix="push again: the shards will be shared out anew",
        )

    def expected_at(self, rank: int, digest: str) -> Home | None:
        """The other replica to which a rank with this layout has to push, as the agreement is that of the push before; None if there is none."""
        known, agreed = self.known, self.agreed
        if known is None or agreed is None or agreed.prepared is not known.prepared or rank in self.declared:
            return None
        there = known.declarations[rank]
        return there.home if there.digest == digest and there.home != self.home else None

    def hear(
        self, elsewhere: Iterable[tuple[int, Declaration]]
    ) -> tuple[Declarations, WeighbridgeError | None]:
        """Record what ranks have declared to other replicas.

        Returns:
            The declarations with these, and what the version fails of, if it does.
        """
        declared = dict(self.declared)
        for rank, declaration in elsewhere:
            if rank >= self.ranks:
                return self, VersionFailed(
                    f"rank {rank} of {self.name} pushes to {declaration.home}: there is no such rank"
                )
            there = declared.setdefault(rank, declaration)
            if there != declaration:
                return self, VersionFailed(
                    f"rank {rank} of {self.name} has declared to two replicas, {there.home} and {declaration.home}",
                    fix="each rank pushes to one replica; if two trainers push this step, give each its own run name; if a "
                    "replica was restarted, push the step again",
                )
        boots: dict[str, Home] = {}
        for declaration in declared.values():
            home = declaration.home
            if boots.setdefault(home.address, home) != home:
                return self, VersionFailed(
                    f"the replica at {home.address} was restarted while {self.name} was being received",
                    fix="push the step again",
                )
        here = {rank: declaration for rank, declaration in declared.items() if declaration.home == self.home}
        return replace(self, declared=declared, here=here), None

    def agree(self, prepared: PreparedPush) -> Declarations:
        """The agreement that the declarations of all ranks lead to, by this plan."""
        return self._agreed_on(self.declared, prepared)

    def _agreed_on(self, declarations: Mapping[int, Declaration], prepared: PreparedPush) -> Declarations:
        in_order = [declarations[rank] for rank in range(self.ranks)]
        homes = tuple(dict.fromkeys(declaration.home for declaration in in_order))
        said = [[d.digest, d.home.address, d.home.boot] for d in in_order]
        # the time of its opening, too: a model that is removed and registered again begins to count anew
        text = json.dumps([self.name, self.created_ms, said])
        digest = hashlib.sha256(text.encode()).hexdigest()[:32]
        claim = f"{digest}@{homes[0].address}" if len(homes) == 1 else digest
        layouts = layouts_digest(declaration.digest for declaration in in_order)
        return replace(self, agreed=Agreement(prepared, homes, claim, layouts=layouts))


def layouts_digest(digests: Iterable[str]) -> str:
    """SHA-256 over the digests of ranks' layouts, in the order of the ranks, a line each; 64 hex digits."""
    return hashlib.sha256("".join(f"{digest}\n" for digest in digests).encode()).hexdigest()


def alone_at(entry: OpenEntry) -> str:
    """The address of the only replica that receives an open version; empty if there are several, or nobody has claimed it."""
    return entry.holder or address_in(entry.claim)


def address_in(claim: str) -> str:
    """The address of the only replica to which the ranks pushed under a claim; empty if they pushed to several."""
    return claim.partition("@")[2]


def is_alone_elsewhere(entry: OpenEntry, home: Home) -> bool:
    """Whether another replica receives an open version alone."""
    return alone_at(entry) not in ("", home.address)


def numbers_of(declarations: Mapping[int, Declaration]) -> tuple[int, ...]:
    """For each rank the number of the replica to which it pushes."""
    return numbered([declarations[rank].home.address for rank in range(len(declarations))])
