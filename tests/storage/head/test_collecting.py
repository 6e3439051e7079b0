"""Do collections delete everything that is not kept, and nothing else, beside other collections, readers, writers and
crashes?
"""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.support.heads import open_version
from tests.support.s3_server import S3Server
from weighbridge._core.reports.collection import Collection, DeletedVersion, SweptVersion, WaitingVersion
from weighbridge._core.resources import Retention
from weighbridge.errors import (
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    Unavailable,
    VersionFailed,
)
from weighbridge_storage.documents.entries import VersionEntry
from weighbridge_storage.documents.names import (
    MANIFEST_FILE,
    ModelName,
    lease_key,
    node_of_key,
    numbered_key,
    version_key,
    version_prefix,
)
from weighbridge_storage.head.collecting import collect
from weighbridge_storage.head.head import Head
from weighbridge_storage.head.head_changes import delete_versions, keep, publish, set_ref
from weighbridge_storage.head.head_store import HeadStore
from weighbridge_storage.head.history import History
from weighbridge_storage.head.history_tree import names
from weighbridge_storage.head.leases import Grace, read_lease, write_lease
from weighbridge_storage.head.open_versions import claim_version
from weighbridge_storage.opening import open_store
from weighbridge_storage.stores.local import LocalStore
from weighbridge_storage.stores.objects import Buffer, ByteArray, ObjectStore, PutMode

SMOL = ModelName("acme", "smol")
GRACE = Grace(1000)
FEW = 3
"""Most entries that heads hold here, so that small histories have trees."""
NBYTES = 77


class Bench:
    """A model in a store, with a clock that only the test moves."""

    def __init__(self, store: ObjectStore, retention: Retention | None = None) -> None:
        self.store = store
        self.heads = HeadStore(store, most_recent=FEW)
        self.now_ms = 1_000_000
        start = Head(files_id="f", retention=retention or Retention())
        self.heads.update(SMOL, lambda _: (start, None), create=True)

    @property
    def history(self) -> History:
        found = self.heads.history(SMOL)
        assert found is not None
        return found

    @property
    def head(self) -> Head:
        return self.history.head

    @property
    def versions(self) -> dict[int, VersionEntry]:
        return self.history.versions()

    @property
    def retired(self) -> dict[int, VersionEntry]:
        return self.history.retired()

    def clock(self) -> int:
        return self.now_ms

    def open(self, claim: str = "", lease_ms: int = 500) -> int:
        """Open a version and claim its folder; its number."""

        def change(head: Head) -> tuple[Head, int]:
            request = f"q{head.next_version}"
            head, entry = open_version(
                head, request_id=request, step=1, run="r", ranks=1, now_ms=self.now_ms, lease_ms=lease_ms
            )
            return claim_version(head, entry.number, claim or f"w{entry.number}"), entry.number

        return self.heads.update(SMOL, change)

    def write(self, number: int, files: Iterable[str] = ("config.json", "model.safetensors", MANIFEST_FILE)) -> None:
        """Write a version's folder, its manifest last."""
        for name in files:
            self.store.put(version_key(SMOL, number, name), content(number, name), mode="overwrite")

    def publish(self, number: int) -> None:
        entry = VersionEntry(number, 1, "r", self.now_ms, NBYTES, 1, "f", f"w{number}")
        self.heads.edit(SMOL, lambda history: (publish(history, entry), None))

    def add(self, count: int = 1) -> None:
        """Add durable versions."""
        for _ in range(count):
            number = self.open()
            self.write(number)
            self.publish(number)

    def change(self, change: Callable[[History], Head]) -> None:
        self.heads.edit(SMOL, lambda history: (change(history), None))

    def keep(self, **rules: int) -> None:
        self.change(lambda history: keep(history.head, Retention(**rules)))

    def collect(self, store: ObjectStore | None = None, *, dry_run: bool = False) -> Collection:
        store = store or self.store
        heads = HeadStore(store, most_recent=FEW)
        return collect(store, heads, SMOL, grace=GRACE, clock=self.clock, dry_run=dry_run)

    def collect_all(self) -> Collection:
        """Collect, let the grace time pass, and collect again; returns the second collection."""
        self.collect()
        self.now_ms += GRACE.ms
        return self.collect()

    def folders(self) -> set[int]:
        """Numbers under which something lies."""
        places = (numbered_key(SMOL, key) for key in self.store.list(SMOL.prefix))
        return {place[1] for place in places if place is not None}

    def nodes(self) -> set[str]:
        """Names of the nodes in the store."""
        nodes = (node_of_key(SMOL, key) for key in self.store.list(SMOL.prefix))
        return {node[0] for node in nodes if node is not None}

    def tree(self) -> set[str]:
        """Names of the nodes that the head leads to."""
        return names(self.head.root, partial(self.heads.load_node, SMOL))

    def check_readable(self) -> None:
        """Check that each version that the head lists is complete."""
        for number in self.versions:
            for name in ("config.json", "model.safetensors", MANIFEST_FILE):
                assert self.store.get(version_key(SMOL, number, name))[0] == content(number, name)


