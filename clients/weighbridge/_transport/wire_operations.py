"""Messages of the operations in the table, and the values that they carry."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, Generic, TypeVar

from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from weighbridge._core.json_values import json_value
from weighbridge._core.operations.operation import Operation, OperationEntry
from weighbridge._transport import wire
from weighbridge.errors import InvalidArgument
from weighbridge.v1 import model_service_pb2

Answer = TypeVar("Answer")


class Messages(Generic[Answer]):
    """Messages of one operation.

    Args:
        operation: an operation with its arguments and its result in the table.

    Attributes:
        path: path of its calls.
    """

    def __init__(self, operation: Operation[Answer]) -> None:
        descriptor = descriptor_of(operation)
        self.path = f"/{descriptor.containing_service.full_name}/{descriptor.name}"
        self._request: Any = GetMessageClass(descriptor.input_type)
        self._response: Any = GetMessageClass(descriptor.output_type)
        self._operation = operation

    def request(self, arguments: Mapping[str, Any]) -> Message:
        """A request with these arguments, by the names of its fields. Raises InvalidArgument for values that do not
        fit into the contract's fields.
        """
        try:
            message: Message = self._request(**{name: json_value(value) for name, value in arguments.items()})
        except ValueError as error:
            raise InvalidArgument(f"a value does not fit into the request: {error}") from error
        return message

    def arguments(self, request: Any) -> dict[str, Any]:
        """The arguments in a request. Raises the dataclasses' errors for values out of bounds."""
        return {each.name: _argument(each.kind, getattr(request, each.name)) for each in self._operation.takes}

    def response(self, answer: Any, next_page: str = "") -> Message:
        """The response for an answer; for a list, with the token of the next page."""
        found, within = wire.written(answer), self._operation.within
        fields: dict[str, Any] = {within: found} if within else found
        if self._operation.pages:
            fields["next_page_token"] = next_page
        message: Message = self._response(**fields)
        return message

    def read(self, raw: bytes) -> Any:
        """A response as a message."""
        return self._response.FromString(raw)

    def answer(self, response: Any) -> Any:
        """The answer in a response: a value, or a list of values."""
        gives, within = self._operation.gives, self._operation.within
        found = getattr(response, within) if within else response
        return [wire.read(gives, each) for each in found] if self._operation.order else wire.read(gives, found)


@functools.cache
def messages_of(operation: Operation[Answer]) -> Messages[Answer]:
    """The messages of an operation."""
    return Messages(operation)


def descriptor_of(operation: OperationEntry) -> MethodDescriptor:
    """An operation's method in the contract. Raises KeyError."""
    package = model_service_pb2.DESCRIPTOR.package
    found: MethodDescriptor = model_service_pb2.DESCRIPTOR.pool.FindMethodByName(f"{package}.{operation.method}")
    return found


def _argument(kind: Any, value: Any) -> Any:
    if dataclasses.is_dataclass(kind):
        return wire.read(kind, value)  # type: ignore[arg-type]  # a class, not an instance
    return tuple(value) if kind == tuple[str, ...] else value
