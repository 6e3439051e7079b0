"""Do HTTP requests take the caller's span as their trace parent, and ignore everything else that the caller sends?"""

from __future__ import annotations

import logging

import pytest
from opentelemetry import trace
from opentelemetry.baggage import get_all

from weighbridge._tracing.traceparent import TraceParents

READERS = ("opentelemetry", "weighbridge._tracing")
GOOD = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def caller(headers: dict[str, str | list[str]]) -> trace.SpanContext:
    return trace.get_current_span(TraceParents().extract(headers)).get_span_context()


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The log messages of the modules that read these headers."""
    return [each.getMessage() for each in caplog.records if each.name.startswith(READERS)]


@pytest.mark.parametrize(("flags", "sampled"), [("01", True), ("00", False)])
def test_a_callers_span_and_whether_it_is_sampled_count(flags: str, sampled: bool) -> None:
    found = caller({"traceparent": GOOD[:-2] + flags})
    assert f"00-{found.trace_id:032x}-{found.span_id:016x}" == GOOD[:-3]
    assert found.is_remote
    assert found.trace_flags.sampled is sampled


def test_tracestate_and_baggage_are_neither_kept_nor_told_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    said = {"tracestate": "a=1," * 2000 + "not a member", "baggage": ",".join(["x" * 60] * 150)}
    headers: dict[str, str | list[str]] = {"traceparent": GOOD, **said}
    context = TraceParents().extract(headers)
    assert caller(headers).is_valid
    assert not trace.get_current_span(context).get_span_context().trace_state
    assert not get_all(context)
    assert not logged(caplog)


@pytest.mark.parametrize(
    "hostile",
    ["x" * 16000, GOOD + "-" + "x" * 8000, GOOD.upper(), f"ff{GOOD[2:]}", [GOOD, GOOD], "", GOOD[:-1] + "\n"],
)
def test_what_is_malformed_or_said_twice_is_ignored(hostile: str | list[str], caplog: pytest.LogCaptureFixture) -> None:
    assert not caller({"traceparent": hostile}).is_valid
    assert not logged(caplog)