def content(number: int, name: str) -> bytes:
    return f"{name} of {number}".encode()


def everything(store: ObjectStore) -> dict[str, bytes]:
    return {key: store.get(key)[0] for key in store.list("")}


@pytest.fixture
def bench(store: ObjectStore) -> Bench:
    return Bench(store)


def test_what_is_not_kept_is_gone_after_the_grace_time_and_everything_else_is_there(bench: Bench) -> None:
    bench.add(6)
    bench.change(lambda history: set_ref(history, "prod", 2))
    bench.keep(keep_last=2)
    first = bench.collect()
    assert first.retired == (1, 3, 4)
    assert [(kept.number, kept.rules, kept.refs) for kept in first.kept] == [
        (2, (), ("prod",)),
        (5, ("keep_last",), ()),
        (6, ("keep_last",), ("latest",)),
    ]
    end_ms = bench.now_ms + GRACE.ms
    assert first.waiting == tuple(WaitingVersion(number, end_ms, 0) for number in (1, 3, 4))
    assert first.deleted == ()
    assert set(bench.versions) == {2, 5, 6}, "readers do not find them any more"
    assert bench.folders() == {1, 2, 3, 4, 5, 6}, "earlier readers still read them"

    bench.now_ms = end_ms - 1
    assert bench.collect() == replace(first, retired=())
    bench.now_ms = end_ms
    last = bench.collect()
    assert last.deleted == tuple(DeletedVersion(number, NBYTES) for number in (1, 3, 4))
    assert (last.deleted_bytes, last.waiting, last.problems) == (3 * NBYTES, (), ())
    assert bench.folders() == set(bench.versions) == {2, 5, 6}
    assert bench.retired == {}
    bench.check_readable()


def test_a_collection_that_has_nothing_to_do_writes_nothing_and_reports_nothing(bench: Bench) -> None:
    bench.add(3)
    bench.keep(keep_last=1)
    bench.collect_all()
    for _ in range(2):  # replaced tree nodes wait for a grace time of their own
        bench.now_ms += GRACE.ms
        bench.collect()
    before = everything(bench.store)
    report = bench.collect()
    assert report == Collection("acme/smol", False, kept=report.kept)
    assert everything(bench.store) == before


def messy(bench: Bench) -> None:
    """A model with one of everything that a collection finds."""
    bench.add(5)
    bench.keep(keep_last=1)
    bench.change(lambda history: delete_versions(history, [1, 2], bench.now_ms))
    write_lease(bench.store, SMOL, 2, "reader", bench.now_ms + 5 * GRACE.ms)
    write_lease(bench.store, SMOL, 5, "dead", bench.now_ms)
    for folder in ("versions", "incoming", "leases"):
        bench.store.put(f"{SMOL.prefix}{folder}/{bench.open():012d}/left", b"x", mode="create")
    bench.now_ms += 2 * GRACE.ms


def test_a_dry_run_says_what_would_be_done_and_writes_nothing(bench: Bench) -> None:
    messy(bench)
    before = everything(bench.store)
    planned = bench.collect(dry_run=True)
    assert everything(bench.store) == before
    assert planned == bench.collect(dry_run=True)
    done = bench.collect()
    assert done == replace(planned, dry_run=False)
    assert done == Collection(
        "acme/smol",
        False,
        kept=done.kept,
        retired=(3, 4),
        waiting=(
            WaitingVersion(2, 1_000_000 + 5 * GRACE.ms + GRACE.quarter_ms, 1),
            WaitingVersion(3, bench.now_ms + GRACE.ms, 0),
            WaitingVersion(4, bench.now_ms + GRACE.ms, 0),
        ),
        deleted=(DeletedVersion(1, NBYTES),),
        given_up=(6, 7, 8),
        swept=(SweptVersion(6, 1), SweptVersion(7, 1), SweptVersion(8, 1)),
        leases_removed=1,
    )
    assert bench.folders() == {2, 3, 4, 5}


