"""Messages of the local lane on a Unix socket: how they are framed, and how descriptors come with them.

The format is described in ``weighbridge/v1/local_lane.proto``. Both sides use these functions.
"""

from __future__ import annotations

import mmap
import os
import socket
import struct
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from typing import Protocol

from weighbridge.errors import BY_REASON, Unavailable, WeighbridgeError
from weighbridge.v1 import local_lane_pb2 as pb

_LENGTH = struct.Struct("<I")
MAX_MESSAGE_BYTES = 64 << 20
"""Largest message: the plan of a rank of the largest models has some ten thousand copies, a hundred bytes each."""
MAX_DESCRIPTORS = 128
"""Most descriptors with one message; Linux takes 253. Files of a version are the most there can be."""
_READ_AT_ONCE = 1 << 20
_FREE_BYTES = 64 << 10
"""Bytes of a message that need no reservation: nearly all messages have fewer."""


class _Serializable(Protocol):
    def SerializeToString(self) -> bytes: ...


def send(connection: socket.socket, message: _Serializable, descriptors: Sequence[int] = ()) -> None:
    """Send one message. Raises OSError if the connection is gone."""
    raw = message.SerializeToString()
    head = _LENGTH.pack(len(raw))
    if descriptors:
        socket.send_fds(connection, [head], list(descriptors))
    else:
        connection.sendall(head)
    connection.sendall(raw)


def send_at_once(connection: socket.socket, message: _Serializable) -> None:
    """Send one small message if the other side has room for it.

    Raises OSError if it has not, or the connection is gone.
    """
    raw = message.SerializeToString()
    framed = _LENGTH.pack(len(raw)) + raw
    if connection.send(framed, socket.MSG_DONTWAIT) != len(framed):
        raise BlockingIOError("the socket of the local lane has no room for a message")


def limit_sending(connection: socket.socket, seconds: float) -> None:
    """Let what is sent fail with an OSError if the other side takes nothing for so long."""
    limit = struct.pack("@ll", int(seconds), 0)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


class Room(Protocol):
    """Budget of the memory that long messages occupy while they are received; see `receive`."""

    def take(self, nbytes: int) -> None:
        """Reserve bytes. Raises WeighbridgeError if there are too few."""

    def give(self, nbytes: int) -> None:
        """Release bytes."""


def receive(
    connection: socket.socket,
    room: Room | None = None,
    seconds: float | None = None,
    most_descriptors: int = MAX_DESCRIPTORS,
) -> tuple[bytes, list[int]] | None:
    """The next message and its descriptors, which the caller closes; None if the other side has closed the connection.

    Args:
        connection: a stream socket.
        room: budget for messages of more than 64 KiB.
        seconds: time in which a message that has begun must arrive; None for the socket's own timeout.
        most_descriptors: most descriptors with one message; the kernel closes others.

    Raises:
        Unavailable: the message is too long, or breaks off.
        WeighbridgeError: there is no room for it.
        OSError: the connection is broken.
    """
    descriptors: list[int] = []
    try:
        head = b""
        while len(head) < _LENGTH.size:
            part, found, _, _ = socket.recv_fds(
                connection, _LENGTH.size - len(head), most_descriptors, socket.MSG_CMSG_CLOEXEC
            )
            descriptors += found
            if not part:
                if head:
                    raise Unavailable("a message on the local lane was cut off")
                return None
            head += part
        (length,) = _LENGTH.unpack(head)
        if length > MAX_MESSAGE_BYTES:
            raise Unavailable(f"a message of {length} bytes on the local lane is too long")
        raw = _body(connection, length, room, seconds)
        kept, descriptors = descriptors, []
        return raw, kept
    finally:
        close_all(descriptors)


def _body(connection: socket.socket, length: int, room: Room | None, seconds: float | None) -> bytes:
    taken = 0
    before, deadline = connection.gettimeout(), None if seconds is None else time.monotonic() + seconds
    # a mapping takes memory only for bytes that have come, and frees it when it goes; memory of an allocator does
    # neither
    with ExitStack() as stack:
        if length > _FREE_BYTES:
            raw: bytearray | mmap.mmap = stack.enter_context(closing(mmap.mmap(-1, length)))
        else:
            raw = bytearray(length)
        stack.callback(connection.settimeout, before)
        if room is not None:
            stack.callback(lambda: room.give(taken))
        view = stack.enter_context(memoryview(raw))
        received = 0
        while received < length:
            if room is not None and length > _FREE_BYTES and received == taken:
                step = min(length - received, _READ_AT_ONCE)
                room.take(step)
                taken += step
            if deadline is not None:
                connection.settimeout(max(deadline - time.monotonic(), 0.001))
            end = taken if room is not None and taken else length
            count = connection.recv_into(view[received:end])
            if not count:
                raise Unavailable("a message on the local lane was cut off")
            received += count
        return bytes(view)


def close_all(descriptors: Sequence[int]) -> None:
    """Close descriptors."""
    for descriptor in descriptors:
        os.close(descriptor)


def error_to_proto(error: WeighbridgeError) -> pb.LaneError:
    """An error as a message."""
    return pb.LaneError(reason=error.reason, message=error.message, fix=error.fix, details=list(error.details))


def error_from_proto(message: pb.LaneError) -> WeighbridgeError:
    """A message as the error that it was."""
    kind = BY_REASON.get(message.reason, WeighbridgeError)
    return kind(message.message, fix=message.fix, details=list(message.details))
