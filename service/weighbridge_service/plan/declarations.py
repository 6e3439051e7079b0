"""Declarations of one push: the layout of each rank, the replica that it pushes to, and the resulting agreement.

Pure values.
"""

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
        address: ``host:port`` at which other replicas reach its gRPC port.
        boot: distinguishes this process from earlier and later ones at the same address.
    """

    address: str
    boot: str

    def __str__(self) -> str:
        return f"{self.address} ({self.boot[:8]})"


@dataclass(frozen=True, slots=True)
class Declaration:
    """Declaration of one rank.

    Attributes:
        client_id: client id of the declaring process.
        digest: digest of the rank's layout.
        home: replica that received the declaration.
    """

    client_id: str
    digest: str
    home: Home

    def same_shards(self, other: Declaration) -> bool:
        """Whether both push the same shards to the same replica."""
        return (self.digest, self.home) == (other.digest, other.home)


@dataclass(frozen=True, slots=True)
class KnownSet:
    """The declarations of a model's last push, by rank, and the resulting plan."""

    declarations: Mapping[int, Declaration]
    prepared: PreparedPush

    def is_of(self, homes: frozenset[Home]) -> bool:
        """Whether all ranks pushed to these replicas."""
        return {each.home for each in self.declarations.values()} <= homes


@dataclass(frozen=True, slots=True)
class ReplicaShare:
    """One replica's part in a push.

    Attributes:
        me: number of the replica.
        files: files that it assembles and uploads, each with its bytes of tensors.
        ranks: ranks that push to it.
        owners: numbers of all replicas that assemble files.
        alone: whether it is the only replica in the push.
    """

    me: int
    files: Mapping[str, int]
    ranks: frozenset[int]
    owners: frozenset[int]
    alone: bool


@dataclass(frozen=True, slots=True)
class Agreement:
    """The agreement that follows from the declarations of all ranks.

    Attributes:
        prepared: plan of the push.
        homes: current holder of each replica's share, by the replicas' numbers in `Spread`; at first the replicas
            themselves.
        claim: name of this agreement in head.json. Replicas that derive the same agreement derive the same claim;
            another process at one of their addresses derives another claim. A handover of a share does not change it.
        handovers: number of handovers of each share, by number; shares without a handover are omitted.
        layouts: SHA-256 over the digests of all ranks' layouts (`layouts_digest`), equal for pushes with the same
            layouts.
    """

    prepared: PreparedPush
    homes: Sequence[Home]
    claim: str
    handovers: Mapping[int, int] = field(default_factory=dict)
    layouts: str = ""

    def routes(self, rank: int) -> Mapping[Home, RangeSet]:
        """Parts of a rank's stream, by the replica that they are pushed to. Several replicas may need one part."""
        spread = self.prepared.spread
        if spread is None:
            return {self.homes[0]: RangeSet([(0, self.prepared.streams[rank].nbytes)])}
        return {self.homes[number]: meant for number, meant in spread.routes.get(rank, {}).items()}

    def share_of(self, home: Home) -> ReplicaShare:
        """The share of a replica that holds only its own share."""
        return self.share(self.homes.index(home))

    def share(self, me: int) -> ReplicaShare:
        """The share of the replica with this number."""
        spread = self.prepared.spread
        if spread is None:
            ranks = frozenset(self.prepared.streams)
            return ReplicaShare(0, dict(self.prepared.fills), ranks, frozenset((0,)), alone=True)
        files = {file: self.prepared.fills[file] for file in spread.files_of(me)}
        ranks = frozenset(rank for rank, number in enumerate(spread.homes) if number == me)
        return ReplicaShare(me, files, ranks, frozenset(spread.owners.values()), alone=False)

    def moved(self, number: int, to: Home, handovers: int) -> Agreement:
        """The agreement after a handover of a share; unchanged if this or a later handover is already recorded.

        Args:
            number: number of the share.
            to: new holder of the share.
            handovers: number of handovers of the share, including this one.
        """
        if not 0 <= number < len(self.homes) or handovers <= self.handovers.get(number, 0):
            return self
        homes = tuple(to if each == number else home for each, home in enumerate(self.homes))
        return replace(self, homes=homes, handovers={**self.handovers, number: handovers})

    def check_claim(self, claim: str) -> None:
        """Check the claim of a rank that pushes to this replica from another one.

        Raises FailedPrecondition if the claim differs, or if all ranks push to one replica.
        """
        if self.prepared.spread is None or claim != self.claim:
            raise FailedPrecondition(
                "two replicas do not agree on which rank pushes which files", fix="push the step again"
            )

    @property
    def alone(self) -> bool:
        """Whether all ranks push to one replica."""
        return len(self.homes) == 1


