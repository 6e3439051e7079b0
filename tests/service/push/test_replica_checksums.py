"""Are ranks that hold different bytes under one box told so, with the tensor and both ranks, and all others let
alone?
"""

from __future__ import annotations

import pytest

from weighbridge._core.boxes import Box
from weighbridge._core.layouts import Shard
from weighbridge.errors import LayoutError
from weighbridge_service.push.replica_checksums import ReplicaChecksum, VersionChecksums

NORM, UP = Shard("norm", Box((0,), (4,))), Shard("up", Box((0, 0), (4, 4)))
LOWER = Shard("up", Box((4, 0), (4, 4)))


def test_ranks_that_say_the_same_of_a_box_agree_whatever_their_indexes() -> None:
    checksums = VersionChecksums()
    checksums.compare(0, {0: NORM, 1: UP}, [ReplicaChecksum(0, 0, 8, 5), ReplicaChecksum(1, 0, 32, 6)])
    checksums.compare(1, {7: UP, 9: NORM}, [ReplicaChecksum(7, 0, 32, 6), ReplicaChecksum(9, 0, 8, 5)])
    checksums.compare(1, {7: UP, 9: NORM}, [ReplicaChecksum(7, 0, 32, 6)])  # again, as after a lost answer


def test_other_bytes_under_one_box_are_refused_with_the_tensor_and_both_ranks() -> None:
    checksums = VersionChecksums()
    checksums.compare(2, {0: NORM, 1: UP}, [ReplicaChecksum(0, 0, 8, 5), ReplicaChecksum(1, 0, 32, 6)])
    with pytest.raises(LayoutError) as caught:
        checksums.compare(5, {0: NORM, 1: UP}, [ReplicaChecksum(0, 0, 8, 5), ReplicaChecksum(1, 0, 32, 7)])
    [problem] = caught.value.details
    assert problem.startswith("up: ")
    assert "rank 2" in problem
    assert "rank 5" in problem


def test_other_parts_other_boxes_and_shards_that_nobody_shares_are_not_compared() -> None:
    checksums = VersionChecksums()
    checksums.compare(0, {0: UP}, [ReplicaChecksum(0, 0, 32, 1)])
    checksums.compare(1, {0: UP}, [ReplicaChecksum(0, 0, 16, 2)])
    checksums.compare(2, {0: LOWER}, [ReplicaChecksum(0, 0, 32, 3)])
    checksums.compare(3, {}, [ReplicaChecksum(0, 0, 32, 4)])
