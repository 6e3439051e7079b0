"""Trace parent: the W3C header that names the span of a call.

Source: Trace Context, https://www.w3.org/TR/trace-context/, section 3.2.
"""

from __future__ import annotations

from collections.abc import Iterable

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.propagators.textmap import CarrierT, Getter, default_getter
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

HEADER = "traceparent"
"""Key in a call's metadata."""
_LENGTH = 55
"""Length of version 00, the only one defined."""


class TraceParents(TraceContextTextMapPropagator):
    """OpenTelemetry's reader of request headers, restricted to this header.

    Otherwise it would keep a caller's `tracestate` with each span, up to 8 KiB, and log malformed entries of it and of
    `baggage`, one by one: any client that reaches the port could fill memory and disk.
    """

    def extract(
        self, carrier: CarrierT, context: Context | None = None, getter: Getter[CarrierT] = default_getter
    ) -> Context:
        """Context of a request. It contains the caller's span if the request has exactly one ``traceparent`` header."""
        found = getter.get(carrier, HEADER) or []
        if len(found) != 1 or len(found[0]) != _LENGTH:
            return Context() if context is None else context
        return super().extract({HEADER: found[0]}, context)


_READER = TraceParents()


def parse(text: str) -> trace.SpanContext | None:
    """The span that a header names; None if it is malformed or the span is not recorded, as neither is continued."""
    found = trace.get_current_span(_READER.extract({HEADER: text}, Context())).get_span_context()
    return found if found.is_valid and found.trace_flags.sampled else None


def canonical(span: trace.SpanContext | None) -> str:
    """The header for a span; empty if there is none, or it is not recorded."""
    if span is None or not span.is_valid or not span.trace_flags.sampled:
        return ""
    return f"00-{span.trace_id:032x}-{span.span_id:016x}-01"


def in_metadata(metadata: Iterable[tuple[str, str | bytes]] | None) -> str:
    """The header in a call's metadata, in canonical form; empty if there is none, or several."""
    shown = [value for key, value in metadata or () if key == HEADER]
    return canonical(parse(shown[0])) if len(shown) == 1 and isinstance(shown[0], str) else ""
