"""Handlers of the operations in the table: each reads the arguments from its request, calls the operation's body, and
builds the response.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

from google.protobuf.message import Message

from weighbridge._core.operations.operation import LARGEST_PAGE, Operation
from weighbridge._core.operations.table import OPERATIONS
from weighbridge._transport.wire_operations import messages_of
from weighbridge_service.api.bodies import PAGE, Bodies
from weighbridge_service.api.grpc.call import Call


def page_size(size: int) -> int:
    """Number of items in a page for a requested ``size``; 0 requests the default."""
    return min(size, LARGEST_PAGE) if size > 0 else PAGE


class OperationHandler:
    """Handler of one operation.

    Args:
        operation: the operation.
        body: its implementation.
    """

    def __init__(self, operation: Operation[Any], body: Callable[..., Any]) -> None:
        self._messages = messages_of(operation)
        self._body = body
        self._place = attrgetter(operation.order) if operation.pages else None

    def __call__(self, request: Any, call: Call) -> Message:
        arguments = self._messages.arguments(request)
        if self._place is None:
            return self._messages.response(self._body(call.peer, **arguments))
        size = page_size(request.page_size)
        items = self._body(call.peer, **arguments, after=request.page_token, size=size)
        return self._messages.response(items, str(self._place(items[-1])) if len(items) == size else "")


def operation_handlers(bodies: Bodies) -> dict[str, OperationHandler]:
    """Handlers of all operations, by service and method."""
    return {each.method: OperationHandler(each, getattr(bodies, each.name)) for each in OPERATIONS}
