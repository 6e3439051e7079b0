"""Collection of a model's versions: the report of what it has deleted, or would delete."""

from __future__ import annotations

from dataclasses import dataclass

from weighbridge._core.json_values import JsonValue

__all__ = ["Collection", "DeletedVersion", "KeptVersion", "SweptVersion", "WaitingVersion"]

RULE_KEEP_LAST = "keep_last"
RULE_KEEP_EVERY = "keep_every"
RULE_KEEP_YOUNGER = "keep_younger_s"
RULE_KEEP_EVERY_STEPS = "keep_every_steps"
RULE_KEEP_EVERYTHING = "keep_everything"
"""Rule that keeps every version as long as the model does not have another rule."""
RULE_ADAPTERS = "adapters"
"""Rule that keeps every base of an adapter's version, in addition to the model's rules."""
MOST_PROBLEMS = 100


@dataclass(frozen=True, slots=True)
class KeptVersion(JsonValue):
    """A version that is kept."""

    number: int
    """Number of the version."""
    rules: tuple[str, ...]
    """Rules that keep the version; `keep_everything` if the model does not have rules."""
    refs: tuple[str, ...]
    """Refs that name the version, or that a pending request would move to it."""
    engines: tuple[str, ...] = ()
    """Engines that serve the version or are being updated to it, as text.

    If there are many, the first ones and the number of the others.
    """


@dataclass(frozen=True, slots=True)
class WaitingVersion(JsonValue):
    """A retired version whose objects still exist."""

    number: int
    """Number of the version."""
    until_ms: int
    """End of the grace time, until which the objects are kept; Unix time in milliseconds."""
    readers: int
    """Number of readers' leases that keep the objects beyond the grace time."""


@dataclass(frozen=True, slots=True)
class DeletedVersion(JsonValue):
    """A version whose objects were deleted."""

    number: int
    """Number of the version."""
    nbytes: int
    """Bytes of its weights."""


@dataclass(frozen=True, slots=True)
class SweptVersion(JsonValue):
    """Deleted objects of an aborted or deleted version."""

    number: int
    """Number of the version."""
    objects: int
    """Number of objects that were deleted."""


@dataclass(frozen=True, slots=True)
class Collection(JsonValue):
    """Result of collecting the versions of a model; in a dry run, the result that a collection would have.

    Several replicas may collect at the same time. Each reports only its own work.
    """

    model: str
    """`namespace/name`."""
    dry_run: bool
    """Whether nothing was changed."""
    kept: tuple[KeptVersion, ...] = ()
    """Versions that stay part of the history, with the reasons."""
    retired: tuple[int, ...] = ()
    """Versions that this collection has retired."""
    waiting: tuple[WaitingVersion, ...] = ()
    """Retired versions, old and new, whose objects are still needed."""
    deleted: tuple[DeletedVersion, ...] = ()
    """Versions whose objects were deleted."""
    given_up: tuple[int, ...] = ()
    """Versions that were being received and were given up, because their leases had expired."""
    swept: tuple[SweptVersion, ...] = ()
    """Leftover objects of versions that were aborted or deleted."""
    uploads_discarded: int = 0
    """Number of unfinished uploads whose parts were removed. A dry run does not search for them."""
    leases_removed: int = 0
    """Number of orphaned leases of readers that were removed."""
    problems: tuple[str, ...] = ()
    """One line for each deletion that failed. The next collection tries again."""

    @property
    def deleted_bytes(self) -> int:
        """Bytes of the weights of all versions that were deleted."""
        return sum(version.nbytes for version in self.deleted)