def test_a_lease_keeps_a_retired_version_until_it_ends_and_then_goes_too(bench: Bench) -> None:
    bench.add(2)
    bench.keep(keep_last=1)
    bench.collect()
    end_ms = bench.now_ms + 10 * GRACE.ms
    write_lease(bench.store, SMOL, 1, "a", end_ms - 5 * GRACE.ms)
    write_lease(bench.store, SMOL, 1, "b", end_ms)
    # clocks differ: the reader's may be a quarter of the grace time behind
    bench.now_ms = end_ms + GRACE.quarter_ms
    assert bench.collect().waiting == (WaitingVersion(1, end_ms + GRACE.quarter_ms, 1),)
    assert 1 in bench.folders()
    bench.now_ms += 1
    assert bench.collect().deleted == (DeletedVersion(1, NBYTES),)
    assert bench.folders() == {2}


def test_leases_of_dead_readers_are_removed_from_versions_that_stay(bench: Bench) -> None:
    bench.add(1)
    write_lease(bench.store, SMOL, 1, "dead", bench.now_ms)
    write_lease(bench.store, SMOL, 1, "alive", bench.now_ms + 1)
    bench.now_ms += GRACE.ms + 1
    assert bench.collect().leases_removed == 1
    assert read_lease(bench.store, SMOL, lease_key(SMOL, 1, "dead")) is None
    assert read_lease(bench.store, SMOL, lease_key(SMOL, 1, "alive")) is not None
    bench.check_readable()


@pytest.mark.parametrize(
    "text", [b"", b"{}", b'{"until_ms": -1}', b'{"until_ms": "x"}', b'{"until_ms": 1, "x": 2}', b"\xff"]
)
def test_a_lease_that_cannot_be_read_keeps_its_version_and_is_reported(store: ObjectStore, text: bytes) -> None:
    bench = Bench(store, Retention(keep_last=1))
    bench.add(3)
    store.put(lease_key(SMOL, 1, "odd"), text, mode="create")
    report = bench.collect_all()
    assert report.deleted == (DeletedVersion(2, NBYTES),)
    assert len(report.problems) == 1
    assert lease_key(SMOL, 1, "odd") in report.problems[0]
    assert bench.folders() == {1, 3}


def test_only_numbers_that_stand_for_nothing_are_swept(bench: Bench) -> None:
    bench.add(2)
    bench.change(lambda history: delete_versions(history, [1], bench.now_ms))
    still_open = bench.open(lease_ms=10**6)
    bench.write(still_open, ["config.json"])
    abandoned = bench.open(lease_ms=0)
    bench.write(abandoned, ["config.json", "model.safetensors"])
    foreign = [
        SMOL.prefix + key
        for key in (
            f"versions/{still_open + 100:012d}/x", "versions/000000000000/x", "versions/17/x", "versions/latest/x",
            "files/000000000001/x", "notes/000000000001/x", "versions/000000000001x/x",
        )
    ]  # fmt: skip
    for key in [*foreign, "models/acme/smol2/versions/000000000001/x"]:
        bench.store.put(key, b"not ours", mode="create")
    bench.now_ms += 1
    report = bench.collect()
    assert report.given_up == (abandoned,)
    assert report.swept == (SweptVersion(abandoned, 2),)
    keys = set(bench.store.list(""))
    assert {*foreign, "models/acme/smol2/versions/000000000001/x"} <= keys
    assert {version_key(SMOL, n, "config.json") for n in (1, 2, still_open)} <= keys
    bench.write(still_open)
    bench.publish(still_open)
    bench.check_readable()


def test_a_stalled_writer_that_wakes_up_late_publishes_nothing_and_leaves_nothing(bench: Bench) -> None:
    bench.add(1)
    number = bench.open()
    bench.write(number, ["config.json"])
    bench.now_ms += 501
    assert bench.collect().given_up == (number,)
    bench.write(number)
    with pytest.raises(VersionFailed):
        bench.publish(number)
    assert number in bench.folders()
    assert bench.collect().swept == (SweptVersion(number, 3),)
    assert bench.folders() == {1}
    assert bench.open() == number + 1


