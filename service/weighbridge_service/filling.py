"""Which bytes of the ranks' streams have come, and how do they get to where they belong?

They come in any order and on many threads, and each is copied once: straight to its final place in the image.
"""

from __future__ import annotations

from collections.abc import Mapping

from weighbridge import rpc
from weighbridge.errors import DataLoss, InvalidArgument
from weighbridge_service.arrivals import Arrivals
from weighbridge_service.declaring import Agreement, Home
from weighbridge_service.forwarding import Forwarding
from weighbridge_service.lifecycle import Lifecycle
from weighbridge_service.ranges import RangeSet
from weighbridge_service.transfers import Bytes
from weighbridge_storage.images import Image


class Filling:
    """The image of one version while it is being filled. Safe to use from many threads.

    Args:
        lifecycle: the version's; its condition is notified when files are complete.
        agreed: who pushes what, and where every byte goes.
        home: this process.
        image: of the files that this process writes.
        forwarding: passes bytes on to other replicas.

    Attributes:
        agreed: as given.
        received: for each rank, what has come of its stream; guarded by the version's condition.
        arrivals: which files are complete; guarded by the version's condition.
    """

    def __init__(
        self, lifecycle: Lifecycle, agreed: Agreement, home: Home, image: Image, forwarding: Forwarding
    ) -> None:
        self.agreed = agreed
        self.received: Mapping[int, RangeSet] = {rank: RangeSet() for rank in agreed.prepared.streams}
        self.arrivals = Arrivals(agreed.to_come_to(home), image.region)
        self._name = lifecycle.name
        self._changed = lifecycle.changed
        self._home = home
        self._buffers: Mapping[str, Bytes] = image.buffers
        self._forwarding = forwarding

    def take(self, rank: int, offset: int, data: memoryview, checksum: int, *, forward: bool) -> None:
        """Put a piece of a rank's stream where it belongs. What has come before is left alone.

        Args:
            rank: whose stream.
            offset: where in it.
            data: the bytes.
            checksum: of the bytes.
            forward: whether those that belong to other replicas are to be passed on.

        Raises:
            DataLoss: the piece does not agree with its checksum.
            InvalidArgument: it lies outside the stream.
        """
        if rpc.checksum(data) != checksum:
            raise DataLoss(
                f"{self._name}, rank {rank}: the piece at byte {offset} does not agree with its checksum"
            )
        end, whole = offset + len(data), self._length(rank)
        if end > whole:
            raise InvalidArgument(
                f"{self._name}, rank {rank}: bytes {offset} to {end} lie outside of its stream of {whole} bytes"
            )
        with self._changed:
            # taken by this call, before they are copied: nobody else copies and counts them again
            fresh = self.received[rank].claim(offset, end)
        for start, stop in fresh:
            self._place(rank, start, data[start - offset : stop - offset], forward=forward)

    def take_written(self, rank: int) -> None:
        """All of a rank's stream was written to the image by its own process."""
        with self._changed:
            fresh = self.received[rank].claim(0, self._length(rank))
        for start, stop in fresh:
            self._count(self.agreed.prepared.transfer.filled(start, stop, str(rank)))

    def is_whole(self, rank: int) -> bool:
        """Whether all of a rank's stream has come."""
        return self.received[rank].size == self._length(rank)

    def close(self) -> None:
        """Let go of the image's memory; nothing is written any more."""
        self._buffers = {}

    def _length(self, rank: int) -> int:
        return self.agreed.prepared.streams[rank].nbytes

    def _place(self, rank: int, start: int, data: memoryview, *, forward: bool) -> None:
        prepared = self.agreed.prepared
        self._count(prepared.transfer.scatter(data, start, self._buffers, str(rank)))
        if forward and prepared.spread is not None:
            for number, meant in prepared.spread.routes.get(rank, {}).items():
                home = self.agreed.homes[number]
                if home != self._home:
                    for begin, end in meant.within(start, start + len(data)):
                        self._forwarding.forward(
                            self.agreed.claim, home, rank, begin, data[begin - start : end - start]
                        )

    def _count(self, filled: Mapping[str, int]) -> None:
        with self._changed:
            if self.arrivals.count(filled):
                self._changed.notify_all()
