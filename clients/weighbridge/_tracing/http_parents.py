"""Trace parents of HTTP requests, for OpenTelemetry's instrumentation. Imported where tracing is on.

Of what a caller says of its trace the `traceparent` counts, as over gRPC. OpenTelemetry would keep its `tracestate` with each span, up to 8 KiB of it,
and write what is malformed in that or in `baggage` into the log, once for each of them: whoever reaches the port could fill memory and disk.
"""

from __future__ import annotations

from opentelemetry.context import Context
from opentelemetry.propagators.textmap import CarrierT, Getter, default_getter
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from weighbridge._tracing.traceparent import HEADER

_LENGTH = 55
"""Of version 00, the only one that there is."""


class TraceParents(TraceContextTextMapPropagator):
    """OpenTelemetry's, which is shown nothing else."""

    def extract(
        self, carrier: CarrierT, context: Context | None = None, getter: Getter[CarrierT] = default_getter
    ) -> Context:
        """The context of a request: its caller's span, if it says just one."""
        found = getter.get(carrier, HEADER) or []
        if len(found) != 1 or len(found[0]) != _LENGTH:
            return Context() if context is None else context
        return super().extract({HEADER: found[0]}, context)
