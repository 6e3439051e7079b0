"""Do ranks agree: is a failure of one rank raised on all, with the name of that rank?"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest

from weighbridge.errors import NotFound, WeighbridgeError
from weighbridge.integrations.engine_rank.agreement import OneRank, RanksFailed, agree, exchange, from_first


class Together:
    """Ranks as threads of this process; the values that they exchange are pickled, as between processes."""

    def __init__(self, rank: int, size: int, barrier: threading.Barrier, given: list[bytes]) -> None:
        self.rank = rank
        self.size = size
        self._barrier = barrier
        self._given = given

    def all_gather_object(self, mine: Any) -> list[Any]:
        self._given[self.rank] = pickle.dumps(mine)
        self._barrier.wait(60)
        found = [pickle.loads(each) for each in self._given]
        self._barrier.wait(60)
        return found


def on_all(size: int, do: Callable[[Together], Any]) -> list[Any]:
    """The result of each rank, or its error."""
    barrier, given, found = threading.Barrier(size), [b""] * size, [None] * size

    def run(rank: int) -> None:
        try:
            found[rank] = do(Together(rank, size, barrier, given))
        except WeighbridgeError as error:
            found[rank] = error  # type: ignore[call-overload]

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def failing(*failed: int, error: Callable[[int], Exception]) -> Callable[[Together], Any]:
    def step(rank: int) -> int:
        if rank in failed:
            raise error(rank)
        return rank * 10

    return lambda ranks: agree(ranks, "it is not done", lambda: step(ranks.rank))


def test_each_rank_gets_what_its_own_step_gave() -> None:
    assert on_all(3, failing(error=RuntimeError)) == [0, 10, 20]


def test_what_fails_on_one_rank_is_raised_on_all_and_says_where() -> None:
    for raised in on_all(3, failing(1, error=lambda rank: NotFound(f"gone for {rank}", fix="wait"))):
        assert type(raised) is RanksFailed
        assert raised.message == "it is not done"
        assert raised.details == ("rank 1: gone for 1\n  What to do: wait",)
        assert [type(error) for error in raised.errors] == [type(None), NotFound, type(None)]
        assert raised.errors[1].fix == "wait"


def test_an_error_of_the_engines_own_is_named_by_its_type() -> None:
    for raised in on_all(2, failing(0, error=lambda rank: AssertionError("shapes differ"))):
        assert raised.details == ("rank 0: AssertionError: shapes differ",)


def test_ranks_that_fail_alike_are_said_once_and_others_one_by_one() -> None:
    for raised in on_all(2, failing(0, 1, error=lambda _: NotFound("gone"))):
        assert raised.details == ("all ranks: gone",)
    for raised in on_all(2, failing(0, 1, error=lambda rank: NotFound(f"gone for {rank}"))):
        assert raised.details == ("rank 0: gone for 0", "rank 1: gone for 1")
    for raised in on_all(3, failing(0, 2, error=lambda _: NotFound("gone"))):
        assert raised.details == ("rank 0: gone", "rank 2: gone")


def test_one_rank_agrees_with_itself() -> None:
    assert agree(OneRank(), "it is not done", lambda: 7) == 7
    with pytest.raises(RanksFailed) as raised:
        agree(OneRank(), "it is not done", lambda: 1 // 0)
    assert raised.value.details == ("ZeroDivisionError: integer division or modulo by zero",)
    assert isinstance(raised.value.__cause__.__cause__, ZeroDivisionError)  # type: ignore[union-attr]


def test_only_the_first_rank_asks() -> None:
    asked = []

    def ask() -> int:
        asked.append(1)
        return 17

    assert on_all(3, lambda ranks: from_first(ranks, ask)) == [17, 17, 17]
    assert len(asked) == 1


def test_what_the_first_rank_is_refused_is_raised_on_all_as_it_is() -> None:
    def ask() -> int:
        raise NotFound("no such ref")

    for raised in on_all(3, lambda ranks: from_first(ranks, ask)):
        assert type(raised) is NotFound
        assert raised.message == "no such ref"


def test_all_ranks_are_told_what_every_step_gave_or_who_could_not() -> None:
    def step(rank: int, failed: int | None) -> int:
        if rank == failed:
            raise NotFound("no such thing")
        return rank * 10

    for failed in (None, 1):
        found = on_all(
            3,
            lambda ranks, failed=failed: exchange(ranks, "it is not done", lambda: step(ranks.rank, failed)),
        )
        if failed is None:
            assert found == [[0, 10, 20]] * 3
        else:
            assert all(isinstance(each, RanksFailed) for each in found)
            assert {str(each) for each in found} == {"it is not done\n  - rank 1: no such thing"}
