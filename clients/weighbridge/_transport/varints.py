"""Variable-length integers of protobuf's encoding (https://protobuf.dev/programming-guides/encoding/)."""

from __future__ import annotations

from google.protobuf.message import DecodeError


def write_varint(value: int) -> bytes:
    """The encoding of a non-negative number."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def read_varint(raw: bytes | memoryview, position: int) -> tuple[int, int]:
    """The number at a position, and the position after it. Raises DecodeError if there is none."""
    value = shift = 0
    while True:
        if position >= len(raw) or shift > 63:
            raise DecodeError("truncated or malformed varint")
        byte = raw[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
