"""Trace parents: is a good one taken as the standard has it, and anything else ignored?"""

from __future__ import annotations

import pytest

from weighbridge._tracing.traceparent import canonical, in_metadata, parse

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
GOOD = f"00-{TRACE}-{SPAN}-01"


def test_the_example_of_the_standard_is_read() -> None:
    found = parse(GOOD)
    assert found is not None
    assert (found.trace_id, found.span_id) == (int(TRACE, 16), int(SPAN, 16))
    assert canonical(found) == GOOD


def test_flags_and_versions_of_the_future_are_taken_as_what_is_known_of_them() -> None:
    assert canonical(parse(f"00-{TRACE}-{SPAN}-ff")) == GOOD
    assert canonical(parse(f"fe-{TRACE}-{SPAN}-01")) == GOOD


@pytest.mark.parametrize(
    "hostile",
    [
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"ff-{TRACE}-{SPAN}-01",
        GOOD.upper(),
        f"{GOOD}-{'x' * 5000}",
        f"{GOOD}\n",
        f" {GOOD}",
        f"00-{TRACE[:-1]}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-1",
        f"00-\u0664{TRACE[1:]}-{SPAN}-01",
        "'; drop table spans",
        "",
    ],
)
def test_what_is_malformed_is_ignored(hostile: str) -> None:
    assert canonical(parse(hostile)) == ""
    assert in_metadata([("traceparent", hostile)]) == ""


def test_a_span_that_is_not_recorded_is_continued_by_nobody() -> None:
    assert canonical(parse(f"00-{TRACE}-{SPAN}-00")) == ""


def test_metadata_that_says_it_twice_or_in_bytes_says_nothing() -> None:
    assert in_metadata([("other", "1"), ("traceparent", GOOD)]) == GOOD
    assert in_metadata([("traceparent", GOOD), ("traceparent", GOOD)]) == ""
    assert in_metadata([("traceparent", GOOD.encode())]) == ""
    assert in_metadata(None) == ""
