"""Prefetch of the next part of a stream from the store while one part is being sent.

A single GET takes tens of milliseconds before its first byte comes: a stream that waited for each would be slow.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from weighbridge._core.byte_copies import ByteCopy
from weighbridge._transport.pieces import Buffer
from weighbridge_service.plan.transfers import Transfer
from weighbridge_storage.memory.file_bytes import FileBytes, Kept

AHEAD_BYTES = 64 << 20
"""Blocks that one reader has asked for, and not come to yet, take so much at most."""
STEP_BYTES = 8 << 20
"""Bytes of the stream that are looked at together: those that lie next to each other are fetched together."""


@dataclass(frozen=True, slots=True)
class ReadStep:
    """A part of a stream: the position at which it ends, and what it needs."""

    end: int
    needs: Sequence[ByteCopy[str]]


class ReadAhead:
    """A window that moves along a stream, of which the files are asked for all they need. For one thread.

    Args:
        files: the sources, by name.
        steps: the stream from where reading begins, in order.
        room: bytes of the window, both of the stream and of the blocks that it is made of.
    """

    def __init__(
        self, files: Mapping[str, FileBytes], steps: Iterator[ReadStep], room: int = AHEAD_BYTES
    ) -> None:
        self._files = files
        self._steps = steps
        self._room = room
        self._next = next(steps, None)
        self._kept: dict[Hashable, tuple[Kept, int]] = {}  # with the position up to which it is needed
        self._nbytes = 0

    def advance(self, position: int) -> None:
        """All before ``position`` is done with, what comes behind it is needed soon."""
        for kept, end in list(self._kept.values()):
            if end <= position:
                self._release(kept)
        while (
            self._next is not None and self._nbytes < self._room and self._next.end <= position + self._room
        ):
            if self._next.end > position and not self._prepare(self._next):
                return
            self._next = next(self._steps, None)

    def close(self) -> None:
        """Nothing more is needed."""
        for kept, _ in list(self._kept.values()):
            self._release(kept)
        self._next = None

    def _prepare(self, step: ReadStep) -> bool:
        """Ask for what a step needs; whether there was room for all of it."""
        for need in step.needs:
            found = self._files[need.file].prepare(need.file_offset, need.extent, need.file_strides)
            if found is None:
                return False
            for kept in found:
                if kept.key in self._kept:
                    kept.release()
                    kept = self._kept[kept.key][0]
                else:
                    self._nbytes += kept.nbytes
                self._kept[kept.key] = (kept, step.end)
        return True

    def _release(self, kept: Kept) -> None:
        del self._kept[kept.key]
        self._nbytes -= kept.nbytes
        kept.release()


class StreamReader:
    """Reads a stream of slices out of a version's files, front to back. For one thread.

    Args:
        transfer: what lies where.
        files: the files' bytes, by name.
        nbytes: length of the stream.
    """

    def __init__(self, transfer: Transfer, files: Mapping[str, FileBytes], nbytes: int) -> None:
        self._transfer = transfer
        self._files = files
        self._nbytes = nbytes
        self._remote = not all(file.is_near for file in files.values())
        self._ahead: ReadAhead | None = None

    def gather(self, offset: int, length: int) -> Buffer:
        """A range of the stream. Raises as `FileBytes`."""
        if self._remote:
            if self._ahead is None:
                self._ahead = ReadAhead(self._files, self._steps(offset))
            self._ahead.advance(offset)
        return self._transfer.gather(offset, length, self._files)

    def close(self) -> None:
        """Bring nothing more."""
        if self._ahead is not None:
            self._ahead.close()

    def _steps(self, start: int) -> Iterator[ReadStep]:
        for begin in range(start, self._nbytes, STEP_BYTES):
            end = min(begin + STEP_BYTES, self._nbytes)
            yield ReadStep(end, self._transfer.pieces(begin, end))
