"""Handover of a version: what a replica that leaves gives to another one besides the files, and how it reaches that."""

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
    """The share of one replica in a version that several hold together.

    Attributes:
        number: of the replica whose share it was at first.
        homes: who has which share, by number; this one's is the one that leaves.
        owners: for each file of the version, the number of the share that it belongs to.
        handovers: how often each share was handed over before, by number.
    """

    number: int
    homes: Sequence[Home]
    owners: Mapping[str, int]
    handovers: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class HandedVersion:
    """A version that is ready and not durable, or a share of one, without its bytes.

    Attributes:
        model: the registration under which it was opened.
        entry: what head.json said of it when it was opened.
        claim: the agreement under which it was pushed, and is published.
        ready_ms: when it became ready, in milliseconds since 1970 UTC.
        ranks: client and layout digest of each rank.
        share: what is handed over; None if that is all of the version.
        nonfinite: how many of its elements are known to be NaN or infinite.
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
        """The number of the share; 0 if it is all of the version."""
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
    """The replicas that may take versions over from this one. Thread-safe."""

    def others(self) -> Sequence[Home]:
        """Those that are known, in the order in which they are to be asked. Asks nothing of the store."""

    def staying(self) -> frozenset[Home]:
        """Those that have not said that they stop."""

    def leave(self) -> frozenset[tuple[str, int]]:
        """Tell the others that this replica stops, and learn which versions, by model and number, they receive together with it."""

    def hand_over(self, to: Home, version: HandedVersion, seconds: float, memory_wait: float) -> None:
        """Returns when another replica has all bytes of a version and owns it.

        Args:
            to: which replica.
            version: which version.
            seconds: how long that may take.
            memory_wait: seconds of these that it may wait for memory to become free.

        Raises:
            WeighbridgeError: it refuses, cannot be reached, or takes too long.
        """
