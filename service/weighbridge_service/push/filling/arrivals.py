"""Arrivals: marks of a version's tensors whose bytes are all in place.

Processes read these tensors while others still arrive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from weighbridge._core.layouts import Layout
from weighbridge_service.models.registered_model import RegisteredModel
from weighbridge_service.plan.transfers import Transfer
from weighbridge_storage.memory.images import Image, ImageHold
from weighbridge_storage.memory.regions import PAGE, Region


class Arrivals:
    """Marks in shared memory: one byte for each tensor, and a first byte for whether the marks are valid.

    For one thread at a time.

    A mark is set once, after the last byte of its tensor has arrived. As soon as a byte that has arrived might be
    written again, all marks are revoked for good. So a reader checks the first byte once the version is ready: it shows
    whether all that it has read is unchanged.

    Only whole shards are counted, by tables that are computed once for a plan, because counting holds the lock that
    pushes need.

    Args:
        transfer: the copies from streams to files.
        streams: names of the streams.

    Attributes:
        region: the memory. Byte 0 is 1 until `revoke`; further bytes belong to the placements of ``transfer.files``, in
            order.
    """

    def __init__(self, transfer: Transfer, streams: Iterable[str]) -> None:
        files = transfer.files.placements
        count = len(files)
        self.region = Region(-(-(1 + count) // PAGE) * PAGE, None)
        self.region.writable[0] = 1
        self._marks = {placement.shard.tensor: 1 + index for index, placement in enumerate(files)}
        self._left = np.array([placement.nbytes for placement in files], np.int64)
        self.region.writable[1 : 1 + count] = self._left == 0
        self._shards = {stream: transfer.shards(stream) for stream in streams}
        self._counted = {stream: np.zeros(len(shards.starts), bool) for stream, shards in self._shards.items()}

    @property
    def revoked(self) -> bool:
        """Whether the marks were revoked."""
        return not self.region.readable[0]

    def marks_of(self, slices: Layout) -> list[int]:
        """Offset of the mark of each slice's tensor in the region."""
        return [self._marks[placement.shard.tensor] for placement in slices.placements]

    def add(self, stream: str, start: int, stop: int, in_place: Callable[[int, int], bool]) -> None:
        """Count the shards that a range of a stream completes, and mark the tensors that these complete.

        Args:
            stream: name of the stream.
            start, stop: the range, all of which is in place.
            in_place: returns whether another range of the stream is in place.
        """
        shards, counted = self._shards[stream], self._counted[stream]
        low = int(np.searchsorted(shards.ends, start, "right"))
        high = int(np.searchsorted(shards.starts, stop, "left"))
        whole = ~counted[low:high]
        for index in {low, high - 1} if low < high else ():  # shards that the range may cover in part
            if whole[index - low] and not in_place(int(shards.starts[index]), int(shards.ends[index])):
                whole[index - low] = False
        counted[low:high] |= whole
        chosen = np.repeat(whole, np.diff(shards.first[low : high + 1]))
        parts = slice(shards.first[low], shards.first[high])
        places = shards.places[parts][chosen]
        np.subtract.at(self._left, places, shards.nbytes[parts][chosen])
        self.region.writable[1 + places[self._left[places] == 0]] = 1

    def revoke(self) -> None:
        """Withdraw all marks, for good."""
        self.region.writable[0] = 0


@dataclass(frozen=True, slots=True)
class ArrivingVersion:
    """Version that is being received. A process on this machine reads its tensors as they arrive.

    Attributes:
        model: its registration, with the tensors of this version.
        image: memory in which its files are assembled.
        hold: keeps the image from being reused for another version.
        arrivals: marks of the tensors that have arrived.
    """

    model: RegisteredModel
    image: Image
    hold: ImageHold
    arrivals: Arrivals
