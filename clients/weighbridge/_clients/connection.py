"""Connection of one client to the service: control calls with retries and failover, and the transport of its
weights.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import grpc

from weighbridge._clients.calls.absences import absences
from weighbridge._clients.calls.steps import Steps, UnaryCall, take
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
    """Channels to the service, one for each address that was used, and the transport of weights. Thread-safe.

    A call uses the current address. If that address cannot be reached, the call uses the next one immediately; after
    all of them have failed, it pauses first. The arguments are those of `Transport`.
    """

    @property
    def closed(self) -> bool:
        """Whether the connection was closed, so that it makes no further calls."""
        return self.streams.closed

    def run(self, steps: Steps[T], *, at: str | None = None, retry_seconds: float | None = None) -> T:
        """Execute the steps of a control call in this thread, and return their result.

        Args:
            steps: the steps.
            at: the only address to call; None for any.
            retry_seconds: overrides the connection's; 0 for one attempt of each call.

        Raises:
            WeighbridgeError: the service returned an error, or could not be reached.
        """
        seconds = self.retry_seconds if retry_seconds is None else retry_seconds
        return take(steps, lambda call: self._call(call, at, seconds))

    def responses(self, path: str, request: bytes, decode: Callable[[bytes], T]) -> Iterator[T | None]:
        """Yield the responses of a stream without weights. If the service reports that it has accepted the call, yield
        None before them. The call ends when the iteration ends.

        Raises:
            WeighbridgeError: the service returned an error. It is Unavailable if the connection broke; the next call
                then uses the next address.
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
        """Wait before a stream is opened again, and meanwhile connect to the current address.

        Raises Unavailable if the client is closed.
        """
        with self._ending_when_closed():
            rpc.connect_within(self.streams.control(self.addresses.current), seconds)

    @contextmanager
    def reminding(self, missing: Callable[[], Sequence[tuple[str, str]]]) -> Iterator[None]:
        """While the block runs, log every `REMIND_SECONDS`, at level WARNING, what refs wait for.

        Args:
            missing: returns pairs of model and ref; the logging ends once it returns none. It is called from another
                thread.
        """
        ended = threading.Event()
        threading.Thread(target=self._remind, args=(missing, ended), name="watch-reminder", daemon=True).start()
        try:
            yield
        finally:
            ended.set()

    def _remind(self, missing: Callable[[], Sequence[tuple[str, str]]], ended: threading.Event) -> None:
        while not ended.wait(waits.REMIND_SECONDS) and not self.closed and (refs := missing()):
            with suppress(WeighbridgeError):  # other code logs that the service is unreachable
                for sentence in self.run(absences(refs), retry_seconds=0.0):
                    if not ended.is_set():
                        log.warning("%s", sentence)

    def another(self) -> Connection:
        """Return a separate connection to the same service, for control calls that must neither wait for other calls
        nor make them wait.
        """
        return Connection(
            str(self.addresses),
            retry_seconds=self.retry_seconds,
            lane="grpc",
            connections=1,
            credentials=self.credentials,
        )

    def _call(self, call: UnaryCall, at: str | None, seconds: float) -> bytes:
        """Make a call that is safe to repeat. Retry until the service responds, or until the push that makes the call
        may no longer block its rank.
        """
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
        """Raise Unavailable instead of grpc's own errors for a channel that was closed in the meantime."""
        try:
            yield
        except (ValueError, grpc.RpcError) as error:
            ended = not isinstance(error, grpc.Call) or error.code() is grpc.StatusCode.CANCELLED
            if not self.closed or not ended:
                raise
            raise Unavailable("the client has been closed") from None
