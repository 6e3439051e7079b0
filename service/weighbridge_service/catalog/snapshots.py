"""Snapshots of versions: what this process knows of one beyond the store, at one moment."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from weighbridge._core.resources import Version
from weighbridge_storage.memory.images import Image


@dataclass(frozen=True, slots=True)
class VersionSnapshot:
    """What this process knows of a version beyond the store, at one moment.

    Attributes:
        version: as everybody sees it.
        image: the bytes of its files, or of those that this process has put together, if they are complete and still in memory.
        unfinished: whether something is to be done for it yet.
        waits: says what a version waits for that is being received; None for others.
        abandoned: of a version that is visible and not durable, that it will not become durable.
    """

    version: Version
    image: Image | None = None
    unfinished: bool = True
    abandoned: bool = False
    waits: Callable[[], Iterable[str]] | None = field(default=None, compare=False)

    @property
    def described(self) -> Version:
        """The version, with what it waits for."""
        return self.version if self.waits is None else replace(self.version, waits_for=tuple(self.waits()))

    @property
    def readable(self) -> bool:
        """Whether it can be read from memory."""
        return self.version.state.visible and self.image is not None

    def differs_from(self, other: VersionSnapshot) -> bool:
        """Whether something has changed that anybody waits for: not how many bytes have come, or how many ranks have sealed."""
        return (self.version.state, self.version.held, self.unfinished, self.abandoned) != (
            other.version.state,
            other.version.held,
            other.unfinished,
            other.abandoned,
        )
