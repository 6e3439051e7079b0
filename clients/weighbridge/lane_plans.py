"""Plans that the service has sent to this client, and the copies that they come to."""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from weighbridge.errors import DataLoss
from weighbridge.layouts import Layout
from weighbridge.strided import ShardCopies, placed_copies
from weighbridge.v1 import local_lane_pb2 as pb

_KEPT = 32


@dataclass(frozen=True, slots=True)
class PlacedPlan:
    """A plan for memory that is mapped now.

    Attributes:
        copies: for each shard, where which of its bytes lie in the memories.
        streamed: the parts of the stream that no copy covers, sorted and disjoint: they go by gRPC.
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
        """The plan that was used last for something, and its name; an empty name if it is not known any more."""
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
            what: the plan is for.

        Raises:
            DataLoss: what the service says does not fit together.
        """
        places: Mapping[str, tuple[int, int]] = {file.name: (file.memory, file.offset) for file in loan.files}
        if any(number >= len(sizes) for number, _ in places.values()):
            raise DataLoss("the service says that a file lies in memory that it has not lent")
        plan = loan.plan if loan.HasField("plan") else known
        if plan is None:
            raise DataLoss("the service counts on a plan that is not known here")
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
