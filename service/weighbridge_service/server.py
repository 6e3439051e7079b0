"""Process of the service: starts all servers over one store, and drains them at the end."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import os
import re
import signal
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from weighbridge._tracing.settings import OF_PROCESS
from weighbridge.errors import InvalidArgument, Unavailable, WeighbridgeError
from weighbridge_service.access.certificates import Certificates
from weighbridge_service.api.grpc.engine_handlers import engine_service
from weighbridge_service.api.grpc.server import OTHER_PORTS, GrpcListener, GrpcServer
from weighbridge_service.api.http.app import create_app
from weighbridge_service.api.http.connections import Listener, connections
from weighbridge_service.api.http.metrics import Metrics
from weighbridge_service.api.http.tracing import trace_requests
from weighbridge_service.api.lane.server import LaneServer
from weighbridge_service.exports.jobs import Exports
from weighbridge_service.health import Health
from weighbridge_service.metrics.instruments import CallInstruments
from weighbridge_service.models.bridge_process import BridgeProcess
from weighbridge_service.models.bridges import made_by
from weighbridge_service.models.library_models import compare_with_library, compared_by
from weighbridge_service.runtime.config import ServiceConfig
from weighbridge_service.runtime.descriptors import Descriptors, raise_limit
from weighbridge_service.runtime.process_memory import collect_rarely, keep_freed_memory, settle
from weighbridge_service.service import Weighbridge
from weighbridge_storage.stores.objects import error_for

log = logging.getLogger(__name__)

_PACKAGES = ("weighbridge", "weighbridge_service", "weighbridge_storage")
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_LINGER_SECONDS = 1.0
"""Seconds for which a drained service still answers, so that the trainer of the last push can ask for its result."""
_GRPC_GRACE_SECONDS = 10.0
"""Seconds for which pulls may continue after a complete drain; after an incomplete one they end at once."""
_HTTP_GRACE_SECONDS = 5
_REQUEST_SECONDS = 10.0
_SWITCH_SECONDS = 0.0005
"""Switch interval of Python threads. Threads that compute digests request the interpreter lock about twice per MiB:
with Python's default of 5 ms, one busy Python thread slowed digests from 0.3 s/GB to 12 s/GB."""
_BACKLOG = 4096
_HOST = re.compile(r"[A-Za-z0-9_.:%-]{1,200}")


