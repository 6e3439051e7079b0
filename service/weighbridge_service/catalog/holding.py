"""Reasons to hold a version: what one replica knows of why ``live`` and ``latest`` pass it by, until history says it. Pure.

Reasons are given when a version is opened, counted by its ranks when they seal, told by other replicas, and found when digests are made.
Approval stands against them by name. So a further reason needs nothing but somebody who gives it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from weighbridge._core.resources import HELD_NONFINITE, Version
from weighbridge_storage.documents.entries import Approval, OpenEntry, VersionEntry


@dataclass(frozen=True, slots=True)
class HoldReasons:
    """Why a version is held, as far as one replica knows.

    Attributes:
        opened: the reasons of its opening.
        allows_nonfinite: whether it is not held for elements that are NaN or infinite.
        approved: reasons that were approved.
        counted: how many such elements ranks have counted that seal here, by rank; ranks without any are not there.
        elsewhere: how many other replicas know of, by number; likewise.
        found: how many there are in the files here that have digests.
    """

    opened: tuple[str, ...] = ()
    allows_nonfinite: bool = False
    approved: frozenset[str] = frozenset()
    counted: Mapping[int, int] = field(default_factory=dict)
    elsewhere: Mapping[int, int] = field(default_factory=dict)
    found: int = 0

    @staticmethod
    def of(entry: OpenEntry) -> HoldReasons:
        """What head.json says of a version that is being received."""
        return HoldReasons().with_entry(entry)

    @staticmethod
    def stored(entry: VersionEntry) -> HoldReasons:
        """What history says of a version: all there is to say."""
        return HoldReasons(entry.held, allows_nonfinite=True, found=entry.nonfinite_elements)

    def with_entry(self, entry: OpenEntry) -> HoldReasons:
        """After head.json was read: what further ranks have said at its opening, and what was approved."""
        approved = () if entry.approval is None else entry.approval.reasons
        return replace(
            self,
            opened=entry.held,
            allows_nonfinite=entry.allow_nonfinite,
            approved=self.approved.union(approved),
        )

    def with_approved(self, reasons: tuple[str, ...]) -> HoldReasons:
        """After these reasons were approved."""
        opened = tuple(reason for reason in self.opened if reason not in reasons)
        return replace(self, opened=opened, approved=self.approved.union(reasons))

    def with_counted(self, rank: int, elements: int) -> HoldReasons:
        """After a rank has said how many elements are NaN or infinite."""
        return replace(self, counted={**self.counted, rank: elements}) if elements else self

    def with_elsewhere(self, replica: int, elements: int) -> HoldReasons:
        """After another replica has said how many it knows of."""
        if elements <= self.elsewhere.get(replica, 0):
            return self
        return replace(self, elsewhere={**self.elsewhere, replica: elements})

    def with_found(self, elements: int) -> HoldReasons:
        """After the digests of a file were made."""
        return replace(self, found=self.found + elements)

    @property
    def here(self) -> int:
        """How many elements are known here to be NaN or infinite; those that ranks have counted may be in files of other replicas."""
        return max(sum(self.counted.values()), self.found)

    @property
    def known(self) -> int:
        """How many are known of in all; at least one if anybody knows of one."""
        return max(sum(self.counted.values()) + sum(self.elsewhere.values()), self.found)

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why the version is held now; empty if it is not."""
        nonfinite = (HELD_NONFINITE,) if self.known and not self.allows_nonfinite else ()
        return tuple(sorted({*self.opened, *nonfinite} - self.approved))


def with_approval(version: Version, approval: Approval | None) -> Version:
    """A version with what head.json says of its approval."""
    if approval is None:
        return version
    return replace(
        version,
        held=tuple(reason for reason in version.held if reason not in approval.reasons),
        approved_reasons=approval.reasons,
        approved_by=approval.by,
        approved_time_ms=approval.approved_ms,
        approved_note=approval.note,
    )
