"""Encoding and decoding of messages that carry weights, with one copy of the weights instead of three.

On the wire they are the protobuf messages of the contract, with their field ``data`` last: any protobuf library reads
and writes them. Python's own would copy the data into a message, out of it again, and once more into its serialised
form. Here the other fields go through protobuf, and the data beside it. (Encoding:
https://protobuf.dev/programming-guides/encoding/)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from google.protobuf.message import DecodeError, Message

from weighbridge._transport.varints import read_varint, write_varint

Buffer = bytes | memoryview

_DATA_FIELD = 3
_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
_DATA_TAG = bytes([_DATA_FIELD << 3 | _LENGTH])
_MOST_FIELDS = 64
"""Most fields of a message: the contract's have four, and later releases may add some.

Each takes a microsecond to find.
"""


M = TypeVar("M", bound=Message)


@dataclass(frozen=True, slots=True)
class Carried(Generic[M]):
    """A message and the data it carries.

    Attributes:
        message: the other fields; its own ``data`` is empty.
        data: the data, a view of the received bytes.
    """

    message: M
    data: memoryview


def encode(message: Message, data: Buffer) -> bytes:
    """The serialised form of a message with ``data`` as its field 3, which is not set yet."""
    return b"".join((message.SerializeToString(), _DATA_TAG, write_varint(len(data)), data))


def decoder(kind: type[M]) -> Callable[[bytes], Carried[M]]:
    """A deserialiser for messages of this type whose field 3 is ``bytes data``.

    It raises DecodeError, as protobuf does, for bytes that are no such message, and for too many fields.
    """

    def decode(raw: bytes) -> Carried[M]:
        view = memoryview(raw)
        rest: list[memoryview] = []
        data = view[:0]
        position = kept = fields = 0
        while position < len(raw):
            start, fields = position, fields + 1
            if fields > _MOST_FIELDS:
                raise DecodeError(f"more than {_MOST_FIELDS} fields")
            tag, position = read_varint(raw, position)
            wire_type = tag & 7
            if wire_type == _VARINT:
                _, position = read_varint(raw, position)
            elif wire_type == _LENGTH:
                length, position = read_varint(raw, position)
                if tag >> 3 == _DATA_FIELD:
                    rest.append(view[kept:start])
                    data, kept = view[position : position + length], position + length
                position += length
            elif wire_type in (_FIXED64, _FIXED32):
                position += 8 if wire_type == _FIXED64 else 4
            else:
                raise DecodeError(f"wire type {wire_type}")
        if position != len(raw):
            raise DecodeError("truncated")
        rest.append(view[kept:])
        return Carried(kind.FromString(b"".join(rest)), data)

    return decode
