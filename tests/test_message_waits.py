"""Which waits for messages end, and when?"""

from __future__ import annotations

import pytest

from weighbridge_service.admission.message_waits import MOST_GROWTH, Wait, overdue


def wait(since: float, until: float = float("inf")) -> Wait:
    return Wait(since, until, lambda: None)


@pytest.mark.parametrize("growth", [-(1 << 30), 0, MOST_GROWTH])
def test_without_much_growth_a_wait_ends_at_its_time_and_not_before(growth: int) -> None:
    due, patient, for_ever = wait(0.0, 10.0), wait(0.0, 10.1), wait(-1000.0)
    assert overdue([due, patient, for_ever], 10.0, growth) == [due]


def test_the_more_memory_grows_the_sooner_waits_end_and_the_longest_first() -> None:
    waits = [wait(10.0 - age) for age in (1.0, 0.12, 0.03, 0.01, 0.0005)]
    ended = [len(overdue(waits, 10.0, round(MOST_GROWTH * times))) for times in (1.01, 2.0, 4.0, 8.0)]
    assert ended == [2, 3, 4, 4]
    assert overdue(waits, 10.0, round(MOST_GROWTH * 1.01)) == waits[:2]


def test_a_message_that_comes_at_ten_megabytes_a_second_outlives_the_first_alarm() -> None:
    coming = wait(10.0 - (1 << 20) / 11e6)
    assert overdue([coming], 10.0, MOST_GROWTH + 1) == []
