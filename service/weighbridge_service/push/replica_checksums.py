"""Checksums of what ranks hold under one box, compared while they seal.

In Megatron-core's tensor space the ranks say which shards are replicas. In Hugging Face's nobody knows: experts that are numbered on each
rank for itself look like replicas, and are none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from weighbridge._core.boxes import Box
from weighbridge._core.layouts import Shard
from weighbridge._core.text.counts import counted
from weighbridge.errors import LayoutError


class ReplicaChecksum(NamedTuple):
    """What a rank holds in a part of a shard.

    Attributes:
        shard: index of the shard in the rank's layout.
        start: first byte of the part in the shard.
        end: one past its last.
        checksum: XXH3 of these bytes, 64 bits.
    """

    shard: int
    start: int
    end: int
    checksum: int


class ReplicaChecksums:
    """The checksums of one version, of all ranks that have said theirs. Thread-safe: entries are only added, each in one step."""

    def __init__(self) -> None:
        self._first: dict[tuple[str, Box, int, int], tuple[int, int]] = {}

    def compare(self, rank: int, shared: Mapping[int, Shard], checksums: Iterable[ReplicaChecksum]) -> None:
        """Compare what a rank says with what others have said, and take note of it.

        Args:
            rank: which rank.
            shared: its shards that others hold, too, by index; what is said of others is passed over.
            checksums: what it says.

        Raises:
            LayoutError: two ranks hold different bytes under one box; names the tensors and both ranks.
        """
        problems = []
        for each in checksums:
            shard = shared.get(each.shard)
            if shard is None or not 0 <= each.start < each.end:
                continue
            key = (shard.tensor, shard.box, each.start, each.end)
            other, checksum = self._first.setdefault(key, (rank, each.checksum))
            if other == rank:  # what it says again counts: it may have begun anew
                self._first[key] = rank, each.checksum
            elif checksum != each.checksum:
                problems.append(f"{shard.tensor}: box {shard.box} on rank {other} and on rank {rank}")
        if problems:
            raise LayoutError(
                counted(len(problems), "box is", "boxes are")
                + " held by several ranks, with different bytes",
                details=problems[:20],
                fix="name each tensor as the model's files do, experts by their number in the model; and let ranks agree on what they replicate",
            )
