"""Are figures and texts of others written in one way, that fits where it is shown and that a terminal only shows?"""

from __future__ import annotations

import pytest

from weighbridge._core.text.counts import first_lines, named, percent, readable_count
from weighbridge._core.text.durations import readable_duration
from weighbridge._core.text.sizes import readable_rate


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 ms"), (0.9994, "999 ms"), (0.9996, "1.00 s"), (1.5, "1.50 s"), (9.994, "9.99 s"), (9.996, "10.0 s"), (12.345, "12.3 s"),
        (59.94, "59.9 s"), (59.96, "1 min"), (125, "2 min 05 s"), (3599.4, "59 min 59 s"), (3599.6, "1 h"), (4020, "1 h 07 min"),
        (86_399, "23 h 59 min"), (90_000, "1 d 01 h"), (7 * 86_400, "7 d"), (800 * 86_400, "800 d"),
    ],
)  # fmt: skip
def test_a_duration_has_two_units_at_most(seconds: float, text: str) -> None:
    assert readable_duration(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (0.9, "0 s"), (12.9, "12 s"), (119.9, "119 s"), (120, "2 min"), (7199, "119 min"), (7200, "2 h"), (172_800, "2 d")],
)  # fmt: skip
def test_an_age_has_one_unit_and_never_more_than_has_passed(seconds: float, text: str) -> None:
    assert readable_duration(seconds, rough=True) == text


def test_a_part_is_all_of_it_only_if_nothing_is_missing() -> None:
    assert [percent(part, 1000) for part in (0, 9, 10, 999, 1000, 1001)] == [0, 0, 1, 99, 100, 100]
    assert percent(0, 0) == 0, "nothing of what is not known yet"


def test_counts_and_rates_are_read_at_a_glance() -> None:
    assert readable_count(1_234_567) == "1,234,567"
    assert readable_rate(1_500_000.4) == "1.5 MB/s"


@pytest.mark.parametrize("count", [0, 1, 19, 20, 21, 51])
def test_a_list_that_is_cut_says_how_many_there_are_besides(count: int) -> None:
    lines = [f"tensor {i}" for i in range(count)]
    told = first_lines(lines)
    if count <= 20:
        assert told == lines
    else:
        assert told == [*lines[:19], f"and {count - 19} more"]
    for most in range(1, 20):  # cut once more, it still counts those of the first cut
        again = first_lines(told, most)
        assert again == (lines if count <= most else [*lines[: most - 1], f"and {count - most + 1} more"])


def test_names_that_are_cut_say_how_many_there_are_besides() -> None:
    assert named(["a", "b"], 2) == "a, b"
    assert named(["a", "b", "c", "d"], 2) == "a, b and 2 more"
