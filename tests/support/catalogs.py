"""A catalog over a folder, whose reads are counted and whose store can be away, for tests."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.heads import open_version
from weighbridge._core.resources import Version, VersionState
from weighbridge.errors import Unavailable
from weighbridge_service.catalog.catalog import Catalog
from weighbridge_service.catalog.snapshots import VersionSnapshot
from weighbridge_storage.documents.entries import VersionEntry
from weighbridge_storage.documents.names import ModelName
from weighbridge_storage.head.head import Head
from weighbridge_storage.head.head_changes import publish, register
from weighbridge_storage.head.open_versions import claim_version
from weighbridge_storage.memory.images import Image
from weighbridge_storage.stores.local import LocalStore

SMOL, OTHER = ModelName("acme", "smol"), ModelName("acme", "other")


class CountingStore(LocalStore):
    """Store that counts reads of heads, and the reads that it refused.

    Tests can make it unavailable, or make its reads hang.
    """

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.root = root
        self.reads = self.refused = 0
        self.hung, self._hanging = 0, ""
        self.away = False
        self._go_on = threading.Event()
        self._go_on.set()

    def get(self, key: str) -> Any:
        if self.away:
            self.refused += 1
            raise Unavailable("the store is away")
        self.reads += key.endswith("head.json")
        found = super().get(key)
        if not self._go_on.is_set() and self._hanging in threading.current_thread().name:
            self.hung += 1
            self._go_on.wait()
        return found

    @contextmanager
    def hanging(self, thread: str = "") -> Iterator[None]:
        """Let reads, those of a thread or of all, return the content at their start, but only after the block has
        ended.
        """
        self.hung, self._hanging = 0, thread
        self._go_on.clear()
        try:
            yield
        finally:
            self._go_on.set()


def catalog_with_models(store: LocalStore) -> Catalog:
    """One with two models that have no versions."""
    made = Catalog(store)
    for name in (SMOL, OTHER):
        made.heads.update(name, lambda head: (register(head, "f", {}), None), create=True)
    return made


def publish_one(catalog: Catalog, name: ModelName = SMOL) -> int:
    """A version that some replica has published; its number."""

    def opened(head: Head) -> tuple[Head, int]:
        after, entry = open_version(
            head, request_id=f"r{head.next_version}", step=0, run="", ranks=1, now_ms=1, lease_ms=10**6
        )
        return claim_version(after, entry.number, "claim"), entry.number

    number = catalog.heads.update(name, opened)
    entry = VersionEntry(number, 0, "", 1, 1, 1, "f", "claim")
    catalog.heads.edit(name, lambda history: (publish(history, entry), None))
    return number


def snapshot(
    number: int, state: VersionState, *, name: ModelName = SMOL, image: Image | None = None, **more: Any
) -> VersionSnapshot:
    """Snapshot of a version in a process."""
    return VersionSnapshot(Version(str(name), number, state, **more), image=image)


def show(catalog: Catalog, before: VersionSnapshot, after: VersionSnapshot, name: ModelName = SMOL) -> None:
    """Show a change of a version as a session does."""
    catalog.snapshots.show(name, after, changed=after.differs_from(before))
