"""Count of the non-finite elements that a rank pushes, per shard, for written and streamed elements."""

from __future__ import annotations

import bisect
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from weighbridge._core.layouts import Layout
from weighbridge._core.nonfinite import Encoding, count_nonfinite, encoding_of
from weighbridge._core.range_set import RangeSet
from weighbridge._memory.native_copies import count_natively, packed_encodings
from weighbridge._transport.pieces import Buffer


class PlacedPart(NamedTuple):
    """A part of a stream whose elements do not have exactly one position in the version's files.

    Attributes:
        start, end: the first byte, and one past the last; whole elements.
        places: number of positions; 0 for padding.
    """

    start: int
    end: int
    places: int


class PushCounts:
    """Counts of one rank's push. Thread-safe.

    An element counts once for each of its positions in the version's files, so that the counts of all ranks add up to
    the service's count.

    Args:
        stream: the shards.
        placed: its parts that do not have exactly one position, sorted and disjoint.
    """

    def __init__(self, stream: Layout, placed: Sequence[PlacedPart] = ()) -> None:
        self._stream = stream
        self._placed = placed
        self._lock = threading.Lock()
        self._found = np.zeros(len(stream.placements), np.int64)
        self._counted = RangeSet()
        self._complete = True
        self._parts: _Parts | None = None

    def add(self, counts: Sequence[int] | None) -> None:
        """Add the counts of written elements, one for each shard; None if they were not counted."""
        with self._lock:
            if counts is None:
                self._complete = False
            else:
                self._found += np.array(counts, np.int64)

    def add_of(self, counts: Mapping[int, int]) -> None:
        """Add the counts of written elements of some shards, by their indexes."""
        with self._lock:
            for index, count in counts.items():
                self._found[index] += count

    def take(self, start: int, data: Buffer, read: Callable[[int, int], Buffer]) -> None:
        """Count the elements of a piece that no earlier piece contained: pieces are sent again after a stream breaks.

        Args:
            start: its first byte in the stream.
            data: the piece, cut anywhere.
            read: reads other bytes of the stream, for an element that ends after the piece.
        """
        with self._lock:
            fresh = self._counted.claim(start, start + len(data))
            if self._parts is None:
                self._parts = _Parts(self._stream, self._placed)
            parts = self._parts
        for first, last in fresh:
            for shard, count in parts.count(first, last, start, data, read):
                with self._lock:
                    self._found[shard] += count

    @property
    def total(self) -> int | None:
        """Number of non-finite elements so far; None if some elements were not counted."""
        with self._lock:
            return int(self._found.sum()) if self._complete else None

    @property
    def by_tensor(self) -> dict[str, int]:
        """Numbers of non-finite elements by tensor, for tensors that have any, in the order of the stream."""
        with self._lock:
            found = {int(index): int(self._found[index]) for index in np.flatnonzero(self._found)}
        counts: dict[str, int] = {}
        for index, count in found.items():
            name = self._stream.placements[index].shard.tensor
            counts[name] = counts.get(name, 0) + count
        return counts


def encodings_of(stream: Layout) -> list[Encoding | None]:
    """The encoding of each shard's elements; None where there is nothing to count."""
    by_tensor = {name: encoding_of(spec.dtype) for name, spec in stream.tensors.items()}
    return [by_tensor[placement.shard.tensor] for placement in stream.placements]


@dataclass(frozen=True, slots=True)
class _Part:
    """Adjacent elements of one shard with the same weight.

    Attributes:
        start, end: in bytes of the stream.
        shard: index of the shard.
        places: how often each element counts.
        encoding: of the elements.
    """

    start: int
    end: int
    shard: int
    places: int
    encoding: Encoding


class _Parts:
    """Parts of a stream in which elements are counted, in order."""

    def __init__(self, stream: Layout, placed: Sequence[PlacedPart]) -> None:
        self._parts = list(_cut(stream, encodings_of(stream), placed))
        self._ends = [part.end for part in self._parts]

    def count(
        self, first: int, last: int, start: int, data: Buffer, read: Callable[[int, int], Buffer]
    ) -> list[tuple[int, int]]:
        """Numbers of non-finite elements among those that begin in a range, as often as they count: index of the shard,
        and number.

        Args:
            first, last: the range; lies in the piece.
            start, data, read: as for `PushCounts.take`.
        """
        found: list[tuple[_Part, int]] = []
        whole: list[tuple[_Part, int, int]] = []
        index = bisect.bisect_right(self._ends, first)
        while index < len(self._parts) and self._parts[index].start < last:
            part = self._parts[index]
            size = part.encoding.element_bytes
            begin, end = _element_at(part, first), _element_at(part, last)
            if end > start + len(data):  # the last one ends after the piece
                end -= size
                cut = np.frombuffer(read(end, end + size), np.uint8)
                found.append((part, _count(cut, [(part.encoding, 0, size)])[0]))
            whole.append((part, begin - start, end - start))
            index += 1
        spans = [(part.encoding, begin, end) for part, begin, end in whole]
        counts = _count(np.frombuffer(data, np.uint8), spans) if spans else []
        found += [(part, count) for (part, _, _), count in zip(whole, counts, strict=True)]
        return [(part.shard, count * part.places) for part, count in found if count]


def _element_at(part: _Part, position: int) -> int:
    """The first byte of the first element of a part that begins at a position of the stream or behind it; its end if
    none does.
    """
    size = part.encoding.element_bytes
    return min(part.start + -(-max(position - part.start, 0) // size) * size, part.end)


def _cut(stream: Layout, encodings: Sequence[Encoding | None], placed: Sequence[PlacedPart]) -> Iterator[_Part]:
    at = 0
    for index, placement in enumerate(stream.placements):
        position, end = placement.offset, placement.offset + placement.nbytes
        while at < len(placed) and placed[at].end <= position:
            at += 1
        encoding = encodings[index]
        if encoding is None:
            continue
        for part in placed[at:]:
            if part.start >= end:
                break
            if position < part.start:
                yield _Part(position, part.start, index, 1, encoding)
            if part.places:
                yield _Part(part.start, part.end, index, part.places, encoding)
            position = part.end
        if position < end:
            yield _Part(position, end, index, 1, encoding)


def _count(data: NDArray[np.uint8], spans: Sequence[tuple[Encoding, int, int]]) -> list[int]:
    """Non-finite elements of parts of an array, each from its first byte up to one past its last."""
    address = data.ctypes.data
    parts = np.array([(address + begin, end - begin) for _, begin, end in spans], np.int64)
    found = count_natively(parts, packed_encodings([encoding for encoding, _, _ in spans]))
    if found is not None:
        counts: list[int] = found.tolist()
        return counts
    return [count_nonfinite(data[begin:end], encoding) for encoding, begin, end in spans]
