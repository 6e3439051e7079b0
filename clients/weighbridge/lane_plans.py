"""Which plans has the service sent to this client, and to which copies do they come?"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence

from weighbridge.errors import DataLoss
from weighbridge.layouts import Layout
from weighbridge.strided import StridedCopy, placed_copies
from weighbridge.v1 import local_lane_pb2 as pb

_KEPT = 32


class LanePlans:
    """The plans that were used last: the service sends each of them once. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._plans: OrderedDict[str, pb.LanePlan] = OrderedDict()
        self._placed: OrderedDict[Hashable, list[list[StridedCopy]]] = OrderedDict()
        self._last: OrderedDict[Hashable, str] = OrderedDict()

    def known(self, what: Hashable) -> tuple[str, pb.LanePlan | None]:
        """The plan that was used last for something, and its name; an empty name if it is not known any more."""
        with self._lock:
            plan_id = self._last.get(what, "")
            plan = self._plans.get(plan_id)
            return (plan_id, plan) if plan is not None else ("", None)

    def copies(
        self,
        loan: pb.WriteLoan | pb.ReadLoan,
        known: pb.LanePlan | None,
        sizes: Sequence[int],
        stream: Layout,
        what: Hashable,
    ) -> list[list[StridedCopy]]:
        """The copies of a loan; from earlier ones if nothing has changed.

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
            copies = self._placed.get(key)
            if copies is None:
                copies = self._placed[key] = placed_copies(plan, stream, places, sizes)
            for cache in (self._plans, self._last, self._placed):
                while len(cache) > _KEPT:
                    cache.popitem(last=False)
        return copies
