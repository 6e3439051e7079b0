"""Steps of a call without I/O: what is asked, and what the answers mean.

A generator returns the result. It yields a `Call` and is sent the response or thrown the error, yields a `Pause`, or yields `Work` and is
sent its result. `take` takes these steps in a thread that may block, `weighbridge.aio` on an event loop, so requests, paging and waiting
are written once. (httpx writes its authentication flows in this way.)
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
class Call:
    """A call with one response, safe to repeat.

    Attributes:
        path: of the method.
        request: the encoded request, in parts.
        seconds: its deadline.
        latest: gives what of the request is another with each try, such as how long ago something was; None if nothing is.
    """

    path: str
    request: tuple[bytes, ...]
    seconds: float = rpc.CALL_SECONDS
    latest: Callable[[], Message] | None = None

    @property
    def encoded(self) -> tuple[bytes, ...]:
        """The request as it is to be sent now, in parts. Messages that are encoded one behind the other are one message (see `request_parts`)."""
        if self.latest is None:
            return self.request
        *before, last = self.request
        return (*before, last + self.latest().SerializeToString())


@dataclass(frozen=True, slots=True)
class Pause:
    """Time to let pass, in seconds."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Work:
    """Arithmetic that takes milliseconds or more: longer than an event loop should be held up."""

    do: Callable[[], Any]


Step: TypeAlias = Call | Pause | Work
Steps: TypeAlias = Generator[Step, Any, T]


def take(steps: Steps[T], call: Callable[[Call], bytes]) -> T:
    """Take steps one after the other in this thread; their result.

    Args:
        steps: what is to be done.
        call: makes a call, and gives the serialised response.
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


def _take(step: Step, call: Callable[[Call], bytes]) -> Any:
    match step:
        case Call():
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
    """Call a method of the contract; its response as a message."""
    raw = yield Call(f"/{service.full_name}/{name}", encoded_parts(request), seconds, latest)
    return GetMessageClass(service.methods_by_name[name].output_type).FromString(raw)
