"""Steps of a call without I/O: the requests, and the handling of the responses.

A generator yields steps and returns the result of the call. It yields a `UnaryCall` and receives the response or the
error; it yields a `Pause`; or it yields `Work` and receives its result. `take` executes the steps in a thread that may
block, and `weighbridge.aio` on an event loop, so that requests, paging and waiting are implemented once. (httpx
implements its authentication flows in this way.)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from weighbridge._transport import rpc
from weighbridge._transport.request_parts import encoded_parts
from weighbridge.errors import WeighbridgeError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class UnaryCall:
    """A call with one response. It is safe to repeat.

    Attributes:
        path: path of the method.
        request: the encoded request, in parts.
        seconds: deadline of the call.
        latest: returns the part of the request that differs with each attempt, such as the age of an event; None if no
            part differs.
    """

    path: str
    request: tuple[bytes, ...]
    seconds: float = rpc.CALL_SECONDS
    latest: Callable[[], Message] | None = None

    @property
    def encoded(self) -> tuple[bytes, ...]:
        """The request to send now, in parts.

        Encoded messages that are concatenated form one message (see `request_parts`).
        """
        if self.latest is None:
            return self.request
        *before, last = self.request
        return (*before, last + self.latest().SerializeToString())


@dataclass(frozen=True, slots=True)
class Pause:
    """A pause, in seconds."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Work:
    """A computation that takes milliseconds or more, which is longer than an event loop should be blocked."""

    do: Callable[[], Any]


Step: TypeAlias = UnaryCall | Pause | Work
Steps: TypeAlias = Generator[Step, Any, T]


def take(steps: Steps[T], call: Callable[[UnaryCall], bytes]) -> T:
    """Execute steps one after the other in this thread, and return their result.

    Args:
        steps: the steps.
        call: makes a call, and returns the serialised response.
    """
    try:
        step = next(steps)
        while True:
            try:
                answer = _take(step, call)
            except WeighbridgeError as error:
                step = steps.throw(error)
            else:
                step = steps.send(answer)
    except StopIteration as end:
        result: T = end.value
        return result


def _take(step: Step, call: Callable[[UnaryCall], bytes]) -> Any:
    match step:
        case UnaryCall():
            return call(step)
        case Pause(seconds):
            time.sleep(seconds)
        case Work(do):
            return do()
    return None


def call_method(
    service: ServiceDescriptor,
    name: str,
    request: Message,
    seconds: float = rpc.CALL_SECONDS,
    latest: Callable[[], Message] | None = None,
) -> Steps[Any]:
    """Call a method of the contract, and return its response as a message."""
    raw = yield UnaryCall(f"/{service.full_name}/{name}", encoded_parts(request), seconds, latest)
    return GetMessageClass(service.methods_by_name[name].output_type).FromString(raw)
