"""Method of the contract, with the steps around each of its calls. The steps are the same at both ports.

The ports differ only in how they read, write and wait: `methods` on an event loop, `bulk_server` in threads.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from weighbridge._transport import pieces
from weighbridge.errors import InvalidArgument, Unavailable, WeighbridgeError
from weighbridge_service.access.access import Access
from weighbridge_service.access.audit import Audit, noting
from weighbridge_service.admission.identity_quotas import IdentityQuotas
from weighbridge_service.admission.message_waits import MessageWaits
from weighbridge_service.api.grpc.asking import LONG, VERBS, check_allowed, record
from weighbridge_service.api.grpc.call import Call, Context
from weighbridge_service.api.grpc.errors import to_status
from weighbridge_service.api.grpc.requests import RequestLimits, joined

log = logging.getLogger(__name__)

Handler = TypeVar("Handler", bound=Callable[..., Any])
Count = Callable[[str, str, float | None], None]
"""Counts an ended call. Receives the method name, the status code and the duration in seconds; None as the duration if
clients determine how long calls of the method last."""

PAUSE_SECONDS = 60.0
"""Seconds that a stream of weights may pause between messages, because a trainer may be copying weights from its
devices.
"""


def streamed(handler: Handler) -> Handler:
    """Mark a handler that runs in its own thread and receives an iterator over the messages of a request, as
    `pieces.Carried`.
    """
    handler.streamed = True  # type: ignore[attr-defined]
    return handler


def encoded(response: Message | bytes) -> bytes:
    """A response in wire format; messages with weights are already encoded."""
    return response if isinstance(response, bytes) else response.SerializeToString()


@dataclass(frozen=True, slots=True)
class Supervision:
    """Checks, limits and records that apply to all calls.

    Attributes:
        access: identifies callers.
        audit: records the end of each call.
        count: counts the end of each call.
        waits: ends waits for messages that take too long.
        limits: limits of requests while they are received.
        quotas: quotas of identities, which also delay calls before their requests are read.
    """

    access: Access
    audit: Audit
    count: Count
    waits: MessageWaits
    limits: RequestLimits
    quotas: IdentityQuotas


class Method:
    """One method, and its handler.

    Args:
        descriptor: descriptor from the contract.
        handler: handles calls.
        supervision: supervision of calls.

    Attributes:
        handler, supervision: as given.
        path: gRPC path of its calls.
        verb: the verb that callers must be allowed.
        takes_long: whether its calls run in the pool for long calls instead of the one for quick calls.
        joins: whether a call consists of several messages: parts of one request or, if ``lasts`` is also true, separate
            requests.
        on_loop: whether the handler runs on an event loop.
        lasts: whether clients determine how long calls last.
        takes_weights: whether a call receives a stream of weights.
        carries_weights: whether a call receives or sends a stream of weights.
    """

    def __init__(self, descriptor: MethodDescriptor, handler: Callable[..., Any], supervision: Supervision) -> None:
        service, kind = descriptor.containing_service, GetMessageClass(descriptor.input_type)
        self.handler = handler
        self.path = f"/{service.full_name}/{descriptor.name}"
        self.verb = VERBS[service.name][descriptor.name]
        self.takes_long = f"{service.name}.{descriptor.name}" in LONG
        self.joins = descriptor.client_streaming
        self.lasts = inspect.isasyncgenfunction(handler)
        self.on_loop = self.lasts or inspect.iscoroutinefunction(handler)
        self.takes_weights = hasattr(handler, "streamed")
        self.carries_weights = self.takes_weights or inspect.isgeneratorfunction(handler)
        self._descriptor = descriptor
        self.supervision = supervision
        self._decode: Callable[[bytes], Any] = pieces.decoder(kind) if self.takes_weights else kind.FromString

    def begin(self, context: Context, cancel: Callable[[], object]) -> Call:
        """Begin a call; ``cancel`` ends it, from any thread."""
        call = Call(context, self.supervision.access, cancel)
        if not self.lasts:
            call.begin_span(self._descriptor)
        return call

    @contextmanager
    def answering(self, call: Call, is_active: Callable[[], bool]) -> Iterator[None]:
        """Handle a call in the block. An error becomes `Call.refusal`.

        The end of the call is counted, traced and recorded in the audit log.

        Args:
            call: the call.
            is_active: returns whether the caller still waits for a response.
        """
        code = "OK"
        try:
            yield
        except (asyncio.CancelledError, GeneratorExit):
            code = "CANCELLED"
            raise
        except Exception as error:
            # no error for a caller that has disconnected, or whose own stream broke while it was read
            gone = isinstance(error, grpc.RpcError | grpc.aio.InternalError) or not is_active()
            known = Unavailable("the caller has gone") if gone else self._known(error)
            code, call.refusal = "CANCELLED" if gone else known.grpc_code, to_status(known)
            del known  # its traceback refers to this frame
        finally:
            self.supervision.count(self._descriptor.name, code, None if self.lasts else call.seconds)
            call.end_span(code)
            record(self.supervision.audit, call, self._descriptor, code)

    def request(self, call: Call, raw: bytes) -> Any:
        """Decode and authorize a request.

        Raises InvalidArgument if it cannot be decoded, and the same errors as `check_allowed`.
        """
        found = self._decoded(raw)
        check_allowed(call, self.verb, found, self.supervision.audit)
        return found

    def answer(self, call: Call, raw: bytes) -> bytes:
        """The encoded response to a request, from a handler that is a function."""
        with noting(call.noted):
            return encoded(self.handler(self.request(call, raw), call))

    def carry(self, requests: Iterator[bytes], call: Call, first: Any = None) -> Generator[bytes, None, None]:
        """Yield the responses to a call that carries weights.

        Runs in a thread, which waits for the next message when the handler needs it.

        Args:
            requests: the messages, read one at a time.
            call: the call.
            first: the first message, if `request` has already decoded it; ``requests`` then yields the others.
        """
        waited = self._waited_for(requests, call)
        if self.takes_weights:
            messages = self._messages(waited, call, first)
            del first
            answer = encoded(self.handler(messages, call))
            call.check_standing()
            yield answer
            return
        request = self.request(call, joined(waited, self.supervision.limits.longest))
        with closing(self.handler(request, call)) as responses:
            for response in responses:
                call.check_standing()
                yield encoded(response)
                del response

    def _messages(self, requests: Iterator[bytes], call: Call, first: Any) -> Iterator[Any]:
        begun = first is not None
        if begun:
            yield first
        del first
        for raw in requests:
            # only the first message is authorized: it names the model for all further ones
            message = self._decoded(raw) if begun else self.request(call, raw)
            begun = True
            yield message
            del raw, message

    def _waited_for(self, requests: Iterator[bytes], call: Call) -> Iterator[bytes]:
        seconds = self.supervision.limits.silent_seconds
        while True:
            with self.supervision.waits.waiting(call.cancel, seconds):
                message = next(requests, None)
            if message is None:
                return
            seconds = PAUSE_SECONDS
            call.check_standing()
            yield message
            del message

    def _decoded(self, raw: bytes) -> Any:
        try:
            return self._decode(raw)
        except DecodeError as error:
            raise InvalidArgument(
                f"the request is not a message of this method: {error}",
                fix="use the contract in protos/ of this service's release",
            ) from error

    def _known(self, error: Exception) -> WeighbridgeError:
        """The error that the caller receives; an unexpected one is logged and replaced."""
        if isinstance(error, WeighbridgeError):
            return error
        log.error("%s failed", self._descriptor.name, exc_info=error)
        return WeighbridgeError(f"the service failed: {type(error).__name__}", fix="see the log of the service")


def methods_of(
    contract: Iterable[tuple[ServiceDescriptor, object]],
    derived: Mapping[str, Callable[..., Any]],
    supervision: Supervision,
) -> list[Method]:
    """The methods of services.

    Args:
        contract: each service, with an object that has the handlers, each with the name of its method, of all methods
            that are not in ``derived``.
        derived: handlers by ``Service.Method``.
        supervision: supervision of calls.
    """
    return [
        Method(
            method,
            derived.get(f"{service.name}.{method.name}") or getattr(handlers, method.name),
            supervision,
        )
        for service, handlers in contract
        for method in service.methods
    ]


class Behaviours(grpc.GenericRpcHandler):  # type: ignore[type-arg]
    """Behaviours of a server by gRPC path. All requests and responses are streams of bytes."""

    def __init__(self, behaviours: Mapping[str, Callable[..., Any]]) -> None:
        self._found = {path: grpc.stream_stream_rpc_method_handler(each) for path, each in behaviours.items()}

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        """See gRPC."""
        return self._found.get(handler_call_details.method)
