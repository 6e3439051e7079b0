"""A real service on loopback, for tests: handlers, sockets and store as in production, in this process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.raw_clients import TinyModel
from weighbridge import TrainerClient
from weighbridge_service.calls.server import GrpcListener, GrpcServer
from weighbridge_service.config import ServiceConfig
from weighbridge_service.health import Health
from weighbridge_service.lane_server import OFF, LaneServer
from weighbridge_service.metrics import Metrics
from weighbridge_service.service import Weighbridge


class RunningService:
    """A service and its gRPC address.

    Clients would share memory with a service of their own machine. So that tests of what goes by gRPC do not have to say that they are,
    there is no local socket, unless one is asked for; and so that a proxy before the service sees all that goes by gRPC, weights have no
    port of their own.
    """

    def __init__(self, store: Path | str, *, lane_clients: int = 1024, **settings: Any) -> None:
        defaults: dict[str, Any] = {
            "memory_budget": 1 << 30,
            "drain_seconds": 5.0,
            "most_streams": 64,
            "local_socket": OFF,
            "bulk_port": OFF,
        }
        config = ServiceConfig(store, **{**defaults, **settings})
        listener = GrpcListener("127.0.0.1:0", 4096, config.bulk_port)
        try:
            self.service = Weighbridge(config, listener.port)
        except BaseException:
            listener.stop(0.0)
            raise
        self.lane = LaneServer(self.service, config.local_socket, lane_clients)
        self.health = Health.of(self.service)
        self.metrics = Metrics(self.service, self.lane, listener.calls)
        self.grpc = GrpcServer(listener, self.service, self.lane)
        self.grpc.start()
        self.address = f"127.0.0.1:{self.grpc.port}"

    def stop(self) -> None:
        self.health.close()
        self.service.drain()
        self.grpc.stop(0.5)
        self.lane.stop()
        self.service.close()


@contextmanager
def running_service(store: Path | str, **settings: Any) -> Iterator[RunningService]:
    """A service over this store, drained and stopped in the end."""
    running = RunningService(store, **settings)
    try:
        yield running
    finally:
        running.stop()


@contextmanager
def lane_service(folder: Path, model: str, source: TinyModel) -> Iterator[RunningService]:
    """A service with a local lane, where a model is registered."""
    with running_service(folder / "store", local_socket=str(folder / "lane.sock")) as running:
        with TrainerClient(running.address) as trainer:
            trainer.register_files(model, source.files)
        yield running


def eventually(condition: Callable[[], object]) -> None:
    """Wait until something holds that must come to hold."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
