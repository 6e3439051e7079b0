"""Spans: does each belong where the rule says, and is there nothing of them where tracing is off?"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import INVALID_SPAN

from tests.support.traced import Traced, ids, turn_on
from weighbridge._tracing import spans
from weighbridge._tracing.exporting import ENDPOINTS
from weighbridge._tracing.settings import TracingState, wanted
from weighbridge.errors import VersionFailed

PUSH = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
TRACE, ID = int(PUSH[3:35], 16), int(PUSH[36:52], 16)


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Traced:
    found = Traced()
    turn_on(monkeypatch, found)
    return found


def test_who_has_no_span_continues_the_trace_of_what_led_to_it(traced: Traced) -> None:
    with spans.span("update", origin=PUSH):
        spans.begin("pull", origin=PUSH).end()
    ended = traced.ended()
    assert ids(ended["update"]) == (TRACE, ID)
    assert ended["update"].context is not None
    assert ids(ended["pull"]) == (TRACE, ended["update"].context.span_id)


def test_who_has_a_span_continues_its_own_trace_and_links_to_what_led_to_it(traced: Traced) -> None:
    with traced.tracer.start_as_current_span("step") as step, spans.span("update", origin=PUSH):
        pass
    update = traced.ended()["update"]
    assert ids(update) == (step.get_span_context().trace_id, step.get_span_context().span_id)
    assert [link.context.trace_id for link in update.links] == [TRACE]


def test_a_rank_that_comes_later_is_in_the_trace_of_the_push_from_its_own_beginning_on(
    traced: Traced,
) -> None:
    begun = spans.begin("push", {"rank": 3})
    span = spans.moved(begun, "push", {"rank": 3}, PUSH)
    span.set_attribute("version", 17)
    spans.within(span, "open", start_time=spans.began(span)).end()
    span.end()
    ended = traced.ended()
    assert {*ended} == {"push", "open"}, "the trace that it had begun is not told"
    assert ids(ended["push"]) == (TRACE, ID)
    assert ended["push"].attributes == {"rank": 3, "version": 17}
    assert ended["push"].start_time == ended["open"].start_time
    assert ended["push"].start_time <= ended["open"].end_time  # type: ignore[operator]


def test_a_rank_of_an_application_that_traces_stays_in_its_trace_and_links(traced: Traced) -> None:
    with traced.tracer.start_as_current_span("step") as step:
        spans.moved(spans.begin("push"), "push", {}, PUSH).end()
    push = traced.ended()["push"]
    assert ids(push)[0] == step.get_span_context().trace_id
    assert [link.context.trace_id for link in push.links] == [TRACE]


def test_the_rank_that_opens_the_version_stays_the_root(traced: Traced) -> None:
    span = spans.begin("push")
    assert spans.moved(span, "push", {}, spans.traceparent(span)) is span
    assert spans.moved(span, "push", {}, "") is span
    span.end()
    assert ids(traced.ended()["push"])[1] is None


def test_what_is_not_sampled_says_nothing_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Traced(ALWAYS_OFF)
    turn_on(monkeypatch, found)
    with spans.span("push") as span:
        assert spans.traceparent(span) == ""
        assert spans.headers() == ()
    with spans.span("update", origin=PUSH):  # the push is sampled: so is what it has led to
        assert spans.headers()[0][0] == "traceparent"
    assert {*found.ended()} == {"update"}


def test_a_failure_is_told_by_its_kind_alone(traced: Traced) -> None:
    with pytest.raises(VersionFailed), spans.span("push") as span, spans.child(span, "seal"):
        raise VersionFailed("https://bucket/weights?X-Amz-Signature=secret")
    for each in traced.ended().values():
        assert each.status.status_code is trace.StatusCode.ERROR
        assert each.attributes == {"error.type": "VERSION_FAILED"}
        assert "secret" not in each.to_json()


def test_a_call_is_answered_in_its_callers_trace_and_in_none_of_its_own(traced: Traced) -> None:
    with traced.tracer.start_as_current_span("whatever the thread is at"):
        spans.continuing("Service/Method", {"rpc.system": "grpc"}, PUSH, trace.SpanKind.SERVER).end()
        spans.continuing("Service/Other", {}, "", trace.SpanKind.SERVER).end()
    ended = traced.ended()
    assert ids(ended["Service/Method"]) == (TRACE, ID)
    assert ended["Service/Method"].kind is trace.SpanKind.SERVER
    assert "Service/Other" not in ended


@pytest.mark.parametrize(
    ("environment", "is_wanted"),
    [
        ({}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a:4317"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://a:4317"}, True),
        ({"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://a:4317"}, False),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, True),
        ({"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://a:4317"}, False),
        ({"OTEL_SDK_DISABLED": "True", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://a:4317"}, False),
        ({"OTEL_SERVICE_NAME": "trainer"}, False),
    ],
)
def test_the_environment_says_whether_there_are_traces(environment: dict[str, str], is_wanted: bool) -> None:
    assert wanted(environment) is is_wanted


def test_where_tracing_is_off_there_is_one_span_that_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    off = TracingState()
    monkeypatch.setattr(spans, "OF_PROCESS", off)
    for name in ENDPOINTS:
        monkeypatch.delenv(name, raising=False)
    assert spans.begin("push") is INVALID_SPAN
    with spans.span("update", origin=PUSH) as span, spans.child(span, "prepare") as child:
        assert span is child is INVALID_SPAN
        assert spans.headers() == spans.headers(span) == ()
        assert spans.moved(span, "update", {}, PUSH) is span


@pytest.mark.process
def test_an_application_that_sets_up_opentelemetry_late_is_traced_by_its_own_provider() -> None:
    script = """
from opentelemetry import trace
from weighbridge._tracing import spans
assert spans.begin("push") is trace.INVALID_SPAN
from opentelemetry.sdk.trace import TracerProvider
assert spans.begin("push") is trace.INVALID_SPAN
trace.set_tracer_provider(TracerProvider())
span = spans.begin("push")
assert spans.traceparent(span), span
assert span.resource is trace.get_tracer_provider().resource
"""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    subprocess.run([sys.executable, "-c", script], env=clean, check=True, timeout=60)


def test_a_provider_that_the_environment_names_and_that_is_not_there_keeps_nothing_from_working() -> None:
    script = """
from weighbridge._tracing import spans
with spans.span("push") as span:
    assert not span.is_recording()
"""
    named = {**os.environ, "OTEL_PYTHON_TRACER_PROVIDER": "nowhere"}
    subprocess.run([sys.executable, "-c", script], env=named, check=True, timeout=60)
