"""Are bytes that were all read compared with their digests, in whatever order and by however many they were read?"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from tests.support.executed_lines import executed_lines
from weighbridge.errors import DataLoss
from weighbridge_storage.memory import read_checks
from weighbridge_storage.memory.read_checks import DigestedRange, ReadChecks

CONTENT = np.random.default_rng(4).integers(0, 256, 1000, dtype=np.uint8).tobytes()
BOUNDS = [(10, 400), (400, 401), (401, 1000)]


def checks(content: bytes, *, again: bool = True) -> ReadChecks:
    """The digests of `CONTENT`, of a file that has this content now."""
    parts = [
        DigestedRange(f"t{start}", start, end - start, xxhash.xxh3_128_hexdigest(CONTENT[start:end]))
        for start, end in BOUNDS
    ]
    return ReadChecks("f", "a/b@1", parts, (lambda at, n: content[at : at + n]) if again else None)


def spoiled(at: int) -> bytes:
    found = bytearray(CONTENT)
    found[at] ^= 1
    return bytes(found)


@given(
    cuts=st.sets(st.integers(1, 999), max_size=12),
    bad=st.integers(10, 999),
    order=st.randoms(use_true_random=False),
)
def test_a_bit_that_flipped_is_found_when_all_was_read_in_any_order(cuts: set[int], bad: int, order: object) -> None:
    edges = [0, *sorted(cuts), 1000]
    ranges = list(itertools.pairwise(edges))
    order.shuffle(ranges)  # type: ignore[attr-defined]
    ranges += ranges[:2]  # some of it twice
    for content, wrong in ((CONTENT, False), (spoiled(bad), True)):
        reading = checks(content)
        raised = 0
        for start, end in ranges:
            try:
                reading.took(start, content[start:end])
            except DataLoss:
                raised += 1
        assert bool(raised) is reading.damaged is wrong


def test_the_work_of_comparing_columns_that_are_read_one_after_the_other_grows_with_their_number_alone() -> None:
    def lines(rows: int) -> int:
        content = bytes(4 * rows)
        part = DigestedRange("t", 0, len(content), xxhash.xxh3_128_hexdigest(content))
        reading = ReadChecks("f", "a/b@1", [part], lambda _at, n: bytes(n))

        def read() -> None:
            for column in (1, 3, 0, 2):
                for row in range(rows):
                    reading.took(4 * row + column, b"\0")

        found = executed_lines(read)
        assert not reading._under_way, "it was compared"
        return found

    assert lines(800) < 4.5 * lines(200)


def test_each_time_that_all_was_read_it_is_compared_again() -> None:
    content = bytearray(CONTENT)
    reading = checks(bytes(content))
    for _ in range(2):
        reading.took(0, CONTENT)
    with pytest.raises(DataLoss, match="t401 in f"):
        reading.took(0, spoiled(700))


def test_what_was_read_long_before_does_not_stand_for_what_is_read_now(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reading = checks(spoiled(500))
    reading.took(401, CONTENT[401:600])  # a reader that broke off, before the bit flipped
    monkeypatch.setattr(read_checks, "_STALE_SECONDS", -1.0)
    with pytest.raises(DataLoss, match="t401"):
        reading.took(401, spoiled(500)[401:])


def test_a_part_that_did_not_agree_is_refused_to_all_and_the_others_are_not() -> None:
    reading = checks(spoiled(700))
    with pytest.raises(DataLoss):
        reading.took(401, spoiled(700)[401:])
    with pytest.raises(DataLoss, match="t401"):
        reading.took(500, CONTENT[500:510])
    reading.took(10, CONTENT[10:401])


def test_what_cannot_be_read_again_is_compared_where_it_is_read_in_order() -> None:
    reading = checks(CONTENT, again=False)
    reading.took(500, spoiled(700)[500:])
    reading.took(401, spoiled(700)[401:500])  # out of order
    for at in range(0, 950, 50):
        reading.took(at, spoiled(700)[at : at + 50])
    with pytest.raises(DataLoss):
        reading.took(950, spoiled(700)[950:])
