"""Reasons to hold a version, so that ``live`` and ``latest`` skip it, as far as one replica knows before they are in
history. Pure.

Ranks give reasons when they open a version, and count NaN and infinite elements when they seal. Other replicas report
their counts, and digests of files count again. An approval cancels reasons by name, so a new kind of reason needs only
code that gives it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from weighbridge._core.resources import HELD_NONFINITE, Version
from weighbridge_storage.documents.entries import Approval, OpenEntry, VersionEntry


@dataclass(frozen=True, slots=True)
class HoldReasons:
    """Reasons for which a version is held, as far as one replica knows.

    Attributes:
        opened: reasons given when the version was opened.
        allows_nonfinite: whether elements that are NaN or infinite are no reason.
        approved: reasons that were approved.
        counted: number of such elements that each rank which seals here has counted, by rank; ranks without any are
            left out.
        elsewhere: number of such elements that each other replica knows of, by its number; replicas without any are
            left out.
        found: number of such elements in the files here that have digests.
    """

    opened: tuple[str, ...] = ()
    allows_nonfinite: bool = False
    approved: frozenset[str] = frozenset()
    counted: Mapping[int, int] = field(default_factory=dict)
    elsewhere: Mapping[int, int] = field(default_factory=dict)
    found: int = 0

    @staticmethod
    def of(entry: OpenEntry) -> HoldReasons:
        """Reasons from the entry in head.json of a version that is being received."""
        return HoldReasons().with_entry(entry)

    @staticmethod
    def stored(entry: VersionEntry) -> HoldReasons:
        """Reasons from the entry of a version in history, which is complete."""
        return HoldReasons(entry.held, allows_nonfinite=True, found=entry.nonfinite_elements)

    def with_entry(self, entry: OpenEntry) -> HoldReasons:
        """Copy with the reasons and approvals in the version's entry, which further ranks and approvers have
        changed.
        """
        approved = () if entry.approval is None else entry.approval.reasons
        return replace(
            self,
            opened=entry.held,
            allows_nonfinite=entry.allow_nonfinite,
            approved=self.approved.union(approved),
        )

    def with_approved(self, reasons: tuple[str, ...]) -> HoldReasons:
        """Copy in which these reasons are approved."""
        opened = tuple(reason for reason in self.opened if reason not in reasons)
        return replace(self, opened=opened, approved=self.approved.union(reasons))

    def with_counted(self, rank: int, elements: int) -> HoldReasons:
        """Copy with a rank's count of elements that are NaN or infinite."""
        return replace(self, counted={**self.counted, rank: elements}) if elements else self

    def with_elsewhere(self, replica: int, elements: int) -> HoldReasons:
        """Copy with the count of another replica, if it is higher than its last one."""
        if elements <= self.elsewhere.get(replica, 0):
            return self
        return replace(self, elsewhere={**self.elsewhere, replica: elements})

    def with_found(self, elements: int) -> HoldReasons:
        """Copy with the count from the digests of one more file."""
        return replace(self, found=self.found + elements)

    @property
    def here(self) -> int:
        """Number of NaN or infinite elements that this replica knows of; those that its ranks counted may be in files
        of other replicas.
        """
        return max(sum(self.counted.values()), self.found)

    @property
    def known(self) -> int:
        """Number of NaN or infinite elements that all replicas have reported: at least 1 if there is one, but some may
        count twice.
        """
        return max(sum(self.counted.values()) + sum(self.elsewhere.values()), self.found)

    @property
    def reasons(self) -> tuple[str, ...]:
        """Reasons for which the version is held now; empty if it is not held."""
        nonfinite = (HELD_NONFINITE,) if self.known and not self.allows_nonfinite else ()
        return tuple(sorted({*self.opened, *nonfinite} - self.approved))


def with_approval(version: Version, approval: Approval | None) -> Version:
    """The version with its approval from head.json, without the approved reasons."""
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
