"""Does every store keep the promises of an object store: atomic, conditional, whole, and no key it should not take?"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.forked import ForkedPython
from weighbridge.errors import Conflict, DataLoss, InvalidArgument, NotFound
from weighbridge_storage.opening import open_store
from weighbridge_storage.stores import objects
from weighbridge_storage.stores.objects import IfMatch, ObjectStore

HOSTILE_KEYS = [
    "", "/", "/etc/passwd", "..", "../x", "a/../../x", "a/./b", "a//b", "a/", "a\x00b", "a\\b", "x" * 10_000, "x" * 256,
    ".tmp/x", ".locks/00", "a/.hidden", "a\nb", "é" * 128, "\ud800",
]  # fmt: skip


def test_what_is_written_is_read_back_whole_and_in_parts(store: ObjectStore) -> None:
    data = os.urandom(100_000)
    etag = store.put("models/acme/smol/x.bin", data, mode="create")
    assert store.get("models/acme/smol/x.bin") == (data, etag)
    assert store.size("models/acme/smol/x.bin") == len(data)
    assert store.read_range("models/acme/smol/x.bin", 77, 1000) == data[77:1077]
    assert store.read_range("models/acme/smol/x.bin", 0, len(data)) == data
    assert store.read_range("models/acme/smol/x.bin", len(data), 0) == b""
    assert b"".join(store.stream("models/acme/smol/x.bin")) == data


def test_an_object_that_is_too_long_is_not_read_whole(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "MOST_WHOLE_BYTES", 1000)
    for key, size in (("a/fits", 1000), ("a/long", 1001)):
        store.put(key, bytes(size), mode="create")
    assert store.get("a/fits")[0] == bytes(1000)
    with pytest.raises(DataLoss, match="a/long failed: it has 1001 bytes"):
        store.get("a/long")
    assert b"".join(store.stream("a/long")) == bytes(1001)


@pytest.mark.parametrize(
    "pieces",
    [
        [],
        [b"", b"ab", bytearray(b"c"), memoryview(b"defg")[1:3]],
        [
            np.arange(6, dtype=np.int32).reshape(2, 3),
            np.zeros((0, 4)),
            np.array([1.5], dtype=np.float16),
            np.array(7),
        ],
    ],
)
def test_pieces_of_any_memory_are_written_one_after_another(store: ObjectStore, pieces: list[Any]) -> None:
    expected = b"".join(p.tobytes() if isinstance(p, np.ndarray) else bytes(p) for p in pieces)
    etag = store.put("x", iter(pieces), mode="create")
    assert store.get("x") == (expected, etag)
    for i, piece in enumerate(pieces):
        store.put(f"single/{i}", piece, mode="create")
    assert b"".join(store.get(f"single/{i}")[0] for i in range(len(pieces))) == expected


@pytest.mark.parametrize("piece", [np.arange(10)[::2], 7, "text", None])
def test_what_is_no_dense_memory_is_refused_and_leaves_nothing(store: ObjectStore, piece: Any) -> None:
    with pytest.raises(InvalidArgument):
        store.put("x", [b"good", piece], mode="create")
    assert set(store.list("")) == set()


def test_conditions_hold(store: ObjectStore) -> None:
    with pytest.raises(Conflict):
        store.put("k", b"0", mode=IfMatch("anything"))
    first = store.put("k", b"1", mode="create")
    with pytest.raises(Conflict):
        store.put("k", b"2", mode="create")
    with pytest.raises(Conflict):
        store.put("k", b"2", mode=IfMatch("another"))
    second = store.put("k", b"2", mode=IfMatch(first))
    with pytest.raises(Conflict):
        store.put("k", b"3", mode=IfMatch(first))
    assert store.get("k") == (b"2", second)
    store.put("k", b"4", mode="overwrite")
    assert store.get("k")[0] == b"4"
    store.delete("k")
    store.delete("k")
    with pytest.raises(Conflict):
        store.put("k", b"5", mode=IfMatch(second))
    store.put("k", b"6", mode="create")


def test_what_is_missing_is_not_found_and_an_empty_object_is_there(store: ObjectStore) -> None:
    store.put("a/b", b"", mode="create")
    assert store.get("a/b")[0] == b""
    assert b"".join(store.stream("a/b")) == b""
    assert store.read_range("a/b", 0, 0) == b""
    for key in ("a", "a/c", "a/b/c", "x/y/z"):
        for read in (store.get, store.size, store.stream, lambda k: store.read_range(k, 0, 0)):
            with pytest.raises(NotFound):
                read(key)
        with pytest.raises(NotFound):
            store.copy(key, "copied")


def test_ranges_outside_an_object_are_refused(store: ObjectStore) -> None:
    store.put("a", b"12345", mode="create")
    for begin, length in ((0, 6), (5, 1), (-1, 2), (2, -1), (10**18, 1), (0, 10**18)):
        with pytest.raises(InvalidArgument):
            store.read_range("a", begin, length)


def test_an_open_object_is_read_only_and_outlives_its_replacement(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.put("a", b"old", mode="create")
    descriptor = store.open("a")
    assert descriptor is not None
    store.put("a", b"new", mode="overwrite")
    store.delete("a")
    assert os.pread(descriptor, 9, 0) == b"old"
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.pwrite(descriptor, b"x", 0)
    os.close(descriptor)
    store.close()


def test_listing_finds_what_begins_with_the_prefix(store: ObjectStore) -> None:
    keys = {"a/1", "a/b/2", "a-b/3", "a", "z/z/z/z"} - {"a"}
    for key in keys:
        store.put(key, b"", mode="create")
    for prefix in ("", "a", "a/", "a/b", "a/b/", "a-", "z/z/z/z", "nothing", "a/nothing/"):
        assert set(store.list(prefix)) == {key for key in keys if key.startswith(prefix)}, prefix
    assert set(store.folders("")) == {"a", "a-b", "z"}
    assert set(store.folders("a/")) == {"b"}
    assert set(store.folders("nothing/")) == set()
    with pytest.raises(InvalidArgument):
        store.folders("a")
    store.delete("z/z/z/z")
    assert {"a", "a-b"} <= set(store.folders("")) <= {"a", "a-b", "z"}
    assert set(store.list("z")) == set()


def test_a_copy_has_the_content_and_a_fate_of_its_own(store: ObjectStore) -> None:
    store.put("a/config.json", b"one", mode="create")
    store.put("b/config.json", b"something else", mode="create")
    for _ in range(2):
        store.copy("a/config.json", "b/config.json")
        assert set(store.list("")) == {"a/config.json", "b/config.json"}
    store.put("a/config.json", b"two", mode="overwrite")
    assert store.get("b/config.json")[0] == b"one"
    store.copy("a/config.json", "a/config.json")
    assert store.get("a/config.json")[0] == b"two"
    store.copy("a/config.json", "b/config.json")
    store.delete("a/config.json")
    assert store.get("b/config.json")[0] == b"two"


@pytest.mark.parametrize("key", HOSTILE_KEYS)
def test_hostile_keys_are_refused_by_every_verb(store: ObjectStore, tmp_path: Path, key: str) -> None:
    store.put("good", b"x", mode="create")
    before = sorted(tmp_path.rglob("*"))
    for use in (
        store.get,
        store.size,
        store.stream,
        store.delete,
        lambda k: store.read_range(k, 0, 0),
        lambda k: store.put(k, b"bad", mode="overwrite"),
        lambda k: store.copy(k, "good2"),
        lambda k: store.copy("good", k),
    ):
        with pytest.raises(InvalidArgument) as caught:
            use(key)
        assert len(str(caught.value)) < 500
    assert sorted(tmp_path.rglob("*")) == before
    assert set(store.list("")) == {"good"}


def test_data_that_ends_in_an_exception_leaves_nothing(store: ObjectStore) -> None:
    class Broken(Exception):
        pass

    def data() -> Iterator[bytes]:
        yield b"x" * 1000
        raise Broken

    with pytest.raises(Broken):
        store.put("a/b", data(), mode="create")
    assert set(store.list("")) == set()


HANG = """
import sys, time
from weighbridge_storage.opening import open_store
def data():
    for _ in range(5):
        yield bytes(8 << 20)
    print("writing", flush=True)
    time.sleep(600)
