"""Spans of this process, by OpenTelemetry's API.

Where tracing is off, each is its `INVALID_SPAN`, a no-op, and so are the spans within it.

One rule decides the parent of a span: a process with a current span, say an application's training step, continues that
trace, and links to the span that caused the work; a process without one continues the trace of the cause. Attributes
have no secrets, neither tokens nor URLs; there are few kinds of names.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from opentelemetry import context, trace
from opentelemetry.trace import INVALID_SPAN, NonRecordingSpan, Span, SpanContext, SpanKind, StatusCode
from opentelemetry.util.types import Attributes

from weighbridge._tracing.settings import OF_PROCESS
from weighbridge._tracing.traceparent import HEADER, canonical, parse


def begin(name: str, attributes: Attributes = None, *, origin: str = "") -> Span:
    """Start a span.

    Args:
        name, attributes: as in OpenTelemetry.
        origin: traceparent of the cause: the parent if there is no current span, otherwise linked to.
    """
    tracer = OF_PROCESS.tracer()
    if tracer is None:
        return INVALID_SPAN
    led = parse(origin)
    if led is None or _has_own():
        return tracer.start_span(name, attributes=attributes, links=[trace.Link(led)] if led else None)
    return tracer.start_span(name, _under(led), attributes=attributes)


def continuing(name: str, attributes: Attributes, traceparent: str, kind: SpanKind = SpanKind.INTERNAL) -> Span:
    """Start a span under that of another process, ignoring the current span; a no-op if the other span is not
    recorded.
    """
    tracer, parent = OF_PROCESS.tracer(), parse(traceparent)
    if tracer is None or parent is None:
        return INVALID_SPAN
    return tracer.start_span(name, _under(parent), kind, attributes)


def within(span: Span, name: str, attributes: Attributes = None, *, start_time: int | None = None) -> Span:
    """Start a span in another one."""
    tracer = OF_PROCESS.tracer() if span.get_span_context().is_valid else None
    if tracer is None:
        return INVALID_SPAN
    return tracer.start_span(name, trace.set_span_in_context(span), attributes=attributes, start_time=start_time)


def moved(span: Span, name: str, attributes: Attributes, traceparent: str) -> Span:
    """A span of `begin`, once its cause is known: if it has a trace of its own, a span in the cause's trace replaces it
    from its start on, and it is never exported."""
    tracer, led, mine = OF_PROCESS.tracer(), parse(traceparent), span.get_span_context()
    if tracer is None or led is None or not mine.is_valid or led.trace_id == mine.trace_id:
        return span
    if _has_own():
        span.add_link(led)
        return span
    return tracer.start_span(name, _under(led), attributes=attributes, start_time=began(span))


def began(span: Span) -> int | None:
    """Start time of a span, in nanoseconds; None if it is not recorded."""
    return getattr(span, "start_time", None)


def fail(span: Span, error: BaseException) -> None:
    """Mark a span as failed. Keeps the kind of the error, and not its text, which may contain anything."""
    span.set_attribute("error.type", getattr(error, "reason", type(error).__name__))
    span.set_status(StatusCode.ERROR, type(error).__name__)


def running(span: Span) -> AbstractContextManager[Span]:
    """Make a span current in the block, in one thread or task, and end it with the block."""
    return nullcontext(span) if span is INVALID_SPAN else _running(span)


@contextmanager
def _running(span: Span) -> Iterator[Span]:
    token = context.attach(trace.set_span_in_context(span))
    try:
        yield span
    except Exception as error:
        fail(span, error)
        raise
    finally:
        context.detach(token)
        span.end()


def span(name: str, attributes: Attributes = None, *, origin: str = "") -> AbstractContextManager[Span]:
    """Run the block in a new span. See `begin` and `running`."""
    return running(begin(name, attributes, origin=origin))


def child(span: Span, name: str, attributes: Attributes = None) -> AbstractContextManager[Span]:
    """Run the block in a span within another one. See `running`."""
    return running(within(span, name, attributes))


def traceparent(span: Span) -> str:
    """Header with which other processes continue a span; empty if it is not recorded."""
    return canonical(span.get_span_context())


def headers(span: Span | None = None) -> tuple[tuple[str, str], ...]:
    """Metadata for calls that belong to a span, by default the current one; empty outside of spans."""
    said = traceparent(trace.get_current_span() if span is None else span)
    return ((HEADER, said),) if said else ()


def _has_own() -> bool:
    return trace.get_current_span().get_span_context().is_valid


def _under(parent: SpanContext) -> context.Context:
    return trace.set_span_in_context(NonRecordingSpan(parent), context.Context())
