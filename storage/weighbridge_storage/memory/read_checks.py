"""Comparison of stored bytes with their digests while they are read.

XXH3-128 needs bytes in order, but readers read them in any order: several connections share one stream, and ranks of an
engine read parts of tensors. So bytes that are next in order are hashed as they are read. Other ranges are recorded,
and read again when it is their turn. A digest is compared each time all of its bytes have been read.
"""

from __future__ import annotations

import bisect
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import xxhash

from weighbridge._core.range_set import RangeSet
from weighbridge.errors import DataLoss

Data: TypeAlias = bytes | memoryview
Again = Callable[[int, int], Data]
"""Reads a range of the file again; called with offset and number of bytes."""

_STEP_BYTES = 1 << 20
_STALE_SECONDS = 5.0
"""Seconds without a read after which a read of the first byte restarts the hash."""


@dataclass(frozen=True, slots=True)
class DigestedRange:
    """A range of a file with its digest.

    Attributes:
        name: name of the range, for messages.
        offset: offset of its first byte in the file.
        nbytes: number of bytes; at least one.
        xxh3_128: its digest, as 32 hex digits.
    """

    name: str
    offset: int
    nbytes: int
    xxh3_128: str

    @property
    def end(self) -> int:
        """Offset of the first byte after the range."""
        return self.offset + self.nbytes


def differs(what: str, file: str, title: str) -> DataLoss:
    """The error to raise for bytes that do not match their digest.

    Args:
        what: name of the bytes, such as a tensor's name; the file's name for the whole file.
        file: name of the version's file.
        title: name of the version.
    """
    named = f"{file} of {title}" if what == file else f"{what} in {file} of {title}"
    return DataLoss(
        f"{named} does not agree with its digest",
        fix=(
            f"`weighbridge verify {title}` reads all of it again; if it fails again, the store has "
            "lost bytes: restore the file from a backup"
        ),
        worth_retrying=0.0,
    )


def parts_between(parts: Sequence[DigestedRange], start: int, end: int) -> Iterator[DigestedRange]:
    """Those of the parts, which are disjoint and sorted by offset, that have bytes between ``start`` and ``end``."""
    first = max(bisect.bisect_right(parts, start, key=lambda part: part.offset) - 1, 0)
    for index in range(first, len(parts)):
        part = parts[index]
        if part.offset >= end:
            break
        if part.end > start:
            yield part


class ReadChecks:
    """Comparison of one file's bytes as any number of readers read them. Thread-safe.

    If a part did not match once, all later reads of it fail, because other readers may have read only some of its bytes
    so far.

    Args:
        file: name of the file.
        title: name of its version.
        parts: digested parts of the file, disjoint and sorted by offset.
        again: reads bytes again; None if that costs too much. Then only parts that are read in order are compared.
    """

    def __init__(self, file: str, title: str, parts: Sequence[DigestedRange], again: Again | None) -> None:
        self._file = file
        self._title = title
        self._parts = parts
        self._again = again
        self._lock = threading.Lock()
        self._under_way: dict[str, _Passing] = {}
        self._damaged: set[str] = set()
        self._damaged_at = 0.0

    @property
    def damaged(self) -> bool:
        """Whether a part did not match its digest."""
        return bool(self._damaged)

    @property
    def damaged_at(self) -> float:
        """Time at which a part last did not match, in seconds of the monotonic clock."""
        return self._damaged_at

    def took(self, start: int, data: Data) -> None:
        """Hash bytes that were read from ``start`` on.

        Raises:
            DataLoss: they complete a part that does not match its digest; or a part of them did not match earlier.
        """
        view = memoryview(data)
        self._check(start, start + len(view))
        for part in parts_between(self._parts, start, start + len(view)):
            with self._lock:
                passing = self._under_way.get(part.name)
                if passing is None:
                    passing = self._under_way[part.name] = _Passing(part)
            first, last = max(start, part.offset), min(start + len(view), part.end)
            agrees = passing.take(first, view[first - start : last - start], self._again)
            if agrees is None:
                continue
            with self._lock:
                if not agrees:
                    self._damaged.add(part.name)
                    self._damaged_at = time.monotonic()
                self._under_way.pop(part.name, None)
            if not agrees:
                raise differs(part.name, self._file, self._title)

    def _check(self, start: int, end: int) -> None:
        if self._damaged:
            for part in parts_between(self._parts, start, end):
                if part.name in self._damaged:
                    raise differs(part.name, self._file, self._title)


class _Passing:
    """A part with some bytes read since it was last compared."""

    def __init__(self, part: DigestedRange) -> None:
        self._part = part
        self._lock = threading.Lock()
        self._ended = False
        self._begin()

    def _begin(self) -> None:
        self._digest = xxhash.xxh3_128()
        self._position = self._part.offset
        self._noted = RangeSet()
        self._taken_at = time.monotonic()

    def take(self, start: int, data: memoryview, again: Again | None) -> bool | None:
        """Hash bytes.

        When the last bytes of the part have arrived, returns once whether the part matches; otherwise returns None.
        """
        with self._lock:
            if self._ended:
                return None
            end = start + len(data)
            now = time.monotonic()
            if start == self._part.offset and now - self._taken_at > _STALE_SECONDS:
                self._begin()  # an earlier reader stopped early, and the bytes may have changed since
            self._taken_at = now
            if start > self._position:
                if again is not None:
                    self._noted.add(start, end)
                return None
            if end > self._position:
                self._digest.update(data[self._position - start :])
                self._position = end
            if again is not None:
                self._catch_up(again)
            self._ended = self._position == self._part.end
            return self._digest.hexdigest() == self._part.xxh3_128 if self._ended else None

    def _catch_up(self, again: Again) -> None:
        while (end := self._noted.end_from(self._position)) > self._position:
            end = min(end, self._position + _STEP_BYTES)
            self._digest.update(again(self._position, end - self._position))
            self._position = end
