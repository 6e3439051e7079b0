"""Checksums of shards that other ranks also have.

The service compares them, and refuses shards that are not replicas.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Sequence

import xxhash

from weighbridge._core.layouts import Layout, Shard
from weighbridge._formats.push_sources import HeldShards
from weighbridge.v1 import checkpoint_service_pb2 as pb

_STAGED_BYTES = 64 << 20
"""Bytes of shards that are copied at a time."""
_SAMPLE_BYTES = 64 << 10
_SAMPLED = 16
"""Each push compares a part of one in this many shards."""
_MOST = 60_000
"""Checksums in one message."""


class ReplicaChecksums:
    """Checksums that a client sends for shards that other ranks also have: of all bytes until a version with these
    shards is visible, then of samples. Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: set[tuple[str, str]] = set()
        self._compared: dict[tuple[str, str], int] = {}

    def of_push(
        self,
        model: str,
        number: int,
        layout: Layout,
        shared: Sequence[int],
        shards: HeldShards,
        is_visible: Callable[[int], bool],
    ) -> list[pb.ReplicaChecksum]:
        """The checksums for one push.

        Args:
            model: ``namespace/name``.
            number: number of the version: all ranks sample the same parts.
            layout: the shards that the rank holds.
            shared: indexes of those that other ranks also have.
            shards: these shards.
            is_visible: whether a version of the model, by its number, has become visible.
        """
        if not shared:
            return []
        # samples are always sent: other ranks may have compared all bytes before
        found = [_sample(layout, index, number) for index in shared]
        parts = [part for part in found if part is not None]
        # depends only on these shards: unshared ones may have a different size in each push
        if not self._agreed((model, layout.select(shared).digest), number, is_visible):
            parts += [(index, 0, layout.placements[index].nbytes) for index in shared]
        parts = list(dict.fromkeys(parts))[:_MOST]
        return [
            pb.ReplicaChecksum(shard=index, start=start, end=end, checksum=_checksum(layout, index, start, end, shards))
            for index, start, end in parts
        ]

    def _agreed(self, key: tuple[str, str], number: int, is_visible: Callable[[int], bool]) -> bool:
        """Whether all ranks were found to have the same shards: a version whose bytes were all compared is visible."""
        with self._lock:
            compared = self._compared.setdefault(key, number)
            agreed = key in self._known
        agreed = agreed or (compared != number and is_visible(compared))
        with self._lock:
            if agreed:
                self._known.add(key)
            else:
                self._compared[key] = number
        return agreed


def _sample(layout: Layout, index: int, number: int) -> tuple[int, int, int] | None:
    """The part of a shard that is compared in every push; None if none of it is."""
    placement = layout.placements[index]
    dice = _dice(placement.shard, number)
    if dice % _SAMPLED:
        return None
    start = dice // _SAMPLED % max(placement.nbytes - _SAMPLE_BYTES, 1)
    return index, start, min(start + _SAMPLE_BYTES, placement.nbytes)


def _dice(shard: Shard, number: int) -> int:
    """A pseudorandom number that is equal on all ranks that have the box."""
    return zlib.crc32(f"{shard.tensor} {shard.box} {number}".encode())


def _checksum(layout: Layout, index: int, start: int, end: int, shards: HeldShards) -> int:
    digest = xxhash.xxh3_64()
    source = shards.select([index], layout.select([index]))
    try:
        for begin in range(start, end, _STAGED_BYTES):
            stop = min(begin + _STAGED_BYTES, end)
            staged = source.stage([(begin, stop)])
            try:
                digest.update(staged.read(begin, stop))
            finally:
                if staged is not source:
                    staged.release()
    finally:
        source.release()
    return digest.intdigest()
