"""Arrivals: marks of the tensors of a version whose bytes are all in place, for processes that read them while the rest still comes."""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from dataclasses import dataclass

from weighbridge._core.byte_copies import ByteCopy
from weighbridge._core.layouts import Layout
from weighbridge_service.models.registered_model import RegisteredModel
from weighbridge_storage.memory.images import Hold, Image
from weighbridge_storage.memory.regions import PAGE, Region


class Arrivals:
    """Marks in shared memory: one byte for each tensor, and one that says whether marks hold. For one thread at a time.

    A mark is set once, after the last byte of its tensor has come. As soon as a byte that has come might be written again, all marks are
    revoked for good: a reader that looks at the first byte after it has learnt that the version is ready knows whether all that it has
    read is still there.

    Args:
        files: the tensors in their files.

    Attributes:
        region: the memory. Byte 0 is 1 until `revoke`; further bytes belong to the placements of ``files``, in order.
    """

    def __init__(self, files: Layout) -> None:
        count = len(files.placements)
        self.region = Region(-(-(1 + count) // PAGE) * PAGE, None)
        self.region.writable[0] = 1
        self._left = [placement.nbytes for placement in files.placements]
        order = sorted(range(count), key=lambda index: files.placements[index].offset)
        self._indexes: dict[str, list[int]] = {}
        for index in order:
            self._indexes.setdefault(files.placements[index].buffer, []).append(index)
        self._starts = {
            file: [files.placements[index].offset for index in indexes]
            for file, indexes in self._indexes.items()
        }
        self._marks = {placement.shard.tensor: 1 + index for index, placement in enumerate(files.placements)}
        for index, left in enumerate(self._left):
            self.region.writable[1 + index] = not left

    @property
    def revoked(self) -> bool:
        """Whether marks hold no longer."""
        return not self.region.readable[0]

    def marks_of(self, slices: Layout) -> list[int]:
        """The bytes that say of each slice whether its tensor has arrived."""
        return [self._marks[placement.shard.tensor] for placement in slices.placements]

    def add(self, pieces: Iterable[ByteCopy[str]]) -> None:
        """Count bytes that are in place, each once, and mark the tensors that are complete by them."""
        for piece in pieces:
            starts = self._starts[piece.file]
            index = self._indexes[piece.file][bisect.bisect_right(starts, piece.file_offset) - 1]
            self._left[index] -= piece.nbytes
            if not self._left[index]:
                self.region.writable[1 + index] = 1

    def revoke(self) -> None:
        """Withdraw all marks, for good."""
        self.region.writable[0] = 0


@dataclass(frozen=True, slots=True)
class ArrivingVersion:
    """A version that is being received, for a process of this machine that reads what has arrived.

    Attributes:
        model: its registration, with the tensors of this version.
        image: what it is put together in.
        hold: keeps the image from being used for another version.
        arrivals: marks of what has arrived.
    """

    model: RegisteredModel
    image: Image
    hold: Hold
    arrivals: Arrivals
