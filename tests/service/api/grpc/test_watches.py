"""What do those hear who wait for refs and versions, and what do they cost the store, however many they are?"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from tests.support.catalogs import (
    OTHER,
    SMOL,
    CountingStore,
    catalog_with_models,
    publish_one,
    show,
    snapshot,
)
from tests.support.images import acquire
from tests.support.waiting import eventually, is_done_within
from weighbridge._core.resources import Version, VersionState
from weighbridge.errors import DeadlineExceeded, NotFound, Unavailable, VersionFailed
from weighbridge_service.api.grpc.event_loop import EventLoop
from weighbridge_service.api.grpc.watches import Watches
from weighbridge_service.api.grpc.workers import Workers
from weighbridge_service.catalog.catalog import Catalog
from weighbridge_service.runtime.clock import unix_ms
from weighbridge_storage.head.head_changes import delete_versions, forget_versions, set_ref
from weighbridge_storage.head.open_versions import open_version
from weighbridge_storage.memory.image_pool import ImagePool
from weighbridge_storage.stores.local import LocalStore


@pytest.fixture
def store(tmp_path: Path) -> Iterator[CountingStore]:
    opened = CountingStore(tmp_path)
    yield opened
    opened.close()


@pytest.fixture
def catalog(store: CountingStore) -> Catalog:
    return catalog_with_models(store)


class Bench:
    """Watches on a loop of their own."""

    def __init__(self, catalog: Catalog) -> None:
        self.loop, self.workers = EventLoop("watches"), Workers("watches", 4, 100)
        self.watches = Watches(catalog, self.workers)

    def follow(self, ref: str = "live", after: int = 0) -> list[int]:
        """The numbers that a watch brings, as they come."""
        seen = list[int]()

        async def each() -> None:
            async for version in self.watches.follow(str(SMOL), ref, after):
                seen.append(version.number)

        self.loop.begin(each())
        return seen

    def reached(self, version: str, state: VersionState, seconds: float = 30.0) -> Version:
        return self.loop.run(self.watches.reached(str(SMOL), version, state, seconds))


@pytest.fixture
def bench(catalog: Catalog) -> Iterator[Bench]:
    made = Bench(catalog)
    with made.watches.listening(made.loop.loop):
        yield made
    catalog.stopping.set()
    made.loop.stop()
    made.workers.close()


def reads_beyond_looks(store: CountingStore, action: Callable[[], None]) -> float:
    """Heads read while something is done, without the looks that come due meanwhile; at most 0 if none is read because of it."""
    before, begun = store.reads, time.monotonic()
    action()
    time.sleep(0.1)
    return store.reads - before - looks_due(begun)


def looks_due(begun: float) -> float:
    """How often the store may have been looked at since then: once in half a second, less what clocks and dice take off."""
    return (time.monotonic() - begun) / 0.4 + 1


def tag(catalog: Catalog, number: int) -> None:
    """As another replica does it, of which this process hears nothing."""
    catalog.heads.edit(SMOL, lambda history: (set_ref(history, "prod", number), None))


def test_a_watch_reads_the_store_only_for_what_can_move_its_ref(
    catalog: Catalog, store: CountingStore, bench: Bench
) -> None:
    publish_one(catalog)
    seen = bench.follow()
    eventually(lambda: seen == [1])
    receiving = snapshot(2, VersionState.RECEIVING, ranks=1024)
    catalog.snapshots.show(SMOL, receiving)
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

    assert reads_beyond_looks(store, ranks_seal) <= 0
    assert reads_beyond_looks(store, others_push) <= 0
    show(catalog, receiving, snapshot(2, VersionState.READY))
    eventually(lambda: seen == [1, 2])


def test_a_thousand_watches_read_the_store_as_often_as_one(
    catalog: Catalog, store: CountingStore, bench: Bench
) -> None:
    tag(catalog, publish_one(catalog))
    publish_one(catalog)
    seen = [bench.follow(ref) for ref in ("live", "latest", "prod", "none-yet") for _ in range(250)]
    eventually(lambda: [len(each) for each in seen] == [1] * 750 + [0] * 250)
    before, begun = store.reads, time.monotonic()
    eventually(lambda: store.reads - before >= 2)
    assert store.reads - before <= looks_due(begun)
    tag(catalog, 2)
    eventually(lambda: all(each == [1, 2] for each in seen[500:750]))
    assert all(len(each) == 1 for each in seen[:500])


def test_a_tag_that_another_replica_moves_is_heard_within_half_a_second(
    catalog: Catalog, bench: Bench
) -> None:
    first = publish_one(catalog)
    tag(catalog, first)
    second = publish_one(catalog)
    seen = bench.follow("prod")
    eventually(lambda: seen == [first])
    numbers = itertools.cycle((second, first))

    def move_it() -> None:
        number = next(numbers)
        tag(catalog, number)
        eventually(lambda: seen[-1] == number)

    for _ in range(3):
        assert is_done_within(1.0, move_it)  # 0.5 s, and what a machine with much else to do may take


def test_who_takes_long_over_a_version_gets_the_newest_next(catalog: Catalog, bench: Bench) -> None:
    publish_one(catalog)
    seen, go_on = list[int](), asyncio.Event()

    async def slowly() -> None:
        async for version in bench.watches.follow(str(SMOL), "latest", 0):
            seen.append(version.number)
            await go_on.wait()

    bench.loop.begin(slowly())
    eventually(lambda: seen == [1])
    others = bench.follow("latest")
    eventually(lambda: others == [1])
    for number in (2, 3):
        publish_one(catalog)
        catalog.changes.notify(SMOL)
        eventually(lambda wanted=number: others[-1] == wanted)  # type: ignore[misc]
    bench.loop.loop.call_soon_threadsafe(go_on.set)
    eventually(lambda: seen == [1, 3])


def test_a_watch_outlives_a_store_that_is_away(catalog: Catalog, store: CountingStore, bench: Bench) -> None:
    publish_one(catalog)
    seen = bench.follow("latest")
    eventually(lambda: seen == [1])
    store.away = True
    time.sleep(1.0)
    with pytest.raises(Unavailable, match="away"):
        bench.reached("latest", VersionState.DURABLE)
    store.away = False
    publish_one(catalog)
    eventually(lambda: seen == [1, 2])


def test_a_wait_is_told_of_what_was_there_before_it_began_and_not_of_what_was_seen_earlier(
    catalog: Catalog, bench: Bench
) -> None:
    with pytest.raises(NotFound):
        bench.reached("1", VersionState.READY)
    follower = bench.follow("latest")  # keeps a poller going, which has seen that there is nothing
    time.sleep(0.1)
    number = publish_one(catalog)
    assert bench.reached("latest", VersionState.READY).number == number
    eventually(lambda: follower == [number])


def test_a_version_in_memory_is_told_of_without_a_look_at_the_head(
    catalog: Catalog, store: CountingStore, bench: Bench
) -> None:
    image = acquire(ImagePool(1 << 20), {"a": 1})
    publish_one(catalog)
    catalog.snapshots.show(SMOL, snapshot(2, VersionState.RECEIVING))
    followed = bench.follow()
    eventually(lambda: followed == [1])
    waiting = bench.loop.begin(bench.watches.reached(str(SMOL), "2", VersionState.READY, 30.0))
    time.sleep(0.1)
    assert not waiting.done()
    with store.hanging():
        eventually(lambda: store.hung > 0)  # a look has begun, and what it finds is older
        show(catalog, snapshot(2, VersionState.RECEIVING), snapshot(2, VersionState.READY, image=image))
        assert waiting.result(60).number == 2
        eventually(lambda: followed == [1, 2])
        assert bench.reached("2", VersionState.READY).number == 2
        assert bench.reached("live", VersionState.READY).number == 2
    time.sleep(0.6)
    assert followed == [1, 2]


def test_what_is_live_does_not_go_back_to_a_version_in_memory_when_an_old_reading_ends(
    catalog: Catalog, store: CountingStore, bench: Bench
) -> None:
    image = acquire(ImagePool(1 << 20), {"a": 1})
    elsewhere = Catalog(LocalStore(store.root))
    publish_one(catalog)
    seen = bench.follow()
    eventually(lambda: seen == [1])
    with store.hanging("late"):
        late = threading.Thread(target=catalog.heads.read, args=(SMOL,), name="late")
        late.start()
        eventually(lambda: store.hung > 0)
        elsewhere.heads.update(SMOL, lambda head: (replace(head, next_version=3), None))
        catalog.snapshots.show(SMOL, snapshot(2, VersionState.READY, image=image))
        eventually(lambda: seen == [1, 2])
        assert publish_one(elsewhere) == 3
        eventually(lambda: seen == [1, 2, 3])
    late.join()
    for _ in range(5):
        catalog.changes.notify(SMOL)
        time.sleep(0.1)
    assert seen == [1, 2, 3]


def test_what_is_durable_is_not_told_from_memory(catalog: Catalog, bench: Bench) -> None:
    image = acquire(ImagePool(1 << 20), {"a": 1})
    number = publish_one(catalog)
    catalog.snapshots.show(SMOL, snapshot(number, VersionState.DURABLE, image=image))
    publish_one(catalog)
    catalog.heads.edit(SMOL, lambda history: (delete_versions(history, [number], 1), None))
    catalog.heads.edit(SMOL, lambda history: (forget_versions(history, [number]), None))
    with pytest.raises(NotFound, match="deleted"):
        bench.reached(str(number), VersionState.READY)


def test_waits_end_with_what_has_become_of_the_version(catalog: Catalog, bench: Bench) -> None:
    catalog.snapshots.show(SMOL, snapshot(1, VersionState.RECEIVING))
    failed = snapshot(1, VersionState.FAILED, error="a rank has gone")
    threading.Timer(0.2, lambda: catalog.snapshots.show(SMOL, failed)).start()
    with pytest.raises(VersionFailed, match="a rank has gone"):
        bench.reached("1", VersionState.READY)
    catalog.snapshots.show(SMOL, snapshot(2, VersionState.READY))
    assert bench.reached("2", VersionState.READY).number == 2
    with pytest.raises(DeadlineExceeded, match="acme/smol@2"):
        bench.reached("2", VersionState.DURABLE, 0.2)


def test_a_wait_for_a_version_whose_service_was_killed_ends_when_its_lease_does(
    catalog: Catalog, bench: Bench
) -> None:
    def open_as_another_process(lease_ms: int) -> int:
        asked = {"request_id": str(lease_ms), "step": 1, "run": "", "ranks": 1}
        change = partial(open_version, **asked, now_ms=unix_ms(), lease_ms=lease_ms)
        return catalog.heads.update(SMOL, change).number

    short, long = (str(open_as_another_process(lease_ms)) for lease_ms in (1000, 100_000))
    with pytest.raises(VersionFailed, match="nothing more was heard of it"):
        bench.reached(short, VersionState.DURABLE)
    assert catalog.get_version(str(SMOL), short).state is VersionState.FAILED
    with pytest.raises(DeadlineExceeded, match=f"acme/smol@{long}"):
        bench.reached(long, VersionState.DURABLE, 0.5)


def test_a_version_that_can_have_no_such_number_disturbs_nobody_elses_wait(
    catalog: Catalog, bench: Bench
) -> None:
    catalog.snapshots.show(SMOL, snapshot(1, VersionState.RECEIVING))
    threading.Timer(0.5, lambda: catalog.snapshots.show(SMOL, snapshot(1, VersionState.READY))).start()
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(bench.reached, "1", VersionState.READY)
        with pytest.raises(NotFound):
            bench.reached("9" * 5000, VersionState.READY)
        assert waiting.result(60).number == 1


def test_waits_and_watches_end_with_the_service(catalog: Catalog, bench: Bench) -> None:
    catalog.snapshots.show(SMOL, snapshot(1, VersionState.RECEIVING))

    async def follow() -> list[int]:
        return [version.number async for version in bench.watches.follow(str(SMOL), "latest", 0)]

    following = bench.loop.begin(follow())
    threading.Timer(0.1, lambda: (catalog.stopping.set(), catalog.changes.notify())).start()
    with pytest.raises(Unavailable, match="shutting down"):
        bench.reached("1", VersionState.READY)  # and not that it was not ready within 30 s
    assert following.result(60) == []


def test_nothing_looks_when_nobody_waits(catalog: Catalog, store: CountingStore, bench: Bench) -> None:
    publish_one(catalog)
    assert bench.reached("latest", VersionState.DURABLE).number == 1
    time.sleep(0.6)
    before = store.reads
    time.sleep(1.0)
    assert store.reads == before


def test_a_watch_of_a_model_that_is_not_registered_is_refused(bench: Bench) -> None:
    async def follow() -> None:
        async for _ in bench.watches.follow("acme/none", "live", 0):
            raise AssertionError

    with pytest.raises(NotFound, match="there is no model"):
        bench.loop.run(follow())


def test_a_wait_that_ends_well_while_the_service_stops_is_told_so(catalog: Catalog, bench: Bench) -> None:
    catalog.snapshots.show(SMOL, snapshot(1, VersionState.RECEIVING))

    def end() -> None:
        catalog.snapshots.show(SMOL, snapshot(1, VersionState.READY), changed=False)
        catalog.stopping.set()
        catalog.changes.notify()

    threading.Timer(0.1, end).start()
    assert bench.reached("1", VersionState.READY).state is VersionState.READY
    assert bench.reached("1", VersionState.READY).state is VersionState.READY
    with pytest.raises(Unavailable, match="shutting down"):
        bench.reached("1", VersionState.DURABLE)
