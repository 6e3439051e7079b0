"""Units of work of a conversion. Any process can execute them, in any order and repeatedly."""

from __future__ import annotations

import bisect
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass

from weighbridge._core.byte_copies import ByteCopy
from weighbridge._core.layouts import Placement
from weighbridge_service.converting.conversions import Conversion
from weighbridge_service.converting.worker import Gather, Unit
from weighbridge_service.plan.transfers import Transfer

UNIT_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Range:
    """Range of a target file that a unit covers.

    Attributes:
        number: number of the unit.
        file: name of the target file.
        start: first byte of the range in the file.
        stop: one past its last byte.
        nbytes: bytes of tensors in the range.
    """

    number: int
    file: str
    start: int
    stop: int
    nbytes: int


class Units:
    """All units of a conversion. The content of a unit is computed on demand.

    The ranges depend only on the conversion and `unit_bytes`, so that a resuming run has the same units as the
    interrupted run.

    Args:
        conversion: the conversion.
        gather_bytes: maximum number of bytes that are gathered in memory at once.
        unit_bytes: approximate bytes of a unit. Another value results in other units.

    Attributes:
        gather_bytes: as given.
        ranges: range of each unit.
        source: paths of the source's files; units refer to them by index.
    """

    def __init__(self, conversion: Conversion, gather_bytes: int, unit_bytes: int = UNIT_BYTES) -> None:
        self.gather_bytes = gather_bytes
        self._unit_bytes = unit_bytes
        self._conversion = conversion
        self._transfer = Transfer(conversion.plan, scatter=False)
        self._placements: dict[str, list[Placement]] = {}
        for placement in conversion.plan.target.placements:
            if placement.nbytes:
                self._placements.setdefault(placement.buffer, []).append(placement)
        for placements in self._placements.values():
            placements.sort(key=lambda p: p.offset)
        self._starts = {file: [p.offset for p in placed] for file, placed in self._placements.items()}
        names = sorted(p.buffer for p in conversion.plan.source.placements)
        self._files = {name: index for index, name in enumerate(dict.fromkeys(names))}
        self.source = tuple(str(conversion.source / name) for name in self._files)
        self.ranges = tuple(self._ranges())

    def identity(self) -> str:
        """Digest that identifies the conversion and its units, as hex digits."""
        ranges = [(covered.file, covered.start, covered.stop) for covered in self.ranges]
        text = json.dumps([self._conversion.identity(), ranges])
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()

    def _ranges(self) -> Iterator[Range]:
        number = 0
        for file, placements in self._placements.items():
            start, filled = placements[0].offset, 0
            for placement in placements:
                position, end = placement.offset, placement.offset + placement.nbytes
                while position < end:
                    step = min(end - position, self._unit_bytes - filled)
                    position, filled = position + step, filled + step
                    if filled == self._unit_bytes:
                        yield Range(number, file, start, position, filled)
                        number, start, filled = number + 1, position, 0
            if filled:
                yield Range(number, file, start, end, filled)
                number += 1

    def unit(self, covered: Range) -> Unit:
        """The unit of work for a range."""
        gathers: list[Gather] = []
        placements = self._placements[covered.file]
        first = bisect.bisect_right(self._starts[covered.file], covered.start) - 1
        for placement in placements[max(first, 0) :]:
            start = max(placement.offset, covered.start)
            stop = min(placement.offset + placement.nbytes, covered.stop)
            if start >= stop:
                if placement.offset >= covered.stop:
                    break
                continue
            gathers += self._gathers(placement, start, stop)
        return Unit(covered.number, covered.file, tuple(gathers))

    def _gathers(self, placement: Placement, start: int, stop: int) -> Iterator[Gather]:
        """A range of a placement as runs that fit into memory. If a constant is added to the tensor's elements, the
        runs contain whole elements: those that begin in the range.
        """
        shift = self._conversion.shifts.get(placement.shard.tensor)
        dtype = None if shift is None else self._conversion.plan.target.tensors[placement.shard.tensor].dtype
        size = 1 if dtype is None else dtype.itemsize
        first, last = (-(-(edge - placement.offset) // size) * size for edge in (start, stop))
        step = max(self.gather_bytes // size, 1) * size
        for into in range(first, last, step):
            position, length = placement.offset + into, min(step, last - into)
            pieces = self._transfer.pieces(position, position + length, placement.buffer)
            yield Gather(position, length, tuple(map(self._strided, pieces)), shift or 0.0, dtype)

    def _strided(self, piece: ByteCopy[str]) -> ByteCopy[int]:
        return ByteCopy(
            piece.extent,
            piece.stream_offset,
            piece.stream_strides,
            self._files[piece.file],
            piece.file_offset,
            piece.file_strides,
        )
