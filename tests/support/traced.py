"""Tracing of this process whose spans tests look at."""

from __future__ import annotations

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, ParentBased, Sampler

from weighbridge._tracing import spans
from weighbridge._tracing.settings import TracingState


class Traced:
    """Tracing by a provider whose spans can be looked at."""

    def __init__(self, sampler: Sampler = ALWAYS_ON) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider(sampler=ParentBased(sampler), shutdown_on_exit=False)
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracer = self.provider.get_tracer("application")

    def ended(self) -> dict[str, ReadableSpan]:
        return {span.name: span for span in self.exporter.get_finished_spans()}


def turn_on(monkeypatch: pytest.MonkeyPatch, found: Traced) -> None:
    monkeypatch.setattr(spans, "OF_PROCESS", TracingState(found.provider))


def ids(span: ReadableSpan) -> tuple[int, int | None]:
    """The trace, and the parent's id."""
    assert span.context is not None
    return span.context.trace_id, span.parent.span_id if span.parent else None
