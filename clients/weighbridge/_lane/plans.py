"""Plans that the service has sent to this client, and the copies that follow from them."""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from weighbridge._core.byte_copies import ByteCopy
from weighbridge._core.layouts import Layout
from weighbridge._memory.strided import ShardCopies
from weighbridge.errors import DataLoss
from weighbridge.v1 import local_lane_pb2 as pb

_KEPT = 32
_MOST_AXES = 15
"""Most axes of a copy of bytes in the C extension; tensors have no more than eight."""
_MOST_STRIDE = 1 << 62


@dataclass(frozen=True, slots=True)
class PlacedPlan:
    """A plan for memory that is mapped now.

    Attributes:
        copies: for each shard, where which of its bytes lie in the memories.
        streamed: the parts of the stream that no copy covers, sorted and disjoint; they are sent over gRPC.
    """

    copies: list[ShardCopies]
    streamed: Sequence[tuple[int, int]]


class LanePlans:
    """The plans that were used last: the service sends each of them once. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._plans: OrderedDict[str, pb.LanePlan] = OrderedDict()
        self._placed: OrderedDict[Hashable, PlacedPlan] = OrderedDict()
        self._last: OrderedDict[Hashable, str] = OrderedDict()

    def known(self, what: Hashable) -> tuple[str, pb.LanePlan | None]:
        """Plan that was used last for something, and its name; the name is empty if the plan is no longer known."""
        with self._lock:
            plan_id = self._last.get(what, "")
            plan = self._plans.get(plan_id)
            return (plan_id, plan) if plan is not None else ("", None)

    def placed(
        self,
        loan: pb.WriteLoan | pb.ReadLoan,
        known: pb.LanePlan | None,
        sizes: Sequence[int],
        stream: Layout,
        what: Hashable,
    ) -> PlacedPlan:
        """The plan of a loan, with its files where they lie now; from earlier ones if nothing has changed.

        Args:
            loan: says where files lie, and by which plan, which it has if the client does not.
            known: the plan that the client has.
            sizes: bytes of each memory.
            stream: the shards.
            what: purpose of the plan.

        Raises:
            DataLoss: what the service says does not fit together.
        """
        places: Mapping[str, tuple[int, int]] = {file.name: (file.memory, file.offset) for file in loan.files}
        if any(number >= len(sizes) for number, _ in places.values()):
            raise DataLoss("the service reports a file in memory that it has not granted")
        plan = loan.plan if loan.HasField("plan") else known
        if plan is None:
            raise DataLoss("the service refers to a plan that this client does not have")
        key = (loan.plan_id, tuple(sorted(places.items())), tuple(sizes))
        with self._lock:
            self._plans[loan.plan_id] = plan
            self._last[what] = loan.plan_id
            placed = self._placed.get(key)
            if placed is None:
                copies = placed_copies(plan, stream, places, sizes)
                placed = self._placed[key] = PlacedPlan(copies, _streamed(plan, stream))
            for cache in (self._plans, self._last, self._placed):
                while len(cache) > _KEPT:
                    cache.popitem(last=False)
        return placed


def _streamed(plan: pb.LanePlan, stream: Layout) -> list[tuple[int, int]]:
    ranges = [(each.start, each.end) for each in plan.streamed]
    bounds = [0, *itertools.chain.from_iterable(ranges), stream.nbytes]
    if any(start > end for start, end in itertools.pairwise(bounds)):
        raise DataLoss("the ranges that the plan leaves to be streamed are not in order")
    return ranges


def placed_copies(
    plan: pb.LanePlan, stream: Layout, places: Mapping[str, tuple[int, int]], sizes: Sequence[int]
) -> list[ShardCopies]:
    """The copies of each shard of a stream, with the files where they lie now. What the service says is checked.

    Args:
        plan: how the shards lie in files.
        stream: the shards.
        places: for each file the number of its memory, and the offset of its first byte there.
        sizes: bytes of each memory.

    Raises:
        DataLoss: a copy goes beyond its shard or its memory or is longer than its shard, or the plan is for other
            shards.
    """
    if len(plan.shards) != len(stream.placements):
        raise DataLoss(f"the plan has {len(plan.shards)} shards, and the stream {len(stream.placements)}")
    found = [places.get(name) for name in plan.files]
    copies: list[ShardCopies] = []
    for shard, placement in zip(plan.shards, stream.placements, strict=True):
        of_shard = []
        for each in shard.copies:
            place = found[each.file] if each.file < len(found) else None
            lengths = {len(each.extent), len(each.shard_strides), len(each.file_strides)}
            if place is None or len(lengths) != 1 or 0 in each.extent or not each.extent:
                raise DataLoss(f"the plan for {placement.shard.tensor} is malformed")
            copy = ByteCopy(
                tuple(each.extent),
                each.shard_offset,
                tuple(each.shard_strides),
                place[0],
                place[1] + each.file_offset,
                tuple(each.file_strides),
            )
            strides = (*copy.stream_strides, *copy.file_strides)
            apart = copy.extent[-1] > 1 and (copy.stream_strides[-1], copy.file_strides[-1]) != (1, 1)
            if apart or len(copy.extent) > _MOST_AXES or max(strides) > _MOST_STRIDE:
                raise DataLoss(f"the plan for {placement.shard.tensor} is malformed")
            # with strides of 0, a copy that stays within its bounds could go on for ever
            if max(copy.nbytes, copy.stream_end) > placement.nbytes or copy.file_end > sizes[copy.file]:
                raise DataLoss(f"the plan for {placement.shard.tensor} goes beyond its memory")
            of_shard.append(copy)
        copies.append(ShardCopies(of_shard))
    return copies
