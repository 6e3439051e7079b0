"""Marks of what has arrived of a version that is still being received, in memory that the service writes to."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from weighbridge._lane.connection import LaneConnection
from weighbridge._memory.mappings import MappedMemory


class ArrivalMarks:
    """Marks of the slices of one reader.

    Args:
        memory: of the marks, mapped for reading.
        marks: for each slice the byte that says whether its tensor has arrived.
        tensors_digest: of a layout with all tensors of the version.
        connection: over which the service granted the memory.

    Attributes:
        tensors_digest: as given.
    """

    def __init__(
        self, memory: MappedMemory, marks: NDArray[np.int64], tensors_digest: str, connection: LaneConnection
    ) -> None:
        self.tensors_digest = tensors_digest
        self._memory = memory
        self._marks = marks
        self._connection = connection

    def __repr__(self) -> str:
        return f"<ArrivalMarks: {self.count} of {len(self._marks)} slices{'' if self.hold else ', revoked'}>"

    @property
    def hold(self) -> bool:
        """Whether all bytes that have arrived are still what they were. Once this is false it stays so.

        True does not say that it will be true in a moment, unless the version is ready: nothing can be written to it
        then.
        """
        return bool(self._memory.bytes[0]) and not self._connection.ended

    @property
    def count(self) -> int:
        """Number of slices that have arrived whole."""
        return int(self._memory.bytes[self._marks].sum())

    def of(self, slices: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether the tensor of each of these slices, named by index, has arrived whole."""
        return self._memory.bytes[self._marks[slices]].astype(np.bool_)
