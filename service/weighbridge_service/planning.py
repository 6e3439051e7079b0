"""Plans: which copies take the bytes of a source layout to a target layout, and the proof that none is missing.

Pure: no I/O, no torch, no clock. Whatever is wrong with two layouts is found here, before a byte moves.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from weighbridge.boxes import Box, first_overlap, subtract
from weighbridge.errors import LayoutError
from weighbridge.layouts import Layout, Placement, TensorSpec
from weighbridge_service.relations import Link

_NAMED = 20
"""How many problems an error names; it counts them all."""


@dataclass(frozen=True, slots=True)
class Copy:
    """One strided copy between two shards. Boxes are counted from the origin of their shard.

    Attributes:
        source: index of the placement in the source layout.
        source_box: which part of that shard.
        target: index of the placement in the target layout.
        target_box: which part of that one.
        axes: for each target axis the source axis that runs along it, or None where the extent is one.
    """

    source: int
    source_box: Box
    target: int
    target_box: Box
    axes: tuple[int | None, ...]


@dataclass(frozen=True)
class Plan:
    """Copies that fill every byte of the target exactly once.

    Attributes:
        source: where the bytes come from.
        target: where they go.
        copies: how.
        zeros: parts of target shards that have no source and are zero, as placement index and box.
    """

    source: Layout
    target: Layout
    copies: tuple[Copy, ...]
    zeros: tuple[tuple[int, Box], ...]


class _ByFirstAxis:
    """Finds the placements of a tensor that can meet a box, by their range on the first axis."""

    def __init__(self, placements: Sequence[Placement], indexes: Sequence[int]) -> None:
        def start(index: int) -> int:
            return placements[index].shard.box.offset[0] if placements[index].shard.box.offset else 0

        self._order = sorted(indexes, key=start)
        self._starts = [start(i) for i in self._order]
        self._longest = max((sum(placements[i].shard.box.extent[:1]) for i in indexes), default=0)

    def near(self, box: Box) -> Sequence[int]:
        if not box.offset:
            return self._order
        first = bisect.bisect_right(self._starts, box.offset[0] - self._longest)
        return self._order[first : bisect.bisect_left(self._starts, box.end[0])]


def make_plan(
    source: Layout,
    target: Layout,
    links: Iterable[Link],
    *,
    padding: Iterable[tuple[str, Box]] = (),
    use_all: bool = False,
) -> Plan:
    """Plan the copies from one layout to another.

    Args:
        source: shards without replicas (see `share_out`).
        target: what is to be filled.
        links: how the tensor spaces relate, from source to target.
        padding: parts of tensors that have no counterpart in the other space: zero where they are in the target, left
            behind where they are in the source.
        use_all: refuse a source of which a part would go nowhere.

    Raises:
        LayoutError: a part of the target has no source or two, or (with ``use_all``) a part of the source is not
            used; names the tensors and boxes.
    """
    near_source = {name: _ByFirstAxis(source.placements, i) for name, i in source.by_tensor.items()}
    near_target = {name: _ByFirstAxis(target.placements, i) for name, i in target.by_tensor.items()}
    copies: list[Copy] = []
    for link in links:
        if link.source not in near_source or link.target not in near_target:
            continue
        for s in near_source[link.source].near(link.source_box):
            source_shard = source.placements[s].shard
            offered = source_shard.box.intersect(link.source_box)
            if offered is None:
                continue
            offered = link.to_target(offered)
            for t in near_target[link.target].near(offered):
                target_shard = target.placements[t].shard
                taken = target_shard.box.intersect(offered)
                if taken is not None:
                    copies.append(
                        Copy(
                            s,
                            link.to_source(taken).relative_to(source_shard.box.offset),
                            t,
                            taken.relative_to(target_shard.box.offset),
                            link.axes,
                        )
                    )
    padding = tuple(padding)
    zeros = tuple(_parts(target, padding))
    written = [(copy.target, copy.target_box) for copy in copies]
    _prove(target, [*written, *zeros], "has no source", "would be written twice")
    if use_all:
        read = [(copy.source, copy.source_box) for copy in copies]
        _prove(source, [*read, *_parts(source, padding)], "would go nowhere", "would go to two places")
    return Plan(source, target, tuple(copies), zeros)


def _parts(layout: Layout, boxes: Iterable[tuple[str, Box]]) -> Iterator[tuple[int, Box]]:
    for tensor, box in boxes:
        for index in layout.by_tensor.get(tensor, ()):
            shard = layout.placements[index].shard
            common = shard.box.intersect(box)
            if common is not None:
                yield index, common.relative_to(shard.box.offset)


def _prove(layout: Layout, parts: Iterable[tuple[int, Box]], gap: str, overlap: str) -> None:
    """Prove that the parts cover every shard of the layout exactly once."""
    of_shard: list[list[Box]] = [[] for _ in layout.placements]
    for index, box in parts:
        of_shard[index].append(box)
    problems: list[str] = []
    for placement, boxes in zip(layout.placements, of_shard, strict=True):
        shard, spec = placement.shard, layout.tensors[placement.shard.tensor]
        common = first_overlap(boxes)
        if common is not None:
            problems.append(f"{spec}: box {_moved(common[2], shard.box)} {overlap}")
        elif sum(box.volume for box in boxes) != shard.box.volume:
            left = subtract(Box.whole(shard.box.extent), boxes)
            problems += [f"{spec}: box {_moved(box, shard.box)} {gap}" for box in left]
    if problems:
        raise LayoutError(
            f"{len(problems)} parts of tensors are not covered exactly once", details=problems[:_NAMED]
        )


def _moved(box: Box, origin: Box) -> Box:
    return Box(tuple(a + b for a, b in zip(box.offset, origin.offset, strict=True)), box.extent)


def merge_specs(layouts: Iterable[Layout]) -> Mapping[str, TensorSpec]:
    """All tensors of several ranks' layouts.

    Raises:
        LayoutError: two ranks give one tensor different shapes or dtypes.
    """
    specs: dict[str, TensorSpec] = {}
    problems = []
    for layout in layouts:
        for name, spec in layout.tensors.items():
            if specs.setdefault(name, spec) != spec:
                problems.append(f"{specs[name]} on one rank, {spec} on another")
    if problems:
        raise LayoutError(f"{len(problems)} tensors differ between ranks", details=problems[:_NAMED])
    return MappingProxyType(specs)


def share_out(layouts: Mapping[int, Layout]) -> dict[int, tuple[int, ...]]:
    """Which rank pushes which of its shards, so that each box is pushed once and the bytes are spread evenly.

    Boxes that several ranks hold go to the one that has least to push so far, the largest boxes first. The answer
    depends on nothing but the layouts.

    Returns:
        For each rank, the indexes of its shards, ascending.

    Raises:
        LayoutError: shards overlap without being replicas of each other, or of shards with one box not exactly one is
            the main replica.
    """
    holders: dict[tuple[str, Box], list[tuple[int, int]]] = {}
    mains: dict[tuple[str, Box], int] = {}
    for rank, layout in sorted(layouts.items()):
        for index, placement in enumerate(layout.placements):
            shard = placement.shard
            holders.setdefault((shard.tensor, shard.box), []).append((rank, index))
            mains[shard.tensor, shard.box] = mains.get((shard.tensor, shard.box), 0) + shard.main
    specs = merge_specs(layouts.values())
    problems = [
        f"{specs[tensor]}: box {box} is held by rank {', '.join(str(r) for r, _ in holders[tensor, box][:8])}, "
        + ("none of them" if count == 0 else f"{count} of them")
        + " as main replica"
        for (tensor, box), count in mains.items()
        if count != 1
    ]
    boxes: dict[str, list[Box]] = {}
    for tensor, box in holders:
        boxes.setdefault(tensor, []).append(box)
    for tensor, of_tensor in boxes.items():
        common = first_overlap(of_tensor)
        if common is not None:
            one, other = of_tensor[common[0]], of_tensor[common[1]]
            problems.append(
                f"{specs[tensor]}: boxes {one} (rank {holders[tensor, one][0][0]}) and {other} "
                f"(rank {holders[tensor, other][0][0]}) overlap in {common[2]} and are no replicas of each other"
            )
    if problems:
        raise LayoutError(
            f"{len(problems)} shards overlap without being replicas of one main shard",
            details=problems[:_NAMED],
        )
    load = dict.fromkeys(layouts, 0)
    chosen: dict[int, list[int]] = {rank: [] for rank in layouts}

    def size(item: tuple[tuple[str, Box], list[tuple[int, int]]]) -> int:
        (tensor, box), _ = item
        return box.volume * specs[tensor].dtype.itemsize

    # what has one holder only is no choice: count it first
    for item in sorted(holders.items(), key=lambda item: (len(item[1]) > 1, -size(item))):
        rank, index = min(item[1], key=lambda holder: (load[holder[0]], holder))
        load[rank] += size(item)
        chosen[rank].append(index)
    return {rank: tuple(sorted(indexes)) for rank, indexes in chosen.items()}


def join_streams(streams: Mapping[int, Layout]) -> Layout:
    """The streams of several ranks as one layout, each in a buffer named like its rank."""
    placements = [
        replace(placement, buffer=str(rank))
        for rank, stream in streams.items()
        for placement in stream.placements
    ]
    return Layout(merge_specs(streams.values()), tuple(placements))
