"""Traces of HTTP requests, by OpenTelemetry's instrumentation of FastAPI. Does nothing if tracing is off."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from opentelemetry.trace import Span

from weighbridge._tracing.settings import OF_PROCESS
from weighbridge._tracing.traceparent import TraceParents

_UNTRACED = "/livez,/readyz,/metrics,/events"
"""Paths that are not traced: probes and scrapes come every few seconds, and event streams last as long as their
readers.
"""
_WITH_QUERY = ("http.url", "http.target", "url.full", "url.query")
_LONGEST = 256
"""Maximum characters of a span's attribute."""


def trace_requests(app: FastAPI) -> None:
    """Trace the requests of an application: each in its caller's trace, or in a new one."""
    provider = OF_PROCESS.provider
    if provider is None:
        return
    from opentelemetry.instrumentation.fastapi import FastAPIInstrumentor
    from opentelemetry.metrics import NoOpMeterProvider
    from opentelemetry.propagate import set_global_textmap

    set_global_textmap(TraceParents())  # the instrumentation has no parameter for it
    FastAPIInstrumentor.instrument_app(
        app,
        server_request_hook=_bounded,
        tracer_provider=provider,
        meter_provider=NoOpMeterProvider(),
        excluded_urls=_UNTRACED,
        exclude_spans=["receive", "send"],
        # OpenTelemetry's environment variables may ask for headers in spans; credentials are redacted
        http_capture_headers_sanitize_fields=["authorization", "cookie", "set-cookie", "location"],
    )


def _bounded(span: Span, scope: Mapping[str, Any]) -> None:
    """Remove the query from a request's span, and shorten its other attributes.

    A query may contain secrets, for example a token that was meant for a header. Any client can choose the other
    attributes. They must be short, because thousands of spans may wait for a collector that does not respond, and a
    collector refuses a batch as a whole if it is too large.
    """
    for name in _WITH_QUERY:
        span.set_attribute(name, scope.get("path", ""))
    for name, value in dict(getattr(span, "attributes", None) or {}).items():
        if isinstance(value, str) and len(value) > _LONGEST:
            span.set_attribute(name, value[:_LONGEST])
        elif isinstance(value, tuple):  # headers that environment variables ask for
            span.set_attribute(name, [str(each)[:_LONGEST] for each in value])
