"""Do the parts of a step add up, and moments lie where they were, also for an engine that begins before a version is
ready?
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from weighbridge._core.engines.step_parts import OF_SERVICE, PARTS, chosen, offsets, step_seconds, step_text

WHOLE = {
    "offer": 0.1, "open": 0.05, "receive": 0.2, "hear": 0.004, "wait": 0.0, "stage": 0.2, "agree": 0.05, "pause": 0.02, "apply": 0.03, "resume": 0.01, "confirm": 0.04,
    "answer": 0.06,
}  # fmt: skip


def test_parts_have_one_name_each_and_follow_each_other() -> None:
    assert len({each.name for each in PARTS}) == len({each.end for each in PARTS}) == len(PARTS)
    assert [each.name for each in PARTS if each.still] == ["pause", "apply", "resume"]
    assert list(WHOLE) == [each.name for each in PARTS]


def test_moments_are_counted_from_ready_and_the_step_ends_where_the_engine_goes_on() -> None:
    found = offsets(WHOLE)
    assert list(found)[:4] == ["offered", "opened", "arriving", "ready"]
    assert found == pytest.approx(
        {
            "offered": -0.35, "opened": -0.25, "arriving": -0.2, "ready": 0.0, "heard": 0.004, "begun": 0.004, "staged": 0.204, "agreed": 0.254, "paused": 0.274, "applied": 0.304,
            "resumed": 0.314, "confirmed": 0.354, "answered": 0.414,
        }
    )  # fmt: skip
    assert found["ready"] == 0.0
    assert step_seconds(WHOLE) == pytest.approx(found["resumed"] - found["offered"])


@pytest.mark.parametrize(
    ("missing", "first", "last", "whole"),
    [
        (["offer"], {"opened": -0.25, "arriving": -0.2}, "answered", 0.564),
        (["open"], {"offered": -0.3, "opened": -0.2}, "answered", 0.614),  # then `receive` lasts from the opening
        (["offer", "open"], {"opened": -0.2}, "answered", 0.514),
        (["answer"], {"offered": -0.35, "opened": -0.25, "arriving": -0.2}, "confirmed", 0.664),
    ],
)  # fmt: skip
def test_a_step_without_an_optional_part_is_whole_and_begins_with_the_first_moment_that_is_known(
    missing: list[str], first: dict[str, float], last: str, whole: float
) -> None:
    parts = {name: seconds for name, seconds in WHOLE.items() if name not in missing}
    found = offsets(parts)
    assert {name: found[name] for name in list(found)[: len(first)]} == pytest.approx(first)
    assert list(found)[len(first)] == "ready"
    assert list(found)[-1] == last
    assert step_seconds(parts) == pytest.approx(whole)
    assert step_text(parts).endswith(f"; {round(whole * 1000)} ms in all")


def test_an_optional_part_says_nothing_of_a_step_that_lacks_another_one() -> None:
    parts = {"offer": 0.1, "open": 0.05, "hear": 0.004}
    assert offsets(parts) == {"ready": 0.0, "heard": 0.004}
    assert step_seconds(parts) is None


def test_an_engine_that_begins_early_has_moments_before_ready_and_the_same_sum() -> None:
    early = {**WHOLE, "wait": -0.19, "stage": 0.18, "agree": 0.01}
    found = offsets(early)
    assert found["begun"] < found["staged"] < found["ready"] == 0.0
    assert found["agreed"] == pytest.approx(0.004)
    assert step_seconds(early) == pytest.approx(0.1 + 0.05 + 0.2 + 0.004 + 0.02 + 0.03 + 0.01)
    assert "wait -190 ms" in step_text(early)


@pytest.mark.parametrize(
    ("missing", "last"), [("hear", "ready"), ("stage", "begun"), ("confirm", "resumed"), ("receive", "answered")]
)  # fmt: skip
def test_what_was_not_measured_is_not_guessed(missing: str, last: str) -> None:
    parts = {name: seconds for name, seconds in WHOLE.items() if name != missing}
    found = offsets(parts)
    assert list(found)[-1] == last
    assert ("opened" in found) == (missing != "receive")
    assert (step_seconds(parts) is None) == (missing != "confirm")
    assert missing not in step_text(parts)


def test_parts_that_no_table_names_are_left_out_and_order_is_that_of_the_table() -> None:
    assert list(chosen({"apply": 1.0, "first_token": 2.0, "stage": 3.0})) == ["stage", "apply"]
    assert step_text({"apply": 0.03, "agree": 0.05}) == "agree 50 ms, apply 30 ms"
    assert step_text({}) == ""
    assert step_text(WHOLE).endswith("confirm 40 ms, answer 60 ms; 664 ms in all")


def test_the_documentation_has_the_table() -> None:
    page = (Path(__file__).parents[3] / "docs" / "operations.md").read_text("utf-8")
    in_table = re.findall(r"^\| `(\w+)` \| ([^|]*) \| (\w+) \| the (service|agent) \|$", page, re.MULTILINE)
    by = {each: "service" if each in OF_SERVICE else "agent" for each in PARTS}
    assert in_table == [(each.name, each.text, each.end, by[each]) for each in PARTS]
