"""Trace parent: the W3C header that says which span a call belongs to. Source: Trace Context, https://www.w3.org/TR/trace-context/, section 3.2."""

from __future__ import annotations

from collections.abc import Iterable

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.propagators.textmap import CarrierT, Getter, default_getter
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

HEADER = "traceparent"
"""Key in a call's metadata."""
_LENGTH = 55
"""Of version 00, the only one that there is."""


class TraceParents(TraceContextTextMapPropagator):
    """OpenTelemetry's reader of requests' headers, which is shown this one alone.

    It would keep a caller's `tracestate` with each span, up to 8 KiB of it, and write what is malformed in that or in `baggage` into the log, once
    for each of them: whoever reaches the port could fill memory and disk.
    """

    def extract(
        self, carrier: CarrierT, context: Context | None = None, getter: Getter[CarrierT] = default_getter
    ) -> Context:
        """The context of a request: its caller's span, if it says just one."""
        found = getter.get(carrier, HEADER) or []
        if len(found) != 1 or len(found[0]) != _LENGTH:
            return Context() if context is None else context
        return super().extract({HEADER: found[0]}, context)


_READER = TraceParents()


def parse(text: str) -> trace.SpanContext | None:
    """The span that a header names; None if it is malformed, or the span is not recorded: nothing continues either."""
    found = trace.get_current_span(_READER.extract({HEADER: text}, Context())).get_span_context()
    return found if found.is_valid and found.trace_flags.sampled else None


def canonical(span: trace.SpanContext | None) -> str:
    """The header that names a span; empty if there is none, or it is not recorded."""
    if span is None or not span.is_valid or not span.trace_flags.sampled:
        return ""
    return f"00-{span.trace_id:032x}-{span.span_id:016x}-01"


def in_metadata(metadata: Iterable[tuple[str, str | bytes]] | None) -> str:
    """The header among a call's metadata, as it is kept; empty if there is none, or several."""
    shown = [value for key, value in metadata or () if key == HEADER]
    return canonical(parse(shown[0])) if len(shown) == 1 and isinstance(shown[0], str) else ""
