"""Room for pieces of files on their way to readers over HTTP: the less of it is left, the smaller pieces are.

A reader that stops taking keeps the pieces that it has, for as long as its connection lasts. So no reader waits for the room of another: a
reader that comes when no room is left gets pieces of the smallest size.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

SMALLEST_BYTES = 128 << 10
_SHARES = 16
"""A piece is no larger than this part of the room that is left: 24 readers get on at full size, and hundreds leave some to the next one."""


class PieceRoom:
    """Room of one process. Thread-safe.

    Args:
        nbytes: how much there is.
        largest: bytes of the largest piece.

    Attributes:
        nbytes, largest: as given.
        held: bytes of all pieces on their way; changes under `lock`.
        lock: for that.
    """

    def __init__(self, nbytes: int, largest: int) -> None:
        self.nbytes = nbytes
        self.largest = largest
        self.held = 0
        self.lock = threading.Lock()

    @contextmanager
    def reader(self) -> Iterator[PieceReader]:
        """The pieces of one reader, which are given back in the end."""
        reader = PieceReader(self)
        try:
            yield reader
        finally:
            reader.give_back(reader.held)


class PieceReader:
    """The pieces of one reader.

    Args:
        room: where they come from.

    Attributes:
        held: bytes of those that have not gone.
    """

    def __init__(self, room: PieceRoom) -> None:
        self._room = room
        self.held = 0

    def take(self, wanted: int) -> int:
        """Bytes of a piece of what is left of a file; give them back when it has gone."""
        room = self._room
        with room.lock:
            left = max(room.nbytes - room.held, 0) // _SHARES
            taken = min(wanted, room.largest, max(left, SMALLEST_BYTES))
            room.held += taken
        self.held += taken
        return taken

    def give_back(self, nbytes: int) -> None:
        """These bytes have gone."""
        self.held -= nbytes
        with self._room.lock:
            self._room.held -= nbytes
