"""Plan of a push, from the layouts of all ranks: who pushes what, and where every byte goes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from weighbridge._core.layouts import Layout, Shard, TensorSpec
from weighbridge._core.range_set import RangeSet
from weighbridge._core.tensor_spaces import TensorSpace
from weighbridge._formats.safetensors_files import FilesLayout
from weighbridge.errors import LayoutError
from weighbridge_service.plan.placed_ranges import PlacedRange, placed_ranges
from weighbridge_service.plan.planning import Plan, join_streams, make_plan, share_out
from weighbridge_service.plan.relations import WeightMap
from weighbridge_service.plan.replica_placement import FillableBytes, Spread, routes_of
from weighbridge_service.plan.transfers import Transfer


@dataclass(frozen=True)
class PreparedPush:
    """What a set of layouts leads to; the same for every version that is pushed with them.

    Attributes:
        assigned: for each rank, the indexes of the shards it pushes.
        streams: for each rank, the layout of its stream.
        transfer: from the streams, in buffers named like the ranks, to the files.
        fills: how many bytes the streams bring to each file.
        grantable: for each rank, the parts of its stream that its own process may write to the image of its replica: all that
            belongs to files of that replica and of no other. The rest is streamed.
        spread: who writes which file, if the ranks push to several replicas of the service; None otherwise.
        shared: for each rank, its shards whose boxes other ranks hold, too, by index, where nobody knows whether they are replicas.
        placed: for each rank, the parts of its stream that do not lie in exactly one place of the files, sorted; ranks without any
            are not there.
        shifts: what ranks add to each element of some of their tensors, by their names, before they push them.
    """

    assigned: Mapping[int, tuple[int, ...]]
    streams: Mapping[int, Layout]
    transfer: Transfer
    fills: Mapping[str, int]
    grantable: Mapping[int, RangeSet]
    spread: Spread | None = None
    shared: Mapping[int, Mapping[int, Shard]] = field(default_factory=dict)
    placed: Mapping[int, Sequence[PlacedRange]] = field(default_factory=dict)
    shifts: Mapping[str, float] = field(default_factory=dict)

    def shifts_of(self, rank: int) -> Mapping[str, float]:
        """The shifts of those tensors that are in a rank's stream."""
        return {name: self.shifts[name] for name in self.streams[rank].tensors if name in self.shifts}


_HELD_IN = {TensorSpace.MEGATRON: "sharded_state_dict()", TensorSpace.HUGGING_FACE: "state dict or folder"}

Relate = Callable[[Mapping[str, TensorSpec]], WeightMap]
"""Gives the map between the ranks' tensor space and the files'."""


def prepare_push(
    layouts: Sequence[Layout],
    files: FilesLayout,
    relate: Relate,
    homes: Sequence[int] = (),
    *,
    space: TensorSpace = TensorSpace.MEGATRON,
) -> PreparedPush:
    """Share the shards out, plan the copies into the files, and prove that they cover every byte exactly once.

    Args:
        layouts: of all ranks, in their order.
        files: what is to be written.
        relate: gives the map between the ranks' tensor space and the files'.
        homes: for each rank the number of the replica of the service that it pushes to; empty if there is only one.
        space: the ranks' tensor space. Megatron-core says which shard is the main replica. In Hugging Face's nobody knows: a DTensor is
            not aware of meshes that it is not on.

    Raises:
        LayoutError: names the tensors and boxes that are wrong, missing or there twice.
    """
    by_rank = dict(enumerate(layouts))

    def plan_for(
        assigned: Mapping[int, tuple[int, ...]],
    ) -> tuple[Mapping[int, Layout], Plan, WeightMap]:
        streams = {rank: layout.select(assigned[rank]) for rank, layout in by_rank.items()}
        source = join_streams(streams)
        relation = relate(source.tensors)
        try:
            plan = make_plan(
                source,
                relation.as_seen(files.layout),
                relation.links,
                copies=relation.copies,
                padding=relation.padding,
                use_all=True,
            )
        except LayoutError as error:
            raise LayoutError(
                f"the ranks together do not hold the model: {error.message}",
                details=error.details,
                fix=f"every rank pushes all that its {_HELD_IN[space]} holds; check world_size",
            ) from error
        return streams, plan, relation

    by_box = space == TensorSpace.HUGGING_FACE
    assigned = share_out(by_rank, by_box=by_box)
    streams, plan, relation = plan_for(assigned)
    spread = None
    if len(set(homes)) > 1:
        # where a box goes is only known from a plan; of those who hold it, the one next to its file is to push it
        fillable = FillableBytes(layouts, homes, plan)
        assigned = share_out(by_rank, fillable.prefer, by_box=by_box)
        streams, plan, relation = plan_for(assigned)
        spread = Spread(tuple(homes), fillable.owners, routes_of(plan, fillable.owners))
    grantable = {rank: _grantable(rank, stream.nbytes, spread) for rank, stream in streams.items()}
    return PreparedPush(
        assigned,
        streams,
        Transfer(plan, scatter=True),
        _fills(plan, files),
        grantable,
        spread,
        _shared(by_rank) if by_box else {},
        placed_ranges(plan, relation.unevenly_placed),
        relation.shifts,
    )


def _shared(layouts: Mapping[int, Layout]) -> dict[int, dict[int, Shard]]:
    """The shards of each rank whose boxes other ranks hold, too."""
    holders = Counter(
        (placement.shard.tensor, placement.shard.box)
        for layout in layouts.values()
        for placement in layout.placements
    )
    return {
        rank: {
            index: placement.shard
            for index, placement in enumerate(layout.placements)
            if placement.nbytes and holders[placement.shard.tensor, placement.shard.box] > 1
        }
        for rank, layout in layouts.items()
    }


def nothing_to_push(files: FilesLayout, ranks: int, spread: Spread | None = None) -> PreparedPush:
    """The plan of a push whose bytes are all in their files: no rank has anything to push any more.

    Args:
        files: what was written.
        ranks: how many ranks have pushed it.
        spread: who writes which file, if several replicas do.
    """
    empty = Layout.stream((), ())
    fills = {file.name: 0 for file in files.files}
    for placement in files.layout.placements:
        fills[placement.buffer] += placement.nbytes
    transfer = Transfer(Plan(empty, files.layout, (), ()), scatter=True)
    return PreparedPush({}, dict.fromkeys(range(ranks), empty), transfer, fills, {}, spread)


def _grantable(rank: int, nbytes: int, spread: Spread | None) -> RangeSet:
    crossing = RangeSet() if spread is None else spread.crossing(rank)
    return RangeSet(crossing.gaps(0, nbytes))


def _fills(plan: Plan, files: FilesLayout) -> dict[str, int]:
    fills = {file.name: 0 for file in files.files}
    for copy in plan.copies:
        target = plan.target.placements[copy.target]
        itemsize = plan.target.tensors[target.shard.tensor].dtype.itemsize
        fills[target.buffer] += copy.target_box.volume * itemsize
    return fills
