"""Does a cache of blocks always give the file's own bytes, within its budget, with concurrent readers and with
failures?
"""

from __future__ import annotations

import errno
import gc
import itertools
import os
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from weighbridge.errors import DataLoss, FailedPrecondition, InvalidArgument, ResourceExhausted, Unavailable
from weighbridge_storage.cache import block_file
from weighbridge_storage.cache.block_cache import BlockCache, CachedBytes, DigestedRange
from weighbridge_storage.cache.block_file import BlockFile, check_holes
from weighbridge_storage.cache.strides import blocks_touched

BLOCK = 8192
BUDGET = 8 * BLOCK


class Remote:
    """Files of random bytes, fetched one range at a time, with a record of it."""

    def __init__(self, sizes: Mapping[str, int], seed: int = 0) -> None:
        dice = np.random.default_rng(seed)
        self.files = {name: dice.integers(0, 256, n, dtype=np.uint8) for name, n in sizes.items()}
        self.fetched: Counter[tuple[str, int]] = Counter()
        self.before: Callable[[str, int], None] = lambda file, start: None

    def fetch(self, file: str, start: int, length: int) -> bytes:
        assert start % BLOCK == 0
        for number in range(start // BLOCK, -(-(start + length) // BLOCK)):
            self.fetched[file, number] += 1
        self.before(file, start)
        assert start + length <= len(self.files[file])
        return self.files[file][start : start + length].tobytes()

    def open(
        self, cache: BlockCache, digests: Mapping[str, list[DigestedRange]] | None = None
    ) -> dict[str, CachedBytes]:
        sizes = {name: len(data) for name, data in self.files.items()}
        return cache.open("acme/smol@7", sizes, self.fetch, digests or {})


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[BlockCache]:
    opened = BlockCache(tmp_path, BUDGET, BLOCK)
    yield opened
    opened.close()


def box_in(dice: random.Random, size: int) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """Offset, shape and strides of some bytes of a file: runs, rows at a distance, columns, transposed."""
    inner, rows = dice.choice([1, 3, 700]), dice.randrange(1, 30)
    stride = dice.choice([inner, inner + 5, 2 * BLOCK + 1, BLOCK])
    shape, strides = [rows, inner], [stride, 1]
    if dice.random() < 0.3:
        shape, strides = [dice.randrange(1, 20), *shape], [dice.randrange(50_000), *strides]
    while sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) >= size:
        shape = [max(1, n // 2) for n in shape]
    span = sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + 1
    order = dice.sample(range(len(shape)), len(shape))
    return dice.randrange(size - span + 1), tuple(shape[i] for i in order), tuple(strides[i] for i in order)


def expected(data: NDArray[np.uint8], offset: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> bytes:
    return as_strided(data[offset:], shape, strides).tobytes()


def copied(file: CachedBytes, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> bytes:
    target = np.full(shape, 0xEE, np.uint8)
    file.copy_to(target, offset, strides)
    return target.tobytes()


# -- which blocks ----------------------------------------------------------------------------------------------------


@given(st.integers(0, 2**32), st.integers(1, 300))
def test_every_byte_lies_in_a_touched_block_and_distant_blocks_are_left_out(seed: int, block: int) -> None:
    dice = random.Random(seed)
    shape = tuple(dice.randrange(1, 5) for _ in range(dice.randrange(1, 4)))
    strides = tuple(dice.choice([1, 2, 50, 400, 1000]) for _ in shape)
    offset = dice.randrange(1000)
    places = {
        offset + sum(i * s for i, s in zip(index, strides, strict=True))
        for index in itertools.product(*map(range, shape))
    }
    found = blocks_touched(offset, shape, strides, block)
    assert list(found) == sorted(set(found))
    assert {place // block for place in places} <= set(found)
    # a block without a byte lies between two bytes on an axis along which they are close together
    near = {n for place in places for n in range((place - block * 4) // block, place // block + 5)}
    assert set(found) <= near
    if all(stride > block for stride in strides):
        assert {place // block for place in places} == set(found)


def test_nothing_touches_no_block() -> None:
    assert blocks_touched(5, (3, 0), (10, 1), 4) == ()


# -- bytes and room --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [4 * BLOCK, 9 * BLOCK, 1000 * BLOCK])
def test_any_part_of_a_file_is_what_the_file_has_there(tmp_path: Path, budget: int) -> None:
    cache = BlockCache(tmp_path, budget, BLOCK)
    remote = Remote({"a": 40 * BLOCK + 17, "b": 5, "c": 10 * BLOCK})
    files = remote.open(cache)
    dice = random.Random(budget)
    for _ in range(200):
        name = dice.choice(["a", "a", "b", "c"])
        box = box_in(dice, len(remote.files[name]))
        assert copied(files[name], *box) == expected(remote.files[name], *box)
        assert cache.usage().nbytes <= budget
        assert files["a"].disk_bytes <= budget
    assert files["a"].read(3, 30 * BLOCK).tobytes() == remote.files["a"][3 : 30 * BLOCK + 3].tobytes()
    cache.close()


def test_only_the_blocks_of_what_is_read_are_fetched_and_each_once(cache: BlockCache) -> None:
    remote = Remote({"a": 100 * BLOCK})
    file = remote.open(cache)["a"]
    for _ in range(3):
        assert copied(file, 5 * BLOCK - 1, (2,), (1,)) == remote.files["a"][5 * BLOCK - 1 :][:2].tobytes()
        copied(file, 10 * BLOCK, (4, 10), (20 * BLOCK, 1))
    assert remote.fetched == {("a", n): 1 for n in (4, 5, 10, 30, 50, 70)}
    assert cache.usage().fetched == 6 * BLOCK
    assert cache.usage().misses == 6
    assert cache.usage().hits == 12


def test_the_block_that_was_not_used_for_longest_goes_first(cache: BlockCache) -> None:
    remote = Remote({"a": 100 * BLOCK})
    file = remote.open(cache)["a"]
    for number in (*range(8), 0, 8, 9):
        file.read(number * BLOCK, 1)
    remote.fetched.clear()
    for number in (0, 3, 4, 5, 6, 7, 8, 9):
        file.read(number * BLOCK, 1)
    assert not remote.fetched
    file.read(1 * BLOCK, 1)
    assert remote.fetched == {("a", 1): 1}


def test_blocks_of_a_version_that_nobody_has_open_are_the_first_to_go(cache: BlockCache) -> None:
    old, new = Remote({"a": 10 * BLOCK}, seed=1), Remote({"a": 10 * BLOCK}, seed=2)
    kept, dropped = old.open(cache), new.open(cache)
    kept["a"].read(0, 4 * BLOCK)
    dropped["a"].read(0, 4 * BLOCK)
    del dropped
    gc.collect()
    kept["a"].read(4 * BLOCK, 4 * BLOCK)
    old.fetched.clear()
    kept["a"].read(0, 8 * BLOCK)
    assert not old.fetched


def test_readers_on_a_cache_that_is_much_too_small_never_see_a_hole(tmp_path: Path) -> None:
    budget = 6 * BLOCK
    cache = BlockCache(tmp_path, budget, BLOCK)
    remote = Remote({"a": 30 * BLOCK + 1, "b": 20 * BLOCK, "c": 40 * BLOCK + 3})
    files = remote.open(cache)
    over: list[int] = []

    def read(seed: int) -> None:
        dice = random.Random(seed)
        for _ in range(60):
            name, other = dice.choice("abc"), dice.choice("abc")
            soon = files[other].prepare(*box_in(dice, len(remote.files[other]))) or ()
            box = box_in(dice, len(remote.files[name]))
            assert copied(files[name], *box) == expected(remote.files[name], *box)
            if (used := files["a"].disk_bytes) > budget:
                over.append(used)
            for kept in soon:
                kept.release()

    with ThreadPoolExecutor(12) as readers:
        for done in [readers.submit(read, seed) for seed in range(12)]:
            done.result(timeout=120)
    assert over == []
    assert sum(remote.fetched.values()) > 100
    cache.close()


def test_a_cache_that_is_too_small_for_a_copy_and_what_comes_next_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="too small"):
        BlockCache(tmp_path, 3 * BLOCK, BLOCK)


def test_blocks_next_to_each_other_come_in_one_fetch(tmp_path: Path) -> None:
    cache = BlockCache(tmp_path, 1000 * BLOCK, BLOCK)
    remote = Remote({"a": 100 * BLOCK + 5})
    starts: list[int] = []
    remote.before = lambda file, start: starts.append(start // BLOCK)
    file = remote.open(cache)["a"]
    file.read(0, 20 * BLOCK)
    assert sorted(starts) == [0, 8, 16]
    starts.clear()
    file.read(15 * BLOCK, 10 * BLOCK)
    assert starts == [20]
    starts.clear()
    file.read(97 * BLOCK, 3 * BLOCK + 5)
    assert starts == [97]
    assert max(remote.fetched.values()) == 1
    cache.close()


# -- asking ahead ----------------------------------------------------------------------------------------------------


def test_what_was_asked_for_ahead_stays_until_it_is_released(cache: BlockCache) -> None:
    remote = Remote({"a": 100 * BLOCK})
    file = remote.open(cache)["a"]
    soon = file.prepare(0, (2 * BLOCK,), (1,))
    assert soon is not None
    assert [kept.nbytes for kept in soon] == [BLOCK, BLOCK]
    file.read(10 * BLOCK, 50 * BLOCK)
    remote.fetched.clear()
    assert file.read(0, 2 * BLOCK).tobytes() == remote.files["a"][: 2 * BLOCK].tobytes()
    assert not remote.fetched
    for kept in soon:
        kept.release()
    file.read(10 * BLOCK, 50 * BLOCK)
    remote.fetched.clear()
    file.read(0, 2 * BLOCK)
    assert remote.fetched == {("a", 0): 1, ("a", 1): 1}


def test_readers_that_stand_still_leave_room_for_others(cache: BlockCache) -> None:
    remote = Remote({"a": 100 * BLOCK})
    file = remote.open(cache)["a"]
    assert file.prepare(0, (4 * BLOCK,), (1,)) is not None
    assert file.prepare(4 * BLOCK, (1,), (1,)) is None
    assert file.prepare(BLOCK, (BLOCK,), (1,)) is not None
    assert file.read(50 * BLOCK, 40 * BLOCK).tobytes() == remote.files["a"][50 * BLOCK : 90 * BLOCK].tobytes()


def test_what_nobody_wants_any_more_is_not_fetched(tmp_path: Path) -> None:
    cache = BlockCache(tmp_path, 2000 * BLOCK, BLOCK)
    remote = Remote({"a": 1000 * BLOCK})
    go = threading.Event()
    remote.before = lambda file, start: wait_for(go)
    file = remote.open(cache)["a"]
    soon = file.prepare(0, (1000 * BLOCK,), (1,))
    assert soon is not None
    for kept in soon:
        kept.release()
    go.set()
    cache.close()
    assert sum(remote.fetched.values()) < 200
    assert cache.usage().nbytes == sum(remote.fetched.values()) * BLOCK


def wait_for(event: threading.Event) -> None:
    assert event.wait(60)


# -- several readers -------------------------------------------------------------------------------------------------


def test_readers_that_want_one_block_cause_one_fetch(cache: BlockCache) -> None:
    remote = Remote({"a": 10 * BLOCK})
    file = remote.open(cache)["a"]
    go = threading.Event()
    remote.before = lambda name, start: wait_for(go)
    with ThreadPoolExecutor(8) as readers:
        reading = [readers.submit(file.read, 100, 50) for _ in range(8)]
        go.set()
        assert {done.result().tobytes() for done in reading} == {remote.files["a"][100:150].tobytes()}
    assert remote.fetched == {("a", 0): 1}


def test_a_reader_does_not_wait_for_what_others_have_asked_for_before(tmp_path: Path) -> None:
    cache = BlockCache(tmp_path, 1000 * BLOCK, BLOCK)
    remote = Remote({"slow": 400 * BLOCK, "quick": BLOCK})
    go = threading.Event()
    remote.before = lambda file, start: wait_for(go) if file == "slow" else None
    files = remote.open(cache)
    assert files["slow"].prepare(0, (400 * BLOCK,), (1,)) is not None
    try:
        assert files["quick"].prepare(0, (10,), (1,)) is not None
        assert files["quick"].read(0, BLOCK).tobytes() == remote.files["quick"].tobytes()
    finally:
        go.set()
    assert files["slow"].read(0, 400 * BLOCK).tobytes() == remote.files["slow"].tobytes()
    cache.close()


# -- what goes wrong -------------------------------------------------------------------------------------------------


def test_a_failed_fetch_fails_all_who_need_it_and_is_tried_again_by_the_next(cache: BlockCache) -> None:
    remote = Remote({"a": 10 * BLOCK})
    file = remote.open(cache)["a"]
    go = threading.Event()

    def fail(name: str, start: int) -> None:
        wait_for(go)
        raise Unavailable("the store is away", fix="wait")

    remote.before = fail
    with ThreadPoolExecutor(4) as readers:
        reading = [readers.submit(file.read, 0, 2 * BLOCK) for _ in range(4)]
        go.set()
        for done in reading:
            with pytest.raises(Unavailable, match="the store is away") as caught:
                done.result()
            assert caught.value.fix == "wait"
    assert cache.usage().nbytes == 0
    remote.before = lambda name, start: None
    assert file.read(0, 2 * BLOCK).tobytes() == remote.files["a"][: 2 * BLOCK].tobytes()


def test_a_failure_of_the_code_itself_leaves_nobody_waiting(cache: BlockCache) -> None:
    remote = Remote({"a": 10 * BLOCK})
    file = remote.open(cache)["a"]

    def fail(name: str, start: int) -> None:
        raise ZeroDivisionError

    remote.before = fail
    assert file.prepare(0, (BLOCK,), (1,)) is not None
    with pytest.raises(Unavailable, match="ZeroDivisionError"):
        file.read(0, BLOCK)
    remote.before = lambda name, start: None
    assert file.read(0, BLOCK).tobytes() == remote.files["a"][:BLOCK].tobytes()


def test_a_disk_that_is_full_is_said_to_be(cache: BlockCache, monkeypatch: pytest.MonkeyPatch) -> None:
    remote = Remote({"a": 10 * BLOCK})
    file = remote.open(cache)["a"]
    real = os.pwrite

    def half(fd: int, data: memoryview, offset: int) -> int:
        if offset % BLOCK:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fd, data[: BLOCK // 2], offset)

    monkeypatch.setattr(block_file.os, "pwrite", half)
    with pytest.raises(ResourceExhausted, match=r"a of acme/smol@7.*no space"):
        file.read(0, 2 * BLOCK)
    assert file.disk_bytes == 0
    monkeypatch.undo()
    assert file.read(0, 2 * BLOCK).tobytes() == remote.files["a"][: 2 * BLOCK].tobytes()


def test_a_file_system_without_holes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_holes(tmp_path)

    def cannot(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(BlockFile, "discard", cannot)
    with pytest.raises(FailedPrecondition, match="does not support sparse files"):
        check_holes(tmp_path)


def digests_of(data: NDArray[np.uint8], cuts: list[int]) -> list[DigestedRange]:
    return [
        DigestedRange(f"w{i}", start, end - start, xxhash.xxh3_128_hexdigest(data[start:end].tobytes()))
        for i, (start, end) in enumerate(itertools.pairwise(cuts))
    ]


def test_a_tensor_that_comes_damaged_is_never_given_out_whole(cache: BlockCache) -> None:
    remote = Remote({"a": 7 * BLOCK})
    cuts = [100, BLOCK // 2, 3 * BLOCK + 5, 3 * BLOCK + 6, 7 * BLOCK]
    digests = digests_of(remote.files["a"], cuts)
    good = remote.files["a"].copy()
    for number, (start, end) in enumerate(itertools.pairwise(cuts)):
        for place in (start, end - 1):
            file = remote.open(cache, {"a": digests})["a"]
            remote.files["a"][place] ^= 1
            for _ in range(2):
                with pytest.raises(DataLoss, match=f"w{number} in a of acme/smol@7"):
                    file.read(start, end - start)
            remote.files["a"][:] = good
            assert file.read(0, 7 * BLOCK).tobytes() == good.tobytes()


def test_a_tensor_is_compared_with_its_digest_whoever_brings_its_parts(tmp_path: Path) -> None:
    cache = BlockCache(tmp_path, 100 * BLOCK, BLOCK)
    remote = Remote({"a": 20 * BLOCK})
    digests = digests_of(remote.files["a"], [0, 20 * BLOCK])
    remote.files["a"][11 * BLOCK] ^= 1
    file = remote.open(cache, {"a": digests})["a"]
    order = random.Random(3).sample(range(20), 20)
    together = threading.Barrier(4)
    failed: list[DataLoss] = []

    def read(numbers: list[int]) -> None:
        together.wait()
        for number in numbers:
            try:
                file.read(number * BLOCK, BLOCK)
            except DataLoss as error:
                failed.append(error)

    with ThreadPoolExecutor(4) as readers:
        for done in [readers.submit(read, order[i::4]) for i in range(4)]:
            done.result(timeout=60)
    assert failed
    cache.close()