class _Server(uvicorn.Server):
    """uvicorn's server with connections from a listener.

    Args:
        config: uvicorn's configuration.
        listener: accepts connections.
        tls: TLS context for all connections; None without TLS.
    """

    def __init__(self, config: uvicorn.Config, listener: Listener, tls: ssl.SSLContext | None) -> None:
        super().__init__(config)
        self._listener = listener
        self._tls = tls

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start the server, and accept connections."""
        await super().startup(sockets)
        self._accepting = asyncio.create_task(self._listener.accept(self._speak, self._tls))

    def _speak(self, leave: Callable[[], None]) -> asyncio.Protocol:
        kind: Any = self.config.http_protocol_class
        connection: Any = kind(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)
        connection.leave = leave
        found: asyncio.Protocol = connection
        return found


class HttpServer:
    """The HTTP server's socket, and its server in a thread of its own.

    Args:
        address: ``host:port``; port 0 takes a free one.
        most: maximum number of concurrent connections.
        request_seconds: timeout for receiving a request's headers.
        certificates: certificates of the service; None to serve without TLS.

    Raises:
        InvalidArgument: ``address`` is not a valid address.
        Unavailable: the address cannot be bound.

    Attributes:
        address: ``host:port`` with the bound port.
        url: the address with its scheme.
    """

    def __init__(
        self,
        address: str,
        most: int,
        request_seconds: float = _REQUEST_SECONDS,
        certificates: Certificates | None = None,
    ) -> None:
        self._certificates = certificates
        self._request_seconds = request_seconds
        host, port = _host_and_port(address)
        try:
            family, kind, protocol, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            self._socket = socket.socket(family, kind, protocol)
            try:
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                self._socket.bind(where)
                self._socket.listen(_BACKLOG)
            except OSError:
                self._socket.close()
                raise
        except OSError as error:
            raise Unavailable(
                f"the HTTP address {address} cannot be bound: {error.strerror}",
                fix=OTHER_PORTS,
            ) from error
        self._listener = Listener(self._socket, most, request_seconds)
        scheme = "http" if certificates is None else "https"
        self.address = _with_port(address, self._socket.getsockname()[1])
        self.url = f"{scheme}://{self.address}"
        self._server: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None

    def start(self, app: ASGIApp) -> None:
        """Begin to answer; returns once it does."""
        certificates = self._certificates
        config = uvicorn.Config(
            app,
            http=connections(self._request_seconds),
            lifespan="off",
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,  # otherwise any process on this machine could fake its address
            timeout_graceful_shutdown=_HTTP_GRACE_SECONDS,
        )
        tls = None if certificates is None else certificates.for_http()
        server = _Server(config, self._listener, tls)
        # not in the main thread, where uvicorn would replace our signal handlers
        thread = threading.Thread(target=server.run, args=([],), name="http", daemon=True)
        thread.start()
        while thread.is_alive() and not server.started:
            time.sleep(0.01)
        self._server, self._thread = server, thread

    def stop(self) -> None:
        """Let running requests end, for a few seconds, then stop."""
        if self._server is not None and self._thread is not None:
            self._server.should_exit = True
            self._listener.stop()
            self._thread.join()
        self._socket.close()


def _host_and_port(address: str) -> tuple[str, int]:
    host, colon, port = address.rpartition(":")
    if not colon or not host or not (port.isascii() and port.isdigit()) or int(port[:6]) > 65535:
        raise InvalidArgument(f"{address[:80]!r} is not an address", fix="write it as host:port, e.g. 127.0.0.1:8080")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _check_private(host: str, config: ServiceConfig) -> None:
    """Refuse to serve without TLS at an address that other machines reach. Raises InvalidArgument."""
    if config.tls is not None or config.insecure:
        return
    try:
        addresses = {found[4][0] for found in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except OSError:
        return  # binding it will fail with the reason
    others = [each for each in addresses if not ipaddress.ip_address(str(each).partition("%")[0]).is_loopback]
    if others:
        raise InvalidArgument(
            f"{host} is an address that other machines reach, and traffic there could be read and changed in transit",
            fix="name a certificate with --tls-cert and --tls-key, or pass --insecure in a network that you trust",
        )


def _check_advertised(address: str) -> None:
    host, _ = _host_and_port(address)
    everywhere = False
    with contextlib.suppress(ValueError):
        everywhere = ipaddress.ip_address(host).is_unspecified
    if everywhere or not _HOST.fullmatch(host):
        raise InvalidArgument(
            f"other services cannot reach this one at {address[:80]!r}",
            fix="advertise this machine's own name or address, e.g. 10.0.0.7:50051",
        )


def _with_port(address: str, port: int) -> str:
    return f"{address.rpartition(':')[0]}:{port}"


def run(config: ServiceConfig, grpc: str, http: str, log_level: str = "info") -> int:
    """Serve until SIGTERM or SIGINT, then drain.

    Prints one line on stdout once gRPC and HTTP answer, and logs to stderr. After the first signal, the service
    completes current pushes and publications, refuses new ones, and cancels exports. The second signal ends the process
    at once.

    Args:
        config: settings of the service.
        grpc: ``host:port`` for gRPC; port 0 takes a free one.
        http: ``host:port`` for HTTP; port 0 takes a free one.
        log_level: ``debug``, ``info``, ``warning`` or ``error``.

    Returns:
        The exit code: 0 if the drain was complete, 1 if it was not or the service could not start.
    """
    configure_logging(log_level)
    shares = Descriptors.of(raise_limit())
    keep_freed_memory()
    collect_rarely()
    sys.setswitchinterval(_SWITCH_SECONDS)
    with _first_signal() as wait_for_signal, contextlib.ExitStack() as stack:
        try:
            OF_PROCESS.service = "weighbridge"
            if config.otlp:
                OF_PROCESS.enable(config.otlp)
            for address in (grpc, http):
                _check_private(_host_and_port(address)[0], config)
            certificates = None if config.tls is None else Certificates(config.tls)
            if config.advertise:
                _check_advertised(config.advertise)
            bridges = BridgeProcess()
            # a process that was forked with mbridge imported creates the bridges itself
            elsewhere = "mbridge" not in sys.modules
            if elsewhere:
                stack.enter_context(made_by(bridges.bridge))
            stack.enter_context(compared_by(bridges.compare if elsewhere else compare_with_library))
            stack.callback(bridges.close)
            http_server = HttpServer(http, shares.http, certificates=certificates)
            stack.callback(http_server.stop)
            calls = CallInstruments()
            listener = GrpcListener(grpc, shares.grpc, config.bulk_port, certificates, calls.count)
            stack.callback(listener.stop, 0.0)
            service = Weighbridge(config, listener.port)
            stack.callback(service.close)
            lane = LaneServer(service, config.local_socket, shares.lane)
            stack.callback(lane.stop)
            grpc_server = GrpcServer(
                listener,
                service,
                lane,
                http_server.address,
                more=[engine_service(service.engines)],
                heard=service.engines.heard,
            )
            exports = Exports(service)
            stack.callback(exports.close)
            health = Health.of(service)
            stack.callback(health.close)
            metrics = Metrics(service, lane, calls, health)
        except (WeighbridgeError, OSError) as error:
            known = (
                error_for(error, f"opening {error.filename or config.store}") if isinstance(error, OSError) else error
            )
            sys.stderr.write(f"weighbridge cannot start: {known}\n")
            return 1
        health.start()
        grpc_server.start()
        app = create_app(service, exports, metrics, health)
        trace_requests(app)
        http_server.start(app)
        sys.stdout.write(
            f"weighbridge serving gRPC on {_with_port(grpc, grpc_server.port)}, HTTP on {http_server.url}, "
            f"store {config.store_shown}\n"
        )
        sys.stdout.flush()
        if listener.bulk is not None:
            log.info("streams of weights go in at port %d", listener.bulk.port)
        if elsewhere:
            try:
                bridges.start()
            except WeighbridgeError as error:  # the first registered model retries
                log.warning("%s", error)
        settle()

        name = signal.Signals(wait_for_signal()).name
        log.info(
            "%s: draining for at most %g s; a second signal ends the service at once",
            name,
            config.drain_seconds,
        )
        grpc_server.refuse()
        clean = service.drain()
        exports.close()
        bridges.close()
        time.sleep(_LINGER_SECONDS)
        grpc_server.stop(_GRPC_GRACE_SECONDS if clean else 0.0)
        http_server.stop()
        log.log(
            logging.INFO if clean else logging.WARNING,
            "drained%s",
            "" if clean else ", but some work was not finished",
        )
        return 0 if clean else 1


def configure_logging(level: str) -> None:
    """Log to stderr.

    Args:
        level: ``debug``, ``info``, ``warning`` or ``error``, for the service's own packages. Libraries log at ``info``
            or above, because boto3's debug messages contain signatures, tokens and bodies.
    """
    logging.basicConfig(stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    own = logging.getLevelNamesMapping()[level.upper()]
    logging.getLogger().setLevel(max(own, logging.INFO))
    for package in _PACKAGES:
        logging.getLogger(package).setLevel(own)


@contextlib.contextmanager
def _first_signal() -> Iterator[Callable[[], int]]:
    """Yield a function that waits for the first SIGTERM or SIGINT; the second ends the process.

    Python runs handlers in the main thread, when it is awake. The kernel may deliver a signal to any thread, and a
    signal just before the main thread falls asleep does not wake it. So a thread reads the signals from a socket
    (`signal.set_wakeup_fd`), independently of the main thread.
    """
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    first: SimpleQueue[int] = SimpleQueue()

    def watch() -> None:
        seen = False
        while numbers := reader.recv(1):
            if numbers[0] not in _SIGNALS:
                continue
            if seen:
                os._exit(128 + numbers[0])
            seen = True
            first.put(numbers[0])

    watching = threading.Thread(target=watch, name="signals", daemon=True)
    watching.start()
    before: dict[signal.Signals, Any] = {}
    before_fd = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    try:
        for number in _SIGNALS:  # the default handlers would end the process
            before[number] = signal.signal(number, lambda *_: None)
        yield first.get
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(before_fd)
        writer.close()
        watching.join()
        reader.close()
