"""Calls of the operations in the table that do not need their own steps."""

from __future__ import annotations

from typing import Any, TypeVar

from weighbridge._clients.calls.steps import Steps, UnaryCall
from weighbridge._core.operations.operation import LARGEST_PAGE, Operation
from weighbridge._transport.request_parts import encoded_parts
from weighbridge._transport.wire_operations import messages_of

Answer = TypeVar("Answer")


def ask(operation: Operation[Answer], **arguments: Any) -> Steps[Answer]:
    """Call an operation with these arguments, and return its response."""
    messages = messages_of(operation)
    request = encoded_parts(messages.request(arguments))
    found: Answer = messages.answer(messages.read((yield UnaryCall(messages.path, request, operation.seconds))))
    return found


def ask_all(operation: Operation[Answer], limit: int | None = None, **arguments: Any) -> Steps[list[Answer]]:
    """Call an operation that returns a list, page by page if the service returns pages.

    Returns all items, or the first ``limit``.
    """
    messages, found = messages_of(operation), list[Answer]()
    if limit is not None:
        arguments["page_size"] = min(limit, LARGEST_PAGE)
    while True:
        request = encoded_parts(messages.request(arguments))
        page = messages.read((yield UnaryCall(messages.path, request, operation.seconds)))
        found += messages.answer(page)
        after = page.next_page_token if operation.pages else ""
        if not after or (limit is not None and len(found) >= limit):
            return found[:limit]
        arguments["page_token"] = after
