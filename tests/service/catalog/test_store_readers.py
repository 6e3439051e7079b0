"""Can a reader that began a version finish it, and do quick readers write no lease?"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.support.heads import stored
from weighbridge._core.resources import Retention
from weighbridge.errors import Unavailable
from weighbridge_service.catalog.store_readers import StoreReaders, reading_since
from weighbridge_storage.documents.entries import Ref, VersionEntry
from weighbridge_storage.documents.names import ModelName
from weighbridge_storage.head.collecting import collect
from weighbridge_storage.head.head import Head
from weighbridge_storage.head.head_store import HeadStore
from weighbridge_storage.head.leases import Grace
from weighbridge_storage.stores.local import LocalStore
from weighbridge_storage.stores.objects import Buffer, ObjectStore, PutMode

SMOL = ModelName("acme", "smol")
GRACE = Grace(16_000)
STEP_MS = 1000
"""A sixteenth of the grace time: how often leases are looked after."""
START_MS = 10**9
WEIGHTS = SMOL.prefix + "versions/000000000001/model.safetensors"


def version(number: int, retired_ms: int = 0) -> VersionEntry:
    return VersionEntry(number, number, "r", START_MS, 10, 1, "f", f"w{number}", retired_ms)


def head_of(retention: Retention = Retention()) -> Head:  # noqa: B008
    """Two versions."""
    return Head(
        next_version=3,
        recent={1: version(1), 2: version(2)},
        refs={"latest": Ref(2)},
        retention=retention,
    )


class Clock:
    """One process' idea of a time that is moved by hand."""

    def __init__(self, offset_ms: int = 0) -> None:
        self.true_ms = START_MS
        self.offset_ms = offset_ms

    def __call__(self) -> int:
        return self.true_ms + self.offset_ms


def leases_in(store: ObjectStore) -> dict[str, int]:
    """End of each lease in Unix milliseconds, by the version's folder and the reader."""
    keys = list(store.list(SMOL.prefix + "leases/"))
    return {key.removeprefix(SMOL.prefix + "leases/"): json.loads(store.get(key)[0])["until_ms"] for key in keys}


@pytest.fixture
def local(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path)


def test_a_read_that_is_quick_writes_nothing(local: LocalStore) -> None:
    clock = Clock()
    leases = StoreReaders(local, GRACE, clock)
    for _ in range(5):
        readers = [leases.begin(SMOL, 1, clock()) for _ in range(3)]
        leases.visit(SMOL, 2, clock())
        clock.true_ms += GRACE.quarter_ms - 1
        leases.renew()
        for reader in readers:
            reader.release()
            reader.release()
        clock.true_ms += GRACE.quarter_ms
        leases.renew()
    leases.close()
    assert list(local.list("")) == []


def test_a_read_that_lasts_has_one_lease_for_all_readers_that_is_renewed_each_quarter(
    local: LocalStore,
) -> None:
    clock = Clock()
    leases = StoreReaders(local, GRACE, clock)
    readers = [leases.begin(SMOL, 1, clock()) for _ in range(20)]
    ends = []
    for _ in range(16):
        clock.true_ms += STEP_MS
        leases.renew()
        ends += [*leases_in(local).values()]
    assert sorted(set(ends)) == [START_MS + n * GRACE.quarter_ms + GRACE.ms for n in (1, 2, 3, 4)]
    assert len(leases_in(local)) == 1
    for reader in readers[1:]:
        reader.release()
    clock.true_ms += GRACE.quarter_ms
    leases.renew()
    assert max(leases_in(local).values()) == clock() + GRACE.ms, "one is still reading"
    readers[0].release()
    clock.true_ms += GRACE.quarter_ms
    leases.renew()
    leases.close()
    assert max(leases_in(local).values()) < clock() + GRACE.ms, "it ends by itself"


def test_visits_that_follow_each_other_are_one_read_until_they_stop(local: LocalStore) -> None:
    clock = Clock()
    leases = StoreReaders(local, GRACE, clock)
    for _ in range(4):
        leases.visit(SMOL, 1, clock())
        clock.true_ms += GRACE.quarter_ms // 2
    assert [*leases_in(local).values()] == [START_MS + GRACE.quarter_ms + GRACE.ms]
    clock.true_ms += GRACE.quarter_ms
    for _ in range(20):
        clock.true_ms += GRACE.quarter_ms
        leases.renew()
    assert [*leases_in(local).values()] == [START_MS + GRACE.quarter_ms + GRACE.ms], "nobody comes any more"
    leases.visit(SMOL, 1, clock())
    assert [*leases_in(local).values()] == [START_MS + GRACE.quarter_ms + GRACE.ms], "this is a new one"
    clock.true_ms += 2 * GRACE.quarter_ms
    leases.visit(SMOL, 1, 0)
    leases.close()
    assert [*leases_in(local).values()] == [clock() + GRACE.ms], "this one was slow, and reads on"


def test_who_begins_with_a_version_that_was_retired_long_ago_has_a_lease_at_once(local: LocalStore) -> None:
    clock = Clock()
    leases = StoreReaders(local, GRACE, clock)
    leases.begin(SMOL, 1, reading_since(version(1, START_MS - GRACE.quarter_ms + 1), clock()))
    assert leases_in(local) == {}
    leases.begin(SMOL, 1, reading_since(version(1, START_MS - GRACE.quarter_ms), clock()))
    leases.close()
    assert [*leases_in(local).values()] == [START_MS + GRACE.ms]


