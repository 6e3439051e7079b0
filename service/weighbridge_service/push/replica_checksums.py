"""Checksums of shards that several ranks hold under the same box. The service compares them while the ranks seal.

In Megatron-core's tensor space, ranks mark the shards that are replicas. Hugging Face's names do not show which shards
are replicas: experts that each rank numbers from 0 look like replicas, but are different tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from weighbridge._core.boxes import Box
from weighbridge._core.layouts import Shard
from weighbridge._core.text.counts import counted
from weighbridge.errors import LayoutError


class ReplicaChecksum(NamedTuple):
    """Checksum of a part of a rank's shard.

    Attributes:
        shard: index of the shard in the rank's layout.
        start: offset of the part's first byte in the shard.
        end: offset one past its last byte.
        checksum: XXH3 of these bytes, 64 bits.
    """

    shard: int
    start: int
    end: int
    checksum: int


class VersionChecksums:
    """Checksums of one version, from all ranks that have sent theirs.

    Thread-safe: each entry is set in one step, and none is removed.
    """

    def __init__(self) -> None:
        self._first: dict[tuple[str, Box, int, int], tuple[int, int]] = {}

    def compare(self, rank: int, shared: Mapping[int, Shard], checksums: Iterable[ReplicaChecksum]) -> None:
        """Compare the checksums of a rank with those of other ranks, and record them.

        Args:
            rank: the rank.
            shared: those of its shards that other ranks also hold, by index; checksums of other shards are ignored.
            checksums: the rank's checksums.

        Raises:
            LayoutError: two ranks hold different bytes under the same box. The error names the tensors and both ranks.
        """
        problems = []
        for each in checksums:
            shard = shared.get(each.shard)
            if shard is None or not 0 <= each.start < each.end:
                continue
            key = (shard.tensor, shard.box, each.start, each.end)
            other, checksum = self._first.setdefault(key, (rank, each.checksum))
            if other == rank:  # the latest value counts: the rank may have restarted its push
                self._first[key] = rank, each.checksum
            elif checksum != each.checksum:
                problems.append(f"{shard.tensor}: box {shard.box} on rank {other} and on rank {rank}")
        if problems:
            raise LayoutError(
                counted(len(problems), "box is", "boxes are") + " held by several ranks, with different bytes",
                details=problems[:20],
                fix=(
                    "name each tensor as the model's files do, experts by their number in the "
                    "model; and let ranks agree on what they replicate"
                ),
            )
