"""Connection of one client to the service: control calls with retries and failover, and the transport of its weights."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import grpc

from weighbridge._clients.calls.absences import absences
from weighbridge._clients.calls.steps import Call, Steps, take
from weighbridge._clients.holding.policy import current_hold
from weighbridge._clients.transport import Transport
from weighbridge._core.pauses import DICE
from weighbridge._core.text import waits
from weighbridge._tracing import spans
from weighbridge._transport import rpc
from weighbridge._transport.backoff import Backoff
from weighbridge._transport.outages import Outage
from weighbridge.errors import ResourceExhausted, Unavailable, WeighbridgeError

log = logging.getLogger(__name__)

T = TypeVar("T")


class Connection(Transport):
    """Channels to the service, one for each of its addresses that was used, and what carries weights. Thread-safe.

    A call goes to the address in use; where that cannot be reached, to the next one at once, and after a pause when all of them have
    failed. Arguments are those of `Transport`.
    """

    @property
    def closed(self) -> bool:
        """Whether it was closed: nothing is asked for any more."""
        return self.streams.closed

    def run(self, steps: Steps[T], *, at: str | None = None, retry_seconds: float | None = None) -> T:
        """Take the steps of a control call in this thread; their result.

        Args:
            steps: what is to be done.
            at: the only address at which to call; None for any.
            retry_seconds: overrides the connection's; 0 for one try of each call.

        Raises:
            WeighbridgeError: what the service answered, or why it could not be asked.
        """
        seconds = self.retry_seconds if retry_seconds is None else retry_seconds
        return take(steps, lambda call: self._call(call, at, seconds))

    def responses(self, path: str, request: bytes, decode: Callable[[bytes], T]) -> Iterator[T | None]:
        """Responses of a stream that carries no weights; before them None, if the service says that it has accepted the call. The call ends with
        the iteration.

        Raises:
            WeighbridgeError: what the service answered; Unavailable if the connection broke, and the next call goes to the next address.
        """
        address = self.addresses.current
        call: Any = None
        try:
            with rpc.translated_errors(address, self.credentials), self._ending_when_closed():
                call = self.streams.control(address).unary_stream(path, None, decode)(request)
                if rpc.is_accepted(call.initial_metadata()):
                    self.addresses.answered(address)
                    yield None
                for response in call:
                    self.addresses.answered(address)
                    yield response
        except Unavailable as error:
            self.addresses.failed(address, error)
            raise
        finally:
            if call is not None:
                call.cancel()

    def pause(self, seconds: float) -> None:
        """Wait before a stream is opened again; the address in use is connected to meanwhile. Raises Unavailable if the client is closed."""
        with self._ending_when_closed():
            rpc.connect_within(self.streams.control(self.addresses.current), seconds)

    @contextmanager
    def reminding(self, missing: Callable[[], Sequence[tuple[str, str]]]) -> Iterator[None]:
        """Log what refs wait for while the block runs, at level WARNING, every `REMIND_SECONDS`.

        Args:
            missing: gives the refs with their models; the logging ends once there are none. Is called from another thread.
        """
        ended = threading.Event()
        threading.Thread(
            target=self._remind, args=(missing, ended), name="watch-reminder", daemon=True
        ).start()
        try:
            yield
        finally:
            ended.set()

    def _remind(self, missing: Callable[[], Sequence[tuple[str, str]]], ended: threading.Event) -> None:
        while not ended.wait(waits.REMIND_SECONDS) and not self.closed and (refs := missing()):
            with suppress(WeighbridgeError):  # that the service is away is logged besides
                for sentence in self.run(absences(refs), retry_seconds=0.0):
                    if not ended.is_set():
                        log.warning("%s", sentence)

    def another(self) -> Connection:
        """A connection of its own to the same service, for control calls that must not wait for others, nor keep others waiting."""
        return Connection(
            str(self.addresses),
            retry_seconds=self.retry_seconds,
            lane="grpc",
            connections=1,
            credentials=self.credentials,
        )

    def _call(self, call: Call, at: str | None, seconds: float) -> bytes:
        """Make a call that is safe to repeat until it is answered, or until the push that it is of may hold its rank no longer."""
        hold = current_hold()
        backoff, outage = Backoff(hold.retry_seconds(seconds)), Outage(at or str(self.addresses))
        while True:
            address = at or self.addresses.current
            within = hold.call_seconds(call.seconds)
            try:
                with rpc.translated_errors(address, self.credentials), self._ending_when_closed():
                    method: Callable[..., bytes] = rpc.in_parts(self.streams.control(address), call.path)
                    found = method(call.encoded, timeout=within, metadata=spans.headers() or None)
                self.addresses.answered(address)
                outage.over()
                return found
            except (Unavailable, ResourceExhausted) as error:
                if self.closed:
                    raise
                if isinstance(error, Unavailable) and self.addresses.failed(address, error) and at is None:
                    continue
                retry = backoff.after_error(error, time.monotonic(), DICE.random())
                if retry is None:
                    raise
                backoff = retry.backoff
                outage.failed(error, backoff.left(time.monotonic()))
            with self._ending_when_closed():
                rpc.connect_within(self.streams.control(at or self.addresses.current), retry.pause)

    @contextmanager
    def _ending_when_closed(self) -> Iterator[None]:
        """Raise Unavailable where grpc has its own words for a channel that was closed meanwhile."""
        try:
            yield
        except (ValueError, grpc.RpcError) as error:
            ended = not isinstance(error, grpc.Call) or error.code() is grpc.StatusCode.CANCELLED
            if not self.closed or not ended:
                raise
            raise Unavailable("the client has been closed") from None
