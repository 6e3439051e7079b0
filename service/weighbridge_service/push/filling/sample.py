"""Sample of the pieces that ranks have sent. The service compares it with the image when all pieces have arrived.

A checksum proves that a piece has arrived as it was sent. A rank that writes to shared memory itself computes checksums
before it writes, and sends those. The sample proves that a piece is undamaged and lies where the plan places it: the
comparison collects the same bytes from the image by the inverse of the copies that placed them.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import NamedTuple

from weighbridge._transport import rpc
from weighbridge.errors import DataLoss
from weighbridge_service.plan.transfers import Transfer
from weighbridge_storage.stores.objects import ByteArray

MOST = 64
"""Maximum number of pieces that the sample of one version contains."""
MOST_BYTES = 1 << 20
"""Bytes of one piece; one message carries the same number of bytes."""


class SampledPiece(NamedTuple):
    """Piece of a rank's stream: its byte range, and the checksum that the rank sent with it."""

    rank: int
    start: int
    stop: int
    checksum: int


class Sample:
    """Sample of up to `MOST` pieces, spread evenly over all that are offered. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stride = 1
        self._offered = 0
        self.pieces: list[SampledPiece] = []

    def offer(self, rank: int, start: int, stop: int, checksum: int) -> None:
        """Offer a piece that was copied to the image as a whole."""
        with self._lock:
            self._offered += 1
            if self._offered % self._stride:
                return
            self.pieces.append(SampledPiece(rank, start, stop, checksum))
            if len(self.pieces) > MOST:
                self.pieces = self.pieces[1::2]
                self._stride *= 2

    def compare(self, name: str, transfer: Transfer, files: Mapping[str, ByteArray]) -> None:
        """Compare the pieces with the files. A piece that lies partly in other files is skipped.

        Args:
            name: name of the version, for messages.
            transfer: the copies from the ranks' streams to the files.
            files: bytes of each file.

        Raises:
            DataLoss: a piece differs; names the rank and the range of its stream.
        """
        for piece in self.pieces:
            found = transfer.collect(piece.start, piece.stop, files, str(piece.rank))
            if found is not None and rpc.checksum(found.data) != piece.checksum:
                raise DataLoss(
                    f"{name} was damaged in memory: bytes {piece.start} to {piece.stop} of the "
                    f"stream of rank {piece.rank} "
                    "are not what the rank has sent",
                    fix="push the step again; if that happens again, test this machine's memory",
                )
