"""Plan of a push, from the layouts of all ranks: the shards that each rank pushes, and the place of every byte in the
files.
"""

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
    """Plan of a push for a set of layouts. Every version that is pushed with these layouts uses it.

    Attributes:
        assigned: for each rank, the indexes of the shards that it pushes.
        streams: for each rank, the layout of its stream.
        transfer: transfer from the streams, in buffers named like the ranks, to the files.
        fills: bytes of the streams that go to each file.
        grantable: for each rank, the parts of its stream that its own process may write to the image of its replica:
            the parts that belong only to files of that replica. The rank streams the rest.
        spread: placement of files on replicas, if the ranks push to several replicas of the service; else None.
        shared: for each rank, its shards whose boxes other ranks also hold, by index, if the tensor space does not mark
            replicas.
        placed: for each rank, the parts of its stream that are not in exactly one place of the files, sorted. Ranks
            without such parts are omitted.
        shifts: constants that ranks add to each element of some tensors, by name, before they push them.
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
"""Returns the map between the ranks' tensor space and that of the files, for the ranks' tensors."""


def prepare_push(
    layouts: Sequence[Layout],
    files: FilesLayout,
    relate: Relate,
    homes: Sequence[int] = (),
    *,
    space: TensorSpace = TensorSpace.MEGATRON,
) -> PreparedPush:
    """Assign the shards to ranks, plan the copies into the files, and prove that they cover every byte exactly once.

    Args:
        layouts: layouts of all ranks, in their order.
        files: layout of the files to write.
        relate: returns the map between the ranks' tensor space and that of the files.
        homes: for each rank the number of the replica of the service that it pushes to; empty if there is only one.
        space: tensor space of the ranks. Megatron-core marks the main replica of each shard. Hugging Face's space does
            not, because a DTensor does not know meshes other than its own.

    Raises:
        LayoutError: tensors or boxes are wrong, missing or duplicated. The error names them.
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
        # only a plan shows the file of a box; then a rank on the replica that owns the file should push the box
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
    """The shards of each rank whose boxes other ranks also hold."""
    holders = Counter(
        (placement.shard.tensor, placement.shard.box) for layout in layouts.values() for placement in layout.placements
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
    """The plan of a push whose bytes are all in their files already, so that ranks do not push anything more.

    Args:
        files: layout of the files.
        ranks: number of ranks that have pushed it.
        spread: placement of files on replicas, if there are several.
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
