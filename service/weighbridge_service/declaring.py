"""Who pushes what to which replica of the service: the declarations that a push is planned from."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from weighbridge.errors import (
    AlreadyExists,
    FailedPrecondition,
    InvalidArgument,
    VersionFailed,
    WeighbridgeError,
)
from weighbridge.resources import Version
from weighbridge_service.push.push_plan import PreparedPush
from weighbridge_service.push.replica_placement import numbered


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
    """What one rank said it holds, and where it said so.

    Attributes:
        client_id: which process it was.
        digest: of its layout.
        home: the replica of the service to which it pushes.
    """

    client_id: str
    digest: str
    home: Home

    def same_shards(self, other: Declaration) -> bool:
        """Whether the other one says that the same shards are pushed to the same replica."""
        return (self.digest, self.home) == (other.digest, other.home)


@dataclass(frozen=True, slots=True)
class KnownSet:
    """The declarations of the last push of a model, by rank, and what they led to."""

    declarations: Mapping[int, Declaration]
    prepared: PreparedPush


@dataclass(frozen=True, slots=True)
class Agreement:
    """All ranks of a version have declared: what that leads to.

    Attributes:
        prepared: who pushes what, and where every byte goes.
        homes: the replicas, by their numbers in `Spread`.
        claim: names this agreement in the head. Replicas that have reached the same one have the same claim; one at whose
            replica another process has taken part has another.
    """

    prepared: PreparedPush
    homes: Sequence[Home]
    claim: str

    def home_of(self, rank: int) -> Home:
        """The replica that a rank pushes to."""
        spread = self.prepared.spread
        return self.homes[0 if spread is None else spread.homes[rank]]

    def to_come_to(self, home: Home) -> dict[str, int]:
        """The files that a replica writes, and how many bytes of tensors go into each."""
        spread = self.prepared.spread
        files = self.prepared.fills if spread is None else spread.files_of(self.homes.index(home))
        return {file: self.prepared.fills[file] for file in files}

    def check_forwarded(self, home: Home, claim: str, rank: int, start: int, end: int) -> None:
        """Raise FailedPrecondition if a part of a rank's stream is not one that others pass on to a replica.

        Args:
            home: the replica.
            claim: under which agreement it is passed on.
            rank: whose stream.
            start: first byte of the part.
            end: one past its last.
        """
        spread = self.prepared.spread
        if spread is None or claim != self.claim:
            raise FailedPrecondition(
                "two replicas do not agree on who pushes what", fix="push the step again"
            )
        meant = spread.routes.get(rank, {}).get(self.homes.index(home))
        if self.home_of(rank) == home or meant is None or not meant.covers(start, end):
            raise FailedPrecondition(
                f"bytes {start} to {end} of rank {rank} are not to be passed on to the replica {home}"
            )

    @property
    def alone(self) -> bool:
        """Whether all ranks push to one replica."""
        return len(self.homes) == 1


def alone_at(claim: str) -> str:
    """The address of the only replica that has a part in a claim; empty if there are several, or there is no claim."""
    return claim.partition("@")[2]


class Declarations:
    """What the ranks of one version have declared. Not thread-safe: its user holds a lock.

    Args:
        opened: the version as it was opened.
        home: this process.
        known: the declarations of the push before, if any.

    Attributes:
        agreed: what all ranks have agreed on, once they have.
    """

    def __init__(self, opened: Version, home: Home, known: KnownSet | None) -> None:
        self._opened = opened
        self._name = f"{opened.model}@{opened.number}"
        self._home = home
        self._known = known if known and len(known.declarations) == opened.ranks else None
        self._declared: dict[int, Declaration] = {}
        self._preparing = False
        self.agreed: Agreement | None = None

    @property
    def known_set(self) -> KnownSet | None:
        """What the next push can count on; None as long as not all ranks have declared."""
        if self.agreed is None:
            return None
        if self.absent:
            return self._known  # those of other replicas' ranks were not asked for
        return KnownSet(dict(self._declared), self.agreed.prepared)

    @property
    def here(self) -> dict[int, Declaration]:
        """Those of the ranks that push to this process, by rank."""
        return {rank: d for rank, d in self._declared.items() if d.home == self._home}

    @property
    def everywhere(self) -> dict[int, Declaration]:
        """All that are known, by rank."""
        return dict(self._declared)

    @property
    def absent(self) -> list[int]:
        """Ranks that have not declared, as far as is known here."""
        return [rank for rank in range(self._opened.ranks) if rank not in self._declared]

    def check_rank(self, rank: int) -> None:
        """Raise InvalidArgument if there is no such rank."""
        if rank >= self._opened.ranks:
            raise InvalidArgument(f"{self._name} has {self._opened.ranks} ranks; rank {rank} does not exist")

    def check_client(self, rank: int, client_id: str) -> None:
        """Raise if a rank has not declared (FailedPrecondition), or belongs to another process (AlreadyExists)."""
        self.check_rank(rank)
        declaration = self._declared.get(rank)
        if declaration is None:
            raise FailedPrecondition(f"rank {rank} of {self._name} has not declared its layout")
        if declaration.client_id != client_id:
            raise AlreadyExists(f"rank {rank} of {self._name} belongs to another process")

    def declare(self, rank: int, client_id: str, digest: str) -> WeighbridgeError | None:
        """Take note of what a rank declares to this process; gives what the version fails of, if it does.

        Raises:
            AlreadyExists: another process has declared this rank.
            FailedPrecondition: the rank has declared something else before.
        """
        self.check_rank(rank)
        declaration = Declaration(client_id, digest, self._home)
        there = self._declared.setdefault(rank, declaration)
        if there.client_id != client_id:
            raise AlreadyExists(
                f"rank {rank} of {self._name} has been declared by another process",
                fix="if two trainers push this step, give each its own run name; if the trainer was restarted, "
                f"abort version {self._opened.number} or wait until it times out, and push again",
            )
        if there.home != self._home:
            raise AlreadyExists(f"rank {rank} of {self._name} pushes to another replica, {there.home}")
        if there.digest != digest:
            raise FailedPrecondition(f"rank {rank} of {self._name} has declared another layout before")
        known = self._known
        if known is None or self.agreed is None or self.agreed.prepared is not known.prepared:
            return None
        if known.declarations[rank].same_shards(declaration):
            return None
        # others are pushing what they were assigned on the strength of this rank's former layout
        return VersionFailed(
            f"rank {rank} of {self._name} holds other shards than in the push before",
            fix="push again: the shards will be shared out anew",
        )

    def hear(self, declarations: Mapping[int, Declaration]) -> WeighbridgeError | None:
        """Take note of what ranks have declared to other processes; gives what the version fails of, if it does."""
        for rank, declaration in declarations.items():
            if rank >= self._opened.ranks:
                return VersionFailed(
                    f"rank {rank} of {self._name} pushes to {declaration.home}: there is no such rank"
                )
            there = self._declared.setdefault(rank, declaration)
            if there != declaration:
                return VersionFailed(
                    f"rank {rank} of {self._name} has declared to two replicas, {there.home} and {declaration.home}",
                    fix="each rank pushes to one replica; if two trainers push this step, give each its own run name; if a "
                    "replica was restarted, push the step again",
                )
        boots: dict[str, Home] = {}
        for declaration in self._declared.values():
            home = declaration.home
            if boots.setdefault(home.address, home) != home:
                return VersionFailed(
                    f"the replica at {home.address} was restarted while {self._name} was being received",
                    fix="push the step again",
                )
        return None

    def agree_as_before(self, rank: int) -> bool:
        """Count on the layouts of the push before, if those that are known are the same; whether that is so from now on.

        From then on, whoever declares something else makes the version fail.
        """
        known = self._known
        if (
            known is None
            or self._preparing
            or self.agreed is not None
            or known.declarations[rank] != self._declared[rank]
            or not all(known.declarations[r].same_shards(there) for r, there in self._declared.items())
        ):
            return False
        self._preparing = True
        self.agreed = self.agreement(known.declarations, known.prepared)
        return True

    def begin_preparing(self) -> bool:
        """Whether the caller is to make the plan: all ranks have declared, and nobody else makes it."""
        mine = self.agreed is None and not self.absent and not self._preparing
        self._preparing = self._preparing or mine
        return mine

    def agreement(self, declarations: Mapping[int, Declaration], prepared: PreparedPush) -> Agreement:
        """What all ranks have agreed on.

        Args:
            declarations: of all ranks.
            prepared: what their layouts lead to.
        """
        in_order = [declarations[rank] for rank in range(len(declarations))]
        homes = list(dict.fromkeys(declaration.home for declaration in in_order))
        said = [[d.digest, d.home.address, d.home.boot] for d in in_order]
        # the time of its opening, too: a model that is removed and registered again begins to count anew
        text = json.dumps([self._name, self._opened.create_time_ms, said])
        digest = hashlib.sha256(text.encode()).hexdigest()[:32]
        return Agreement(prepared, homes, f"{digest}@{homes[0].address}" if len(homes) == 1 else digest)


def is_alone_elsewhere(claim: str, home: Home) -> bool:
    """Whether a claim is that of another replica, which receives the version alone."""
    return alone_at(claim) not in ("", home.address)


def numbers_of(declarations: Mapping[int, Declaration]) -> tuple[int, ...]:
    """For each rank the number of the replica that it pushes to."""
    return numbered([declarations[rank].home.address for rank in range(len(declarations))])
