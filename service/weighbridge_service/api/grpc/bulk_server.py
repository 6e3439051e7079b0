"""Server for streams of weights: a port of its own, whose calls each have a thread and show a ticket.

Weights that cross an event loop cost a fifth more of a processor (docs/benchmarks.md). A call without a ticket is refused by the thread that
accepts calls, and takes no other.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from typing import Any

import grpc
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message_factory import GetMessageClass

from weighbridge._transport import bulk_entry, pieces
from weighbridge._transport.request_parts import MAX_REQUEST_BYTES
from weighbridge.errors import FailedPrecondition, InvalidArgument, Unavailable, WeighbridgeError
from weighbridge_service.access.access import Access
from weighbridge_service.access.audit import Audit
from weighbridge_service.access.certificates import Certificates
from weighbridge_service.access.identities import Identity
from weighbridge_service.access.peer import Peer
from weighbridge_service.admission.message_waits import MessageWaits
from weighbridge_service.admission.tickets import Tickets
from weighbridge_service.api.grpc.asking import VERBS, check_allowed, record
from weighbridge_service.api.grpc.call import Call
from weighbridge_service.api.grpc.errors import to_status
from weighbridge_service.api.grpc.methods import (
    PAUSE_SECONDS,
    Count,
    carries_weights,
    decoded,
    encoded,
    known_error,
)
from weighbridge_storage.threads import ThreadPool

_REFUSING_THREADS = 2
_ANYBODY = Peer("bulk")


class BulkListener:
    """A bound port for streams of weights.

    Args:
        address: ``host:port``; port 0 takes a free one.
        options: of the server.
        count: is told how each call ends.
        certificates: of the service; None to answer without TLS.
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
        self._count = count
        # for refusals alone: they must not wait for those who have a thread
        self._refusing = ThreadPoolExecutor(_REFUSING_THREADS, thread_name_prefix="bulk-refuse")
        self._gate = _Gate(count, self._refusing, known_port)
        self._threads = _Threads(self._refusing)
        self._server = grpc.server(self._threads, interceptors=[self._gate], options=tuple(options))
        try:
            if certificates is None:
                self.port: int = self._server.add_insecure_port(address)
            else:
                self.port = self._server.add_secure_port(address, certificates.for_grpc())
        except RuntimeError as error:
            raise Unavailable(
                f"the service cannot listen at {address}, its port for weights: another process has it, or the address is not of this machine",
                fix="name a free port with --bulk-port, or leave it at auto, which finds one; with off, weights share the port of --grpc",
            ) from error

    def answer(
        self,
        contract: Iterable[tuple[ServiceDescriptor, object]],
        tickets: Tickets,
        workers: ThreadPool,
        waits: MessageWaits,
        access: Access,
        audit: Audit,
        check_put_off: Callable[[Identity], None],
        silent_seconds: float,
    ) -> None:
        """Begin to answer those methods of the contract that carry weights.

        Args:
            contract: services, and their handlers.
            tickets: checks what calls show.
            workers: threads for streams.
            waits: ends waits for messages that take too long.
            access: knows who calls.
            audit: where it is written down how each call ends.
            check_put_off: raises if a call of an identity is refused before anything of it is looked at.
            silent_seconds: how long the first message of a call may take.
        """
        self._check_put_off = check_put_off
        self._silent_seconds = silent_seconds
        self._waits = waits
        self._access = access
        self._audit = audit
        self._gate.tickets = tickets
        self._threads.workers = workers
        self._server.add_generic_rpc_handlers(
            tuple(self._methods(service, handlers) for service, handlers in contract)
        )
        self._server.start()

    def stop(self, grace: float) -> None:
        """Let running calls end within ``grace`` seconds, then close the port."""
        self._server.stop(grace).wait()
        self._refusing.shutdown(wait=False, cancel_futures=True)

    def _methods(self, service: ServiceDescriptor, handlers: object) -> grpc.GenericRpcHandler[bytes, bytes]:
        found = {}
        for method in service.methods:
            handler = getattr(handlers, method.name)
            if carries_weights(handler):
                answer = (_taking if hasattr(handler, "streamed") else _giving)(handler, method, self._audit)
                found[method.name] = grpc.stream_stream_rpc_method_handler(self._behaviour(method, answer))
                self._gate.paths.add(f"/{service.full_name}/{method.name}")
        return grpc.method_handlers_generic_handler(service.full_name, found)

    def _behaviour(self, method: MethodDescriptor, answer: _Answer) -> Callable[..., Iterator[bytes]]:
        def behave(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
            call = Call(context, self._access, context.cancel)
            call.begin_span(method)
            if not context.add_callback(call.end):
                call.end()
            code = "OK"
            try:
                self._threads.check()
                self._check_put_off(call.peer.identity)
                for response in answer(self._waited_for(requests, call), call):
                    call.check_standing()
                    yield response
                    del response
            except GeneratorExit:
                code = "CANCELLED"
                raise
            except Exception as error:
                # a caller that has gone is told nothing; neither is one whose own stream broke while it was being read
                gone = not context.is_active() or isinstance(error, grpc.RpcError)
                known = known_error(method.name, error) if not gone else _gone(error)
                code, status = "CANCELLED" if gone else known.grpc_code, to_status(known)
                del known  # its traceback leads back here
                context.abort_with_status(status)
            finally:
                self._count(method.name, code, call.seconds)
                call.end_span(code)
                record(self._audit, call, method, code)

        return behave

    def _waited_for(self, requests: Iterator[bytes], call: Call) -> Iterator[bytes]:
        seconds = self._silent_seconds
        while True:
            with self._waits.waiting(call.cancel, seconds):
                message = next(requests, None)
            if message is None:
                return
            seconds = PAUSE_SECONDS
            call.check_standing()
            yield message
            del message


_Answer = Callable[[Iterator[bytes], Call], Iterator[bytes]]


def _gone(error: Exception) -> WeighbridgeError:
    return error if isinstance(error, WeighbridgeError) else Unavailable("the caller has gone")


def _taking(handler: Callable[..., Any], method: MethodDescriptor, audit: Audit) -> _Answer:
    decode = pieces.decoder(GetMessageClass(method.input_type))
    verb = VERBS[method.containing_service.name][method.name]

    def messages(requests: Iterator[bytes], call: Call) -> Iterator[Any]:
        for i, raw in enumerate(requests):
            message = decoded(decode, raw)
            if not i:  # it names the model for all that follow
                check_allowed(call, verb, message, audit)
            yield message
            del raw, message

    def answer(requests: Iterator[bytes], call: Call) -> Iterator[bytes]:
        yield encoded(handler(messages(requests, call), call))

    return answer


def _joined(requests: Iterator[bytes]) -> bytes:
    """A request, from its parts."""
    found: list[bytes] = []
    size = 0
    for part in requests:
        found.append(part)
        size += len(part)
        if size > MAX_REQUEST_BYTES:
            raise InvalidArgument(
                f"a request is longer than {MAX_REQUEST_BYTES} bytes", fix="ask for less at one time"
            )
    if not found:
        raise InvalidArgument("the call has no request", fix="send one message")
    return b"".join(found)


def _giving(handler: Callable[..., Any], method: MethodDescriptor, audit: Audit) -> _Answer:
    kind = GetMessageClass(method.input_type)
    verb = VERBS[method.containing_service.name][method.name]

    def answer(requests: Iterator[bytes], call: Call) -> Iterator[bytes]:
        request = decoded(kind.FromString, _joined(requests))
        check_allowed(call, verb, request, audit)
        with closing(handler(request, call)) as responses:
            for response in responses:
                yield encoded(response)
                del response

    return answer


class _Gate(grpc.ServerInterceptor):  # type: ignore[type-arg]
    """Refuses calls without a ticket, and those that carry no weights; runs in the thread that accepts calls."""

    def __init__(self, count: Count, pool: ThreadPoolExecutor, known_port: int) -> None:
        self.tickets: Tickets | None = None
        self.paths: set[str] = set()
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
                    f"this is the service's port for weights; all other calls are taken at its port {self._known_port}",
                    fix=f"name that one: --server HOST:{self._known_port}",
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
    """A `ThreadPool` as gRPC knows pools of threads; it is given once there is a service.

    gRPC's thread that accepts calls does not outlive an error of `submit`. So a call for which there is no thread is refused by its own
    behaviour, in the pool for refusals, where `check` raises.
    """

    def __init__(self, refusing: ThreadPoolExecutor) -> None:
        super().__init__(1)
        self.workers: ThreadPool | None = None
        self._refusing = refusing
        self._refusal = threading.local()

    def submit(self, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        if self.workers is None:
            raise RuntimeError("there is no service yet")
        try:
            return self.workers.submit(lambda: work(*args, **kwargs), _ANYBODY)
        except WeighbridgeError as error:
            return self._refusing.submit(self._refuse, error, lambda: work(*args, **kwargs))

    def check(self) -> None:
        """Raise if there was no thread for the call that runs in this thread."""
        error: WeighbridgeError | None = getattr(self._refusal, "error", None)
        if error is not None:
            raise error

    def _refuse(self, error: WeighbridgeError, work: Callable[[], Any]) -> Any:
        self._refusal.error = error
        try:
            return work()
        finally:
            self._refusal.error = None
