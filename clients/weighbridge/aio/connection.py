"""Connection of an asyncio client.

It makes control calls on the event loop, with the same retries and failover as the blocking client.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any, TypeVar

import grpc

from weighbridge._clients.calls.absences import absences
from weighbridge._clients.calls.steps import Pause, Step, Steps, UnaryCall, Work
from weighbridge._core.pauses import DICE
from weighbridge._core.text import waits
from weighbridge._tracing import spans
from weighbridge._transport import rpc
from weighbridge._transport.addresses import Addresses
from weighbridge._transport.backoff import Backoff
from weighbridge._transport.credentials import Credentials
from weighbridge._transport.outages import Outage
from weighbridge._transport.processes import OwnProcess
from weighbridge.aio.threads import Threads
from weighbridge.errors import ResourceExhausted, Unavailable, WeighbridgeError

log = logging.getLogger(__name__)

T = TypeVar("T")


class AsyncConnection:
    """Channels to the service, one for each address that was used. Belongs to the event loop on which it is first used.

    Args:
        addresses: addresses of the service.
        credentials: credentials of all connections.
        retry_seconds: seconds for which calls are retried while the service is unreachable or has no capacity left.
        threads: threads for computations that would block the loop.
    """

    def __init__(self, addresses: Addresses, credentials: Credentials, retry_seconds: float, threads: Threads) -> None:
        self.addresses = addresses
        self._credentials = credentials
        self.retry_seconds = retry_seconds
        self.closed = False
        self._threads = threads
        self._channels: dict[tuple[str, tuple[int, ...]], grpc.aio.Channel] = {}
        self._process = OwnProcess()
        self._calls: set[Any] = set()

    async def run(self, steps: Steps[T], *, retry_seconds: float | None = None) -> T:
        """Run the steps of a control call, and return their result.

        Args:
            steps: the steps.
            retry_seconds: overrides the connection's; 0 for one attempt of each call.

        Raises:
            WeighbridgeError: the service returned an error, or could not be reached.
        """
        seconds = self.retry_seconds if retry_seconds is None else retry_seconds
        try:
            step = next(steps)
            while True:
                try:
                    answer = await self._take(step, seconds)
                except WeighbridgeError as error:
                    step = steps.throw(error)
                else:
                    step = steps.send(answer)
        except StopIteration as end:
            result: T = end.value
            return result

    async def responses(
        self, path: str, request: bytes, decode: Callable[[bytes], T]
    ) -> AsyncGenerator[T | None, None]:
        """Yield the responses of a stream without weights. If the service reports that it has accepted the call, yield
        None before them. The call ends when the iteration ends.

        Raises:
            WeighbridgeError: the service returned an error. It is Unavailable if the connection broke; the next call
                then uses the next address.
        """
        address = self.addresses.current
        try:
            method = self._channel(address).unary_stream(path, None, decode)
            with self._begun(address, method, request) as responses:
                if rpc.is_accepted(await responses.initial_metadata()):
                    self.addresses.answered(address)
                    yield None
                async for response in responses:
                    self.addresses.answered(address)
                    yield response
        except Unavailable as error:
            self.addresses.failed(address, error)
            raise

    @asynccontextmanager
    async def reminding(self, missing: Callable[[], Sequence[tuple[str, str]]]) -> AsyncIterator[None]:
        """While the block runs, log what the refs wait for, as `Connection.reminding` does."""
        task = asyncio.create_task(self._remind(missing))
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait([task])

    async def _remind(self, missing: Callable[[], Sequence[tuple[str, str]]]) -> None:
        await asyncio.sleep(waits.REMIND_SECONDS)
        while not self.closed and (refs := missing()):
            with suppress(WeighbridgeError):  # other code logs an outage of the service
                for sentence in await self.run(absences(refs), retry_seconds=0.0):
                    log.warning("%s", sentence)
            await asyncio.sleep(waits.REMIND_SECONDS)

    def stop(self) -> None:
        """End all calls. Tasks that wait for a call get `Unavailable`."""
        self.closed = True
        for call in list(self._calls):  # closing the channel does not end calls that are being read
            call.cancel()

    async def close(self) -> None:
        """Close all channels, after `stop`."""
        for channel in self._channels.values():
            await channel.close(None)

    def _channel(self, address: str) -> grpc.aio.Channel:
        self._process.check()
        if self.closed:
            raise Unavailable("the client has been closed")
        # made when first used: it belongs to the event loop that runs at that time
        key = address, self._credentials.stamp()
        channel = self._channels.get(key)
        if channel is None:
            channel = self._channels[key] = rpc.open_async_channel(address, self._credentials)
        return channel

    async def _take(self, step: Step, retry_seconds: float) -> Any:
        match step:
            case UnaryCall():
                return await self._call(step, retry_seconds)
            case Pause(seconds):
                await asyncio.sleep(seconds)
            case Work(do):
                return await self._threads.run_or_leave(do)
        return None

    async def _call(self, call: UnaryCall, retry_seconds: float) -> bytes:
        backoff, outage = Backoff(retry_seconds), Outage(str(self.addresses))
        while True:
            address = self.addresses.current
            try:
                method = rpc.in_parts(self._channel(address), call.path)
                with self._begun(address, method, call.encoded, call.seconds) as response:
                    found = bytes(await response)
                self.addresses.answered(address)
                outage.over()
                return found
            except (Unavailable, ResourceExhausted) as error:
                if self.closed:
                    raise
                if isinstance(error, Unavailable) and self.addresses.failed(address, error):
                    continue
                retry = backoff.after_error(error, time.monotonic(), DICE.random())
                if retry is None:
                    raise
                backoff = retry.backoff
                outage.failed(error, backoff.left(time.monotonic()))
            await asyncio.sleep(retry.pause)

    @contextmanager
    def _begun(
        self, address: str, method: Callable[..., Any], request: Any, seconds: float | None = None
    ) -> Iterator[Any]:
        """Start a call, and cancel it at the end. Raises the errors that the service raised."""
        call = method(request, timeout=seconds, metadata=spans.headers() or None)
        self._calls.add(call)
        try:
            with rpc.translated_errors(address, self._credentials):
                yield call
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise Unavailable("the client has been closed") from None  # closing cancels the client's calls
        finally:
            self._calls.discard(call)
            call.cancel()
