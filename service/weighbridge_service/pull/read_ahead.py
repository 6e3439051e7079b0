"""Prefetch of the next parts of a stream from the store while one part is being sent.

A GET has a latency of tens of milliseconds, so a stream that waits for each request would be slow.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from weighbridge._core.byte_copies import ByteCopy
from weighbridge._transport.pieces import Buffer
from weighbridge_service.plan.transfers import Transfer
from weighbridge_storage.memory.file_bytes import FileBytes, Kept

AHEAD_BYTES = 64 << 20
"""Maximum bytes of blocks that one reader has requested but has not reached yet."""
STEP_BYTES = 8 << 20
"""Bytes of a step of the stream. Adjacent blocks of one step are fetched together."""


@dataclass(frozen=True, slots=True)
class ReadStep:
    """A part of a stream: the position of its end, and the copies that it needs."""

    end: int
    needs: Sequence[ByteCopy[str]]


class ReadAhead:
    """A window that moves along a stream and requests all blocks that it needs from the files. Not thread-safe.

    Args:
        files: the sources, by name.
        steps: steps of the stream, in order from the start of the reading.
        room: maximum bytes of the window, both in the stream and in requested blocks.
    """

    def __init__(self, files: Mapping[str, FileBytes], steps: Iterator[ReadStep], room: int = AHEAD_BYTES) -> None:
        self._files = files
        self._steps = steps
        self._room = room
        self._next = next(steps, None)
        self._kept: dict[Hashable, tuple[Kept, int]] = {}  # with the position up to which it is needed
        self._nbytes = 0

    def advance(self, position: int) -> None:
        """Release blocks that are only needed before ``position``, and request blocks that are needed soon after it."""
        for kept, end in list(self._kept.values()):
            if end <= position:
                self._release(kept)
        while self._next is not None and self._nbytes < self._room and self._next.end <= position + self._room:
            if self._next.end > position and not self._prepare(self._next):
                return
            self._next = next(self._steps, None)

    def close(self) -> None:
        """Release all blocks."""
        for kept, _ in list(self._kept.values()):
            self._release(kept)
        self._next = None

    def _prepare(self, step: ReadStep) -> bool:
        """Request the blocks that a step needs. Returns False if a source did not have space for them."""
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
    """Reads a stream of slices from a version's files, front to back. Not thread-safe.

    Args:
        transfer: transfer between the stream and the files.
        files: bytes of the files, by name.
        nbytes: length of the stream.
    """

    def __init__(self, transfer: Transfer, files: Mapping[str, FileBytes], nbytes: int) -> None:
        self._transfer = transfer
        self._files = files
        self._nbytes = nbytes
        self._remote = not all(file.is_near for file in files.values())
        self._ahead: ReadAhead | None = None

    def gather(self, offset: int, length: int) -> Buffer:
        """Read a range of the stream. Raises as `FileBytes`."""
        if self._remote:
            if self._ahead is None:
                self._ahead = ReadAhead(self._files, self._steps(offset))
            self._ahead.advance(offset)
        return self._transfer.gather(offset, length, self._files)

    def close(self) -> None:
        """Stop the prefetch."""
        if self._ahead is not None:
            self._ahead.close()

    def _steps(self, start: int) -> Iterator[ReadStep]:
        for begin in range(start, self._nbytes, STEP_BYTES):
            end = min(begin + STEP_BYTES, self._nbytes)
            yield ReadStep(end, self._transfer.pieces(begin, end))
