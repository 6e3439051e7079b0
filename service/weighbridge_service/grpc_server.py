"""The gRPC server: handlers, health, reflection, limits."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from prometheus_client import Counter

from weighbridge import rpc
from weighbridge.errors import Unavailable
from weighbridge.v1 import (
    checkpoint_service_pb2,
    checkpoint_service_pb2_grpc,
    local_lane_pb2,
    local_lane_pb2_grpc,
    model_service_pb2,
    model_service_pb2_grpc,
    replica_service_pb2,
    replica_service_pb2_grpc,
    weight_service_pb2,
    weight_service_pb2_grpc,
)
from weighbridge_service.bulk_streams import BulkStreams
from weighbridge_service.grpc_carrying import CarryingInterceptor
from weighbridge_service.grpc_errors import ErrorInterceptor
from weighbridge_service.grpc_handlers import (
    CheckpointHandlers,
    LocalLaneHandlers,
    ModelHandlers,
    Places,
    WeightHandlers,
    patience,
)
from weighbridge_service.lane_server import LaneServer
from weighbridge_service.replicas.handlers import ReplicaHandlers
from weighbridge_service.service import Weighbridge

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
        workers: most threads for calls that are no streams; running streams have as many again, and so have those of replicas.
        connections: most at one time.

    Raises:
        Unavailable: the address cannot be bound.

    Attributes:
        port: the bound port.
        workers: as given.
        calls: how many calls have ended, by method and status code.
        server: has no handlers yet.
    """

    def __init__(self, address: str, workers: int, connections: int) -> None:
        self.workers = workers
        self.calls = Counter(
            "weighbridge_grpc_calls", "gRPC calls that have ended.", ["method", "code"], registry=None
        )
        self._pool = ThreadPoolExecutor(3 * workers, thread_name_prefix="grpc")
        self.server = grpc.server(
            self._pool,
            interceptors=[
                ErrorInterceptor(lambda method, code: self.calls.labels(method, code).inc()),
                CarryingInterceptor(),
            ],
            options=(*_OPTIONS, ("grpc.max_allowed_incoming_connections", connections)),
        )
        try:
            self.port: int = self.server.add_insecure_port(address)
        except RuntimeError as error:
            raise Unavailable(
                f"the gRPC address {address} cannot be bound",
                fix="is another service running? name another --grpc",
            ) from error

    def stop(self, grace: float) -> None:
        """Let running calls end within ``grace`` seconds, then close the port."""
        self.server.stop(grace).wait()
        self._pool.shutdown(wait=False, cancel_futures=True)


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
        server, workers = listener.server, listener.workers
        places = Places(workers)
        streams = BulkStreams(
            service.byte_budget, workers, lambda context: patience(context, service.config.budget_wait)
        )
        model_service_pb2_grpc.add_ModelServiceServicer_to_server(ModelHandlers(service, places), server)
        checkpoint_service_pb2_grpc.add_CheckpointServiceServicer_to_server(
            CheckpointHandlers(service, places, streams), server
        )
        weight_service_pb2_grpc.add_WeightServiceServicer_to_server(WeightHandlers(service, streams), server)
        local_lane_pb2_grpc.add_LocalLaneServiceServicer_to_server(LocalLaneHandlers(lane), server)
        replica_service_pb2_grpc.add_ReplicaServiceServicer_to_server(
            ReplicaHandlers(
                service.intake.home,
                service.shared,
                service.shared,
                streams,
                service.directory.met,
                service.takeovers,
            ),
            server,
        )
        names = [
            module.DESCRIPTOR.services_by_name[name].full_name
            for module, name in (
                (model_service_pb2, "ModelService"),
                (checkpoint_service_pb2, "CheckpointService"),
                (weight_service_pb2, "WeightService"),
                (local_lane_pb2, "LocalLaneService"),
                (replica_service_pb2, "ReplicaService"),
            )
        ]
        self._health = health.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        for name in ("", *names):
            self._health.set(name, health_pb2.HealthCheckResponse.SERVING)
        reflection.enable_server_reflection([*names, health.SERVICE_NAME, reflection.SERVICE_NAME], server)

    def start(self) -> None:
        """Begin to answer."""
        self._listener.server.start()

    def refuse(self) -> None:
        """Tell health checks that no new work should come; calls are still answered."""
        self._health.enter_graceful_shutdown()

    def stop(self, grace: float) -> None:
        """Let running calls end within ``grace`` seconds, then stop."""
        self._listener.stop(grace)
