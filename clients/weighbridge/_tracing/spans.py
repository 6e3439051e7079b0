"""Spans of this process. Where tracing is off, each function returns at once what does nothing, and OpenTelemetry is not imported.

One rule says where a span belongs: who has a span of its own, say an application's training step, continues that one's trace, and links to what
led to it; who has none continues the trace of what led to it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

from weighbridge._tracing.settings import OF_PROCESS
from weighbridge._tracing.span import NO_ATTRIBUTES, Attributes, Headers, Span

OFF = Span()
"""The span of a process where tracing is off."""


def begin(name: str, attributes: Attributes = NO_ATTRIBUTES, *, origin: str = "") -> Span:
    """A span that begins now.

    Args:
        name: of few kinds.
        attributes: what is said of it. No secrets: neither tokens nor URLs.
        origin: the traceparent of what led to it: its parent if this process has no span of its own now, and linked to if it has.
    """
    tracing = OF_PROCESS.tracing()
    return OFF if tracing is None else tracing.begin(name, attributes, origin)


def answering(name: str, attributes: Attributes, traceparent: str) -> Span:
    """The span of a call that is answered here, under that of its caller; nothing if the caller records none: its trace is the caller's to begin."""
    tracing = OF_PROCESS.tracing() if traceparent else None
    return OFF if tracing is None else tracing.begin(name, attributes, traceparent, under=True, server=True)


def continuing(name: str, attributes: Attributes, traceparent: str) -> Span:
    """A span under another process's, whatever this thread is at; nothing if that one is not recorded."""
    tracing = OF_PROCESS.tracing() if traceparent else None
    return OFF if tracing is None else tracing.begin(name, attributes, traceparent, under=True)


def span(
    name: str, attributes: Attributes = NO_ATTRIBUTES, *, origin: str = ""
) -> AbstractContextManager[Span]:
    """A span for as long as the block runs, to which what the block calls belongs. See `begin`."""
    return begin(name, attributes, origin=origin).running()


def headers() -> Headers:
    """Metadata of a call that is made now; none outside of spans."""
    tracing = OF_PROCESS.tracing()
    return () if tracing is None else tracing.headers()
