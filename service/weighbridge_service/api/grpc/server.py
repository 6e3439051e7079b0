"""gRPC server of the service: the known port for all calls, on an event loop, and a separate port for streams of
weights.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import grpc

from weighbridge._transport import rpc
from weighbridge.errors import InvalidArgument, Unavailable
from weighbridge.v1 import (
    bulk_service_pb2,
    checkpoint_service_pb2,
    local_lane_pb2,
    model_service_pb2,
    replica_service_pb2,
    weight_service_pb2,
)
from weighbridge_service.access.certificates import Certificates
from weighbridge_service.admission.message_waits import MessageWaits
from weighbridge_service.admission.tickets import Tickets
from weighbridge_service.admission.turns import Turns
from weighbridge_service.api.bodies import Bodies
from weighbridge_service.api.grpc.bulk_server import BulkListener
from weighbridge_service.api.grpc.bulk_streams import BulkStreams
from weighbridge_service.api.grpc.checkpoint_handlers import CheckpointHandlers
from weighbridge_service.api.grpc.event_loop import EventLoop
from weighbridge_service.api.grpc.health_handlers import (
    HEALTH,
    REFLECTION,
    HealthHandlers,
    reflection_handlers,
)
from weighbridge_service.api.grpc.method import Behaviours, Count, Supervision, methods_of
from weighbridge_service.api.grpc.methods import Methods
from weighbridge_service.api.grpc.model_handlers import ModelHandlers
from weighbridge_service.api.grpc.operation_handlers import operation_handlers
from weighbridge_service.api.grpc.replica_handlers import ReplicaHandlers
from weighbridge_service.api.grpc.requests import RequestLimits
from weighbridge_service.api.grpc.watches import Watches
from weighbridge_service.api.grpc.weight_handlers import BulkHandlers, LocalLaneHandlers, WeightHandlers
from weighbridge_service.api.lane.server import LaneServer
from weighbridge_service.core import Core
from weighbridge_storage.threads import ThreadPool

_QUICK_THREADS = 32
_LONG_THREADS = 8
_PLANNING_THREADS = 4
"""A small number, because a planning thread holds the interpreter lock: with 8 threads, other calls waited twice as
long when a thousand pulls began at once."""
_REPLICA_THREADS = 32
_LAST_PORT = 65535

_LIMIT = "grpc.max_receive_message_length"
_MESSAGE_BYTES = 2 << 20
"""Maximum size of a message; larger requests are sent in parts (`weighbridge._transport.request_parts`)."""

_OPTIONS: tuple[tuple[str, int], ...] = (
    *(option for option in rpc.CHANNEL_OPTIONS if option[0] != _LIMIT),
    (_LIMIT, _MESSAGE_BYTES),
    ("grpc.so_reuseport", 0),  # a second service on the same port is an error, not a surprise
    # gRPC 1.76 would answer each early PING with an error, and keep 2.7 kB for it until the peer reads the connection;
    # of the PINGs' answers it keeps at most 10,000, and then stops reading
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.keepalive_permit_without_calls", 1),
    # close connections that do not complete the handshake or have been idle for long; clients reconnect automatically
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.max_connection_idle_ms", 600_000),
)


AUTO, OFF = "auto", "off"


@dataclass(frozen=True, slots=True)
class CallLimits:
    """Limits of calls.

    Attributes:
        line: maximum number of calls that wait for a thread of one pool.
        watches: maximum number of concurrent watches.
        requests: limits of requests while they are received.
    """

    line: int = 4096
    watches: int = 16_384
    requests: RequestLimits = field(default_factory=RequestLimits)


DEFAULT_LIMITS = CallLimits()


def bulk_ports(wanted: str, port: int) -> tuple[int, ...]:
    """Candidate ports for streams of weights. The server uses the first free one.

    Empty if streams of weights have no separate port.

    Args:
        wanted: a number; ``auto`` for the port after ``port``, or any free port if that one is in use; or ``off``.
        port: the port for all calls.

    Raises:
        InvalidArgument: ``wanted`` is not a port number, ``auto`` or ``off``.
    """
    if wanted == OFF:
        return ()
    if wanted == AUTO:
        return (port + 1, 0) if port < _LAST_PORT else (0,)
    if not wanted.isascii() or not wanted.isdigit() or int(wanted[:6]) > _LAST_PORT:
        raise InvalidArgument(f"{wanted[:20]!r} is not a port", fix="name a number, or auto, or off")
    return (int(wanted),)


class GrpcListener:
    """Bound ports, and the servers that will use them.

    Args:
        address: ``host:port``; port 0 takes a free one.
        connections: maximum number of concurrent connections at each port.
        bulk: see `bulk_ports`.
        certificates: certificates of the service; None to serve without TLS.
        count: counts ended calls.

    Raises:
        InvalidArgument: ``bulk`` is not valid.
        Unavailable: an address cannot be bound.

    Attributes:
        port: the port for all calls.
        bulk: listener for streams of weights; None if they have no separate port.
        count: counts ended calls.
        loop: the event loop that serves control calls.
    """

    def __init__(
        self,
        address: str,
        connections: int,
        bulk: str = OFF,
        certificates: Certificates | None = None,
        count: Count = lambda *_: None,
    ) -> None:
        self.count = count
        options = (*_OPTIONS, ("grpc.max_allowed_incoming_connections", connections))
        self.bulk: BulkListener | None = None
        logging.getLogger("grpc._cython.cygrpc").addFilter(_is_news)
        self.loop = EventLoop("grpc")
        try:
            self._server, self.port = self.loop.run(_bound(address, options, certificates))
            ports = bulk_ports(bulk, self.port)
            for i, port in enumerate(ports):
                try:
                    where = f"{address.rpartition(':')[0]}:{port}"
                    self.bulk = BulkListener(where, options, self.count, certificates, known_port=self.port)
                    break
                except Unavailable:
                    if i + 1 == len(ports):
                        raise
        except BaseException:
            self.loop.stop()
            raise

    def answer(self, behaviours: Behaviours) -> None:
        """Start serving calls at the port for all calls."""

        async def begin() -> None:
            self._server.add_generic_rpc_handlers((behaviours,))
            await self._server.start()

        self.loop.run(begin())

    def stop(self, grace: float) -> None:
        """Let running calls end within ``grace`` seconds, then close the ports."""
        if self.loop.loop.is_closed():
            return
        stopping = self.loop.begin(self._server.stop(grace))
        if self.bulk is not None:
            self.bulk.stop(grace)
        stopping.result()
        self.loop.stop()


def _is_news(record: logging.LogRecord) -> bool:
    """Whether to log a record of gRPC.

    Drops the tracebacks of statuses that could not be sent because the caller had disconnected.
    """
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, grpc.aio.InternalError)


OTHER_PORTS = (
    "if another service runs there, use it, or start this one at other ports: "
    "weighbridge serve --grpc 127.0.0.1:50061 --http 127.0.0.1:8081 --store ..."
)
"""The `fix` of the error for an address that cannot be bound."""


async def _bound(
    address: str, options: Iterable[tuple[str, int]], certificates: Certificates | None
) -> tuple[grpc.aio.Server, int]:
    server = grpc.aio.server(options=tuple(options))
    try:
        if certificates is None:
            return server, server.add_insecure_port(address)
        return server, server.add_secure_port(address, certificates.for_grpc())
    except RuntimeError as error:
        raise Unavailable(
            f"the gRPC address {address} cannot be bound: {_why_not_bound(address)}", fix=OTHER_PORTS
        ) from error


def _why_not_bound(address: str) -> str:
    """The system's reason, which gRPC does not report; found by binding the address once more."""
    host, _, port = address.rpartition(":")
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(
            host.strip("[]") or None, int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(where)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else None
        return reason or str(error)
    return "gRPC reports no reason"


class GrpcServer:
    """The service's gRPC server.

    Args:
        listener: its bound ports.
        service: the service.
        lane: the local lane, which `LocalLaneService` describes to clients on this machine.
        http: ``host:port`` of the HTTP server, for clients; empty without one.
        limits: limits of calls.
        more: services of other packages, each with the contract's module, the service's name in it, and its handlers.
        heard: records engines that have reported to another replica.
    """

    def __init__(
        self,
        listener: GrpcListener,
        service: Core,
        lane: LaneServer,
        http: str = "",
        limits: CallLimits = DEFAULT_LIMITS,
        more: Iterable[tuple[Any, str, object]] = (),
        heard: Callable[[Iterable[replica_service_pb2.ReportedEngine]], None] = lambda _: None,
    ) -> None:
        self._listener = listener
        self.port = listener.port
        loop = listener.loop.loop
        most = service.config.most_streams
        self._pools = quick, long, replicas, streams, planners = (
            _threads("quick", _QUICK_THREADS, limits),
            _threads("long", _LONG_THREADS, limits),
            _threads("replica", _REPLICA_THREADS, limits),
            _threads("stream", 2 * most, limits),
            _threads("plan", _PLANNING_THREADS, limits),
        )
        budget = service.byte_budget
        self._waits = MessageWaits(lambda: sum(budget.in_flight.nbytes.values()))
        quotas = service.quotas.identities
        supervision = Supervision(service.access, service.audit, listener.count, self._waits, limits.requests, quotas)
        methods = Methods(loop, quick, long, replicas, streams, supervision)
        self._streams = streams
        self._stack = ExitStack()
        watches = Watches(service.catalog, quick)
        self._stack.enter_context(watches.listening(loop))
        bulk = BulkStreams(service.byte_budget, most, service.config.budget_wait, planners, quotas)
        self._health = HealthHandlers()
        self._tickets = Tickets(service.key)
        bulk_port = listener.bulk.port if listener.bulk else 0
        found: list[tuple[Any, str, object]] = [
            (bulk_service_pb2, "BulkService", BulkHandlers(self._tickets, bulk_port)),
            (model_service_pb2, "ModelService", ModelHandlers(service, methods, watches, limits.watches)),
            (checkpoint_service_pb2, "CheckpointService", CheckpointHandlers(service, methods, bulk)),
            (weight_service_pb2, "WeightService", WeightHandlers(service, bulk)),
            (local_lane_pb2, "LocalLaneService", LocalLaneHandlers(lane, service.access, http)),
            (
                replica_service_pb2,
                "ReplicaService",
                ReplicaHandlers(
                    service.intake.home,
                    service.shared,
                    service.shared,
                    bulk,
                    service.directory.met,
                    service.replica_left,
                    service.is_leaving,
                    service.takeovers,
                    heard,
                ),
            ),
            *more,
        ]
        contract = [(module.DESCRIPTOR.services_by_name[name], handlers) for module, name, handlers in found]
        names = [descriptor.full_name for descriptor, _ in contract]
        self._health.serve(names)
        reflection = reflection_handlers([*names, HEALTH.full_name, REFLECTION.full_name])
        control = [*contract, (HEALTH, self._health), (REFLECTION, reflection)]
        self._methods = methods_of(control, operation_handlers(Bodies(service)), supervision)
        self._behaviours = methods.handling(self._methods)

    def start(self) -> None:
        """Start serving."""
        self._listener.answer(self._behaviours)
        if self._listener.bulk is not None:
            self._listener.bulk.answer(self._methods, self._tickets, self._streams)

    def refuse(self) -> None:
        """Report ``NOT_SERVING`` to health checks, so that no new work arrives. The server still handles calls."""
        self._listener.loop.loop.call_soon_threadsafe(self._health.refuse)

    def stop(self, grace: float) -> None:
        """Let running calls end within ``grace`` seconds, then stop."""
        self._listener.stop(grace)
        self._stack.close()
        self._waits.close()
        for threads in self._pools:
            threads.close()


def _threads(name: str, most: int, limits: CallLimits) -> ThreadPool:
    return ThreadPool(f"grpc-{name}", most, line=Turns(), most_waiting=limits.line)
