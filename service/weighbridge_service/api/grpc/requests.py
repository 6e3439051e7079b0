"""Limits on received requests: the number of messages received at the same time, and their duration and size.

gRPC allocates memory for a message, up to the server's limit, as soon as its length is announced. So a call waits for
its turn before it reads a message. A caller that has announced a message without sending it, or has not sent anything,
loses its place when others wait for one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import grpc

from weighbridge._transport.request_parts import MAX_REQUEST_BYTES
from weighbridge.errors import DeadlineExceeded, InvalidArgument, ResourceExhausted
from weighbridge_service.access.peer import Peer
from weighbridge_service.admission.message_waits import MessageWaits
from weighbridge_service.admission.quotas import RETRY_SECONDS, HostQuota
from weighbridge_service.admission.turns import Turns


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Limits of requests while they are received.

    Attributes:
        places: messages that are received at the same time: with 2 MiB each, 128 MiB.
        longest: maximum bytes of a request.
        pending_bytes: maximum bytes of requests that are incomplete or not answered yet.
        small_bytes: size up to which a request does not count toward ``pending_bytes``; nearly all requests are
            smaller.
        silent_seconds: timeout for receiving a message.
        hurry_seconds: the same while other calls wait for a place.
    """

    places: int = 64
    longest: int = MAX_REQUEST_BYTES
    pending_bytes: int = 256 << 20
    small_bytes: int = 64 << 10
    silent_seconds: float = 10.0
    hurry_seconds: float = 0.25


@dataclass(eq=False, slots=True)
class _Reader:
    """A call that receives a message, or waits for its turn to do so."""

    turn: asyncio.Future[None]
    since: float = 0.0
    limit: asyncio.Timeout | None = None
    hurried: bool = False


class Requests:
    """Reader of requests. Use it in the loop's thread only.

    Args:
        waits: cancels pending reads when memory grows too fast.
        limits: limits of requests.
    """

    def __init__(self, waits: MessageWaits, limits: RequestLimits = RequestLimits()) -> None:
        self._waits = waits
        self._limits = limits
        self._readers: dict[_Reader, None] = {}  # in the order in which they began
        self._waiting: Turns[_Reader] = Turns()
        self._pending = HostQuota("bytes of requests", limits.pending_bytes)
        self._hurrying: asyncio.TimerHandle | None = None

    @asynccontextmanager
    async def whole(self, context: Any, peer: Peer, *, parts: bool) -> AsyncIterator[bytes]:
        """A request: one message, or with ``parts`` all messages of the call, joined.

        Its bytes count toward the limits until the block ends.

        Raises:
            InvalidArgument: the call does not contain a request, or the request is too long.
            DeadlineExceeded: a message did not arrive in time.
            ResourceExhausted: too many bytes of requests are pending, or for the same reasons as in `next`.
        """
        found = await self.next(context, peer)
        if found is None:
            raise _missing()
        received, size, held = [found], len(found), 0
        try:
            while True:
                if size > self._limits.longest:
                    raise _too_long(self._limits.longest)
                if size > self._limits.small_bytes:
                    self._pending.take(peer.host, size - held)
                    held = size
                found = await self.next(context, peer) if parts else None
                if found is None:
                    break
                received.append(found)
                size += len(found)
            raw = received[0] if len(received) == 1 else b"".join(received)
            received.clear()
            yield raw
        finally:
            if held:
                self._pending.give(peer.host, held)

    async def each(self, context: Any, peer: Peer) -> AsyncIterator[bytes]:
        """The messages of a request, one by one. Raises the same errors as `next`."""
        while (found := await self.next(context, peer)) is not None:
            yield found

    async def next(self, context: Any, peer: Peer) -> bytes | None:
        """The next message of a call; None after the last one.

        Raises:
            DeadlineExceeded: no message arrived within ``silent_seconds``.
            ResourceExhausted: no message arrived within ``hurry_seconds``, and other calls wait; or memory grew too
                fast.
        """
        reader = _Reader(asyncio.get_running_loop().create_future())
        if len(self._readers) < self._limits.places and not self._waiting:
            self._begin(reader)
        else:
            self._waiting.add(peer, reader)
            if self._hurrying is None:
                self._hurry()
        try:
            await reader.turn
            return await self._read(context, reader)
        finally:
            self._end(peer, reader)

    async def _read(self, context: Any, reader: _Reader) -> bytes | None:
        try:
            async with asyncio.timeout(self._limits.silent_seconds) as reader.limit:
                loop, limit = asyncio.get_running_loop(), reader.limit

                def end() -> None:
                    reader.hurried = True
                    with suppress(RuntimeError):  # the timeout has just ended
                        limit.reschedule(loop.time())

                with self._waits.waiting(lambda: loop.call_soon_threadsafe(end)):
                    found = await context.read()
        except TimeoutError:
            if reader.hurried:
                raise ResourceExhausted(
                    "the call has sent no message, and other calls wait",
                    fix="send a request at once, then try again",
                    retry_after=RETRY_SECONDS,
                ) from None
            raise DeadlineExceeded(
                f"the call has sent no message for {self._limits.silent_seconds:g} s",
                fix="send a request at once",
            ) from None
        if found is grpc.aio.EOF:  # type: ignore[attr-defined]
            return None
        data: bytes = found
        return data

    def _begin(self, reader: _Reader) -> None:
        if not reader.turn.done():  # if it is done, the caller has disconnected
            reader.since = time.monotonic()
            self._readers[reader] = None
            reader.turn.set_result(None)

    def _end(self, peer: Peer, reader: _Reader) -> None:
        if reader in self._readers:
            del self._readers[reader]
        else:  # its turn has not come
            self._waiting.discard(peer, reader)
        while self._waiting and len(self._readers) < self._limits.places:
            self._begin(self._waiting.take())
        if self._waiting and self._hurrying is None:
            self._hurrying = asyncio.get_running_loop().call_later(self._limits.hurry_seconds, self._hurry)

    def _hurry(self) -> None:
        """Time out the reads that have had a place for `hurry_seconds`, one for each waiting call."""
        self._hurrying = None
        now, wanted = time.monotonic(), len(self._waiting)
        loop = asyncio.get_running_loop()
        for reader in self._readers:
            if not wanted:
                return
            if reader.hurried:
                continue
            left = reader.since + self._limits.hurry_seconds - now
            if left > 0:  # all further readers began later
                self._hurrying = loop.call_later(left, self._hurry)
                return
            if reader.limit is not None:
                reader.hurried = True
                reader.limit.reschedule(loop.time())
                wanted -= 1


def joined(parts: Iterable[bytes], longest: int) -> bytes:
    """A request, joined from its parts.

    Raises InvalidArgument if there are no parts, or if it has more than ``longest`` bytes.
    """
    found: list[bytes] = []
    size = 0
    for part in parts:
        found.append(part)
        size += len(part)
        if size > longest:
            raise _too_long(longest)
    if not found:
        raise _missing()
    return b"".join(found)


def _missing() -> InvalidArgument:
    return InvalidArgument("the call has no request", fix="send one message")


def _too_long(longest: int) -> InvalidArgument:
    return InvalidArgument(f"a request is longer than {longest} bytes", fix="ask for less at one time")
