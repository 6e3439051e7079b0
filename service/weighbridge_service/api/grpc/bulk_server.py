"""Server for streams of weights, on a separate port. Each call runs in its own thread and must present a ticket.

Weights that pass through an event loop cost a fifth more CPU time (docs/benchmarks.md). The thread that accepts calls
refuses a call without a ticket, so that the call does not occupy a stream thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import grpc

from weighbridge._transport import bulk_entry
from weighbridge.errors import FailedPrecondition, Unavailable, WeighbridgeError
from weighbridge_service.access.certificates import Certificates
from weighbridge_service.access.peer import Peer
from weighbridge_service.admission.tickets import Tickets
from weighbridge_service.api.grpc.errors import to_status
from weighbridge_service.api.grpc.method import Behaviours, Count, Method
from weighbridge_storage.threads import ThreadPool

_REFUSING_THREADS = 2
_ANYBODY = Peer("bulk")


class BulkListener:
    """A bound port for streams of weights.

    Args:
        address: ``host:port``; port 0 takes a free one.
        options: options of the gRPC server.
        count: receives the status code of each ended call.
        certificates: certificates of the service; None to serve without TLS.
        known_port: the service's port for all other calls.

    Raises:
        Unavailable: the address cannot be bound.

    Attributes:
        port: the bound port.
    """

    def __init__(
        self,
        address: str,
        options: Iterable[tuple[str, int]],
        count: Count,
        certificates: Certificates | None = None,
        *,
        known_port: int = 0,
    ) -> None:
        self._threads = _Threads()
        self._gate = _Gate(count, self._threads.refusing, known_port)
        self._server = grpc.server(self._threads, interceptors=[self._gate], options=tuple(options))
        try:
            if certificates is None:
                self.port: int = self._server.add_insecure_port(address)
            else:
                self.port = self._server.add_secure_port(address, certificates.for_grpc())
        except RuntimeError as error:
            raise Unavailable(
                (
                    f"the service cannot listen at {address}, its port for weights: another "
                    "process uses it, or the address does not belong to this machine"
                ),
                fix=(
                    "name a free port with --bulk-port, or leave it at auto, which finds one; "
                    "with off, weights share the port of --grpc"
                ),
            ) from error

    def answer(self, methods: Iterable[Method], tickets: Tickets, threads: ThreadPool) -> None:
        """Start serving the methods that carry weights.

        Args:
            methods: all methods of the contract.
            tickets: checks the tickets of calls.
            threads: thread pool for streams.
        """
        self._threads.pool = threads
        found = {each.path: partial(self._behave, each) for each in methods if each.carries_weights}
        self._gate.paths, self._gate.tickets = found.keys(), tickets
        self._server.add_generic_rpc_handlers((Behaviours(found),))
        self._server.start()

    def stop(self, grace: float) -> None:
        """Let running calls end within ``grace`` seconds, then close the port."""
        self._server.stop(grace).wait()
        self._threads.refusing.shutdown(wait=False, cancel_futures=True)

    def _behave(self, method: Method, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        call = method.begin(context, context.cancel)
        if not context.add_callback(call.end):
            call.end()
        with method.answering(call, context.is_active):
            self._threads.check()
            method.supervision.quotas.check_put_off(call.peer.identity)
            yield from method.carry(requests, call)
        if call.refusal is not None:
            context.abort_with_status(call.refusal)


class _Gate(grpc.ServerInterceptor):  # type: ignore[type-arg]
    """Refuses calls without a valid ticket and calls that do not carry weights.

    Runs in the thread that accepts calls.
    """

    def __init__(self, count: Count, pool: ThreadPoolExecutor, known_port: int) -> None:
        self.tickets: Tickets | None = None
        self.paths: Collection[str] = ()
        self._known_port = known_port
        self._count = count
        self._pool = pool

    def intercept_service(self, continuation: Any, details: Any) -> Any:
        ticket = dict(details.invocation_metadata).get(bulk_entry.TICKET, "")
        try:
            if self.tickets is None:
                raise Unavailable("the service is starting", fix="try again")
            if details.method not in self.paths:
                raise FailedPrecondition(
                    f"this is the service's port for weights; all other calls go to its port {self._known_port}",
                    fix=f"name that port: --server HOST:{self._known_port}",
                )
            self.tickets.host_of(ticket if isinstance(ticket, str) else "")
        except WeighbridgeError as error:
            self._count("refused", error.grpc_code, None)
            return self._refusing(error)
        return continuation(details)

    def _refusing(self, error: WeighbridgeError) -> Any:
        status = to_status(error)

        def refuse(_requests: object, context: grpc.ServicerContext) -> Iterator[bytes]:
            context.abort_with_status(status)

        refuse.experimental_thread_pool = self._pool  # type: ignore[attr-defined]
        return grpc.stream_stream_rpc_method_handler(refuse)


class _Threads(ThreadPoolExecutor):
    """Adapter from `ThreadPool` to gRPC's executor interface; ``pool`` is set once the service exists.

    An exception from `submit` would end gRPC's thread that accepts calls. So if no thread is free, the call's behaviour
    runs in the pool for refusals, and `check` raises the error there.
    """

    def __init__(self) -> None:
        super().__init__(1)
        self.pool: ThreadPool | None = None
        self._here = threading.local()
        self._error: WeighbridgeError | None = None
        # a separate pool for refusals, because they must not wait for running streams
        self.refusing = ThreadPoolExecutor(_REFUSING_THREADS, "bulk-refuse", setattr, (self._here, "refuses", True))

    def submit(self, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        if self.pool is None:
            raise RuntimeError("there is no service yet")
        try:
            return self.pool.submit(partial(work, *args, **kwargs), _ANYBODY)
        except WeighbridgeError as error:
            self._error = error.anew()
            return self.refusing.submit(work, *args, **kwargs)

    def check(self) -> None:
        """Raise the error of `submit` if this thread runs a call for which no thread was free."""
        if self._error is not None and hasattr(self._here, "refuses"):
            raise self._error.anew()