open_store(sys.argv[1]).put("models/x/object", data(), mode="create")
"""


@pytest.mark.process
def test_what_a_killed_writer_left_is_found_and_removed(store: ObjectStore, location: str) -> None:
    writer = ForkedPython("-c", HANG, location)
    assert writer.stdout.readline() == "writing\n"
    assert store.discard_unfinished("", older_than_s=600.0) == 0, "it may be alive"
    writer.send_signal(signal.SIGKILL)
    writer.communicate(timeout=30)
    assert store.discard_unfinished("models/", older_than_s=0.0) == 1
    assert store.discard_unfinished("", older_than_s=0.0) == 0
    assert set(store.list("")) == set()


CREATE = """
import sys, threading
from weighbridge.errors import Conflict
from weighbridge_storage.opening import open_store
location, me, threads, rounds = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
store = open_store(location)
print("ready", flush=True)
sys.stdin.readline()
together = threading.Barrier(threads)
def race(i):
    for n in range(rounds):
        together.wait()
        try:
            store.put(f"race/{n}/prize", f"{me}.{i}".encode(), mode="create")
            print("won", n, f"{me}.{i}", flush=True)
        except Conflict:
            pass
racers = [threading.Thread(target=race, args=(i,)) for i in range(threads)]
for r in racers: r.start()
for r in racers: r.join()
"""


@pytest.mark.process
def test_of_32_racing_creates_exactly_one_wins(store: ObjectStore, location: str) -> None:
    # SeaweedFS makes those who race for one name wait for seconds
    rounds, processes = (1, 2) if location.startswith("s3:") else (10, 8)
    racers = [
        ForkedPython("-c", CREATE, location, str(me), str(32 // processes), str(rounds)) for me in range(processes)
    ]
    for racer in racers:
        assert racer.stdout.readline() == "ready\n"
    lines = []
    for racer in racers:
        racer.stdin.write("go\n")
        racer.stdin.flush()
    for racer in racers:
        out, _ = racer.communicate(timeout=60)
        assert racer.returncode == 0
        lines += [line.split()[1:] for line in out.splitlines()]
    assert sorted(int(n) for n, _ in lines) == list(range(rounds))
    for n, winner in lines:
        assert store.get(f"race/{n}/prize")[0].decode() == winner


def test_readers_see_whole_objects_while_writers_replace_and_delete_them(store: ObjectStore) -> None:
    begin = time.monotonic()
    failures: list[object] = []
    seen = set()

    def goes_on() -> bool:
        # some requests a second are all that a server gives on a busy machine
        passed = time.monotonic() - begin
        return passed < 1 or (seen != {b"\x01", b"\x02"} and passed < 30)

    def write(value: int) -> None:
        while goes_on():
            store.put("deep/er/object", [bytes([value]) * 50_000] * 4, mode="overwrite")
            if random.random() < 0.3:
                store.delete("deep/er/object")

    def read() -> None:
        while goes_on():
            try:
                data = store.get("deep/er/object")[0]
            except NotFound:
                continue
            seen.add(data[:1])
            if len(data) != 200_000 or len(set(data)) != 1:
                failures.append(len(data))

    def guarded(target: object, *arguments: int) -> None:
        try:
            target(*arguments)  # type: ignore[operator]
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(write, v)) for v in (1, 2)]
    threads += [threading.Thread(target=guarded, args=(read,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert seen == {b"\x01", b"\x02"}
