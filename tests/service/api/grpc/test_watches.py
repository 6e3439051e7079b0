"""Do watches of refs and versions report changes, and is the load on the store independent of their number?"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
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
from tests.support.heads import open_version
from tests.support.images import acquire
from tests.support.waiting import eventually
from weighbridge._core.resources import HELD_CANDIDATE, RECEIVING, Version, VersionState
from weighbridge.errors import DeadlineExceeded, InvalidArgument, NotFound, Unavailable, VersionFailed
from weighbridge_service.api.grpc.event_loop import EventLoop
from weighbridge_service.api.grpc.watches import LOOK_SECONDS, Watches
from weighbridge_service.catalog.catalog import Catalog
from weighbridge_service.runtime.clock import unix_ms
from weighbridge_storage.documents.names import ModelName
from weighbridge_storage.head.head_changes import (
    delete_model,
    delete_versions,
    forget_versions,
    register,
    set_ref,
)
from weighbridge_storage.memory.image_pool import ImagePool
from weighbridge_storage.stores.local import LocalStore
from weighbridge_storage.threads import ThreadPool


@pytest.fixture
def store(tmp_path: Path) -> Iterator[CountingStore]:
    opened = CountingStore(tmp_path)
    yield opened
    opened.close()


@pytest.fixture
def catalog(store: CountingStore) -> Catalog:
    return catalog_with_models(store)


QUICK = 0.05
"""Seconds between two looks, where a test waits for looks."""


class Bench:
    """Watches on a loop of their own."""

    def __init__(self, catalog: Catalog, look_seconds: float = LOOK_SECONDS) -> None:
        self.loop, self.workers = EventLoop("watches"), ThreadPool("watches", 4)
        self.watches = Watches(catalog, self.workers, look_seconds)

    def follow(self, ref: str = "live", after: int = 0) -> list[int]:
        """The numbers that a watch brings, as they come."""
        seen = list[int]()

        async def each() -> None:
            async for version in self.watches.follow(str(SMOL), ref, after):
                if version is not None:
                    seen.append(version.number)

        self.loop.begin(each())
        return seen

    def reached(self, version: str, state: VersionState, seconds: float = 30.0) -> Version:
        return self.loop.run(self.watches.reached(str(SMOL), version, state, seconds))


@contextmanager
def listening(made: Bench, catalog: Catalog) -> Iterator[Bench]:
    """Watches that are notified of changes in a catalog, and end with it."""
    with made.watches.listening(made.loop.loop):
        yield made
    catalog.stopping.set()
    made.loop.stop()
    made.workers.close()


@pytest.fixture
def bench(catalog: Catalog) -> Iterator[Bench]:
    with listening(Bench(catalog), catalog) as made:
        yield made


@pytest.fixture
def quick(catalog: Catalog) -> Iterator[Bench]:
    """One that looks often."""
    with listening(Bench(catalog, QUICK), catalog) as made:
        yield made


def has_looked(store: CountingStore) -> None:
    """Wait until a look has begun and ended."""
    before = store.reads
    eventually(lambda: store.reads >= before + 2)


def reads_beyond_looks(store: CountingStore, action: Callable[[], None]) -> float:
    """Number of heads read during an action, less the polls due in that time; at most 0 if the action itself reads
    none.
    """
    before, begun = store.reads, time.monotonic()
    action()
    time.sleep(0.1)
    return store.reads - before - looks_due(begun)


def looks_due(begun: float) -> float:
    """Upper bound on the polls of the store since then: one per half second, with a margin for clocks and jitter."""
    return (time.monotonic() - begun) / 0.4 + 1


def tag(catalog: Catalog, number: int) -> None:
    """Set a tag as another replica does, without a notice to this process."""
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


def test_a_tag_that_another_replica_moves_is_heard_with_the_next_look(
    catalog: Catalog, store: CountingStore, quick: Bench
) -> None:
    assert LOOK_SECONDS < 0.5
    first, second = publish_one(catalog), publish_one(catalog)
    tag(catalog, first)
    seen: list[tuple[int, int]] = []

    async def each() -> None:
        async for version in quick.watches.follow(str(SMOL), "prod", 0):
            if version is not None:
                seen.append((version.number, store.reads))  # noqa: PERF401 (as they come)

    quick.loop.begin(each())
    eventually(lambda: seen)
    for number in (second, first, second):
        with store.hanging("watches"):
            eventually(lambda: store.hung > 0)  # a look is under way, which still finds the old tag
            tag(catalog, number)
            begun = store.reads
        eventually(lambda wanted=number: seen[-1][0] == wanted)  # type: ignore[misc]
        assert seen[-1][1] == begun + 1


def test_who_takes_long_over_a_version_gets_the_newest_next(catalog: Catalog, bench: Bench) -> None:
    publish_one(catalog)
    seen, go_on = list[int](), asyncio.Event()

    async def slowly() -> None:
        async for version in bench.watches.follow(str(SMOL), "latest", 0):
            assert version is not None
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


def test_a_watch_outlives_a_store_that_is_away(catalog: Catalog, store: CountingStore, quick: Bench) -> None:
    publish_one(catalog)
    seen = quick.follow("latest")
    eventually(lambda: seen == [1])
    store.away = True
    eventually(lambda: store.refused >= 3)
    with pytest.raises(Unavailable, match="away"):
        quick.reached("latest", VersionState.DURABLE)
    store.away = False
    publish_one(catalog)
    eventually(lambda: seen == [1, 2])


def test_what_is_being_received_is_told_while_the_store_is_away(
    catalog: Catalog, store: CountingStore, quick: Bench
) -> None:
    """One stream reports both: if this failed, an agent would not learn of a live version in memory either."""
    publish_one(catalog)
    store.away = True
    seen = quick.follow(RECEIVING)
    eventually(lambda: store.refused >= 3)
    before = snapshot(2, VersionState.OPEN)
    show(catalog, before, snapshot(2, VersionState.RECEIVING))
    eventually(lambda: seen == [2])
    again = quick.follow(RECEIVING)
    eventually(lambda: again == [2])


def test_a_version_that_is_held_from_its_push_on_is_not_told_to_be_received(
    catalog: Catalog, store: CountingStore, quick: Bench
) -> None:
    """Engines that stage it early would keep its memory until the version is approved."""
    publish_one(catalog)
    held = snapshot(3, VersionState.RECEIVING, held=(HELD_CANDIDATE,))
    show(catalog, snapshot(3, VersionState.OPEN), held)
    show(catalog, snapshot(2, VersionState.OPEN), snapshot(2, VersionState.RECEIVING))
    seen = quick.follow(RECEIVING)
    eventually(lambda: seen)
    has_looked(store)
    assert seen == [2]


def test_an_older_version_is_not_told_to_be_received_when_a_newer_one_is_ready(
    catalog: Catalog, store: CountingStore, quick: Bench
) -> None:
    """It will not be live: an engine that stages it would give up the newer one."""
    publish_one(catalog)
    for number in (2, 3):
        show(catalog, snapshot(number, VersionState.OPEN), snapshot(number, VersionState.RECEIVING))
    seen = quick.follow(RECEIVING)
    eventually(lambda: seen == [3])
    show(catalog, snapshot(3, VersionState.RECEIVING), snapshot(3, VersionState.READY))
    late = quick.follow(RECEIVING)
    has_looked(store)
    show(catalog, snapshot(4, VersionState.OPEN), snapshot(4, VersionState.RECEIVING))
    eventually(lambda: seen[-1] == 4 and late)
    assert (seen, late) == ([3, 4], [4])


def test_a_wait_is_told_of_what_was_there_before_it_began_and_not_of_what_was_seen_earlier(
    catalog: Catalog, store: CountingStore, quick: Bench
) -> None:
    with pytest.raises(NotFound):
        quick.reached("1", VersionState.READY)
    follower = quick.follow("latest")  # keeps a poller going
    has_looked(store)  # and has seen that there is nothing
    number = publish_one(catalog)
    assert quick.reached("latest", VersionState.READY).number == number
    eventually(lambda: follower == [number])


def test_a_version_in_memory_is_told_of_without_a_look_at_the_head(
    catalog: Catalog, store: CountingStore, quick: Bench
) -> None:
    image = acquire(ImagePool(1 << 20), {"a": 1})
    publish_one(catalog)
    catalog.snapshots.show(SMOL, snapshot(2, VersionState.RECEIVING))
    followed = quick.follow()
    eventually(lambda: followed == [1])
    waiting = quick.loop.begin(quick.watches.reached(str(SMOL), "2", VersionState.READY, 30.0))
    has_looked(store)
    assert not waiting.done()
    with store.hanging():
        eventually(lambda: store.hung > 0)  # a look has begun, and what it finds is older
        show(catalog, snapshot(2, VersionState.RECEIVING), snapshot(2, VersionState.READY, image=image))
        assert waiting.result(60).number == 2
        eventually(lambda: followed == [1, 2])
        assert quick.reached("2", VersionState.READY).number == 2
        assert quick.reached("live", VersionState.READY).number == 2
    has_looked(store)  # the one that hung has ended before
    assert followed == [1, 2]


def test_what_is_live_does_not_go_back_to_a_version_in_memory_when_an_old_reading_ends(
    catalog: Catalog, store: CountingStore, quick: Bench
) -> None:
    image = acquire(ImagePool(1 << 20), {"a": 1})
    elsewhere = Catalog(LocalStore(store.root))
    publish_one(catalog)
    seen = quick.follow()
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
        has_looked(store)
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


def test_a_wait_for_a_version_whose_service_was_killed_ends_when_its_lease_does(catalog: Catalog, bench: Bench) -> None:
    def open_as_another_process(lease_ms: int) -> int:
        asked = {"request_id": str(lease_ms), "step": 1, "run": "", "ranks": 1}
        change = partial(open_version, **asked, now_ms=unix_ms(), lease_ms=lease_ms)
        return catalog.heads.update(SMOL, change).number

    short, long = (str(open_as_another_process(lease_ms)) for lease_ms in (1000, 100_000))
    with pytest.raises(VersionFailed, match="no replica renewed it in time"):
        bench.reached(short, VersionState.DURABLE)
    assert catalog.get_version(str(SMOL), short).state is VersionState.FAILED
    with pytest.raises(DeadlineExceeded, match=f"acme/smol@{long}"):
        bench.reached(long, VersionState.DURABLE, 0.5)


def test_a_version_that_can_have_no_such_number_disturbs_nobody_elses_wait(catalog: Catalog, bench: Bench) -> None:
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
        return [found.number async for found in bench.watches.follow(str(SMOL), "latest", 0) if found]

    following = bench.loop.begin(follow())
    threading.Timer(0.1, lambda: (catalog.stopping.set(), catalog.changes.notify())).start()
    with pytest.raises(Unavailable, match="shutting down"):
        bench.reached("1", VersionState.READY)  # and not that it was not ready within 30 s
    assert following.result(60) == []


def test_nothing_looks_when_nobody_waits(catalog: Catalog, store: CountingStore, quick: Bench) -> None:
    publish_one(catalog)
    assert quick.reached("latest", VersionState.DURABLE).number == 1
    eventually(lambda: not quick.watches._tasks)
    before = store.reads
    catalog.changes.notify(SMOL)
    quick.loop.run(asyncio.sleep(3 * QUICK))
    assert store.reads == before


def test_a_watch_waits_for_a_model_that_is_registered_later_and_ends_when_it_is_deleted(
    catalog: Catalog, bench: Bench
) -> None:
    heard = list[int | None]()

    async def follow(name: ModelName, after: int = 0) -> None:
        async for found in bench.watches.follow(str(name), "latest", after):
            heard.append(found and found.number)

    unregistered = ModelName("acme", "later")
    following = bench.loop.begin(follow(unregistered))
    eventually(lambda: heard == [None])
    gone = bench.loop.begin(follow(unregistered, 7))
    with pytest.raises(NotFound, match="there is no model acme/later"):
        gone.result(30)  # of which its caller has seen a version
    catalog.heads.update(unregistered, lambda head: (register(head, "f", {}), None), create=True)
    publish_one(catalog, unregistered)
    catalog.changes.notify(unregistered)
    eventually(lambda: heard == [None, 1])
    catalog.heads.update(unregistered, lambda head: (delete_model(head, 1), None))
    catalog.changes.notify(unregistered)
    with pytest.raises(NotFound, match="there is no model acme/later"):
        following.result(30)


def test_a_model_that_is_not_registered_is_looked_for_less_often(store: CountingStore, quick: Bench) -> None:
    async def follow() -> None:
        async for _ in quick.watches.follow("acme/none", "live", 0):
            pass

    before = store.reads
    quick.loop.begin(follow())
    eventually(lambda: store.reads > before)
    begun = store.reads
    quick.loop.run(asyncio.sleep(6 * QUICK))
    assert store.reads == begun


@pytest.mark.parametrize(("model", "ref"), [("acme", "live"), ("acme/a b", "live"), (str(SMOL), "a b")])
def test_a_watch_of_what_can_never_be_is_refused_at_once(bench: Bench, model: str, ref: str) -> None:
    async def follow() -> None:
        async for _ in bench.watches.follow(model, ref, 0):
            raise AssertionError

    with pytest.raises(InvalidArgument):
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
