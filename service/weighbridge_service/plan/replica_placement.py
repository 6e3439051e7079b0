"""Placement of a push that several replicas of the service receive: the owner of each file, and the routes of all
bytes.

Each trainer rank declares to the replica on its own node. A file has one owner: the replica that can fill most of it
from its own ranks. Ranks of other replicas push their parts of the file to its owner; no other data leaves their node.
All functions are pure: replicas with the same declarations compute the same placement without communication.

Replicas are numbered in the order of the lowest rank that pushes to them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from weighbridge._core.boxes import Box
from weighbridge._core.layouts import Layout
from weighbridge._core.range_set import RangeSet
from weighbridge_service.plan.planning import Plan


@dataclass(frozen=True, slots=True)
class Spread:
    """Placement of one push on several replicas.

    Attributes:
        homes: for each rank, the number of its own replica.
        owners: for each file, the number of the replica that writes it.
        routes: for each rank, the parts of its stream by the number of the replica that needs them.
    """

    homes: Sequence[int]
    owners: Mapping[str, int]
    routes: Mapping[int, Mapping[int, RangeSet]]

    def files_of(self, replica: int) -> list[str]:
        """The files that a replica writes."""
        return [file for file, owner in self.owners.items() if owner == replica]

    def crossing(self, rank: int) -> RangeSet:
        """The parts of a rank's stream that replicas other than its own need, including parts that its own also
        needs.
        """
        home = self.homes[rank]
        return RangeSet(
            each for replica, meant in self.routes.get(rank, {}).items() if replica != home for each in meant
        )


def numbered(names: Sequence[str]) -> tuple[int, ...]:
    """For each rank the number of its replica, from the name of the replica of each rank."""
    numbers: dict[str, int] = {}
    return tuple(numbers.setdefault(name, len(numbers)) for name in names)


class FillableBytes:
    """Bytes of each file that each replica could fill from its own ranks.

    Args:
        layouts: layouts of all ranks, in their order.
        homes: for each rank, the number of the replica that it pushes to.
        plan: plan from the streams of a push to the files. Any rank that holds a box may push it in this plan.
    """

    def __init__(self, layouts: Sequence[Layout], homes: Sequence[int], plan: Plan) -> None:
        self._homes = homes
        self._to_files: dict[tuple[str, Box], dict[str, int]] = defaultdict(lambda: defaultdict(int))
        for copy in plan.copies:
            source = plan.source.placements[copy.source].shard
            target = plan.target.placements[copy.target]
            elements = copy.source_box.volume
            itemsize = plan.source.tensors[source.tensor].dtype.itemsize
            self._to_files[source.tensor, source.box][target.buffer] += elements * itemsize
        holders: dict[tuple[str, Box], set[int]] = defaultdict(set)
        for rank, layout in enumerate(layouts):
            for placement in layout.placements:
                holders[placement.shard.tensor, placement.shard.box].add(homes[rank])
        could: dict[str, dict[int, int]] = {placement.buffer: defaultdict(int) for placement in plan.target.placements}
        for key, files in self._to_files.items():
            for file, nbytes in files.items():
                for home in holders[key]:
                    could[file][home] += nbytes
        self.owners = _owners(could, sorted(set(homes)))

    def prefer(self, tensor: str, box: Box, rank: int) -> bool:
        """Whether a rank pushes to the replica whose files get most bytes of a box."""
        by_owner: dict[int, int] = defaultdict(int)
        for file, nbytes in self._to_files[tensor, box].items():
            by_owner[self.owners[file]] += nbytes
        return bool(by_owner) and self._homes[rank] == max(by_owner, key=lambda owner: (by_owner[owner], -owner))


def _owners(could: Mapping[str, Mapping[int, int]], replicas: Sequence[int]) -> dict[str, int]:
    """For each file, the replica that can fill most of it.

    If several can, the one with the fewest bytes to write so far.
    """
    load = dict.fromkeys(replicas, 0)
    owners = {}
    for file, by_replica in sorted(could.items(), key=lambda item: (-sum(item[1].values()), item[0])):
        owner = min(replicas, key=lambda replica: (-by_replica.get(replica, 0), load[replica], replica))
        load[owner] += max(by_replica.values(), default=0)
        owners[file] = owner
    return {file: owners[file] for file in could}


def routes_of(plan: Plan, owners: Mapping[str, int]) -> dict[int, dict[int, RangeSet]]:
    """Parts of each rank's stream, by rank and by the number of the replica that needs them.

    Args:
        plan: plan from the streams, in buffers named like the ranks, to the files.
        owners: for each file, the number of the replica that writes it.
    """
    routes: dict[int, dict[int, RangeSet]] = defaultdict(dict)
    for copy in plan.copies:
        placement = plan.source.placements[copy.source]
        owner = owners[plan.target.placements[copy.target].buffer]
        itemsize = plan.source.tensors[placement.shard.tensor].dtype.itemsize
        start, end = _span(copy.source_box, placement.shard.box.extent)
        routes[int(placement.buffer)].setdefault(owner, RangeSet()).add(
            placement.offset + start * itemsize, placement.offset + end * itemsize
        )
    return dict(routes)


def _span(box: Box, extent: Sequence[int]) -> tuple[int, int]:
    """Index of the first element of a box and one past its last, in the row-major order of a shard of this extent."""
    first = last = 0
    for start, count, whole in zip(box.offset, box.extent, extent, strict=True):
        first = first * whole + start
        last = last * whole + start + count - 1
    return (first, last + 1) if box.volume else (first, first)
