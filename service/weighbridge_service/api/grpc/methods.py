"""Methods of the service on an event loop: the loop reads requests, runs each handler on the loop or in a thread, and
sends responses.

The kind of a handler determines where it runs. A coroutine or an asynchronous generator runs on the loop and must not
block it. A function may access the store or compute; it occupies a thread of a pool while it runs. A generator, which
yields messages with weights, and a function that receives messages one by one (`streamed`) run in their own threads.

Every request is read as a stream, even if the contract defines a single message. So a caller that sends only headers
does not occupy a thread, and receives DeadlineExceeded.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, aclosing, closing, suppress
from functools import partial
from typing import Any, TypeVar, cast

import grpc
from google.protobuf.message import Message

from weighbridge._core.operations.verbs import Verb
from weighbridge.errors import Unavailable, WeighbridgeError
from weighbridge_service.admission.quotas import HostQuota
from weighbridge_service.admission.rates import Rates
from weighbridge_service.api.grpc.call import Call
from weighbridge_service.api.grpc.method import Behaviours, Method, Supervision, encoded
from weighbridge_service.api.grpc.requests import Requests
from weighbridge_storage.threads import ThreadPool

T = TypeVar("T")

_MOST_CALLS = 8192
_CALLS_A_SECOND, _CALLS_AT_ONCE = 2000.0, 10_000.0
"""Rate and burst of calls from one host. 1,024 ranks that wait for each other make 500 calls per second in total."""
_SMALL_REQUEST = 32 << 10
"""Requests of up to this many bytes are decoded on the loop, which takes less than a millisecond."""
_STUCK = Unavailable("the stream stalled, and other streams need its memory", fix="resume it at its offset")


class Methods:
    """Runner of handlers.

    Args:
        loop: the event loop of the server.
        quick: threads for quick calls.
        long: threads for long calls.
        replicas: threads for calls of other replicas, because a handover must not wait for clients.
        streams: threads for streams of weights.
        supervision: supervision of calls.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        quick: ThreadPool,
        long: ThreadPool,
        replicas: ThreadPool,
        streams: ThreadPool,
        supervision: Supervision,
    ) -> None:
        self._loop = loop
        self._access, self._quotas = supervision.access, supervision.quotas
        self._quick = quick
        self._long = long
        self._replicas = replicas
        self._streams = streams
        self._requests = Requests(supervision.waits, supervision.limits)
        self._calls = HostQuota("calls", _MOST_CALLS)
        self._rates = Rates(_CALLS_A_SECOND, _CALLS_AT_ONCE)

    async def run(self, call: Call, work: Callable[[], T]) -> T:
        """Run work that accesses the store, or that computes, in a thread. For handlers that are coroutines."""
        return await self._quick.run(work, call.peer)

    def begin(self, call: Call, work: Callable[[], T]) -> Future[T]:
        """Like `run`, but return a future at once."""
        return self._quick.submit(work, call.peer)

    def handling(self, methods: Iterable[Method]) -> Behaviours:
        """Behaviours of these methods, for a server on the loop."""
        return Behaviours({method.path: partial(self._behave, method) for method in methods})

    async def _behave(self, method: Method, _: object, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        task = cast("asyncio.Task[Any]", asyncio.current_task())
        evicted: WeighbridgeError | None = None

        def evict(why: WeighbridgeError = _STUCK) -> None:
            nonlocal evicted
            evicted = why
            with suppress(RuntimeError):  # the loop has just been closed
                self._loop.call_soon_threadsafe(task.cancel)

        call = method.begin(context, evict)
        watched = self._watched(call, evict)
        with ExitStack() as counted:  # until the client has read the status of the call, or has disconnected
            try:
                with method.answering(call, call.is_active):
                    self._rates.count(call.peer.host)
                    counted.enter_context(self._calls.taking(call.peer.host))
                    try:
                        if seconds := self._quotas.put_off(call.peer.identity):
                            await asyncio.sleep(seconds)
                        await self._answer(method, call, context)
                    except asyncio.CancelledError:
                        if evicted is None:
                            raise
                        task.uncancel()
                        raise evicted.anew() from None
                if call.refusal is not None:
                    call.end()  # wakes the call's thread, which may be waiting for the client as well
                    await _refuse(context, call.refusal)
            finally:
                watched()
                call.end()

    def _watched(self, call: Call, evict: Callable[[WeighbridgeError], None]) -> Callable[[], None]:
        """Check a call's credentials periodically, and evict it once they are invalid.

        Returns a function that stops the checks.
        """
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

    async def _answer(self, method: Method, call: Call, context: Any) -> None:
        if method.takes_weights:
            raw = await self._requests.next(context, call.peer)
            # authorized here, so that a refused caller occupies no thread
            first = None if raw is None else method.request(call, raw)
            requests = iter(()) if raw is None else self._rest(call, context)
            del raw
            await self._carry(method, requests, call, context, first)
            return
        if method.lasts and method.joins:  # each message is a request of its own
            each = (method.request(call, raw) async for raw in self._requests.each(context, call.peer))
            await _send(method.handler(each, call), context)
            return
        # an unidentified caller is refused in any case, so reading more than one part would only waste memory
        parts = method.joins and not call.peer.identity.problem
        async with self._requests.whole(context, call.peer, parts=parts) as raw:
            if method.carries_weights:
                await self._carry(method, iter((raw,)), call, context)
            elif not method.on_loop:
                work = partial(method.answer, call, raw)
                await context.write(await self._threads_of(method).run(work, call.peer))
            else:
                small = len(raw) <= _SMALL_REQUEST
                decode = partial(method.request, call, raw)
                request = decode() if small else await self.run(call, decode)
                if method.lasts:
                    await _send(method.handler(request, call), context)
                else:
                    await context.write(encoded(await method.handler(request, call)))

    def _threads_of(self, method: Method) -> ThreadPool:
        if method.verb is Verb.REPLICATE:
            return self._replicas
        return self._long if method.takes_long else self._quick

    async def _carry(
        self, method: Method, requests: Iterator[bytes], call: Call, context: Any, first: Any = None
    ) -> None:
        """Answer a call that carries weights in a thread, which reads and writes through the loop."""
        begun = [] if first is None else [first]
        del first

        def work() -> None:
            with closing(method.carry(requests, call, begun.pop() if begun else None)) as responses:
                for response in responses:
                    self._wait(call, context.write(response))
                    del response

        await self._streams.run(work, call.peer)

    def _rest(self, call: Call, context: Any) -> Iterator[bytes]:
        """The messages of a stream after the first one, for a thread. Each is read only when the thread asks for it."""
        while (raw := self._wait(call, _next(context))) is not None:
            yield raw
            del raw

    def _wait(self, call: Call, work: Coroutine[Any, Any, T]) -> T:
        return call.wait(asyncio.run_coroutine_threadsafe(work, self._loop))


async def _send(responses: AsyncGenerator[Message, None], context: Any) -> None:
    async with aclosing(responses):
        async for response in responses:
            await context.write(encoded(response))


async def _refuse(context: Any, status: grpc.Status) -> None:
    """Answer a call with an error, unless its caller has disconnected. Nothing can be sent afterwards."""
    try:
        await context.abort(status.code, status.details, status.trailing_metadata)
    except grpc.aio.AbortError as aborted:
        # gRPC keeps the error with the call, and its traceback refers to the call: only the garbage collector would
        # free refused calls
        aborted.__traceback__ = aborted.__context__ = None
    except grpc.aio.InternalError:  # the status could not be sent
        pass


async def _next(context: Any) -> bytes | None:
    """The next message of a stream of weights; None after the last one."""
    found = await context.read()
    return None if found is grpc.aio.EOF else found  # type: ignore[attr-defined]
