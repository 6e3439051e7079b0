"""A service in a process of its own, on a fixed port, that can be killed and is back within a second."""

from __future__ import annotations

import functools
import multiprocessing
import os
import threading
import time
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import grpc

from tests.support.forked import forking
from tests.support.ports import reserved_port


def serve(
    store: Path | str,
    port: int,
    settings: dict[str, Any],
    file_bytes: int | None,
    credentials: dict[str, str],
) -> None:
    """Serve until killed, or until the process that started this one ends; with ``file_bytes``, versions are cut into
    files of that size.
    """
    # the process that this one is forked from may be older than they are
    os.environ.update(credentials)
    from weighbridge._formats.safetensors_files import lay_out_files
    from weighbridge_service.api.grpc.engine_handlers import engine_service
    from weighbridge_service.api.grpc.server import GrpcListener, GrpcServer
    from weighbridge_service.api.lane.server import LaneServer
    from weighbridge_service.models import registered_model
    from weighbridge_service.runtime.config import ServiceConfig
    from weighbridge_service.service import Weighbridge

    if file_bytes is not None:
        registered_model.lay_out_files = functools.partial(lay_out_files, max_shard_bytes=file_bytes)  # type: ignore[assignment]
    config = ServiceConfig(
        store,
        **{"memory_budget": 1 << 28, "most_streams": 32, "local_socket": "off", "bulk_port": "0", **settings},
    )
    listener = GrpcListener(f"127.0.0.1:{port}", 4096, config.bulk_port)
    service = Weighbridge(config, listener.port)
    lane = LaneServer(service, config.local_socket, 1024)
    server = GrpcServer(listener, service, lane, more=[engine_service(service.engines)], heard=service.engines.heard)
    server.start()
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join(3600)


class KillableService:
    """Starts and kills service processes over one store; all are forked from one that has imported everything.

    Args:
        store: the store's folder, or its location.
        file_bytes: largest file of a version; None for the default.
        settings: settings of the service; ``advertise`` is completed by the port.
    """

    def __init__(self, store: Path | str, *, file_bytes: int | None = None, **settings: Any) -> None:
        self.store = store
        self._file_bytes = file_bytes
        self.port = reserved_port()
        self.address = f"127.0.0.1:{self.port}"
        self.settings = settings
        self._context = forking()
        self._process: ForkServerProcess | None = None

    def start(self, *, wait: bool = True) -> None:
        """Start a process; with ``wait``, return when it answers."""
        credentials = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
        arguments = (self.store, self.port, self.settings, self._file_bytes, credentials)
        self._process = self._context.Process(target=serve, args=arguments, daemon=True)
        self._process.start()
        if wait:
            self._wait_until_ready(self._process)

    def _wait_until_ready(self, process: ForkServerProcess) -> None:
        ready = threading.Event()
        with grpc.insecure_channel(self.address, options=[("grpc.max_reconnect_backoff_ms", 50)]) as channel:
            grpc.channel_ready_future(channel).add_done_callback(lambda _: ready.set())
            deadline = time.monotonic() + 60
            while not ready.wait(0.2):
                assert process.is_alive(), f"the service ended by itself: {process.exitcode}"
                assert time.monotonic() < deadline, f"{self.address} does not answer"

    def kill(self) -> None:
        """End it as ``kill -9`` does."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._process.close()
            self._process = None
