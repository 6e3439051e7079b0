"""Sets of positions in a stream, such as the bytes that have arrived or that are sent to one replica."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator


class RangeSet:
    """A set of byte positions, stored as sorted, disjoint, non-adjacent half-open ranges.

    Args:
        ranges: the initial positions.
    """

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._size = 0
        for start, end in ranges:
            self.add(start, end)

    @property
    def size(self) -> int:
        """Number of positions in the set."""
        return self._size

    def add(self, start: int, end: int) -> None:
        """Add the positions from ``start`` up to ``end``."""
        if start >= end:
            return
        first = bisect.bisect_left(self._ends, start)
        last = bisect.bisect_right(self._starts, end)
        for i in range(first, last):
            start, end = min(start, self._starts[i]), max(end, self._ends[i])
            self._size -= self._ends[i] - self._starts[i]
        self._starts[first:last] = [start]
        self._ends[first:last] = [end]
        self._size += end - start

    def claim(self, start: int, end: int) -> list[tuple[int, int]]:
        """Add positions as `add` does, and return the ranges of the new ones."""
        fresh = self.gaps(start, end)
        self.add(start, end)
        return fresh

    def gaps(self, start: int, end: int) -> list[tuple[int, int]]:
        """Return the ranges from ``start`` up to ``end`` that the set does not contain."""
        found = []
        position = start
        for there_start, there_end in self.within(start, end):
            if position < there_start:
                found.append((position, there_start))
            position = there_end
        if position < end:
            found.append((position, end))
        return found

    def within(self, start: int, end: int) -> list[tuple[int, int]]:
        """Return the ranges of the set between ``start`` and ``end``, cut off at both."""
        first = bisect.bisect_right(self._ends, start)
        last = bisect.bisect_left(self._starts, end)
        return [(max(start, self._starts[i]), min(end, self._ends[i])) for i in range(first, last)]

    def end_from(self, position: int) -> int:
        """Return the first position from ``position`` on that the set does not contain."""
        i = bisect.bisect_right(self._starts, position) - 1
        return max(self._ends[i], position) if i >= 0 else position

    def covers(self, start: int, end: int) -> bool:
        """Whether the set contains every position from ``start`` up to ``end``."""
        if start >= end:
            return True
        i = bisect.bisect_right(self._starts, start) - 1
        return i >= 0 and self._ends[i] >= end

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return zip(self._starts, self._ends, strict=True)
