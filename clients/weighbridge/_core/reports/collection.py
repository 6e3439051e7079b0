"""Collection of a model's versions: what one has done, or would do."""

from __future__ import annotations

from dataclasses import dataclass

from weighbridge._core.json_values import JsonValue

__all__ = ["Collection", "DeletedVersion", "KeptVersion", "SweptVersion", "WaitingVersion"]

RULE_KEEP_LAST = "keep_last"
RULE_KEEP_EVERY = "keep_every"
RULE_KEEP_YOUNGER = "keep_younger_s"
RULE_KEEP_EVERY_STEPS = "keep_every_steps"
RULE_KEEP_EVERYTHING = "keep_everything"
"""Speaks for every version as long as the model has no other rule."""
RULE_ADAPTERS = "adapters"
"""Keeps every version that an adapter is on, beside the model's rules."""
MOST_PROBLEMS = 100


@dataclass(frozen=True, slots=True)
class KeptVersion(JsonValue):
    """A version that is kept."""

    number: int
    """Which version."""
    rules: tuple[str, ...]
    """Those that speak for it; `keep_everything` if there is no rule."""
    refs: tuple[str, ...]
    """Those that name it, or are asked to."""
    engines: tuple[str, ...] = ()
    """Engines that serve it or are being taken to it, for people; of many the first, and how many more."""


@dataclass(frozen=True, slots=True)
class WaitingVersion(JsonValue):
    """A version that was taken out of history and whose objects are still there."""

    number: int
    """Which version."""
    until_ms: int
    """They stay at least until then; Unix time in milliseconds."""
    readers: int
    """Leases that keep them beyond the grace time."""


@dataclass(frozen=True, slots=True)
class DeletedVersion(JsonValue):
    """A version whose objects were deleted, and the bytes of its weights."""

    number: int
    """Which version."""
    nbytes: int
    """Bytes of its weights."""


@dataclass(frozen=True, slots=True)
class SweptVersion(JsonValue):
    """Objects of a number that stands for no version: how many were deleted."""

    number: int
    """Which version."""
    objects: int
    """How many were deleted."""


@dataclass(frozen=True, slots=True)
class Collection(JsonValue):
    """What collecting the versions of a model did; in a dry run, what it would have done.

    Several replicas may collect at the same time: each reports what it has done itself.
    """

    model: str
    """`namespace/name`."""
    dry_run: bool
    """Whether nothing was changed."""
    kept: tuple[KeptVersion, ...] = ()
    """Versions that stay part of history, and why."""
    retired: tuple[int, ...] = ()
    """Versions taken out of history now."""
    waiting: tuple[WaitingVersion, ...] = ()
    """Versions taken out of history, now or before, and still needed."""
    deleted: tuple[DeletedVersion, ...] = ()
    """Versions whose objects were deleted."""
    given_up: tuple[int, ...] = ()
    """Versions being received of which nothing more was heard."""
    swept: tuple[SweptVersion, ...] = ()
    """What was left of versions that were given up or deleted."""
    uploads_discarded: int = 0
    """Objects never finished whose parts were removed; a dry run does not look for them."""
    leases_removed: int = 0
    """Leases that readers have left behind."""
    problems: tuple[str, ...] = ()
    """One line for each deletion that failed; the next collection tries again."""

    @property
    def deleted_bytes(self) -> int:
        """Bytes of the weights of all versions that were deleted."""
        return sum(version.nbytes for version in self.deleted)
