"""What a process knows of versions beyond the store: who is woken by what, and what ``live`` names meanwhile."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.services import eventually
from weighbridge.errors import Unavailable
from weighbridge.resources import Version, VersionState
from weighbridge_service.catalog import Catalog, VersionSnapshot
from weighbridge_storage.entries import VersionEntry
from weighbridge_storage.head import Head
from weighbridge_storage.head_changes import claim_version, open_version, publish, register
from weighbridge_storage.image_pool import ImagePool
from weighbridge_storage.images import Image
from weighbridge_storage.local import LocalStore
from weighbridge_storage.names import ModelName

SMOL, OTHER = ModelName("acme", "smol"), ModelName("acme", "other")


class CountingStore(LocalStore):
    """Counts reads of heads; is away as long as it is told so."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.reads = 0
        self.away = False

    def get(self, key: str) -> Any:
        if self.away:
            raise Unavailable("the store is away")
        self.reads += key.endswith("head.json")
        return super().get(key)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[CountingStore]:
    opened = CountingStore(tmp_path)
    yield opened
    opened.close()


@pytest.fixture
def catalog(store: CountingStore) -> Iterator[Catalog]:
    made = Catalog(store)
    for name in (SMOL, OTHER):
        made.heads.update(name, lambda head: (register(head, "f", {}), None), create=True)
    yield made
    made.stopping.set()
    made.notify()


def publish_one(catalog: Catalog) -> int:
    """A version that some replica has published; its number."""

    def opened(head: Head) -> tuple[Head, int]:
        after, entry = open_version(
            head, request_id=f"r{head.next_version}", step=0, run="", ranks=1, now_ms=1, lease_ms=10**6
        )
        return claim_version(after, entry.number, "claim"), entry.number

    number = catalog.heads.update(SMOL, opened)
    entry = VersionEntry(number, 0, "", 1, 1, 1, "f", "claim")
    catalog.heads.edit(SMOL, lambda history: (publish(history, entry), None))
    return number


def snapshot(
    number: int, state: VersionState, *, name: ModelName = SMOL, image: Image | None = None, **more: Any
) -> VersionSnapshot:
    return VersionSnapshot(Version(str(name), number, state, **more), image=image)


def show(catalog: Catalog, before: VersionSnapshot, after: VersionSnapshot, name: ModelName = SMOL) -> None:
    """As a session does."""
    catalog.show(name, after, changed=after.differs_from(before))


def watching(catalog: Catalog, ref: str = "live") -> list[int]:
    """The numbers that a watch brings, as they come."""
    active, seen = threading.Event(), list[int]()
    active.set()

    def watch_each() -> None:
        for version in catalog.watch_ref(str(SMOL), ref, 0, active):
            seen.append(version.number)

    threading.Thread(target=watch_each, daemon=True).start()
    return seen


def quiet_reads(store: CountingStore, action: Callable[[], None]) -> int:
    """Heads read while something is done that takes far less than a watch's pause."""
    before, begun = store.reads, time.monotonic()
    action()
    time.sleep(0.2)
    assert time.monotonic() - begun < 0.8, "too slow to tell what was read because of it"
    return store.reads - before


def test_a_watch_reads_the_store_only_for_what_can_move_its_ref(
    catalog: Catalog, store: CountingStore
) -> None:
    publish_one(catalog)
    seen = watching(catalog)
    eventually(lambda: seen == [1])
    receiving = snapshot(2, VersionState.RECEIVING, ranks=1024)
    catalog.show(SMOL, receiving)
    time.sleep(0.1)

    def ranks_seal() -> None:
        before = receiving
        for sealed in range(100):
            version = replace(receiving.version, sealed_ranks=sealed, received_bytes=sealed * 1000)
            after = replace(receiving, version=version)
            show(catalog, before, after)
            before = after
            time.sleep(0.001)

    def others_push() -> None:
        before = snapshot(1, VersionState.OPEN, name=OTHER)
        for number in range(50):
            for state in (VersionState.OPEN, VersionState.RECEIVING, VersionState.READY):
                after = snapshot(number, state, name=OTHER)
                show(catalog, before, after, OTHER)
                before = after
                time.sleep(0.001)

    # the watch looks again once a second, whatever happens
    assert quiet_reads(store, ranks_seal) <= 1
    assert quiet_reads(store, others_push) <= 1
    show(catalog, receiving, snapshot(2, VersionState.READY))
    eventually(lambda: seen == [1, 2])


def test_a_version_that_fails_while_live_is_looked_up_ends_no_watch(store: CountingStore) -> None:
    class Failing(Catalog):
        """A version fails right after somebody has seen that it is ready."""

        def snapshots(self, name: ModelName) -> dict[int, VersionSnapshot]:
            found = super().snapshots(name)
            self.show(name, snapshot(2, VersionState.FAILED), changed=False)
            return found

    catalog = Failing(store)
    catalog.heads.update(SMOL, lambda head: (register(head, "f", {}), None), create=True)
    publish_one(catalog)
    catalog.show(SMOL, snapshot(2, VersionState.READY))
    assert catalog.resolve(SMOL, "live").number == 2
    assert catalog.resolve(SMOL, "live").number == 1


def test_live_does_not_go_back_when_the_store_is_away(catalog: Catalog, store: CountingStore) -> None:
    image = ImagePool(1 << 20).acquire({"a": 1})
    mine = publish_one(catalog)
    catalog.show(SMOL, snapshot(mine, VersionState.DURABLE, image=image))
    store.away = True
    assert catalog.resolve(SMOL, "live").number == mine
    store.away = False
    newer = publish_one(catalog)  # by another replica
    assert catalog.resolve(SMOL, "live").number == newer
    store.away = True
    with pytest.raises(Unavailable):
        catalog.resolve(SMOL, "live")
    assert catalog.resolve(SMOL, str(mine)).number == mine


def test_a_version_in_history_is_durable_also_before_its_session_hears_that(catalog: Catalog) -> None:
    number = publish_one(catalog)
    expected = catalog.resolve(SMOL, "latest")
    assert expected.state is VersionState.DURABLE
    catalog.show(SMOL, snapshot(number, VersionState.VERIFIED, ready_time_ms=5, verified_time_ms=6))
    assert catalog.resolve(SMOL, "latest") == expected


def test_waiting_for_a_version_ends_with_the_service(catalog: Catalog) -> None:
    catalog.show(SMOL, snapshot(1, VersionState.RECEIVING))
    threading.Timer(0.1, lambda: (catalog.stopping.set(), catalog.notify())).start()
    begun = time.monotonic()
    with pytest.raises(Unavailable, match="shutting down"):
        catalog.get_version(str(SMOL), "1", VersionState.READY, 30.0)
    assert time.monotonic() - begun < 5
