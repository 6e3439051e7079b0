"""Capacity for pieces of files that are being sent to readers over HTTP.

The less capacity is left, the smaller new pieces are.

A reader that stops reading occupies its pieces for as long as its connection lasts. So no reader waits for the capacity
of another: when no capacity is left, a new reader still gets pieces of the smallest size.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

SMALLEST_BYTES = 128 << 10
_SHARES = 16
"""A piece takes at most one part in this many of the free capacity: 24 readers get pieces of full size, and hundreds
still leave some free.
"""


class PieceRoom:
    """Capacity for pieces in one process. Thread-safe.

    Args:
        nbytes: capacity in bytes.
        largest: maximum bytes of a piece.

    Attributes:
        nbytes, largest: as given.
        held: bytes of all pieces that are being sent; guarded by `lock`.
        lock: guards `held`.
    """

    def __init__(self, nbytes: int, largest: int) -> None:
        self.nbytes = nbytes
        self.largest = largest
        self.held = 0
        self.lock = threading.Lock()

    @contextmanager
    def reader(self) -> Iterator[PieceReader]:
        """The pieces of one reader, released at the end of the block."""
        reader = PieceReader(self)
        try:
            yield reader
        finally:
            reader.give_back(reader.held)


class PieceReader:
    """The pieces of one reader.

    Args:
        room: the capacity that they are taken from.

    Attributes:
        held: bytes of its pieces that are not sent yet.
    """

    def __init__(self, room: PieceRoom) -> None:
        self._room = room
        self.held = 0

    def take(self, wanted: int) -> int:
        """Reserve a piece of at most `wanted` bytes, and return its size. The caller gives it back once it is sent."""
        room = self._room
        with room.lock:
            left = max(room.nbytes - room.held, 0) // _SHARES
            taken = min(wanted, room.largest, max(left, SMALLEST_BYTES))
            room.held += taken
        self.held += taken
        return taken

    def give_back(self, nbytes: int) -> None:
        """Release bytes that were sent."""
        self.held -= nbytes
        with self._room.lock:
            self._room.held -= nbytes
