"""Is it said in few words which ranks are waited for, and not more often than it should be?"""

from __future__ import annotations

import pytest

from weighbridge._core.text import waits
from weighbridge._core.text.waits import Reminder, ranks_text


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([3], "rank 3"),
        ([3, 5], "ranks 3 and 5"),
        ([0, 1, 2, 7, 9, 10], "ranks 0-2, 7 and 9-10"),
        (range(1024), "ranks 0-1023"),
        (range(0, 1024, 2), "ranks 0, 2, 4, 6, 8, 10, 12, 14, 16, 18 and 502 more"),
        ([], "ranks none"),
    ],
)
def test_ranks_are_named_in_runs_and_not_all_of_very_many(ranks: list[int], text: str) -> None:
    assert ranks_text(ranks) == text


def test_a_reminder_is_due_once_in_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter((100.0, 100.0, 109.4, 110.0, 115.0, 121.0, 130.4, 131.0))
    monkeypatch.setattr(waits.time, "monotonic", lambda: next(times))
    reminder = Reminder()
    assert [reminder.due() for _ in range(7)] == [None, None, 10.0, None, 21.0, None, 31.0]


def test_looks_that_come_some_milliseconds_before_their_time_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those do of calls that wait just as long."""
    times = iter((100.0, 109.98, 119.97))
    monkeypatch.setattr(waits.time, "monotonic", lambda: next(times))
    reminder = Reminder()
    assert [reminder.due() is not None for _ in range(2)] == [True, True]
