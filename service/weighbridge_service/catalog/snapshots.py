"""Snapshots of versions: state in the memory of this process that is not in the store."""

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
    """Beginning of a version, kept only in the memory of the process that has opened it.

    Attributes:
        offer_s: seconds from the trainer's call of push to the opening, as sent by the rank whose request opened it;
            None if not sent.
        first_byte_ms: when the first byte arrived, in milliseconds since 1970 UTC; 0 if none has.
    """

    offer_s: float | None = None
    first_byte_ms: int = 0


@dataclass(frozen=True, slots=True)
class VersionSnapshot:
    """State of a version in the memory of this process, at one moment.

    Attributes:
        version: the version as readers see it.
        image: bytes of its files, or of those that this process has assembled, if they are complete and still in
            memory.
        files: layout of the version in its files; None if it cannot be read here.
        unfinished: whether this process still has work to do for it.
        waits: returns the names of the things that a version which is being received waits for; None for others.
        abandoned: whether a version that is visible and not durable will not become durable.
        beginning: how the version began; None if this process has not opened it.
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
        """The version, with the names of the things that it waits for."""
        return self.version if self.waits is None else replace(self.version, waits_for=tuple(self.waits()))

    @property
    def readable(self) -> bool:
        """Whether the version can be read from memory."""
        return self.version.state.visible and self.image is not None

    def differs_from(self, other: VersionSnapshot) -> bool:
        """Whether anything has changed that callers wait for, which excludes the numbers of received bytes and sealed
        ranks.
        """
        return (self.version.state, self.version.held, self.unfinished, self.abandoned) != (
            other.version.state,
            other.version.held,
            other.unfinished,
            other.abandoned,
        )


class Snapshots:
    """Snapshots of all models. Thread-safe.

    Args:
        changes: notifies listeners when a snapshot changes.
    """

    def __init__(self, changes: Changes) -> None:
        self._changes = changes
        self._lock = threading.Lock()
        self._known: dict[ModelName, dict[int, VersionSnapshot]] = {}

    def show(self, name: ModelName, snapshot: VersionSnapshot, *, changed: bool = True) -> None:
        """Set the snapshot of a version.

        Args:
            name: name of the model.
            snapshot: the new snapshot, which replaces the previous one.
            changed: whether to notify listeners.
        """
        with self._lock:
            self._known.setdefault(name, {})[snapshot.version.number] = snapshot
        if changed:
            self._changes.notify(name)

    def forget(self, name: ModelName, number: int) -> None:
        """Drop the snapshot of a version, of which only the head remains."""
        with self._lock:
            known = self._known.get(name, {})
            known.pop(number, None)
            if not known:
                self._known.pop(name, None)
        self._changes.notify(name)

    def forget_deleted(self, name: ModelName, head: Head | None) -> None:
        """Drop the snapshots of versions whose model was deleted, by any replica."""
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
        """Snapshot of a version; None if this process has none."""
        with self._lock:
            return self._known.get(name, {}).get(number)

    def of_model(self, name: ModelName) -> dict[int, VersionSnapshot]:
        """Snapshots of a model's versions, by number."""
        with self._lock:
            return dict(self._known.get(name, {}))

    def present(self, name: ModelName) -> frozenset[int]:
        """Numbers of a model's versions that this process has, and has not given up. It renews their leases itself,
        late after an outage of the store.
        """
        found = self.of_model(name).items()
        return frozenset(number for number, known in found if not known.version.state.given_up)

    def any_unfinished(self, name: ModelName) -> bool:
        """Whether this process still has work to do for a version of a model."""
        return any(known.unfinished for known in self.of_model(name).values())

    def count(self, state: VersionState) -> int:
        """Number of versions with a snapshot in this state."""
        return sum(snapshot.version.state is state for snapshot in self._all())

    @property
    def held(self) -> dict[ModelName, list[int]]:
        """Numbers of visible versions whose snapshots are held, by model.

        Another replica may have approved them since.
        """
        found: dict[ModelName, list[int]] = {}
        for version in (snapshot.version for snapshot in self._all()):
            if version.state.visible and version.held:
                found.setdefault(ModelName.parse(version.model), []).append(version.number)
        return found

    @property
    def unfinished(self) -> int:
        """Number of versions for which this process still has work to do."""
        return sum(snapshot.unfinished for snapshot in self._all())

    @property
    def not_durable(self) -> list[Version]:
        """Versions that are visible here, could not be made durable so far, and are retried; `Version.error` is the
        reason.
        """
        tried = (each.version for each in self._all() if not each.abandoned)
        return [version for version in tried if version.state.visible and version.error]

    def _all(self) -> list[VersionSnapshot]:
        with self._lock:
            return [snapshot for known in self._known.values() for snapshot in known.values()]
