"""Methods of the service on an event loop: reads requests, runs handlers where they belong, and answers.

What a handler is says where it runs. A coroutine or an asynchronous generator runs on the loop, and must not hold it up. A function touches
the store or computes, and takes a thread of the workers for as long as it runs. A generator gives messages with weights; it, and a function
that takes messages one by one (`streamed`), has a thread of its own.

Every request is read as a stream, also where the contract has a single message: so a caller that sends headers and nothing more costs no
thread, and is told that its time is up.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import aclosing, closing, suppress
from typing import Any, TypeVar, cast

import grpc
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from weighbridge._transport import pieces
from weighbridge.errors import InvalidArgument, Unavailable, WeighbridgeError
from weighbridge_service.access.access import Access
from weighbridge_service.access.audit import Audit, noting
from weighbridge_service.access.identities import Identity
from weighbridge_service.access.scopes import Verb
from weighbridge_service.admission.message_waits import MessageWaits
from weighbridge_service.admission.quotas import HostQuota
from weighbridge_service.admission.rates import Rates
from weighbridge_service.api.grpc.asking import VERBS, check_allowed, record
from weighbridge_service.api.grpc.call import Call
from weighbridge_service.api.grpc.errors import to_status
from weighbridge_service.api.grpc.requests import RequestLimits, Requests
from weighbridge_storage.threads import ThreadPool

log = logging.getLogger(__name__)

T = TypeVar("T")
Handler = TypeVar("Handler", bound=Callable[..., Any])
Count = Callable[[str, str, float | None], None]
"""Is told the method and the status code of each call that ends, and how long it took; None of those that last as long as their clients."""

PAUSE_SECONDS = 60.0
"""How long a stream of weights may pause: a trainer copies what it sends from its devices."""
_MOST_CALLS = 8192
_CALLS_A_SECOND, _CALLS_AT_ONCE = 2000.0, 10_000.0
"""Of one host. 1,024 ranks that wait for each other make 500 a second together."""
_SMALL_REQUEST = 32 << 10
"""Bytes that are decoded on the loop; it takes less than a millisecond."""


def takes_long(handler: Handler) -> Handler:
    """A handler that reads all of a version, or all models: it has other threads than those that are answered at once."""
    handler.takes_long = True  # type: ignore[attr-defined]
    return handler


def streamed(handler: Handler) -> Handler:
    """A handler that takes an iterator over the messages of a request, as `pieces.Carried`, in a thread of its own."""
    handler.streamed = True  # type: ignore[attr-defined]
    return handler


def carries_weights(handler: Callable[..., Any]) -> bool:
    """Whether a handler takes or gives a stream of weights."""
    return inspect.isgeneratorfunction(handler) or hasattr(handler, "streamed")


def known_error(method: str, error: Exception) -> WeighbridgeError:
    """What the caller is told of an error; one that nobody expected is logged."""
    if isinstance(error, WeighbridgeError):
        return error
    if isinstance(error, grpc.aio.InternalError):  # a response could not be sent
        return Unavailable("the caller has gone")
    log.error("%s failed", method, exc_info=error)
    return WeighbridgeError(f"the service failed: {type(error).__name__}", fix="its log says more")


def decoded(kind: Callable[[bytes], T], raw: bytes) -> T:
    """A message. Raises InvalidArgument if it is none."""
    try:
        return kind(raw)
    except DecodeError as error:
        raise InvalidArgument(
            f"the request is no message of this method: {error}",
            fix="use the contract in protos/, of this service's release",
        ) from error


def encoded(response: Message | bytes) -> bytes:
    """A response as it goes on the wire; messages with weights are encoded already."""
    return response if isinstance(response, bytes) else response.SerializeToString()


_STUCK = Unavailable("the stream stalled, and other streams need its memory", fix="resume it at its offset")
_GONE = Unavailable("the caller has gone")
_BROKEN = grpc.aio.InternalError
"""Is raised where a message or a status is sent to a caller that has gone, before the call's task is cancelled."""