@dataclass(frozen=True, slots=True)
class Declarations:
    """Declarations of the ranks of one version that one replica knows.

    Attributes:
        name: name of the version in messages.
        ranks: number of ranks that push it.
        created_ms: time of its opening in milliseconds since 1970 UTC; part of the claim.
        home: this replica.
        known: declarations of the previous push, if it had the same number of ranks.
        declared: declarations by rank.
        here: declarations of the ranks that push to this replica, by rank.
        agreed: the agreement; None until there is one.
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
        """The declarations of a version that has just been opened."""
        if known is not None and len(known.declarations) != opened.ranks:
            known = None
        return Declarations(f"{opened.model}@{opened.number}", opened.ranks, opened.create_time_ms, home, known)

    @staticmethod
    def taken_over(opened: Version, home: Home, ranks: Sequence[tuple[str, str]], agreed: Agreement) -> Declarations:
        """The declarations of a version that another replica hands over to this one, either the whole version or only
        its share.

        Args:
            opened: the version.
            home: this replica, which becomes the home of all ranks.
            ranks: client id and layout digest of each rank.
            agreed: agreement of the push, with a plan in which nothing remains to be pushed.
        """
        declared = {rank: Declaration(client, digest, home) for rank, (client, digest) in enumerate(ranks)}
        return replace(
            Declarations.of(opened, home, None),
            declared=declared,
            here=declared,
            agreed=agreed,
        )

    def counting_on(self, replicas: frozenset[Home]) -> Declarations:
        """The declarations if ranks can push only to these other replicas. Drops `known` if it requires further
        replicas; keeps an existing agreement.
        """
        known = self.known
        if self.agreed is not None or known is None or known.is_of(replicas | {self.home}):
            return self
        return replace(self, known=None)

    def moved(self, number: int, to: Home, handovers: int) -> Declarations:
        """The declarations after a handover of a share; see `Agreement.moved`."""
        return self if self.agreed is None else replace(self, agreed=self.agreed.moved(number, to, handovers))

    @property
    def complete(self) -> bool:
        """Whether all ranks have declared, here or at other replicas."""
        return len(self.declared) == self.ranks

    @property
    def absent(self) -> list[int]:
        """Ranks whose declaration this replica does not know."""
        return [rank for rank in range(self.ranks) if rank not in self.declared]

    @property
    def known_set(self) -> KnownSet | None:
        """The known set for the next push; None before there is an agreement."""
        if self.agreed is None:
            return None
        if not self.complete:
            return self.known  # agreed without waiting for declarations at other replicas
        return KnownSet(self.declared, self.agreed.prepared)

    def check_rank(self, rank: int) -> None:
        """Raise InvalidArgument if the rank does not exist."""
        if rank >= self.ranks:
            raise InvalidArgument(f"{self.name} has {counted(self.ranks, 'rank')}; rank {rank} does not exist")

    def check_client(self, rank: int, client_id: str) -> None:
        """Raise if a rank has not declared (FailedPrecondition), or belongs to another process (AlreadyExists)."""
        self.check_rank(rank)
        there = self.declared.get(rank)
        if there is None:
            raise FailedPrecondition(f"rank {rank} of {self.name} has not declared its layout")
        if there.client_id != client_id:
            raise AlreadyExists(f"rank {rank} of {self.name} belongs to another process")

    def check_same(self, rank: int, client_id: str, digest: str) -> None:
        """Compare a declaration with the recorded declaration of its rank, if one exists.

        Raises:
            AlreadyExists: another process has declared this rank, or the rank has declared to another replica.
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
            raise FailedPrecondition(f"rank {rank} of {self.name} has declared a different layout before")

    def declare(
        self, rank: int, client_id: str, digest: str, *, planning: bool
    ) -> tuple[Declarations, WeighbridgeError | None]:
        """Record the declaration of a rank to this replica. An existing declaration of the rank is kept.

        Args:
            rank: the rank.
            client_id: client id of the declaring process.
            digest: digest of the rank's layout.
            planning: whether a plan is already being made from all declarations, so that the previous push is not
                repeated.

        Returns:
            The declarations with this one, and the error if it makes the version fail. If the declaration repeats the
            previous push, they contain an agreement.
        """
        if rank in self.declared or rank >= self.ranks:
            return self, None
        declaration = Declaration(client_id, digest, self.home)
        known = self.known
        if known is not None and known.declarations[rank] == declaration:
            declaration = known.declarations[rank]  # share one object between pushes, to save memory
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
        # other ranks already push shards that were assigned for this rank's previous layout
        return after, VersionFailed(
            f"rank {rank} of {self.name} holds different shards than in the previous push",
            fix="push again: the shards will be distributed again",
        )

    def expected_at(self, rank: int, digest: str) -> Home | None:
        """The other replica that a rank with this layout must push to, if the agreement repeats the previous push; else
        None.
        """
        known, agreed = self.known, self.agreed
        if known is None or agreed is None or agreed.prepared is not known.prepared or rank in self.declared:
            return None
        there = known.declarations[rank]
        return there.home if there.digest == digest and there.home != self.home else None

    def hear(self, elsewhere: Iterable[tuple[int, Declaration]]) -> tuple[Declarations, WeighbridgeError | None]:
        """Record declarations that ranks made to other replicas.

        Returns:
            The declarations with these, and the error if they make the version fail.
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
                    fix="each rank pushes to one replica; if two trainers push this step, give "
                    "each its own run name; if a "
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
        """The declarations with the agreement of all ranks on this plan."""
        return self._agreed_on(self.declared, prepared)

    def _agreed_on(self, declarations: Mapping[int, Declaration], prepared: PreparedPush) -> Declarations:
        in_order = [declarations[rank] for rank in range(self.ranks)]
        homes = tuple(dict.fromkeys(declaration.home for declaration in in_order))
        said = [[d.digest, d.home.address, d.home.boot] for d in in_order]
        # include the time of the opening, since the numbers of a model that is deleted and registered again restart
        text = json.dumps([self.name, self.created_ms, said])
        digest = hashlib.sha256(text.encode()).hexdigest()[:32]
        claim = f"{digest}@{homes[0].address}" if len(homes) == 1 else digest
        layouts = layouts_digest(declaration.digest for declaration in in_order)
        return replace(self, agreed=Agreement(prepared, homes, claim, layouts=layouts))


def layouts_digest(digests: Iterable[str]) -> str:
    """SHA-256 over the digests of ranks' layouts, one per line in the order of the ranks; 64 hex digits."""
    return hashlib.sha256("".join(f"{digest}\n" for digest in digests).encode()).hexdigest()


def alone_at(entry: OpenEntry) -> str:
    """The address of the only replica that receives an open version; empty if there are several, or no replica has
    claimed it.
    """
    return entry.holder or address_in(entry.claim)


def address_in(claim: str) -> str:
    """The address of the only replica that ranks pushed to under a claim; empty if they pushed to several."""
    return claim.partition("@")[2]


def is_alone_elsewhere(entry: OpenEntry, home: Home) -> bool:
    """Whether another replica receives an open version alone."""
    return alone_at(entry) not in ("", home.address)


def numbers_of(declarations: Mapping[int, Declaration]) -> tuple[int, ...]:
    """For each rank the number of the replica that it pushes to."""
    return numbered([declarations[rank].home.address for rank in range(len(declarations))])
