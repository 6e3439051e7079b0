"""Does a cache keep the values used last, within what they may weigh together?"""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from weighbridge._core.lru import Cache

key = st.integers(0, 5)
KEPT = 10


@given(st.lists(st.tuples(st.sampled_from(["get", "put", "drop"]), key, st.integers(1, 12))))
def test_the_values_used_last_stay(steps: list[tuple[str, int, int]]) -> None:
    """Compared with a list in the order of use."""
    cache: Cache[int] = Cache(KEPT, weigh=lambda value: value)
    expected: list[tuple[int, int]] = []
    for what, name, weight in steps:
        there = dict(expected).get(name)
        rest = [each for each in expected if each[0] != name]
        if what == "put":
            cache.put(name, weight)
            expected = [*rest, (name, weight)]
            while len(expected) > 1 and sum(value for _, value in expected) > KEPT:
                expected.pop(0)
        elif what == "get":
            assert cache.get(name) == there
            expected = expected if there is None else [*rest, (name, there)]
        else:
            cache.drop(name)
            expected = rest
        assert cache.keys == [each for each, _ in expected]
        assert cache.weight == sum(value for _, value in expected)


def test_a_value_is_made_once_while_it_is_kept() -> None:
    cache: Cache[str] = Cache(2)
    made: list[str] = []

    def make(name: str) -> str:
        return cache.get_or_make(name, lambda: made.append(name) or name)

    assert [make(name) for name in "abacba"] == [*"abacba"]
    assert made == [*"abcba"], "b goes when c comes, a when b comes back"


def test_all_who_make_a_value_at_once_get_the_one_that_was_there_first() -> None:
    cache: Cache[list[str]] = Cache(2)
    others: list[list[str]] = []

    def make() -> list[str]:
        others.append(cache.get_or_make("a", lambda: ["of another caller"]))  # comes and goes meanwhile
        return ["own"]

    first = cache.get_or_make("a", make)
    assert first is others[0]
    newer = ["newer"]
    assert cache.put_instead("a", first, newer) is newer
    assert cache.put_instead("a", first, ["late"]) is newer
    assert cache.get("a") is newer


def test_what_is_not_wanted_any_more_is_forgotten() -> None:
    cache: Cache[str] = Cache(9)
    for number in range(9):
        cache.put(number, "value")
    cache.drop_if(lambda number: number % 2)
    assert cache.keys == [0, 2, 4, 6, 8]
    assert cache.weight == 5
