"""Traces of HTTP requests, by OpenTelemetry's instrumentation of FastAPI; nothing where tracing is off."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from opentelemetry.trace import Span

from weighbridge._tracing.settings import OF_PROCESS
from weighbridge._tracing.traceparent import TraceParents

_UNTRACED = "/livez,/readyz,/metrics,/events"
"""Probes and scrapes come every few seconds, and streams of events last as long as their readers."""
_WITH_QUERY = ("http.url", "http.target", "url.full", "url.query")
_LONGEST = 256
"""Characters of what a span says of a request."""


def trace_requests(app: FastAPI) -> None:
    """Trace the requests of an application from now on: each in its caller's trace, or in one of its own."""
    provider = OF_PROCESS.provider
    if provider is None:
        return
    from opentelemetry.instrumentation.fastapi import FastAPIInstrumentor
    from opentelemetry.metrics import NoOpMeterProvider
    from opentelemetry.propagate import set_global_textmap

    set_global_textmap(TraceParents())  # the instrumentation takes none of its own
    FastAPIInstrumentor.instrument_app(
        app,
        server_request_hook=_bounded,
        tracer_provider=provider,
        meter_provider=NoOpMeterProvider(),
        excluded_urls=_UNTRACED,
        exclude_spans=["receive", "send"],
        # of headers that somebody asks for by OpenTelemetry's variables, those that let a caller in are left out
        http_capture_headers_sanitize_fields=["authorization", "cookie", "set-cookie", "location"],
    )


def _bounded(span: Span, scope: Mapping[str, Any]) -> None:
    """A query may have anything in it, as what was meant for a header. Whoever reaches the port chooses the rest, and thousands of spans wait for a
    collector that does not answer, which refuses a batch as a whole if it is too long."""
    for name in _WITH_QUERY:
        span.set_attribute(name, scope.get("path", ""))
    for name, value in dict(getattr(span, "attributes", None) or {}).items():
        if isinstance(value, str) and len(value) > _LONGEST:
            span.set_attribute(name, value[:_LONGEST])
        elif isinstance(value, tuple):  # headers that the environment asks for
            span.set_attribute(name, [str(each)[:_LONGEST] for each in value])