def test_unfinished_uploads_of_what_is_gone_are_discarded_at_once_and_no_others(seaweed: S3Server) -> None:
    store = open_store(seaweed.location())
    bench = Bench(store)
    bench.add(1)
    gone, still_open = bench.open(lease_ms=0), bench.open(lease_ms=10**6)
    client = store._client  # type: ignore[attr-defined]
    names = {number: store._name(version_key(SMOL, number, "x")) for number in (gone, still_open)}  # type: ignore[attr-defined]
    for name in names.values():
        client.begin_upload(name, "w", checksums=False)
    bench.now_ms += 1
    assert bench.collect().uploads_discarded == 1
    assert [upload.name for upload in client.uploads("") if upload.name in names.values()] == [names[still_open]]
    assert bench.collect().uploads_discarded == 0
    store.close()


def test_eight_collectors_at_once_delete_each_version_once(bench: Bench, location: str) -> None:
    messy(bench)
    stores = [open_store(location) for _ in range(8)]
    with ThreadPoolExecutor(8) as pool:
        reports = [*pool.map(lambda store: bench.collect(store), stores)]
        bench.now_ms += 10 * GRACE.ms
        reports += pool.map(lambda store: bench.collect(store), stores)
    for store in stores:
        store.close()
    assert [problem for report in reports for problem in report.problems] == []
    deleted = sorted(version.number for report in reports for version in report.deleted)
    assert deleted == [1, 2, 3, 4]
    assert sorted(number for report in reports for number in report.given_up) == [6, 7, 8]
    assert bench.folders() == set(bench.versions) == {5}
    bench.check_readable()


