"""Parts of a large request: messages of the same type that a service merges into one again.

Protobuf merges concatenated messages: repeated fields are joined, and nested messages are merged
(https://protobuf.dev/programming-guides/encoding/#last-one-wins). So an encoded request can be cut between its fields,
and within a field that is a message. Only a model's file is cut within its bytes: by the contract, it goes on in a
further file of the same name.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

from google.protobuf.message import DecodeError, Message

from weighbridge._transport.varints import read_varint, write_varint
from weighbridge.errors import InvalidArgument
from weighbridge.v1 import resources_pb2

PART_BYTES = 1 << 20
"""Length of a part in bytes, without the tags and lengths of the fields around it."""
MAX_REQUEST_BYTES = 64 << 20
"""Most bytes of all parts of a request together."""

M = TypeVar("M", bound=Message)

_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
_FILE = resources_pb2.ModelFile.DESCRIPTOR


def encoded_parts(request: Message, most: int = PART_BYTES) -> tuple[bytes, ...]:
    """A request, encoded in parts.

    Args:
        request: a request of any length.
        most: most bytes of a part.

    Raises:
        InvalidArgument: it is longer than a request may be, or has a long field that is unknown or cannot be cut.
    """
    raw = request.SerializeToString()
    if len(raw) > MAX_REQUEST_BYTES:
        raise InvalidArgument(
            f"a {request.DESCRIPTOR.name} of {len(raw)} bytes is longer than {MAX_REQUEST_BYTES}",
            fix="ask for less at one time",
        )
    return (raw,) if len(raw) <= most else tuple(map(bytes, _cut(memoryview(raw), request.DESCRIPTOR, most)))


def parts(request: M) -> Iterator[M]:
    """A request in parts, for a generated stub."""
    encoded = encoded_parts(request)
    if len(encoded) == 1:
        yield request
        return
    for each in encoded:
        yield type(request).FromString(each)


def _cut(raw: memoryview, kind: Any, most: int) -> Iterator[bytes | memoryview]:
    """An encoded message as encoded messages of the same type, each of at most so many bytes without the tags and
    lengths around it.
    """
    begin = position = 0
    while position < len(raw):
        start = position
        tag, position = read_varint(raw, position)
        content = position
        wire_type = tag & 7
        if wire_type == _VARINT:
            _, position = read_varint(raw, position)
        elif wire_type == _LENGTH:
            length, content = read_varint(raw, position)
            position = content + length
        elif wire_type in (_FIXED64, _FIXED32):
            position += 8 if wire_type == _FIXED64 else 4
        else:
            raise DecodeError(f"wire type {wire_type}")
        if position - begin <= most:
            continue
        if start > begin:
            yield raw[begin:start]
        begin = start
        if position - start > most:
            field = kind.fields_by_number.get(tag >> 3)
            if field is None:
                raise InvalidArgument(
                    f"a {kind.name} has {position - content} bytes in an unknown field, which cannot be sent in parts"
                )
            for part in _cut_field(raw[content:position], field, most):
                yield write_varint(tag) + write_varint(len(part)) + part
            begin = position
    if begin < len(raw):
        yield raw[begin:]


def _cut_field(raw: memoryview, field: Any, most: int) -> Iterator[bytes]:
    """A field's content as contents of the same field, which merge into it."""
    message = field.message_type
    if message is _FILE:
        file = resources_pb2.ModelFile.FromString(bytes(raw))
        for start in range(0, max(len(file.content), 1), most):
            content = file.content[start : start + most]
            yield resources_pb2.ModelFile(name=file.name, content=content).SerializeToString()
    elif message is not None and not field.is_repeated:
        for part in _cut(raw, message, most):
            yield bytes(part)
    else:
        raise InvalidArgument(f"{field.full_name} has {len(raw)} bytes, and cannot be sent in parts")
