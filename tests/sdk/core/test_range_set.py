"""Is a set of ranges the set of its positions, whatever is added in whatever order? Compared with Python's own sets."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from weighbridge._core.range_set import RangeSet

LENGTH = 40
position = st.integers(0, LENGTH)
a_range = st.tuples(position, position)


def positions(ranges: object) -> list[int]:
    return [at for start, end in ranges for at in range(start, end)]  # type: ignore[attr-defined]


@given(st.lists(a_range, max_size=12), a_range)
def test_it_holds_what_was_added_and_nothing_else(added: list[tuple[int, int]], asked: tuple[int, int]) -> None:
    held, expected = RangeSet(added), set(positions(added))
    assert positions(held) == sorted(expected)
    assert held.size == len(expected)
    window = range(*asked)
    assert positions(held.within(*asked)) == [at for at in window if at in expected]
    assert positions(held.gaps(*asked)) == [at for at in window if at not in expected]
    assert held.covers(*asked) == expected.issuperset(window)


@given(st.lists(a_range, max_size=12))
def test_its_ranges_are_as_few_as_can_be(added: list[tuple[int, int]]) -> None:
    ranges = list(RangeSet(added))
    assert all(start < end for start, end in ranges)
    assert all(end < start for (_, end), (start, _) in itertools.pairwise(ranges))


@given(st.lists(a_range, max_size=12))
def test_each_position_is_claimed_once(claimed: list[tuple[int, int]]) -> None:
    held = RangeSet()
    given_out = [at for each in claimed for at in positions(held.claim(*each))]
    assert sorted(given_out) == sorted(set(positions(claimed)))


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=8), st.integers(0, 41))
def test_a_run_of_what_it_holds_ends_where_the_first_position_is_missing(
    added: list[tuple[int, int]], position: int
) -> None:
    held = {at for start, end in added for at in range(start, end)}
    end = RangeSet(added).end_from(position)
    assert end not in held
    assert held.issuperset(range(position, end))