def test_collectors_and_writers_do_not_disturb_each_other(bench: Bench, location: str) -> None:
    """Real clocks, and a grace time so short that versions are deleted all the while."""
    wanted, done = (40, threading.Event()) if location.startswith("/") else (12, threading.Event())
    bench.keep(keep_last=2)
    bench.now_ms = time.time_ns() // 10**6
    grace = Grace(50)

    def write(count: int) -> None:
        for _ in range(count):
            number = bench.open(lease_ms=10**9)
            bench.write(number)
            bench.publish(number)

    def go_on_collecting() -> list[Collection]:
        store, reports = open_store(location), []
        while not done.is_set():
            heads = HeadStore(store)
            reports.append(collect(store, heads, SMOL, grace=grace, clock=lambda: time.time_ns() // 10**6))
        store.close()
        return reports

    with ThreadPoolExecutor(4) as pool:
        collectors = [pool.submit(go_on_collecting) for _ in range(2)]
        writers = [pool.submit(write, wanted // 2) for _ in range(2)]
        try:
            for writer in writers:
                writer.result()
        finally:
            done.set()
        reports = [report for collector in collectors for report in collector.result()]
    assert [problem for report in reports for problem in report.problems] == []
    deleted = [version.number for report in reports for version in report.deleted]
    assert len(set(deleted)) == len(deleted), "each is deleted once"
    bench.check_readable()
    bench.now_ms = 2 * time.time_ns() // 10**6
    bench.collect_all()
    assert bench.folders() == set(bench.versions) == {wanted - 1, wanted}
    bench.check_readable()


class Killed(BaseException):
    """The process ended here."""


class Failing(LocalStore):
    """A local store that fails from some call on, or at some calls."""

    def __init__(self, root: Path, failure: Callable[[int, str, str], BaseException | None]) -> None:
        super().__init__(root)
        self._failure = failure
        self.calls: itertools.count[int] = itertools.count()

    def _call(self, verb: str, key: str) -> None:
        error = self._failure(next(self.calls), verb, key)
        if error is not None:
            raise error

    def get(self, key: str) -> tuple[bytes, str]:
        self._call("get", key)
        return super().get(key)

    def put(self, key: str, data: Buffer | Iterable[Buffer], *, mode: PutMode) -> str:
        self._call("put", key)
        return super().put(key, data, mode=mode)

    def list(self, prefix: str) -> Iterator[str]:
        self._call("list", prefix)
        return super().list(prefix)

    def delete(self, key: str) -> None:
        self._call("delete", key)
        super().delete(key)

    def map(self, key: str) -> ByteArray:
        raise AssertionError("a collection reads no weights")


def test_a_collector_that_is_killed_anywhere_is_made_good_by_the_next_one(tmp_path: Path) -> None:
    """Killed at its first call, at its second, and so on, until one comes through."""
    for at in itertools.count():
        root = tmp_path / str(at)
        bench = Bench(LocalStore(root))
        messy(bench)
        killed = Failing(root, lambda n, verb, key, at=at: Killed() if n >= at else None)  # type: ignore[misc]
        try:
            bench.collect(killed)
            came_through = True
        except Killed:
            came_through = False
        bench.check_readable()
        for number in bench.retired.keys() & bench.folders():
            keys = set(bench.store.list(version_prefix(SMOL, number)))
            whole = {version_key(SMOL, number, n) for n in ("config.json", "model.safetensors", MANIFEST_FILE)}
            assert keys == whole or version_key(SMOL, number, MANIFEST_FILE) not in keys
        bench.collect()
        assert bench.folders() == {2, 3, 4, 5}
        bench.now_ms += 10 * GRACE.ms
        assert bench.collect().problems == ()
        assert bench.folders() == set(bench.versions) == {5}
        assert bench.retired == {}
        for _ in range(2):
            bench.now_ms += GRACE.ms
            bench.collect()
        assert bench.nodes() == bench.tree()
        if came_through:
            break
    assert at > 10, "there are that many calls to be killed at"


def test_a_deletion_that_fails_stops_no_other_and_is_reported_and_tried_again(tmp_path: Path) -> None:
    bench = Bench(LocalStore(tmp_path), Retention(keep_last=1))
    bench.add(5)
    bench.collect()
    bench.now_ms += GRACE.ms
    bad = {version_key(SMOL, 2, MANIFEST_FILE), version_key(SMOL, 3, "config.json")}
    failing = Failing(
        tmp_path, lambda n, verb, key: Unavailable(f"no {key}") if verb == "delete" and key in bad else None
    )
    report = bench.collect(failing)
    assert [version.number for version in report.deleted] == [1, 4]
    assert sorted(report.problems) == sorted(f"no {key}" for key in bad)
    assert set(bench.retired) == {2, 3}
    assert len(list(bench.store.list(version_prefix(SMOL, 2)))) == 3, "complete as long as there is a manifest"
    assert [version.number for version in bench.collect().deleted] == [2, 3]
    assert bench.folders() == {5}


def test_a_collection_that_is_told_to_stop_leaves_the_rest_to_the_next(tmp_path: Path) -> None:
    bench = Bench(LocalStore(tmp_path), Retention(keep_last=1))
    bench.add(5)
    bench.collect()
    bench.now_ms += GRACE.ms
    manifests = [version_key(SMOL, number, MANIFEST_FILE) for number in (1, 2, 3, 4)]

    def has_begun() -> bool:
        return not set(manifests) <= set(bench.store.list(SMOL.prefix))

    report = collect(bench.store, bench.heads, SMOL, grace=GRACE, clock=bench.clock, stopping=has_begun)
    assert report.deleted == ()
    assert report.problems == ()
    bench.check_readable()
    assert has_begun()
    with pytest.raises(Unavailable, match="was interrupted"):
        collect(bench.store, bench.heads, SMOL, grace=GRACE, clock=bench.clock, stopping=has_begun)
    assert [version.number for version in bench.collect().deleted] == [1, 2, 3, 4]
    assert bench.folders() == {5}


def test_empty_folders_go_with_what_lay_in_them_on_a_local_store(tmp_path: Path) -> None:
    bench = Bench(LocalStore(tmp_path), Retention(keep_last=1))
    bench.add(3)
    bench.collect_all()
    folders = {str(path.relative_to(tmp_path / SMOL.prefix)) for path in (tmp_path / SMOL.prefix).rglob("*/")}
    assert folders == {"versions", "versions/000000000003"}


def test_there_is_nothing_to_collect_of_an_unknown_model(store: ObjectStore) -> None:
    with pytest.raises(NotFound):
        collect(store, HeadStore(store), SMOL, grace=GRACE, clock=lambda: 0)
    assert everything(store) == {}


@pytest.mark.parametrize("ms", [3, 0, -1, 1.5, 2**63])
def test_a_grace_time_that_cannot_be_is_refused(ms: Any) -> None:
    with pytest.raises(InvalidArgument):
        Grace(ms)


def test_a_report_is_json(bench: Bench) -> None:
    messy(bench)
    report = bench.collect()
    document = json.loads(json.dumps(report.to_json()))
    assert document["retired"] == [3, 4]
    assert document["kept"] == [{"number": 5, "rules": ["keep_last"], "refs": ["latest"], "engines": []}]
    assert document["deleted"] == [{"number": 1, "nbytes": NBYTES}]
    assert document["swept"][0] == {"number": 6, "objects": 1}


class Everybody(RuleBasedStateMachine):
    """Everybody at once, in any order, on one clock."""

    store: ObjectStore

    @initialize(last=st.integers(0, 2), every=st.integers(0, 3), younger=st.integers(0, 2))
    def begin(self, last: int, every: int, younger: int) -> None:
        for key in list(self.store.list("")):
            self.store.delete(key)
        self.bench = Bench(self.store, Retention(last, every, younger))
        self.writers: dict[int, int] = {}
        self.readers: dict[int, int] = {}
        self.tagged: dict[str, int] = {}
        self.newest = 0

    @rule()
    def open(self) -> None:
        self.writers[self.bench.open()] = 0

    @rule()
    def push(self) -> None:
        """A push that nothing comes between."""
        self.bench.add()
        self.newest = self.bench.head.latest

    @precondition(lambda self: self.writers)
    @rule(data=st.data())
    def write_on(self, data: st.DataObject) -> None:
        """A writer, however long it was stalled, writes its next file, and publishes behind the last one."""
        number = data.draw(st.sampled_from(sorted(self.writers)))
        files = ["config.json", "model.safetensors", MANIFEST_FILE]
        done = self.writers[number]
        if done < len(files):
            self.bench.write(number, [files[done]])
            self.writers[number] += 1
            return
        del self.writers[number]
        was_open = number in self.bench.head.open
        try:
            self.bench.publish(number)
        except VersionFailed:
            assert not was_open
            return
        assert was_open
        self.newest = max(self.newest, number)

    @precondition(lambda self: self.bench.versions)
    @rule(data=st.data(), name=st.sampled_from(["prod", "test"]))
    def tag(self, data: st.DataObject, name: str) -> None:
        number = data.draw(st.sampled_from(sorted(self.bench.versions)))
        self.bench.change(lambda history: set_ref(history, name, number))
        self.tagged[name] = number

    @precondition(lambda self: self.bench.versions)
    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.bench.versions)))
        try:
            self.bench.change(lambda history: delete_versions(history, [number], self.bench.now_ms))
        except FailedPrecondition:
            assert number in {*self.tagged.values(), self.newest}

    @precondition(lambda self: self.bench.versions)
    @rule(data=st.data())
    def read(self, data: st.DataObject) -> None:
        """Begin a read of any length, with a lease from the start."""
        number = data.draw(st.sampled_from(sorted(self.bench.versions)))
        self.readers[number] = self.bench.now_ms + GRACE.ms
        write_lease(self.store, SMOL, number, "reader", self.readers[number])

    @rule(data=st.data())
    def renew(self, data: st.DataObject) -> None:
        """The readers that are not dead renew their leases."""
        for number, until_ms in self.readers.items():
            if until_ms >= self.bench.now_ms:
                self.readers[number] = self.bench.now_ms + GRACE.ms
                write_lease(self.store, SMOL, number, "reader", self.readers[number])

    @rule(ms=st.sampled_from([1, 100, 400, 1000]))
    def wait(self, ms: int) -> None:
        self.bench.now_ms += ms

    @rule(dry_run=st.booleans())
    def collect(self, dry_run: bool) -> None:
        assert self.bench.collect(dry_run=dry_run).problems == ()

    @invariant()
    def what_is_listed_is_whole(self) -> None:
        self.bench.check_readable()

    @invariant()
    def what_is_being_read_is_whole(self) -> None:
        for number, until_ms in self.readers.items():
            if until_ms >= self.bench.now_ms:
                key = version_key(SMOL, number, "model.safetensors")
                assert self.store.get(key)[0] == content(number, "model.safetensors")

    @invariant()
    def refs_name_what_they_did(self) -> None:
        refs = self.tagged | ({"latest": self.newest} if self.newest else {})
        assert self.bench.head.ref_numbers == refs

    def teardown(self) -> None:
        if not hasattr(self, "bench"):
            return
        self.bench.now_ms += 10**6
        self.bench.collect_all()
        head = self.bench.head
        assert head.open == self.bench.retired == {}
        assert self.bench.folders() == set(self.bench.versions)
        for _ in range(2):
            self.bench.now_ms += GRACE.ms
            self.bench.collect()
        assert self.bench.nodes() == self.bench.tree()


@pytest.mark.slow
def test_in_any_order_of_events_what_is_listed_is_whole_and_nothing_is_left(tmp_path: Path) -> None:
    Everybody.store = LocalStore(tmp_path)
    run_state_machine_as_test(
        Everybody,
        settings=settings(
            max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
