"""Export of spans by OpenTelemetry's SDK, which is in the extra ``tracing`` and imported only where spans are
exported.
"""

from __future__ import annotations

import atexit
import os
import threading
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from weighbridge.errors import InvalidArgument

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
"""Environment variables of the collector's address; the first that is set counts."""
_GRPC, _HTTP = "grpc", "http/protobuf"
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
"""Environment variables of the protocol; the first that is set counts."""
_EXIT_SECONDS = 2.0
"""Seconds for which an exiting process waits for a collector that does not answer."""


def exporting(service: str, endpoint: str) -> TracerProvider:
    """A provider that sends spans to a collector; it leaves the application's own provider, if there is one, alone.

    Spans are sent by a thread, in batches; those that a collector does not take in time are dropped.

    Args:
        service: name of the process, unless the environment has another one.
        endpoint: the collector's OTLP address; empty for that of the environment.

    Raises:
        ImportError: packages of the extra are missing.
        InvalidArgument: that is no address, or there is no such protocol.
    """
    from opentelemetry.sdk.resources import SERVICE_NAME, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    named = os.environ.get("OTEL_SERVICE_NAME") or "service.name=" in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    resource = Resource.create({} if named else {SERVICE_NAME: service})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(_exporter(endpoint)))

    def end() -> None:
        ending = threading.Thread(target=provider.shutdown, name="traces-end", daemon=True)
        ending.start()
        ending.join(_EXIT_SECONDS)

    atexit.register(end)
    return provider


def _exporter(endpoint: str) -> SpanExporter:
    from opentelemetry.sdk.trace.export import ConsoleSpanExporter

    if not endpoint and os.environ.get("OTEL_TRACES_EXPORTER", "").strip().lower() == "console":
        return ConsoleSpanExporter()
    protocol = next((found for name in _PROTOCOLS if (found := os.environ.get(name, "").strip())), _GRPC)
    if protocol not in (_GRPC, _HTTP):
        raise InvalidArgument(
            f"OTLP is sent over {_GRPC} or {_HTTP}, not over {protocol[:40]!r}",
            fix=f"set {_PROTOCOLS[1]} to one of these",
        )
    if endpoint and (urlsplit(endpoint).scheme not in ("http", "https") or not urlsplit(endpoint).hostname):
        raise InvalidArgument(
            f"{endpoint.rpartition('@')[2][:80]!r} is not the URL of a collector",
            fix="as in http://127.0.0.1:4317",
        )
    # gRPC ignores it, and OpenTelemetry logs the address
    if protocol == _GRPC and "@" in (endpoint or next(filter(None, map(os.environ.get, ENDPOINTS)), "")):
        raise InvalidArgument(
            "the URL of the collector contains a user name or a password, which gRPC does not send",
            fix="set OTEL_EXPORTER_OTLP_HEADERS",
        )
    if protocol == _HTTP:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as ByHttp

        return ByHttp(endpoint=f"{endpoint.rstrip('/')}/v1/traces") if endpoint else ByHttp()
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as ByGrpc

    return ByGrpc(endpoint=endpoint or None)
