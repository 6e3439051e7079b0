"""Spans by OpenTelemetry. Imported where tracing is on."""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

from opentelemetry import context, trace
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter, SpanExporter
from opentelemetry.trace import NonRecordingSpan, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from weighbridge._tracing.span import NO_ATTRIBUTES, Attributes, Headers, Span, Tracing
from weighbridge._tracing.traceparent import HEADER, TraceParent
from weighbridge._tracing.variables import ENDPOINTS, PROTOCOLS
from weighbridge._version import VERSION
from weighbridge.errors import InvalidArgument

_GRPC, _HTTP = "grpc", "http/protobuf"
_EXIT_SECONDS = 2.0
"""How long a process that ends waits for a collector that does not answer."""


class OpenTelemetry:
    """`Tracing` by a provider of OpenTelemetry's. Thread-safe.

    Args:
        provider: makes tracers.

    Attributes:
        provider: as given.
    """

    def __init__(self, provider: trace.TracerProvider) -> None:
        self.provider = provider
        self.tracer = provider.get_tracer("weighbridge", VERSION)

    def begin(
        self, name: str, attributes: Attributes, origin: str, *, under: bool = False, server: bool = False
    ) -> Span:
        """See `Tracing`."""
        led = TraceParent.parse(origin)
        own = trace.get_current_span().get_span_context().is_valid and not under
        links = [trace.Link(_remote(led))] if led is not None and own else []
        parent = context.get_current() if own or led is None else _under(led)
        kind = SpanKind.SERVER if server else SpanKind.INTERNAL
        made = self.tracer.start_span(name, parent, kind, attributes, links)
        return _Recorded(self, made, name, attributes, root=not own and led is None)

    def headers(self) -> Headers:
        """See `Tracing`."""
        return _headers(trace.get_current_span())


class _Recorded(Span):
    """A span of OpenTelemetry's."""

    def __init__(
        self, tracing: OpenTelemetry, made: trace.Span, name: str, attributes: Attributes, *, root: bool
    ) -> None:
        self.recorded = made
        self._tracing = tracing
        self._name = name
        self._attributes = dict(attributes)
        self._root = root
        self._began: int | None = getattr(made, "start_time", None)

    @property
    def traceparent(self) -> str:  # type: ignore[override]
        found = self.headers
        return found[0][1] if found else ""

    @property
    def headers(self) -> Headers:
        return _headers(self.recorded)

    def set(self, name: str, value: str | float | bool) -> None:
        self.recorded.set_attribute(name, value)
        self._attributes[name] = value

    def fail(self, error: BaseException) -> None:
        self.recorded.set_attribute("error.type", getattr(error, "reason", type(error).__name__))
        self.recorded.set_status(Status(StatusCode.ERROR, type(error).__name__))

    def end(self) -> None:
        self.recorded.end()

    @contextmanager
    def running(self) -> Iterator[Span]:
        token = context.attach(trace.set_span_in_context(self.recorded))
        try:
            yield self
        except Exception as error:
            self.fail(error)
            raise
        finally:
            context.detach(token)
            self.end()

    def under(self, traceparent: str) -> Span:
        found, mine = TraceParent.parse(traceparent), self.recorded.get_span_context()
        if found is None or found.trace_id == mine.trace_id:
            return self
        if not self._root:
            self.recorded.add_link(_remote(found))
            return self
        # what never ends is never exported
        made = self._tracing.tracer.start_span(
            self._name, _under(found), attributes=self._attributes, start_time=self._began
        )
        return _Recorded(self._tracing, made, self._name, self._attributes, root=False)

    def begin(self, name: str, attributes: Attributes = NO_ATTRIBUTES, *, back: bool = False) -> Span:
        within = trace.set_span_in_context(self.recorded)
        start = self._began if back else None
        made = self._tracing.tracer.start_span(name, within, attributes=attributes, start_time=start)
        return _Recorded(self._tracing, made, name, attributes, root=False)


def _headers(span: trace.Span) -> Headers:
    found = span.get_span_context()
    if not found.is_valid or not found.trace_flags.sampled:
        return ()
    return ((HEADER, str(TraceParent(found.trace_id, found.span_id))),)


def _remote(parent: TraceParent) -> SpanContext:
    return SpanContext(
        parent.trace_id, parent.span_id, is_remote=True, trace_flags=TraceFlags(TraceFlags.SAMPLED)
    )


def _under(parent: TraceParent) -> context.Context:
    return trace.set_span_in_context(NonRecordingSpan(_remote(parent)), context.Context())


def of_application() -> Tracing | None:
    """Tracing by what the application has set up; None if it has not."""
    found = trace.get_tracer_provider()
    return OpenTelemetry(found) if isinstance(found, TracerProvider) else None


def exporting(service: str, endpoint: str) -> Tracing:
    """Tracing that sends spans to a collector, by a provider of its own: that of the application, if it sets one up, is left alone.

    Spans are sent by a thread, in batches; those that a collector does not take in time are dropped.

    Args:
        service: name of the process, unless the environment has another one.
        endpoint: the collector's OTLP address; empty for what the environment says.
    """
    named = os.environ.get("OTEL_SERVICE_NAME") or "service.name=" in os.environ.get(
        "OTEL_RESOURCE_ATTRIBUTES", ""
    )
    resource = Resource.create({} if named else {SERVICE_NAME: service})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(_exporter(endpoint)))

    def end() -> None:
        ending = threading.Thread(target=provider.shutdown, name="traces-end", daemon=True)
        ending.start()
        ending.join(_EXIT_SECONDS)

    atexit.register(end)
    return OpenTelemetry(provider)


def _exporter(endpoint: str) -> SpanExporter:
    if not endpoint and os.environ.get("OTEL_TRACES_EXPORTER", "").strip().lower() == "console":
        return ConsoleSpanExporter()
    protocol = next((found for name in PROTOCOLS if (found := os.environ.get(name, "").strip())), _GRPC)
    if protocol not in (_GRPC, _HTTP):
        raise InvalidArgument(
            f"OTLP goes by {_GRPC} or {_HTTP}, not by {protocol[:40]!r}",
            fix=f"set {PROTOCOLS[1]} to one of these",
        )
    if endpoint and (urlsplit(endpoint).scheme not in ("http", "https") or not urlsplit(endpoint).hostname):
        raise InvalidArgument(
            f"{endpoint.rpartition('@')[2][:80]!r} is no URL of a collector",
            fix="as in http://127.0.0.1:4317",
        )
    # gRPC has no use for one, and OpenTelemetry writes the address into the log
    if protocol == _GRPC and "@" in (endpoint or next(filter(None, map(os.environ.get, ENDPOINTS)), "")):
        raise InvalidArgument(
            "the address of the collector has a name or a password in it, which gRPC does not send",
            fix="set OTEL_EXPORTER_OTLP_HEADERS",
        )
    if protocol == _HTTP:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as ByHttp

        return ByHttp(endpoint=f"{endpoint.rstrip('/')}/v1/traces") if endpoint else ByHttp()
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as ByGrpc

    return ByGrpc(endpoint=endpoint or None)
