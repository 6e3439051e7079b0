"""Snapshots of versions: what this process knows of them beyond the store."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from weighbridge._core.resources import Version, VersionState
from weighbridge._formats.safetensors_files import FilesLayout
from weighbridge_service.catalog.changes import Changes
from weighbridge_storage.documents.names import ModelName
from weighbridge_storage.head.head import Head
from weighbridge_storage.memory.images import Image


@dataclass(frozen=True, slots=True)
class Beginning:
    """Beginning of a version, known to the process that has opened it, and kept in its memory alone.

    Attributes:
        offer_s: seconds from the trainer's call of push to the opening, as the rank has told whose request opened it; None if it has not.
        first_byte_ms: when its first byte had come, in milliseconds since 1970 UTC; 0 if none has.
    """

    offer_s: float | None = None
    first_byte_ms: int = 0


@dataclass(frozen=True, slots=True)
class VersionSnapshot:
    """What this process knows of a version beyond the store, at one moment.

    Attributes:
        version: as everybody sees it.
        image: the bytes of its files, or of those that this process has put together, if they are complete and still in memory.
        files: how the version lies in its files; None if nothing of it can be read here.
        unfinished: whether something is to be done for it yet.
        waits: says what a version waits for that is being received; None for others.
        abandoned: of a version that is visible and not durable, that it will not become durable.
        beginning: how it began; None if this process has not opened it.
    """

    version: Version
    image: Image | None = None
    files: FilesLayout | None = field(default=None, compare=False)
    unfinished: bool = True
    abandoned: bool = False
    waits: Callable[[], Iterable[str]] | None = field(default=None, compare=False)
    beginning: Beginning | None = None

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


class Snapshots:
    """The snapshots of all models. Thread-safe.

    Args:
        changes: is told of what changes here.
    """

    def __init__(self, changes: Changes) -> None:
        self._changes = changes
        self._lock = threading.Lock()
        self._known: dict[ModelName, dict[int, VersionSnapshot]] = {}

    def show(self, name: ModelName, snapshot: VersionSnapshot, *, changed: bool = True) -> None:
        """From now on, this is what is known of a version.

        Args:
            name: of the model.
            snapshot: takes the place of the one before.
            changed: whether those who wait for a change are to be woken.
        """
        with self._lock:
            self._known.setdefault(name, {})[snapshot.version.number] = snapshot
        if changed:
            self._changes.notify(name)

    def forget(self, name: ModelName, number: int) -> None:
        """No more is known of a version than its head says."""
        with self._lock:
            known = self._known.get(name, {})
            known.pop(number, None)
            if not known:
                self._known.pop(name, None)
        self._changes.notify(name)

    def forget_deleted(self, name: ModelName, head: Head | None) -> None:
        """Know no more of versions whose model was deleted, by whatever replica."""
        with self._lock:
            known = self._known.get(name, {})
            gone = [number for number in known if head is None or number < head.first_version]
            for number in gone:
                del known[number]
            if gone and not known:
                self._known.pop(name, None)
        if gone:
            self._changes.notify(name)

    def get(self, name: ModelName, number: int) -> VersionSnapshot | None:
        """What this process knows of a version beyond the store."""
        with self._lock:
            return self._known.get(name, {}).get(number)

    def of_model(self, name: ModelName) -> dict[int, VersionSnapshot]:
        """What this process knows of a model's versions beyond the store, by number."""
        with self._lock:
            return dict(self._known.get(name, {}))

    def any_unfinished(self, name: ModelName) -> bool:
        """Whether this process has something to do yet for a version of a model."""
        return any(known.unfinished for known in self.of_model(name).values())

    def count(self, state: VersionState) -> int:
        """Versions in this state of which this process knows more than the store."""
        return sum(snapshot.version.state is state for snapshot in self._all())

    @property
    def held(self) -> dict[ModelName, list[int]]:
        """Visible versions that were held when this process heard of them last, of those of which it knows more than the store, by model."""
        found: dict[ModelName, list[int]] = {}
        for version in (snapshot.version for snapshot in self._all()):
            if version.state.visible and version.held:
                found.setdefault(ModelName.parse(version.model), []).append(version.number)
        return found

    @property
    def unfinished(self) -> int:
        """Versions for which this process has something to do yet."""
        return sum(snapshot.unfinished for snapshot in self._all())

    @property
    def not_durable(self) -> list[Version]:
        """Versions that are visible here, could not be made durable so far, and are tried again; each says why."""
        tried = (each.version for each in self._all() if not each.abandoned)
        return [version for version in tried if version.state.visible and version.error]

    def _all(self) -> list[VersionSnapshot]:
        with self._lock:
            return [snapshot for known in self._known.values() for snapshot in known.values()]
