"""Does a folder keep the promises of an object store: atomic, durable, conditional, and nothing outside of it
touched?
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import os
import random
import stat
import time
from collections.abc import Iterator
from contextlib import closing
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import xxhash

from tests.support.alone import alone
from tests.support.descriptors import descriptors
from tests.support.forked import ForkedPython, forking
from weighbridge.errors import (
    Conflict,
    DataLoss,
    FailedPrecondition,
    NotFound,
    ResourceExhausted,
    Unavailable,
)
from weighbridge_storage.stores import local
from weighbridge_storage.stores.local import LocalStore
from weighbridge_storage.stores.objects import IfMatch


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def store(root: Path) -> Iterator[LocalStore]:
    opened = LocalStore(root)
    yield opened
    opened.close()


def files_below(folder: Path) -> set[str]:
    return {str(p.relative_to(folder)) for p in folder.rglob("*") if not p.is_dir()}


def visible(root: Path) -> set[str]:
    return {name for name in files_below(root) if not name.startswith(".locks/")}


def test_an_object_is_the_plain_file_of_the_same_path(store: LocalStore, root: Path) -> None:
    data = os.urandom(100_000)
    etag = store.put("models/acme/smol/x.bin", data, mode="create")
    assert (root / "models/acme/smol/x.bin").read_bytes() == data
    assert visible(root) == {"models/acme/smol/x.bin"}
    assert store.get("models/acme/smol/x.bin") == (data, etag)
    assert etag == xxhash.xxh3_128_hexdigest(data)
    assert store.size("models/acme/smol/x.bin") == len(data)
    assert store.read_range("models/acme/smol/x.bin", 77, 1000) == data[77:1077]
    descriptor = store.open("models/acme/smol/x.bin")
    assert os.pread(descriptor, len(data) + 1, 0) == data
    os.close(descriptor)


def test_other_users_may_read_objects_and_nobody_may_write_them(store: LocalStore, root: Path) -> None:
    mask = os.umask(0o022)
    try:
        store.put("a/b", b"x", mode="create")
    finally:
        os.umask(mask)
    assert stat.S_IMODE((root / "a/b").stat().st_mode) == 0o444


def test_the_etag_of_a_large_object_changes_with_it_and_is_the_same_from_put_and_get(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "ETAG_BY_CONTENT_LIMIT", 10)
    etags = {store.put("big", [b"12345", b"678901"], mode="overwrite") for _ in range(5)}
    assert len(etags) == 5
    etag = store.get("big")[1]
    assert etag in etags
    assert store.put("big", b"x", mode=IfMatch(etag)) == xxhash.xxh3_128_hexdigest(b"x")
    with pytest.raises(Conflict):
        store.put("big", b"y", mode=IfMatch(etag))


def test_a_copy_shares_bytes_but_not_fate(store: LocalStore, root: Path) -> None:
    store.put("a/config.json", b"one", mode="create")
    for _ in range(2):
        store.copy("a/config.json", "b/config.json")
        assert visible(root) == {"a/config.json", "b/config.json"}
    assert (root / "a/config.json").stat().st_ino == (root / "b/config.json").stat().st_ino
    store.put("a/config.json", b"two", mode="overwrite")
    assert store.get("b/config.json")[0] == b"one"
    store.copy("a/config.json", "b/config.json")
    store.delete("a/config.json")
    assert store.get("b/config.json")[0] == b"two"


def test_a_copy_works_where_files_cannot_be_linked(
    store: LocalStore, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EMLINK, "Too many links")

    data = os.urandom(20 << 20)
    store.put("a", data, mode="create")
    monkeypatch.setattr(os, "link", refuse)
    store.copy("a", "b")
    assert store.get("b")[0] == data
    assert visible(root) == {"a", "b"}


def test_no_verb_follows_a_symbolic_link(store: LocalStore, root: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_bytes(b"secret")
    store.put("m/real", b"x", mode="create")
    (root / "m/folder").symlink_to(outside)
    (root / "m/file").symlink_to(outside / "secret")
    (root / "m/dangling").symlink_to(outside / "new")
    for key in ("m/folder/secret", "m/file", "m/dangling"):
        for read in (store.get, store.size, store.open, lambda k: store.copy(k, "m/copied")):
            with pytest.raises(NotFound):
                read(key)
        with pytest.raises(Conflict):
            store.put("m/file", b"bad", mode=IfMatch(xxhash.xxh3_128_hexdigest(b"secret")))
    for key in ("m/folder/secret", "m/folder/new", "m/folder/deep/new"):
        with pytest.raises(FailedPrecondition):
            store.put(key, b"bad", mode="overwrite")
        with pytest.raises(FailedPrecondition):
            store.copy("m/real", key)
    with pytest.raises(Conflict):
        store.put("m/dangling", b"bad", mode="create")
    store.put("m/file", b"mine", mode="overwrite")  # replaces the link itself
    store.delete("m/folder/secret")
    assert set(store.list("")) == {"m/real", "m/file"}
    assert set(store.folders("m/")) == set()
    assert {p.name: p.read_bytes() for p in outside.iterdir()} == {"secret": b"secret"}


def test_a_pipe_in_the_folder_blocks_nobody(store: LocalStore, root: Path) -> None:
    os.mkfifo(root / "pipe")
    with pytest.raises(NotFound):
        store.get("pipe")
    assert list(store.list("")) == []


def test_an_object_and_a_folder_cannot_have_one_name(store: LocalStore) -> None:
    store.put("a/b", b"x", mode="create")
    for key in ("a", "a/b/c"):
        with pytest.raises((FailedPrecondition, Conflict)):
            store.put(key, b"y", mode="create")
        with pytest.raises(FailedPrecondition):
            store.put(key, b"y", mode="overwrite")
    assert store.get("a/b")[0] == b"x"


def test_everything_is_flushed_before_put_returns(
    store: LocalStore, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[str] = []
    real = os.fsync

    def fsync(file: int) -> None:
        name = os.readlink(f"/proc/self/fd/{file}")
        if name.startswith(str(root)):  # other threads of this process may flush as well
            flushed.append(name)
        real(file)

    monkeypatch.setattr(os, "fsync", fsync)
    store.put("a/b/c", b"x", mode="create")
    ends = [name.rpartition("/store")[2] for name in flushed]
    assert ends[0].startswith("/.tmp/")  # the content, before it gets its name
    assert ends[1:] == ["", "/a", "/a/b"]  # the new folders' names, then the object's
    flushed.clear()
    store.put("a/b/d", b"x", mode="create")
    assert [name.rpartition("/store")[2] for name in flushed][1:] == ["/a/b"]


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (errno.ENOSPC, ResourceExhausted),
        (errno.EDQUOT, ResourceExhausted),
        (errno.EIO, DataLoss),
        (errno.EROFS, Unavailable),
    ],
)
@pytest.mark.parametrize("call", ["write", "fsync", "rename"])
def test_a_failing_system_call_leaves_the_old_object_and_no_file(
    store: LocalStore,
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    call: str,
    number: int,
    expected: type[Exception],
) -> None:
    store.put("a/b", b"old", mode="create")

    def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patched:
        patched.setattr(os, call, fail)
        with pytest.raises(expected, match="writing a/b failed"):
            store.put("a/b", b"new", mode="overwrite")
    assert store.get("a/b")[0] == b"old"
    assert visible(root) == {"a/b"}


def test_short_writes_are_continued(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    monkeypatch.setattr(os, "write", lambda file, data: real(file, data[:7]))
    store.put("a", bytes(range(100)), mode="create")
    assert store.get("a")[0] == bytes(range(100))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"none", os.fsencode(folder), b"tmpfs", 0, b"size=1m") != 0:
        pytest.skip(f"cannot mount: {os.strerror(ctypes.get_errno())}")
    yield folder
    libc.umount2(os.fsencode(folder), 2)


def test_a_full_disk_is_said_so_and_the_store_goes_on(small_disk: Path) -> None:
    store = LocalStore(small_disk / "store")
    store.put("small", b"x" * 1000, mode="create")
    free = os.statvfs(small_disk).f_bavail
    for _ in range(5):
        with pytest.raises(ResourceExhausted, match="no space is left"):
            store.put("big", (b"x" * 100_000 for _ in range(20)), mode="create")
        assert os.statvfs(small_disk).f_bavail == free
    assert set(store.list("")) == {"small"}
    store.put("small", b"y" * 1000, mode="overwrite")
    assert store.get("small")[0] == b"y" * 1000
    store.close()


@pytest.mark.process
def test_a_limit_on_file_size_is_said_so(root: Path) -> None:
    script = """
