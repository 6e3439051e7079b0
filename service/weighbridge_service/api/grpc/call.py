"""Call: what a handler may know of who called, and for how long it can wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

from google.protobuf.descriptor import MethodDescriptor
from grpc import StatusCode
from opentelemetry.trace import INVALID_SPAN, Span, SpanKind

from weighbridge._tracing import spans
from weighbridge._tracing.traceparent import in_metadata
from weighbridge._transport.credentials import AUTHORIZATION
from weighbridge._transport.rpc import ACCEPTED
from weighbridge.errors import Unavailable
from weighbridge_service.access.access import Access
from weighbridge_service.access.certificates import names_from_grpc
from weighbridge_service.access.identities import EVERYBODY, Evidence, Identity
from weighbridge_service.access.peer import Peer

if TYPE_CHECKING:
    import grpc

T = TypeVar("T")

_MARGIN = 0.25
"""Seconds by which a wait ends before the caller's deadline, so that the answer says what was missing."""


class Context(Protocol):
    """What is the same in gRPC's contexts of threads and of event loops."""

    def invocation_metadata(self) -> Iterable[tuple[str, str | bytes]] | None:
        """What the call has brought along."""

    def auth_context(self) -> Mapping[str, Any]:
        """What TLS has proved of the caller."""

    def time_remaining(self) -> float | None:
        """Seconds until the deadline; None without one."""

    def peer(self) -> str:
        """Who has called."""


class Call:
    """One call. Thread-safe.

    Args:
        context: gRPC's.
        access: knows who calls.
        cancel: ends the call, from any thread; what its handler is at breaks off.

    Attributes:
        peer: who has called.
        cancel: as given.
        evidence: what it has shown; None where that is not asked for.
        span: of the answer to it.
        named: the models and refs that its request names, once it has come; of one that is refused, the first that it may not.
        noted: what was said to `note` of the change that it makes.
        refusal: the error that its caller is told; None without one.
    """

    def __init__(self, context: Context, access: Access, cancel: Callable[[], object] = lambda: None) -> None:
        self.cancel = cancel
        self._access = access
        self.evidence = None if access.open else _evidence(context)
        self.peer = Peer.of_grpc(context.peer(), self._identity())
        self._begun = self._stood = time.monotonic()
        self.span: Span = INVALID_SPAN
        self.named: tuple[tuple[str, str], ...] = ()
        self.noted: dict[str, Any] = {}
        self.refusal: grpc.Status | None = None
        self._context = context
        self._lock = threading.Lock()
        self._ended = False
        self._callbacks: list[Callable[[], object]] = []
        self._awaited: Future[Any] | None = None

    @property
    def seconds(self) -> float:
        """How long ago it came."""
        return time.monotonic() - self._begun

    def begin_span(self, method: MethodDescriptor) -> None:
        """Begin the span of its answer, if its caller traces it and is somebody."""
        traceparent = in_metadata(self._context.invocation_metadata())
        if traceparent and not self.peer.identity.problem:
            service = method.containing_service.full_name
            said = {"rpc.system": "grpc", "rpc.service": service, "rpc.method": method.name}
            self.span = spans.continuing(f"{service}/{method.name}", said, traceparent, SpanKind.SERVER)

    def end_span(self, code: str) -> None:
        """End it, with the call's status."""
        self.span.set_attribute("rpc.grpc.status_code", StatusCode[code].value[0])
        self.span.end()

    def patience(self, without: float) -> float:
        """How many seconds the call may wait now: almost until its deadline, and at most ``without``."""
        left = self._context.time_remaining()
        return without if left is None or left > without else max(left - _MARGIN, 0.0)

    async def accept(self) -> None:
        """Tell the caller of a stream, before anything is sent, that it has been accepted."""
        context = cast("grpc.aio.ServicerContext[Any, Any]", self._context)
        await context.send_initial_metadata(((ACCEPTED, "1"),))

    def check_standing(self) -> None:
        """Raise Unavailable if what let the call in does so no longer, as a token that has expired; asked now and then in a long call.

        It is no refusal: whoever calls again with a new token goes on where the call has ended.
        """
        now = time.monotonic()
        if self.evidence is None or now - self._stood < self._access.standing_seconds:
            return
        self._stood = now
        if self._identity() != self.peer.identity:
            raise Unavailable(
                "what the call has shown counts no longer: its token has expired, or the policy has changed",
                fix="call again, with a token that is valid",
            )

    def _identity(self) -> Identity:
        return EVERYBODY if self.evidence is None else self._access.identify(self.evidence)

    def is_active(self) -> bool:
        """Whether the caller still waits for an answer."""
        return not self._ended

    def wait(self, future: Future[T]) -> T:
        """Wait in the handler's thread, until the call ends at most. Raises CancelledError if it does."""
        self._awaited = future
        try:
            if self._ended:
                future.cancel()
            return future.result()
        finally:
            self._awaited = None
            del future  # its error's traceback leads back here

    def add_callback(self, callback: Callable[[], object]) -> None:
        """Call this, from any thread, when the call has ended; at once if it has."""
        with self._lock:
            if not self._ended:
                self._callbacks.append(callback)
                return
        callback()

    def end(self) -> None:
        """The caller has its answer, or has gone."""
        with self._lock:
            self._ended = True
            callbacks, self._callbacks = self._callbacks, []
        awaited = self._awaited
        if awaited is not None:
            awaited.cancel()
        for callback in callbacks:
            callback()


def _evidence(context: Context) -> Evidence:
    shown = [value for key, value in context.invocation_metadata() or () if key == AUTHORIZATION]
    texts = [value if isinstance(value, str) else value.decode("ascii", "replace") for value in shown]
    return Evidence.of_call(texts, names_from_grpc(context.auth_context()))
