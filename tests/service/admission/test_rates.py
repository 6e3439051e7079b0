"""Is the rate at which a host begins calls limited?"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weighbridge.errors import ResourceExhausted
from weighbridge_service.admission.rates import Rates


class Clock:
    """A clock that a test moves by hand, in seconds."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def allowed(rates: Rates, host: str, calls: int) -> int:
    """Number of these calls that may begin."""
    begun = 0
    for _ in range(calls):
        try:
            rates.count(host)
        except ResourceExhausted:
            continue
        begun += 1
    return begun


def test_a_host_begins_calls_at_its_rate_and_saves_no_more_than_a_burst() -> None:
    clock = Clock()
    rates = Rates(10.0, 30.0, clock)
    assert allowed(rates, "a", 100) == 30
    assert allowed(rates, "b", 100) == 30  # what others do does not matter
    clock.now += 0.5
    assert allowed(rates, "a", 100) == 5
    clock.now += 3600.0
    assert allowed(rates, "a", 100) == 30


def test_a_host_that_comes_back_when_it_was_told_is_let_in() -> None:
    clock = Clock()
    rates = Rates(2.0, 1.0, clock)
    rates.count("a")
    with pytest.raises(ResourceExhausted, match="a starts more than 2 calls per second") as refused:
        rates.count("a")
    assert refused.value.retry_after == pytest.approx(0.5)
    clock.now += refused.value.retry_after or 0.0
    rates.count("a")


@given(steps=st.lists(st.floats(0.0, 2.0), max_size=200))
def test_no_pattern_of_calls_gets_more_than_the_rate(steps: list[float]) -> None:
    clock = Clock()
    rates = Rates(3.0, 5.0, clock)
    begun = 0
    for seconds in steps:
        clock.now += seconds
        begun += allowed(rates, "a", 1)
    assert begun <= 5.0 + 3.0 * sum(steps) + 1e-6


def test_memory_of_hosts_is_bounded() -> None:
    rates = Rates(1.0, 1.0, Clock(), most_names=3)
    assert [allowed(rates, host, 1) for host in ("a", "b", "c", "a", "d")] == [1, 1, 1, 0, 1]
    assert allowed(rates, "a", 1) == 0  # still known: it has called later than b, which is forgotten
    assert allowed(rates, "b", 1) == 1
