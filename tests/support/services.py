"""A real service on loopback, for tests: handlers, sockets and store as in production, in this process."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.forked import ForkedPython
from tests.support.raw_clients import TinyModel
from weighbridge import TrainerClient
from weighbridge_service.access.certificates import Certificates
from weighbridge_service.api.grpc.engine_handlers import engine_service
from weighbridge_service.api.grpc.server import DEFAULT_LIMITS, CallLimits, GrpcListener, GrpcServer
from weighbridge_service.api.http.metrics import Metrics
from weighbridge_service.api.lane.server import OFF, LaneServer
from weighbridge_service.health import Health
from weighbridge_service.metrics.instruments import CallInstruments
from weighbridge_service.push.machine.phases import BEFORE_SEALED
from weighbridge_service.runtime.config import ServiceConfig
from weighbridge_service.service import Weighbridge

_READY = re.compile(r"weighbridge serving gRPC on (\S+), HTTP on (\S+), store .*\n")


class RunningService:
    """A service and its gRPC address.

    A client on the service's machine would use shared memory. By default this service has no local socket, so that
    tests of gRPC need no setting against it; and weights have no port of their own, so that a proxy before the service
    sees all gRPC traffic.
    """

    def __init__(
        self,
        store: Path | str,
        *,
        lane_clients: int = 1024,
        http: str = "",
        limits: CallLimits = DEFAULT_LIMITS,
        **settings: Any,
    ) -> None:
        defaults: dict[str, Any] = {
            "memory_budget": 1 << 30,
            "drain_seconds": 5.0,
            "most_streams": 64,
            "local_socket": OFF,
            "bulk_port": OFF,
        }
        config = ServiceConfig(store, **{**defaults, **settings})
        certificates = None if config.tls is None else Certificates(config.tls)
        calls = CallInstruments()
        listener = GrpcListener("127.0.0.1:0", 4096, config.bulk_port, certificates, calls.count)
        try:
            self.service = Weighbridge(config, listener.port)
        except BaseException:
            listener.stop(0.0)
            raise
        self.lane = LaneServer(self.service, config.local_socket, lane_clients)
        self.health = Health.of(self.service)
        self.metrics = Metrics(self.service, self.lane, calls, self.health)
        engines = self.service.engines
        self.grpc = GrpcServer(
            listener, self.service, self.lane, http, limits, [engine_service(engines)], engines.heard
        )
        self.grpc.start()
        self.address = f"127.0.0.1:{self.grpc.port}"

    def stop(self) -> None:
        self.health.close()
        self._wait_for_sealed()
        self.service.intake.drain(0.0)
        self.grpc.stop(0.5)
        self.lane.stop()
        self.service.close()

    def _wait_for_sealed(self) -> None:
        """Wait for versions that have all their ranks. To others none comes any more, now that a test is over."""
        end = time.monotonic() + self.service.config.drain_seconds
        for session in self.service.registry.all():
            if session.state.phase not in BEFORE_SEALED:
                session.wait_finished(max(end - time.monotonic(), 0.0))


@contextmanager
def running_service(
    store: Path | str, models: Mapping[str, Mapping[str, bytes]] | None = None, **settings: Any
) -> Iterator[RunningService]:
    """A service over this store, with these models registered by their files, drained and stopped in the end."""
    running = RunningService(store, **settings)
    try:
        if models:
            with TrainerClient(running.address) as trainer:
                for name, files in models.items():
                    trainer.register_files(name, files)
        yield running
    finally:
        running.stop()


@dataclass(frozen=True)
class ServiceProcess:
    """``weighbridge serve`` in a process of its own.

    Attributes:
        process: it.
        ready: the line that it has said when it was.
        address: address for gRPC.
        url: URL for HTTP.
    """

    process: ForkedPython
    ready: str
    address: str
    url: str

    def stop(self) -> int:
        """Tell it to end, and wait for that; its exit code."""
        self.process.terminate()
        return self.process.wait(60)


@contextmanager
def service_process(
    store: Path | str, *options: object, stderr: int = 2, environment: Mapping[str, str] | None = None
) -> Iterator[ServiceProcess]:
    """Such a process over this store, stopped in the end.

    Args:
        store: its store.
        options: options of the command.
        stderr, environment: as for `ForkedPython`.
    """
    line = ("weighbridge", "serve", "--grpc", "127.0.0.1:0", "--http", "127.0.0.1:0", "--store", store)
    with ForkedPython("-m", *map(str, (*line, *options)), stderr=stderr, environment=environment) as process:
        try:
            ready = process.stdout.readline()
            found = _READY.fullmatch(ready)
            assert found, ready
            yield ServiceProcess(process, ready, *found.groups())
        finally:
            process.terminate()


@dataclass(frozen=True)
class FamilyService:
    """A service that maps families, in this process or in one of another Python environment.

    Attributes:
        address: address for gRPC.
        store: its folder.
    """

    address: str
    store: Path


@contextmanager
def family_service(store: Path) -> Iterator[FamilyService]:
    """A service over this store, run by ``WEIGHBRIDGE_SERVICE_PYTHON`` if that names a Python: its transformers may be
    others.
    """
    python = os.environ.get("WEIGHBRIDGE_SERVICE_PYTHON")
    if python is None:
        with running_service(store) as running:
            yield FamilyService(running.address, store)
        return
    line = [
        python,
        "-m",
        "weighbridge",
        "serve",
        "--grpc",
        "127.0.0.1:0",
        "--http",
        "127.0.0.1:0",
        "--store",
        str(store),
    ]
    with subprocess.Popen([*line, "--memory-budget", "1GiB"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        ready = process.stdout.readline()
        try:
            yield FamilyService(ready.partition(" gRPC on ")[2].partition(",")[0], store)
        finally:
            process.terminate()


@contextmanager
def lane_service(folder: Path, model: str, source: TinyModel, **settings: Any) -> Iterator[RunningService]:
    """A service with a local lane, where a model is registered."""
    with running_service(
        folder / "store", {model: source.files}, local_socket=str(folder / "lane.sock"), **settings
    ) as running:
        yield running
