"""Handover of a version: the data that a stopping replica sends to another one in addition to the files, and the
interface for it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from weighbridge_service.models.registered_model import RegisteredModel
from weighbridge_service.plan.declarations import Agreement, Home, layouts_digest
from weighbridge_service.plan.push_plan import nothing_to_push
from weighbridge_service.plan.replica_placement import Spread
from weighbridge_storage.documents.entries import OpenEntry


@dataclass(frozen=True, slots=True)
class HandedShare:
    """Share of one replica in a version that several replicas hold together.

    Attributes:
        number: number of the share: that of the replica which held it first.
        homes: replica that holds each share, by number; for this share, the stopping one.
        owners: number of the share to which each file of the version belongs.
        handovers: number of earlier handovers of each share, by number of the share.
    """

    number: int
    homes: Sequence[Home]
    owners: Mapping[str, int]
    handovers: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class HandedVersion:
    """Description of a version that is ready and not durable, or of a share of one, without its bytes.

    Attributes:
        model: the registration under which it was opened.
        entry: entry of the version in head.json, as read when it was opened.
        claim: the agreement under which it was pushed, and is published.
        ready_ms: when it became ready, in milliseconds since 1970 UTC.
        ranks: client and layout digest of each rank.
        share: the share that is handed over; None if it is the whole version.
        nonfinite: number of its elements that are known to be NaN or infinite.
    """

    model: RegisteredModel
    entry: OpenEntry
    claim: str
    ready_ms: int
    ranks: Sequence[tuple[str, str]]
    share: HandedShare | None = None
    nonfinite: int = 0

    @property
    def key(self) -> tuple[str, int, str]:
        """Model, number and claim."""
        return str(self.model.name), self.entry.number, self.claim

    @property
    def number(self) -> int:
        """The number of the share; 0 if it is the whole version."""
        return 0 if self.share is None else self.share.number

    @property
    def files(self) -> Collection[str]:
        """The files that are handed over."""
        if self.share is None:
            return self.model.files.file_sizes.keys()
        return [file for file, number in self.share.owners.items() if number == self.share.number]

    def agreed_by(self, home: Home) -> Agreement:
        """The agreement once a replica has taken it over."""
        share, ranks = self.share, self.entry.ranks
        layouts = layouts_digest(digest for _, digest in self.ranks)
        if share is None:
            plan = nothing_to_push(self.model.files, ranks)
            return Agreement(plan, (home,), self.claim, layouts=layouts)
        spread = Spread((share.number,) * ranks, share.owners, {})
        agreed = Agreement(
            nothing_to_push(self.model.files, ranks, spread),
            share.homes,
            self.claim,
            share.handovers,
            layouts,
        )
        return agreed.moved(share.number, home, share.handovers.get(share.number, 0) + 1)


class Successors(Protocol):
    """Replicas that may take versions over from this one. Thread-safe."""

    def others(self) -> Sequence[Home]:
        """Known replicas, in the order in which this one asks them. Does not read the store."""

    def staying(self) -> frozenset[Home]:
        """Replicas that have not announced that they stop."""

    def leave(self) -> frozenset[tuple[str, int]]:
        """Announce to the others that this replica stops.

        Returns model and number of the versions that they receive together with it.
        """

    def hand_over(self, to: Home, version: HandedVersion, seconds: float, memory_wait: float) -> None:
        """Hand a version over. Returns when the other replica has all of its bytes and owns it.

        Args:
            to: the other replica.
            version: the version, or a share of it.
            seconds: timeout of the handover.
            memory_wait: part of that time, in seconds, for which the other replica may wait for free memory.

        Raises:
            WeighbridgeError: the other replica refuses, cannot be reached, or takes too long.
        """
