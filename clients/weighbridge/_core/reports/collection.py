"""Collection of a model's versions: what one has done, or would do."""

from __future__ import annotations

from dataclasses import dataclass

from weighbridge._core.json_values import JsonValue

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
    """A version that is kept.

    Attributes:
        number: which one.
        rules: the rules of the retention that speak for it.
        refs: the refs in the store that name it, or are asked to.
        engines: the engines that serve it or are being taken to it, for people; of many the first, and how many more.
    """

    number: int
    rules: tuple[str, ...]
    refs: tuple[str, ...]
    engines: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class WaitingVersion(JsonValue):
    """A version that was taken out of history and whose objects are still there.

    Attributes:
        number: which one.
        until_ms: they stay at least until then, Unix time in milliseconds.
        readers: the leases that keep them beyond the grace time; 0 if it is the grace time that does.
    """

    number: int
    until_ms: int
    readers: int


@dataclass(frozen=True, slots=True)
class DeletedVersion(JsonValue):
    """A version whose objects were deleted, and the bytes of its weights."""

    number: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class SweptVersion(JsonValue):
    """Objects of a number that stands for no version: how many were deleted."""

    number: int
    objects: int


@dataclass(frozen=True, slots=True)
class Collection(JsonValue):
    """What collecting the versions of a model did; in a dry run, what it would have done.

    Several replicas may collect at the same time: each reports what it has done itself.

    Attributes:
        model: ``namespace/name``.
        dry_run: whether nothing was changed.
        kept: the versions that stay part of history, and why.
        retired: versions that were taken out of history now.
        waiting: versions that were taken out of history, now or before, and whose objects are still needed.
        deleted: versions whose objects were deleted.
        given_up: versions that were being received, and of which nothing more was heard.
        swept: what was left of versions that were given up or deleted.
        uploads_discarded: objects that were never finished and whose parts were removed. A dry run does not look for them.
        leases_removed: leases that readers have left behind.
        problems: one line for each deletion that failed, the first `MOST_PROBLEMS` of them; the next collection tries again.
    """

    model: str
    dry_run: bool
    kept: tuple[KeptVersion, ...] = ()
    retired: tuple[int, ...] = ()
    waiting: tuple[WaitingVersion, ...] = ()
    deleted: tuple[DeletedVersion, ...] = ()
    given_up: tuple[int, ...] = ()
    swept: tuple[SweptVersion, ...] = ()
    uploads_discarded: int = 0
    leases_removed: int = 0
    problems: tuple[str, ...] = ()

    @property
    def deleted_bytes(self) -> int:
        """Bytes of the weights of all versions that were deleted."""
        return sum(version.nbytes for version in self.deleted)