class Methods:
    """What runs handlers.

    Args:
        loop: on which calls come.
        quick: threads for what is answered at once.
        long: threads for what is not.
        replicas: threads for other replicas: a handover must not wait for clients.
        streams: threads for streams of weights.
        count: is told how each call ends.
        waits: ends waits for messages that take too long.
        access: knows who calls.
        audit: where it is written down how each call ends.
        put_off: seconds for which a call of an identity waits before anything of it is looked at.
        limits: what requests may take on their way in.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        quick: ThreadPool,
        long: ThreadPool,
        replicas: ThreadPool,
        streams: ThreadPool,
        count: Count,
        waits: MessageWaits,
        access: Access,
        audit: Audit,
        put_off: Callable[[Identity], float],
        limits: RequestLimits,
    ) -> None:
        self._loop = loop
        self._put_off = put_off
        self._access = access
        self._audit = audit
        self._quick = quick
        self._long = long
        self._replicas = replicas
        self._streams = streams
        self._count = count
        self._waits = waits
        self._requests = Requests(waits, limits)
        self._calls = HostQuota("calls", _MOST_CALLS)
        self._rates = Rates(_CALLS_A_SECOND, _CALLS_AT_ONCE)

    async def run(self, call: Call, work: Callable[[], T]) -> T:
        """Do something that touches the store, or computes, for a call. For handlers that are coroutines."""
        return await self._in(self._quick, call, work)

    def begin(self, call: Call, work: Callable[[], T]) -> Future[T]:
        """As `run`, but does not wait for it."""
        return self._quick.submit(work, call.peer)

    def of(self, service: ServiceDescriptor, handlers: object) -> grpc.GenericRpcHandler[bytes, bytes]:
        """The methods of one service of the contract.

        Args:
            service: of the contract.
            handlers: have a handler of the name of each method.
        """
        return grpc.method_handlers_generic_handler(
            service.full_name,
            {
                method.name: grpc.stream_stream_rpc_method_handler(
                    self._method(method, getattr(handlers, method.name))
                )
                for method in service.methods
            },
        )

    def _method(self, method: MethodDescriptor, handler: Callable[..., Any]) -> Callable[..., Any]:
        answer = self._answer_with(method, handler)
        lasting = inspect.isasyncgenfunction(handler)

        def ended(call: Call, code: str) -> None:
            self._count(method.name, code, None if lasting else call.seconds)
            call.end_span(code)
            record(self._audit, call, method, code)

        async def behaviour(_: object, context: grpc.aio.ServicerContext[Any, Any]) -> None:
            task = cast("asyncio.Task[Any]", asyncio.current_task())
            evicted: WeighbridgeError | None = None

            def evict(why: WeighbridgeError = _STUCK) -> None:
                nonlocal evicted
                evicted = why
                with suppress(RuntimeError):  # the loop has just been closed
                    self._loop.call_soon_threadsafe(task.cancel)

            call = Call(context, self._access, evict)
            if not lasting:
                call.begin_span(method)
            watched = self._watched(call, evict)
            try:
                self._rates.count(call.peer.host)
                with self._calls.taking(call.peer.host):
                    try:
                        if seconds := self._put_off(call.peer.identity):
                            await asyncio.sleep(seconds)
                        await answer(call, context)
                    except asyncio.CancelledError:
                        if evicted is None:
                            raise
                        task.uncancel()
                        call.end()  # its thread may wait for the same
                        ended(call, evicted.grpc_code)
                        # counted as a call until its client has read or gone
                        await _refuse(context, to_status(evicted))
                    else:
                        ended(call, "OK")
            except asyncio.CancelledError:
                if evicted is None:
                    ended(call, "CANCELLED")
                raise
            except _BROKEN:
                ended(call, "CANCELLED")
                await _refuse(context, to_status(_GONE))
            except Exception as error:
                status = to_status(known := known_error(method.name, error))
                ended(call, known.grpc_code)
                del known  # its traceback leads back here
                await _refuse(context, status)
            finally:
                watched()
                call.end()

        return behaviour

    def _watched(self, call: Call, evict: Callable[[WeighbridgeError], None]) -> Callable[[], None]:
        """Evict a call once it may not go on; returns what ends the watching."""
        if self._access.open:
            return lambda: None

        timer: asyncio.TimerHandle

        def look() -> None:
            nonlocal timer
            try:
                call.check_standing()
            except Unavailable as error:
                evict(error.anew())
            else:
                timer = self._loop.call_later(self._access.standing_seconds, look)

        def end() -> None:
            timer.cancel()

        timer = self._loop.call_later(self._access.standing_seconds, look)
        return end

    def _answer_with(self, method: MethodDescriptor, handler: Callable[..., Any]) -> Callable[..., Any]:
        """What answers a call of a method, given the call and its context."""
        kind = GetMessageClass(method.input_type)
        verb = VERBS[method.containing_service.name][method.name]

        def allowed(call: Call, request: T) -> T:
            check_allowed(call, verb, request, self._audit)
            return request

        def decode_allowed(call: Call, raw: bytes) -> Any:
            return allowed(call, decoded(kind.FromString, raw))

        if hasattr(handler, "streamed"):
            decode = pieces.decoder(kind)

            async def take(call: Call, context: Any) -> None:
                raw = await self._requests.next(context, call.peer)
                first = None if raw is None else allowed(call, decoded(decode, raw))
                del raw

                def work() -> bytes:
                    return encoded(handler(self._taken(call, context, decode, first), call))

                await context.write(await self._in(self._streams, call, work))

            return take

        if inspect.isasyncgenfunction(handler) and method.client_streaming:

            async def converse(call: Call, context: Any) -> None:
                requests = self._requests.each(context, call.peer)
                each = (decode_allowed(call, raw) async for raw in requests)
                async with aclosing(handler(each, call)) as responses:
                    async for response in responses:
                        await context.write(encoded(response))

            return converse

        async def answer(call: Call, context: Any) -> None:
            # of whoever is nobody, one part is enough to say so: others would be kept until then
            parts = method.client_streaming and not call.peer.identity.problem
            async with self._requests.whole(context, call.peer, parts=parts) as raw:
                if inspect.isgeneratorfunction(handler):

                    def send() -> None:
                        with closing(handler(decode_allowed(call, raw), call)) as responses:
                            self._sent(call, context, responses)

                    await self._in(self._streams, call, send)
                elif inspect.iscoroutinefunction(handler):
                    request = await self._decoded(call, decode_allowed, raw)
                    await context.write(encoded(await handler(request, call)))
                elif inspect.isasyncgenfunction(handler):
                    request = await self._decoded(call, decode_allowed, raw)
                    async with aclosing(handler(request, call)) as responses:
                        async for response in responses:
                            await context.write(encoded(response))
                else:
                    threads = self._long if hasattr(handler, "takes_long") else self._quick
                    if verb is Verb.REPLICATE:
                        threads = self._replicas

                    def work() -> bytes:
                        with noting(call.noted):
                            return encoded(handler(decode_allowed(call, raw), call))

                    await context.write(await self._in(threads, call, work))

        return answer

    async def _in(self, threads: ThreadPool, call: Call, work: Callable[[], T]) -> T:
        return await threads.run(work, call.peer)

    async def _decoded(self, call: Call, decode: Callable[[Call, bytes], T], raw: bytes) -> T:
        if len(raw) <= _SMALL_REQUEST:
            return decode(call, raw)
        return await self.run(call, lambda: decode(call, raw))

    def _taken(self, call: Call, context: Any, decode: Callable[[bytes], T], first: T | None) -> Iterator[T]:
        """The messages of a request, for a thread: each is fetched when it is asked for."""
        if first is None:
            return
        yield first
        del first
        while True:
            with self._waits.waiting(call.cancel, PAUSE_SECONDS):
                raw = call.wait(asyncio.run_coroutine_threadsafe(_next(context), self._loop))
            if raw is None:
                return
            yield decoded(decode, raw)
            del raw

    def _sent(self, call: Call, context: Any, responses: Iterator[Message | bytes]) -> None:
        """Send messages from a thread: each is asked for when the transport has taken the one before."""
        for response in responses:
            call.wait(asyncio.run_coroutine_threadsafe(context.write(encoded(response)), self._loop))
            del response


async def _refuse(context: Any, status: grpc.Status) -> None:
    """Answer a call with an error, or not at all if its caller goes meanwhile. Nothing can be sent after that."""
    try:
        await context.abort(status.code, status.details, status.trailing_metadata)
    except grpc.aio.AbortError as aborted:
        # gRPC keeps it with the call, to which its traceback leads: thousands of refused calls would wait for the garbage collector
        aborted.__traceback__ = aborted.__context__ = None
    except _BROKEN:
        pass


async def _next(context: Any) -> bytes | None:
    """The next message of a stream of weights; None behind the last one."""
    found = await context.read()
    return None if found is grpc.aio.EOF else found  # type: ignore[attr-defined]
