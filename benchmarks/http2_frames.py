"""Frames of HTTP/2 as a client sends and reads them, without the library that would keep to the rules.

An attacker breaks what gRPC's own client keeps: it opens calls and says nothing, never widens a window, or withholds
the last byte of a message. And thousands of calls cost it next to nothing, so that what is measured is the service.
Headers are written as literals that no table needs to know. Source: RFC 9113 (frames), RFC 7541 (headers), gRPC's "gRPC
over HTTP2" (what a call looks like).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0x0, 0x1, 0x3, 0x4, 0x6, 0x7, 0x8
END_STREAM = ACK = 0x1
END_HEADERS = 0x4
INITIAL_WINDOW_SIZE, MAX_FRAME_SIZE = 0x4, 0x5
DEFAULT_WINDOW = 65_535
DEFAULT_FRAME = 16_384
LARGEST_WINDOW = 2**31 - 1
_HEAD = struct.Struct(">BHBBI")
_SETTING = struct.Struct(">HI")
_MESSAGE = struct.Struct(">BI")
_NUMBER = struct.Struct(">I")


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame.

    Attributes:
        kind: its type.
        flags: its flags.
        stream: to which it belongs; 0 is the connection.
        payload: bytes after the head.
    """

    kind: int
    flags: int
    stream: int
    payload: bytes

    @property
    def ends_stream(self) -> bool:
        """Whether the other side says nothing more on this stream."""
        return self.kind == RST_STREAM or (self.kind in (DATA, HEADERS) and bool(self.flags & END_STREAM))

    @property
    def settings(self) -> dict[int, int]:
        """The values of a SETTINGS frame."""
        return dict(_SETTING.iter_unpack(self.payload))

    @property
    def increment(self) -> int:
        """Bytes by which a WINDOW_UPDATE frame widens a window."""
        return int(_NUMBER.unpack(self.payload)[0]) & LARGEST_WINDOW


class FrameReader:
    """Cuts what a server sends into frames."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[Frame]:
        """The frames that are complete with these bytes."""
        data = self._rest + data
        start = 0
        while len(data) - start >= _HEAD.size:
            high, low, kind, flags, stream = _HEAD.unpack_from(data, start)
            end = start + _HEAD.size + (high << 16 | low)
            if end > len(data):
                break
            yield Frame(kind, flags, stream & LARGEST_WINDOW, data[start + _HEAD.size : end])
            start = end
        self._rest = data[start:]


def head(kind: int, flags: int, stream: int, length: int) -> bytes:
    """The nine bytes before a payload of this length."""
    return _HEAD.pack(length >> 16, length & 0xFFFF, kind, flags, stream)


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """A whole frame."""
    return head(kind, flags, stream, len(payload)) + payload


def preface(window: int) -> bytes:
    """First bytes that a client sends.

    Args:
        window: bytes that the server may send on each stream without a window update, and on the connection if that is
            more than usual.
    """
    said = PREFACE + frame(SETTINGS, 0, 0, _SETTING.pack(INITIAL_WINDOW_SIZE, window))
    if window > DEFAULT_WINDOW:
        said += frame(WINDOW_UPDATE, 0, 0, _NUMBER.pack(window - DEFAULT_WINDOW))
    return said


def call(stream: int, path: str, authority: str, metadata: Iterable[tuple[str, str]] = ()) -> bytes:
    """The HEADERS frame that opens a gRPC call."""
    fields = (
        (":method", "POST"), (":scheme", "http"), (":path", path), (":authority", authority),
        ("te", "trailers"), ("content-type", "application/grpc"), *metadata,
    )  # fmt: skip
    block = b"".join(b"\0" + _string(name) + _string(value) for name, value in fields)
    return frame(HEADERS, END_HEADERS, stream, block)


def message_head(length: int) -> bytes:
    """The five bytes before a gRPC message of this length."""
    return _MESSAGE.pack(0, length)


def _string(text: str) -> bytes:
    raw = text.encode()
    return _integer(len(raw)) + raw


def _integer(value: int) -> bytes:
    """An integer behind a prefix of one bit, which is 0."""
    if value < 0x7F:
        return bytes((value,))
    found, value = [0x7F], value - 0x7F
    while value >= 0x80:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*found, value))
