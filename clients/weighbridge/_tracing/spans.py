"""Spans of this process, by OpenTelemetry's API. Where tracing is off, each is its `INVALID_SPAN`, which does nothing, and so are those within it.

One rule says where a span belongs: who has a span of its own, say an application's training step, continues that one's trace, and links to what
led to it; who has none continues the trace of what led to it. Attributes have no secrets, neither tokens nor URLs; names are of few kinds.
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
    """A span that begins now.

    Args:
        name, attributes: as OpenTelemetry has them.
        origin: the traceparent of what led to it: its parent if this process has no span of its own now, and linked to if it has.
    """
    tracer = OF_PROCESS.tracer()
    if tracer is None:
        return INVALID_SPAN
    led = parse(origin)
    if led is None or _has_own():
        return tracer.start_span(name, attributes=attributes, links=[trace.Link(led)] if led else None)
    return tracer.start_span(name, _under(led), attributes=attributes)


def continuing(
    name: str, attributes: Attributes, traceparent: str, kind: SpanKind = SpanKind.INTERNAL
) -> Span:
    """A span under another process's, whatever this thread is at; nothing if that one is not recorded: its trace is that process's to begin."""
    tracer, parent = OF_PROCESS.tracer(), parse(traceparent)
    if tracer is None or parent is None:
        return INVALID_SPAN
    return tracer.start_span(name, _under(parent), kind, attributes)


def within(span: Span, name: str, attributes: Attributes = None, *, start_time: int | None = None) -> Span:
    """A span in another one."""
    tracer = OF_PROCESS.tracer() if span.get_span_context().is_valid else None
    if tracer is None:
        return INVALID_SPAN
    return tracer.start_span(
        name, trace.set_span_in_context(span), attributes=attributes, start_time=start_time
    )


def moved(span: Span, name: str, attributes: Attributes, traceparent: str) -> Span:
    """A span that `begin` has begun, once it is known what led to it: if it is a trace of its own, another one takes its place from its beginning
    on, in the trace of that, and it is never told."""
    tracer, led, mine = OF_PROCESS.tracer(), parse(traceparent), span.get_span_context()
    if tracer is None or led is None or not mine.is_valid or led.trace_id == mine.trace_id:
        return span
    if _has_own():
        span.add_link(led)
        return span
    return tracer.start_span(name, _under(led), attributes=attributes, start_time=began(span))


def began(span: Span) -> int | None:
    """When a span has begun, in nanoseconds; None if it is not recorded."""
    return getattr(span, "start_time", None)


def fail(span: Span, error: BaseException) -> None:
    """Say of a span that it has failed. Of the error its kind is kept, and not its text, which may have been made of anything."""
    span.set_attribute("error.type", getattr(error, "reason", type(error).__name__))
    span.set_status(StatusCode.ERROR, type(error).__name__)


def running(span: Span) -> AbstractContextManager[Span]:
    """A span that lasts for as long as the block runs, and to which what the block calls belongs, where that runs in one thread or task."""
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
    """A span for as long as the block runs. See `begin` and `running`."""
    return running(begin(name, attributes, origin=origin))


def child(span: Span, name: str, attributes: Attributes = None) -> AbstractContextManager[Span]:
    """A span in another one, for as long as the block runs. See `running`."""
    return running(within(span, name, attributes))


def traceparent(span: Span) -> str:
    """The header by which other processes continue a span; empty if it is not recorded."""
    return canonical(span.get_span_context())


def headers(span: Span | None = None) -> tuple[tuple[str, str], ...]:
    """Metadata of calls that belong to a span; without one, to that of this thread or task. None outside of spans."""
    said = traceparent(trace.get_current_span() if span is None else span)
    return ((HEADER, said),) if said else ()


def _has_own() -> bool:
    return trace.get_current_span().get_span_context().is_valid


def _under(parent: SpanContext) -> context.Context:
    return trace.set_span_in_context(NonRecordingSpan(parent), context.Context())
