"""Is each host limited to its share?"""

from __future__ import annotations

import threading
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weighbridge.errors import ResourceExhausted
from weighbridge_service.admission.quotas import HostQuota, may_have

HOSTS = ("a", "b", "c")


@given(
    total=st.integers(1, 60),
    asked=st.lists(st.tuples(st.sampled_from(HOSTS), st.integers(1, 20)), max_size=60),
)
def test_no_host_can_shut_others_out(total: int, asked: list[tuple[str, int]]) -> None:
    held = Counter[str]()
    for host, more in asked:
        if not may_have(total, held.total(), held[host], more):
            continue
        held[host] += more
        assert held.total() <= total
        # a host that takes more than a fourth must leave a fourth free for others
        assert held[host] <= total / 4 or total - held.total() >= total // 4


@given(
    total=st.integers(4, 60),
    asked=st.lists(st.tuples(st.sampled_from(HOSTS), st.integers(1, 20)), max_size=60),
    more=st.integers(1, 15),
)
def test_who_stays_within_a_fourth_gets_what_is_left(total: int, asked: list[tuple[str, int]], more: int) -> None:
    held = Counter[str]()
    for host, wanted in asked:
        if may_have(total, held.total(), held[host], wanted):
            held[host] += wanted
    fits = more <= total // 4 and held.total() + more <= total
    assert may_have(total, held.total(), 0, more) or not fits


def test_one_host_alone_has_three_fourths_and_the_next_one_a_fourth() -> None:
    quota = HostQuota("places", 100)
    assert sum(quota.try_take("a") for _ in range(200)) == 75
    assert sum(quota.try_take("b") for _ in range(200)) == 25
    assert quota.held == 100
    quota.give("a", 50)
    assert sum(quota.try_take("c") for _ in range(200)) == 25
    assert sum(quota.try_take("a") for _ in range(200)) == 0


def test_what_is_taken_is_given_back_also_when_work_fails() -> None:
    quota = HostQuota("places", 8)

    def fail() -> None:
        with quota.taking("a", 2), quota.taking("b"):
            assert quota.held == 3
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert quota.held == 0
    quota.take("a", 6)
    with pytest.raises(ResourceExhausted, match=r"6 of 8 places are taken, 6 of them by a") as refused:
        quota.take("a")
    assert refused.value.retry_after
    assert quota.held == 6


def test_threads_that_take_and_give_leave_nothing_taken() -> None:
    quota = HostQuota("places", 8)

    def work(host: str) -> None:
        for _ in range(2_000):
            if quota.try_take(host):
                assert 0 < quota.held <= 8
                quota.give(host)

    threads = [threading.Thread(target=work, args=(host,)) for host in HOSTS for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert quota.held == 0
