"""Collector of traces: an OTLP receiver over gRPC, which keeps the spans that processes send."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc


@dataclass(frozen=True)
class Seen:
    """A span as it came.

    Attributes:
        service: name of the process.
        name: name of the span.
        trace, id, parent: identities, in hex; no parent is empty.
        links: traces that it links to.
        start, end: nanoseconds since 1970 UTC.
        attributes: attributes of the span.
        failed: whether its status is an error.
        server: whether it is the answer to a call.
    """

    service: str
    name: str
    trace: str
    id: str
    parent: str
    links: tuple[str, ...]
    start: int
    end: int
    attributes: dict[str, Any]
    failed: bool
    server: bool


@dataclass
class Collector:
    """Received spans.

    Attributes:
        endpoint: OTLP address of the collector.
        spans: spans in the order in which they came.
        sent: all requests as they came, byte for byte.
    """

    endpoint: str = ""
    sent: bytes = b""
    spans: list[Seen] = field(default_factory=list)
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def take(self, request: trace_service_pb2.ExportTraceServiceRequest) -> None:
        found = [
            _seen(of_resource.resource, span)
            for of_resource in request.resource_spans
            for scope in of_resource.scope_spans
            for span in scope.spans
        ]
        with self._changed:
            self.spans += found
            self.sent += request.SerializeToString()
            self._changed.notify_all()

    def wait(self, until: Callable[[Sequence[Seen]], bool], seconds: float = 60.0) -> list[Seen]:
        """The spans, once they are those that are waited for."""
        with self._changed:
            assert self._changed.wait_for(lambda: until(self.spans), seconds), listed(self.spans)
            return list(self.spans)

    def named(self, name: str) -> list[Seen]:
        return [span for span in self.spans if span.name == name]


@contextmanager
def collector() -> Iterator[Collector]:
    """A collector on loopback."""
    found = Collector()

    class Servicer(trace_service_pb2_grpc.TraceServiceServicer):  # type: ignore[misc]
        def Export(self, request: Any, context: Any) -> Any:
            found.take(request)
            return trace_service_pb2.ExportTraceServiceResponse()

    server = grpc.server(ThreadPoolExecutor(4))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Servicer(), server)
    found.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield found
    finally:
        server.stop(0).wait()


def sent_to(endpoint: str) -> dict[str, str]:
    """Variables of a process that sends its spans there, soon after they have ended."""
    return {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, "OTEL_BSP_SCHEDULE_DELAY": "100"}


def _seen(resource: Any, span: Any) -> Seen:
    return Seen(
        service=_values(resource.attributes).get("service.name", ""),
        name=span.name,
        trace=span.trace_id.hex(),
        id=span.span_id.hex(),
        parent=span.parent_span_id.hex(),
        links=tuple(link.trace_id.hex() for link in span.links),
        start=span.start_time_unix_nano,
        end=span.end_time_unix_nano,
        attributes=_values(span.attributes),
        failed=span.status.code == 2,
        server=span.kind == 2,
    )


def _values(attributes: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in attributes}


def listed(spans: Sequence[Seen]) -> str:
    """A line for each span, by their beginnings."""
    begun = min((span.start for span in spans), default=time.time_ns())
    return "\n".join(
        (
            f"{(span.start - begun) / 1e6:9.1f} ms {(span.end - span.start) / 1e6:8.1f} ms "
            f"{span.service} {span.name} {span.trace[:6]} {span.id[:6]} < {span.parent[:6]}"
        )
        for span in sorted(spans, key=lambda each: each.start)
    )