def test_who_was_sent_to_the_store_itself_has_a_lease_at_once_that_is_not_written_for_each(
    local: LocalStore,
) -> None:
    clock = Clock()
    readers = StoreReaders(local, GRACE, clock)
    hour_ms = 10 * GRACE.ms
    seen = []
    for _ in range(60):
        readers.extend(SMOL, 1, hour_ms)
        readers.renew()
        (until_ms,) = leases_in(local).values()
        assert until_ms >= clock() + hour_ms, "a URL that was given now can be used for so long"
        seen.append(until_ms)
        clock.true_ms += hour_ms // 20
    assert len(set(seen)) == 3, "written once in that time"
    clock.true_ms += 2 * hour_ms
    readers.renew()
    readers.close()
    assert [*leases_in(local).values()] == seen[-1:], "nobody asks any more"


class Sulking(LocalStore):
    """A store that takes no writes for a while."""

    sulks = True

    def put(self, key: str, data: Buffer | Iterable[Buffer], *, mode: PutMode) -> str:
        if self.sulks:
            raise Unavailable("not now")
        return super().put(key, data, mode=mode)


def test_a_lease_that_cannot_be_written_disturbs_nobody_and_is_tried_again(tmp_path: Path) -> None:
    clock = Clock()
    store = Sulking(tmp_path)
    leases = StoreReaders(store, GRACE, clock)
    leases.begin(SMOL, 1, reading_since(version(1, START_MS - GRACE.ms), clock()))
    leases.renew()
    assert leases_in(store) == {}
    store.sulks = False
    leases.renew()
    leases.close()
    assert len(leases_in(store)) == 1


MOST = GRACE.quarter_ms // 2 - 1


@pytest.mark.slow
@pytest.mark.parametrize("visits", [False, True])
@pytest.mark.parametrize("rounds", [1, 4])
@pytest.mark.parametrize("offsets", [(0, 0, 0), (-MOST, -MOST, MOST), (MOST, MOST, -MOST), (-MOST, MOST, -MOST)])
def test_no_reader_loses_its_version_whatever_the_clocks_say(
    tmp_path: Path, offsets: tuple[int, int, int], rounds: int, visits: bool
) -> None:
    """Clocks differ, and leases come late, by less than a quarter of the grace time; a collector looks after each
    step.
    """
    for begins, retired in itertools.product((20, 21, 23), (-11, -4, -3, 0, 1, 5)):
        for steps in (3, 50):
            store = LocalStore(tmp_path / f"{begins}.{retired}.{steps}")
            clocks = Clock(offsets[0]), Clock(offsets[1]), Clock(offsets[2])
            read_whole = reads_while_versions_go(
                store,
                clocks,
                begins=begins,
                retired=begins + retired,
                steps=steps,
                rounds=rounds,
                visits=visits,
            )
            assert read_whole, (begins, retired, steps)
            assert {key.rpartition("/")[0] for key in store.list(SMOL.prefix)} == {
                SMOL.prefix.rstrip("/"), WEIGHTS.replace("0001/", "0002/").rpartition("/")[0],
            }, "what was read is gone in the end, and so is the lease"  # fmt: skip


def reads_while_versions_go(
    store: LocalStore,
    clocks: tuple[Clock, Clock, Clock],
    *,
    begins: int,
    retired: int,
    steps: int,
    rounds: int,
    visits: bool,
) -> bool:
    """Whether a reader of version 1 finds it there at each of some steps from one on; it is retired at some step."""
    reading, retiring, collecting = clocks
    leases = StoreReaders(store, GRACE, reading)
    heads = HeadStore(store)
    heads.update(SMOL, lambda _: (head_of(), None), create=True)
    for number in (1, 2):
        store.put(WEIGHTS.replace("0001/", f"000{number}/"), b"weights", mode="create")
    reader, whole = None, True
    for step in range(begins + steps):
        if step == retired:
            heads.update(SMOL, lambda _: (head_of(Retention(keep_last=1)), None))
            collect(store, heads, SMOL, grace=GRACE, clock=retiring)
        found = stored(store, SMOL).find(1)
        if step == begins and not visits:
            reader = leases.begin(SMOL, 1, reading_since(found, reading()))
        if step >= begins and visits:
            leases.visit(SMOL, 1, reading_since(found, reading()))
        if step % rounds == 0:
            leases.renew()
        if step > retired:
            collect(store, heads, SMOL, grace=GRACE, clock=collecting)
        whole = whole and (step < begins or list(store.list(WEIGHTS)) == [WEIGHTS])
        for clock in clocks:
            clock.true_ms += STEP_MS
    if reader is not None:
        reader.release()
    if retired >= begins + steps:
        heads.update(SMOL, lambda _: (head_of(Retention(keep_last=1)), None))
    for _ in range(3):
        for clock in clocks:
            clock.true_ms += 2 * GRACE.ms
        leases.renew()
        collect(store, heads, SMOL, grace=GRACE, clock=collecting)
    leases.close()
    return whole
