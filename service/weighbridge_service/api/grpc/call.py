"""A call, with its caller, deadline and end, as its handler sees it."""

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
from weighbridge_service.access.identities import EVERYBODY, Identity, PresentedCredentials
from weighbridge_service.access.peer import Peer

if TYPE_CHECKING:
    import grpc

T = TypeVar("T")

_MARGIN = 0.25
"""A wait ends this many seconds before the caller's deadline, so that the response with the reason still arrives in
time.
"""


class Context(Protocol):
    """Common interface of gRPC's contexts for threads and for event loops."""

    def invocation_metadata(self) -> Iterable[tuple[str, str | bytes]] | None:
        """Metadata of the call."""

    def auth_context(self) -> Mapping[str, Any]:
        """Properties of the caller that TLS has verified."""

    def time_remaining(self) -> float | None:
        """Seconds until the deadline; None if there is no deadline."""

    def peer(self) -> str:
        """Address of the caller."""


class Call:
    """One call. Thread-safe.

    Args:
        context: gRPC's context.
        access: identifies the caller.
        cancel: ends the call, from any thread, and interrupts its handler.

    Attributes:
        peer: the caller.
        cancel: as given.
        evidence: the caller's credentials; None if the service does not require credentials.
        span: tracing span of the call.
        named: the models and refs that the request names, once it has been received; for a refused call, the first one
            that the caller may not use.
        noted: details of the change for the audit log, from `note`.
        refusal: the error that the caller receives; None if there is no error.
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
        """Seconds since the call began."""
        return time.monotonic() - self._begun

    def begin_span(self, method: MethodDescriptor) -> None:
        """Begin the call's span, if the caller sent a ``traceparent`` and was identified."""
        traceparent = in_metadata(self._context.invocation_metadata())
        if traceparent and not self.peer.identity.problem:
            service = method.containing_service.full_name
            said = {"rpc.system": "grpc", "rpc.service": service, "rpc.method": method.name}
            self.span = spans.continuing(f"{service}/{method.name}", said, traceparent, SpanKind.SERVER)

    def end_span(self, code: str) -> None:
        """End the call's span, with the call's status code."""
        self.span.set_attribute("rpc.grpc.status_code", StatusCode[code].value[0])
        self.span.end()

    def patience(self, without: float) -> float:
        """Seconds that the call may still wait: until shortly before its deadline, and at most ``without``."""
        left = self._context.time_remaining()
        return without if left is None or left > without else max(left - _MARGIN, 0.0)

    async def accept(self) -> None:
        """Send the initial metadata of an accepted stream, before its first message."""
        context = cast("grpc.aio.ServicerContext[Any, Any]", self._context)
        await context.send_initial_metadata(((ACCEPTED, "1"),))

    def check_standing(self) -> None:
        """Raise Unavailable if the caller's credentials are no longer valid, for example after a token has expired.

        Long calls check this periodically. The error is Unavailable instead of a refusal, so that a client calls again
        with a new token and resumes.
        """
        now = time.monotonic()
        if self.evidence is None or now - self._stood < self._access.standing_seconds:
            return
        self._stood = now
        if self._identity() != self.peer.identity:
            raise Unavailable(
                "the credentials of the call are no longer valid: its token has expired, or the policy has changed",
                fix="call again with a valid token",
            )

    def _identity(self) -> Identity:
        return EVERYBODY if self.evidence is None else self._access.identify(self.evidence)

    def is_active(self) -> bool:
        """Whether the caller still waits for a response."""
        return not self._ended

    def wait(self, future: Future[T]) -> T:
        """Wait for a future in the handler's thread. Raises CancelledError if the call ends first."""
        self._awaited = future
        try:
            if self._ended:
                future.cancel()
            return future.result()
        finally:
            self._awaited = None
            del future  # its error's traceback leads back here

    def add_callback(self, callback: Callable[[], object]) -> None:
        """Run a callback, in any thread, when the call ends; run it immediately if the call has already ended."""
        with self._lock:
            if not self._ended:
                self._callbacks.append(callback)
                return
        callback()

    def end(self) -> None:
        """Mark the call as ended (the caller has received the response or has disconnected), and run the callbacks."""
        with self._lock:
            self._ended = True
            callbacks, self._callbacks = self._callbacks, []
        awaited = self._awaited
        if awaited is not None:
            awaited.cancel()
        for callback in callbacks:
            callback()


def _evidence(context: Context) -> PresentedCredentials:
    shown = [value for key, value in context.invocation_metadata() or () if key == AUTHORIZATION]
    texts = [value if isinstance(value, str) else value.decode("ascii", "replace") for value in shown]
    return PresentedCredentials.of_call(texts, names_from_grpc(context.auth_context()))
