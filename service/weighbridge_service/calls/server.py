"""Server of the gRPC face: one port on an event loop, for all calls."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

import grpc
from prometheus_client import Counter

from weighbridge import rpc
from weighbridge.errors import Unavailable
from weighbridge.v1 import (
    checkpoint_service_pb2,
    local_lane_pb2,
    model_service_pb2,
    replica_service_pb2,
    weight_service_pb2,
)
from weighbridge_service.bulk_streams import BulkStreams
from weighbridge_service.calls.checkpoint_handlers import CheckpointHandlers
from weighbridge_service.calls.event_loop import EventLoop
from weighbridge_service.calls.health_handlers import HEALTH, REFLECTION, HealthHandlers, reflection_handlers
from weighbridge_service.calls.methods import Methods
from weighbridge_service.calls.model_handlers import ModelHandlers
from weighbridge_service.calls.watches import Watches
from weighbridge_service.calls.weight_handlers import LocalLaneHandlers, WeightHandlers
from weighbridge_service.calls.workers import Workers
from weighbridge_service.lane_server import LaneServer
from weighbridge_service.replicas.handlers import ReplicaHandlers
from weighbridge_service.service import Weighbridge

_QUICK_THREADS = 32
_LONG_THREADS = 8
_LINE = 4096
"""Calls that wait for a thread."""

_OPTIONS: tuple[tuple[str, int], ...] = (
    *rpc.CHANNEL_OPTIONS,
    ("grpc.so_reuseport", 0),  # a second service on the same port is an error, not a surprise
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # a connection that never says what it wants, or has not wanted anything for long, is given up; clients connect again by themselves
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.max_connection_idle_ms", 600_000),
)


class GrpcListener:
    """A bound port, and the server that will answer there.

    Args:
        address: ``host:port``; port 0 takes a free one.
        connections: most at one time.

    Raises:
        Unavailable: the address cannot be bound.

    Attributes:
        port: the bound port.
        calls: how many calls have ended, by method and status code.
        loop: on which the server runs.
        server: has no handlers yet.
    """

    def __init__(self, address: str, connections: int) -> None:
        self.calls = Counter(
            "weighbridge_grpc_calls", "gRPC calls that have ended.", ["method", "code"], registry=None
        )
        self.loop = EventLoop("grpc")
        try:
            self.server, self.port = self.loop.run(_bound(address, connections))
        except BaseException:
            self.loop.stop()
            raise

    def answer(self, handlers: Iterable[grpc.GenericRpcHandler[bytes, bytes]]) -> None:
        """Begin to answer calls of these methods."""

        async def begin() -> None:
            self.server.add_generic_rpc_handlers(tuple(handlers))
            await self.server.start()

        self.loop.run(begin())

    def count(self, method: str, code: str) -> None:
        """A call has ended."""
        self.calls.labels(method, code).inc()

    def stop(self, grace: float) -> None:
        """Let running calls end within ``grace`` seconds, then close the port."""
        if not self.loop.loop.is_closed():
            self.loop.run(self.server.stop(grace))
            self.loop.stop()


async def _bound(address: str, connections: int) -> tuple[grpc.aio.Server, int]:
    server = grpc.aio.server(options=(*_OPTIONS, ("grpc.max_allowed_incoming_connections", connections)))
    try:
        return server, server.add_insecure_port(address)
    except RuntimeError as error:
        raise Unavailable(
            f"the gRPC address {address} cannot be bound",
            fix="is another service running? name another --grpc",
        ) from error


class GrpcServer:
    """The service's gRPC face.

    Args:
        listener: where it answers.
        service: what it is the face of.
        lane: what processes of this machine are told of.
    """

    def __init__(self, listener: GrpcListener, service: Weighbridge, lane: LaneServer) -> None:
        self._listener = listener
        self.port = listener.port
        loop = listener.loop.loop
        most = service.config.grpc_workers
        self._workers = (
            Workers("grpc-quick", _QUICK_THREADS, _LINE),
            Workers("grpc-long", _LONG_THREADS, _LINE),
            Workers("grpc-stream", 2 * most, _LINE),
        )
        quick, long, streams = self._workers
        methods = Methods(loop, quick, long, streams, listener.count)
        self._stack = ExitStack()
        watches = Watches(service.catalog, quick)
        self._stack.enter_context(watches.listening(loop))
        bulk = BulkStreams(service.byte_budget, most, service.config.budget_wait)
        self._health = HealthHandlers()
        found: list[tuple[Any, str, object]] = [
            (model_service_pb2, "ModelService", ModelHandlers(service, methods, watches)),
            (checkpoint_service_pb2, "CheckpointService", CheckpointHandlers(service, methods, bulk)),
            (weight_service_pb2, "WeightService", WeightHandlers(service, bulk)),
            (local_lane_pb2, "LocalLaneService", LocalLaneHandlers(lane)),
            (
                replica_service_pb2,
                "ReplicaService",
                ReplicaHandlers(
                    service.intake.home,
                    service.shared,
                    service.shared,
                    bulk,
                    service.directory.met,
                    service.takeovers,
                ),
            ),
        ]
        contract = [(module.DESCRIPTOR.services_by_name[name], handlers) for module, name, handlers in found]
        names = [descriptor.full_name for descriptor, _ in contract]
        self._health.serve(names)
        reflection = reflection_handlers([*names, HEALTH.full_name, REFLECTION.full_name])
        contract += [(HEALTH, self._health), (REFLECTION, reflection)]
        self._handlers = [methods.of(descriptor, handlers) for descriptor, handlers in contract]

    def start(self) -> None:
        """Begin to answer."""
        self._listener.answer(self._handlers)

    def refuse(self) -> None:
        """Tell health checks that no new work should come; calls are still answered."""
        self._listener.loop.loop.call_soon_threadsafe(self._health.refuse)

    def stop(self, grace: float) -> None:
        """Let running calls end within ``grace`` seconds, then stop."""
        self._listener.stop(grace)
        self._stack.close()
        for workers in self._workers:
            workers.close()