import resource, sys
from weighbridge.errors import ResourceExhausted
from weighbridge_storage.stores.local import LocalStore
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
store = LocalStore(sys.argv[1])
try:
    store.put("big", b"x" * 100_001, mode="create")
except ResourceExhausted as error:
    print(error.message)
"""
    out, _ = ForkedPython("-c", script, str(root)).communicate(timeout=30)
    assert "the limit on a file's size is reached" in out
    assert visible(root) == set()


def write_forever(ready: Connection, root: Path) -> None:
    store = LocalStore(root)
    ready.send(None)
    for value in itertools.cycle(range(256)):
        store.put("models/x/object", [bytes([value]) * 300_000] * 4, mode="overwrite")


@pytest.mark.process
def test_a_writer_killed_at_any_moment_leaves_the_old_or_the_new_object(root: Path) -> None:
    dice, context = random.Random(7), forking()
    left_over = 0
    for _ in range(20):
        begins, ready = context.Pipe(duplex=False)
        writer = context.Process(target=write_forever, args=(ready, root), daemon=True)
        writer.start()
        ready.close()  # ours, or the death of a writer that never begins would not be seen
        with begins:
            begins.recv()
        time.sleep(dice.uniform(0.005, 0.04))
        writer.kill()
        writer.join()
        left_over += any((root / ".tmp").glob("*/*"))
        store = LocalStore(root)
        store.put("next", b"", mode="overwrite")
        assert not list((root / ".tmp").glob("*/*")), "what the dead left is removed when the next store writes"
        store.delete("next")
        for key in store.list(""):
            assert key == "models/x/object"
            data, _ = store.get(key)
            assert len(data) == 1_200_000
            assert len(set(data)) == 1
        store.close()
    assert left_over, "no writer was killed in the middle of a write, so nothing was shown"
    assert os.listdir(root / ".tmp") == []


def test_opening_a_store_leaves_a_living_writers_files_alone(store: LocalStore, root: Path) -> None:
    def data() -> Iterator[bytes]:
        yield b"first"
        for _ in range(3):
            with closing(LocalStore(root)) as other:
                other.put("b", b"", mode="overwrite")
        yield b"second"

    store.put("a", data(), mode="create")
    assert store.get("a")[0] == b"firstsecond"


def test_a_store_that_is_only_read_is_left_as_it_is(root: Path) -> None:
    (root / "models").mkdir(parents=True)
    (root / "models/x").write_bytes(b"content")
    with closing(LocalStore(root)) as store:
        assert list(store.list("")) == ["models/x"]
        assert store.get("models/x")[0] == b"content"
        with pytest.raises(NotFound):
            store.get("models/y")
        assert store.discard_unfinished("", 0.0) == 0
    assert os.listdir(root) == ["models"]


def test_what_no_key_can_name_is_no_object(store: LocalStore, root: Path) -> None:
    store.put("a/b/c", b"", mode="create")
    deep = root.joinpath("a", *["d"] * 600)
    deep.mkdir(parents=True)
    for path in (
        deep / "e",
        root / "a" / os.fsdecode(b"\xff"),
        root / "a/x\ny",
        root / "a/x\\y",
        root / "a/.hidden",
    ):
        path.write_bytes(b"")
    (root / "a/f\ng").mkdir()
    (root / "a/f\ng/object").write_bytes(b"")
    assert list(store.list("")) == ["a/b/c"]
    assert sorted(store.folders("a/")) == ["b", "d"]


@alone
def test_closed_stores_hold_no_files(tmp_path: Path) -> None:
    before = descriptors()
    for _ in range(10):
        opened = LocalStore(tmp_path / "store")
        opened.put("a", b"x", mode="overwrite")
        opened.get("a")
        list(opened.list(""))
        opened.copy("a", "b")
        opened.close()
        opened.close()
    assert not descriptors() - before
