"""Method of the contract: what is done around a call of it, at whichever port it comes.

The ports differ in how they read, write and wait (`methods` on an event loop, `bulk_server` in threads), and in nothing else.
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
"""Is told the method and the status code of each call that ends, and how long it took; None of those that last as long as their clients."""

PAUSE_SECONDS = 60.0
"""How long a stream of weights may pause: a trainer copies what it sends from its devices."""


def streamed(handler: Handler) -> Handler:
    """A handler that takes an iterator over the messages of a request, as `pieces.Carried`, in a thread of its own."""
    handler.streamed = True  # type: ignore[attr-defined]
    return handler


def encoded(response: Message | bytes) -> bytes:
    """A response as it goes on the wire; messages with weights are encoded already."""
    return response if isinstance(response, bytes) else response.SerializeToString()


@dataclass(frozen=True, slots=True)
class Supervision:
    """What all calls are subject to.

    Attributes:
        access: knows who calls.
        audit: where it is written down how each call ends.
        count: is told how each call ends.
        waits: ends waits for messages that take too long.
        limits: what requests may take on their way in.
        quotas: of identities; say how long a call of one is put off before anything of it is looked at.
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
        descriptor: of the contract.
        handler: answers calls of it.
        supervision: of calls.

    Attributes:
        handler, supervision: as given.
        path: of its calls.
        verb: what its callers must be allowed to do.
        takes_long: whether it has threads other than those for calls that are answered at once.
        joins: whether the messages of a request are parts of one, or each is a request.
        on_loop: whether the handler runs on an event loop.
        lasts: whether calls last as long as their clients want.
        takes_weights: whether it takes a stream of weights.
        carries_weights: whether it takes or gives one.
    """

    def __init__(
        self, descriptor: MethodDescriptor, handler: Callable[..., Any], supervision: Supervision
    ) -> None:
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
        """A call that has come; ``cancel`` ends it, from any thread."""
        call = Call(context, self.supervision.access, cancel)
        if not self.lasts:
            call.begin_span(self._descriptor)
        return call

    @contextmanager
    def answering(self, call: Call, is_active: Callable[[], bool]) -> Iterator[None]:
        """Answer a call in the block. An error becomes `Call.refusal`; how the call ends is counted, traced and recorded.

        Args:
            call: the call.
            is_active: whether its caller still waits for an answer.
        """
        code = "OK"
        try:
            yield
        except (asyncio.CancelledError, GeneratorExit):
            code = "CANCELLED"
            raise
        except Exception as error:
            # a caller that has gone is told nothing; neither is one whose own stream broke while it was read
            gone = isinstance(error, grpc.RpcError | grpc.aio.InternalError) or not is_active()
            known = Unavailable("the caller has gone") if gone else self._known(error)
            code, call.refusal = "CANCELLED" if gone else known.grpc_code, to_status(known)
            del known  # its traceback leads back here
        finally:
            self.supervision.count(self._descriptor.name, code, None if self.lasts else call.seconds)
            call.end_span(code)
            record(self.supervision.audit, call, self._descriptor, code)

    def request(self, call: Call, raw: bytes) -> Any:
        """A request of a caller that may ask for what it says. Raises InvalidArgument if it is none, and as `check_allowed`."""
        found = self._decoded(raw)
        check_allowed(call, self.verb, found, self.supervision.audit)
        return found

    def answer(self, call: Call, raw: bytes) -> bytes:
        """The response to a request, by a handler that is a function."""
        with noting(call.noted):
            return encoded(self.handler(self.request(call, raw), call))

    def carry(self, requests: Iterator[bytes], call: Call, first: Any = None) -> Generator[bytes, None, None]:
        """The responses to a call that carries weights, for a thread: the next request is waited for when the handler wants it.

        Args:
            requests: messages as they come.
            call: the call.
            first: the message before these, if `request` has read it already.
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
            # the first one names the model for all that follow
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
                f"the request is no message of this method: {error}",
                fix="use the contract in protos/, of this service's release",
            ) from error

    def _known(self, error: Exception) -> WeighbridgeError:
        """What the caller is told of an error; one that nobody expected is logged."""
        if isinstance(error, WeighbridgeError):
            return error
        log.error("%s failed", self._descriptor.name, exc_info=error)
        return WeighbridgeError(f"the service failed: {type(error).__name__}", fix="its log says more")


def methods_of(
    contract: Iterable[tuple[ServiceDescriptor, object]],
    derived: Mapping[str, Callable[..., Any]],
    supervision: Supervision,
) -> list[Method]:
    """The methods of services.

    Args:
        contract: each service, and an object with a method of the name of each of its methods that is not derived.
        derived: handlers by service and method.
        supervision: of calls.
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
    """What a server runs, by the paths of calls. All requests and responses are streams of bytes."""

    def __init__(self, behaviours: Mapping[str, Callable[..., Any]]) -> None:
        self._found = {path: grpc.stream_stream_rpc_method_handler(each) for path, each in behaviours.items()}

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        """See gRPC."""
        return self._found.get(handler_call_details.method)
