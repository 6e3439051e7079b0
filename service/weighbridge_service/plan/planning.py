"""Plans: copies of the bytes of a source layout to a target layout, and proof that no byte is missing.

Pure functions without I/O, torch or a clock. They find all errors in two layouts before the first byte is copied.
"""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from weighbridge._core.boxes import Box, Link, first_overlap, gaps
from weighbridge._core.layouts import Layout, Placement, TensorSpec
from weighbridge._core.text.counts import counted, first_lines
from weighbridge.errors import LayoutError

_COUNTED = 1000
"""Maximum number of problems that are counted for one error."""


class Copy(NamedTuple):
    """One strided copy between two shards. Boxes are relative to the origin of their shard.

    Attributes:
        source: index of the placement in the source layout.
        source_box: copied box of the source shard.
        target: index of the placement in the target layout.
        target_box: written box of the target shard.
        axes: for each target axis the corresponding source axis, or None if the extent is one.
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
        source: layout of the source.
        target: layout of the target.
        copies: the copies.
        zeros: parts of target shards without a source, as placement index and box. They are zero.
    """

    source: Layout
    target: Layout
    copies: tuple[Copy, ...]
    zeros: tuple[tuple[int, Box], ...]


class _Finder:
    """Finds the placements of a tensor that can intersect a box, by their range on the first axis.

    Args:
        layout: layout of the placements.
        disjoint: whether no two placements share elements. If so, a placement with exactly the box is the only match.
    """

    def __init__(self, layout: Layout, *, disjoint: bool = False) -> None:
        self._placements = layout.placements
        self._by_tensor = layout.by_tensor
        self._disjoint = disjoint
        self._exact: dict[str, dict[Box, int]] = {}
        self._sorted: dict[str, tuple[list[int], list[int], int]] = {}

    def near(self, tensor: str, box: Box) -> Sequence[int]:
        indexes = self._by_tensor.get(tensor, ())
        if len(indexes) < 2 or not box.offset:
            return indexes
        if self._disjoint:
            exact = self._exact.get(tensor)
            if exact is None:
                exact = {self._placements[index].shard.box: index for index in indexes}
                self._exact[tensor] = exact
            just = exact.get(box)
            if just is not None:
                return (just,)
        found = self._sorted.get(tensor)
        if found is None:
            found = self._sorted[tensor] = self._sort(indexes)
        order, starts, longest = found
        first = bisect.bisect_right(starts, box.offset[0] - longest)
        return order[first : bisect.bisect_left(starts, box.offset[0] + box.extent[0])]

    def _sort(self, indexes: Sequence[int]) -> tuple[list[int], list[int], int]:
        boxes = {index: self._placements[index].shard.box for index in indexes}
        order = sorted(indexes, key=lambda index: boxes[index].offset[0])
        starts = [boxes[index].offset[0] for index in order]
        return order, starts, max(box.extent[0] for box in boxes.values())


def make_plan(
    source: Layout,
    target: Layout,
    links: Iterable[Link],
    *,
    copies: Iterable[Link] = (),
    padding: Iterable[tuple[str, Box]] = (),
    use_all: bool = False,
) -> Plan:
    """Plan the copies from one layout to another.

    Args:
        source: layout of the source: shards without replicas (see `share_out`), which do not overlap.
        target: layout to fill.
        links: relation of the tensor spaces, from source to target.
        copies: further links, to additional places of elements that `links` also place.
        padding: parts of tensors without a counterpart in the other space: zero in the target, skipped in the source.
        use_all: whether every part of the source must be used.

    Raises:
        LayoutError: a part of the target has no source or two sources, or (with ``use_all``) a part of the source is
            unused or used twice. The error names the tensors and boxes.
    """
    finders = _Finder(source, disjoint=True), _Finder(target)
    found = list(_copies(source, target, *finders, links))
    further = list(_copies(source, target, *finders, copies))
    padding = tuple(padding)
    zeros = tuple(_parts(target, padding))
    written = [(copy.target, copy.target_box) for copy in (*found, *further)]
    try:
        _prove(target, [*written, *zeros], "has no source", "would be written twice")
        if use_all:
            read = [(copy.source, copy.source_box) for copy in found]
            _prove(source, [*read, *_parts(source, padding)], "would go nowhere", "would go to two places")
    except LayoutError:
        _check_disjoint(source)
        raise
    return Plan(source, target, (*found, *further), zeros)


def _copies(
    source: Layout,
    target: Layout,
    sources: _Finder,
    targets: _Finder,
    links: Iterable[Link],
) -> Iterator[Copy]:
    shapes = {name: spec.shape for name, spec in target.tensors.items()}
    for link in links:
        straight = link.is_identity
        for s in sources.near(link.source, link.source_box):
            source_box = source.placements[s].shard.box
            whole = source_box == link.source_box
            common = source_box if whole else source_box.intersect(link.source_box)
            if common is None:
                continue
            offered = link.target_box if whole else link.to_target(common)
            everything = offered.extent == shapes.get(link.target)
            for t in targets.near(link.target, offered):
                target_box = target.placements[t].shard.box
                taken = target_box if everything or target_box == offered else target_box.intersect(offered)
                if taken is None:
                    continue
                read = taken if straight else common if taken == offered else link.to_source(taken)
                # fast path: most copies of a large model copy whole shards
                yield Copy(
                    s,
                    _whole(read.extent) if read == source_box else read.relative_to(source_box.offset),
                    t,
                    _whole(taken.extent) if taken is target_box else taken.relative_to(target_box.offset),
                    link.axes,
                )


_whole = functools.lru_cache(maxsize=4096)(Box.whole)
"""Boxes that cover a whole shard. They are cached because shards of a model have few different extents."""


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
        if len(boxes) == 1 and boxes[0].extent == shard.box.extent:
            continue
        common = first_overlap(boxes)
        if common is not None:
            problems.append(f"{spec}: box {_moved(common[2], shard.box)} {overlap}")
        elif sum(box.volume for box in boxes) != shard.box.volume:
            left = itertools.islice(gaps(Box.whole(shard.box.extent), boxes), _COUNTED)
            problems += [f"{spec}: box {_moved(box, shard.box)} {gap}" for box in left]
        if len(problems) >= _COUNTED:
            break
    if problems:
        found = counted(
            len(problems),
            "part of a tensor is not covered exactly once",
            "parts of tensors are not covered exactly once",
        )
        raise LayoutError(
            f"at least {found}" if len(problems) >= _COUNTED else found,
            details=first_lines(problems),
        )


def _check_disjoint(layout: Layout) -> None:
    """Raise LayoutError if shards overlap, since other problems of the layout follow from that."""
    problems = []
    for tensor, indexes in layout.by_tensor.items():
        common = first_overlap([layout.placements[index].shard.box for index in indexes])
        if common is not None:
            problems.append(f"{layout.tensors[tensor]}: box {common[2]} occurs twice")
    if problems:
        raise LayoutError(
            counted(len(problems), "tensor has", "tensors have") + " parts that occur twice",
            details=first_lines(problems),
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
            known = specs.setdefault(name, spec)
            if known is not spec and known != spec:
                problems.append(f"{known} on one rank, {spec} on another")
    if problems:
        raise LayoutError(
            counted(len(problems), "tensor differs", "tensors differ") + " between ranks",
            details=first_lines(problems),
        )
    return MappingProxyType(specs)


def share_out(
    layouts: Mapping[int, Layout],
    prefer: Callable[[str, Box, int], bool] | None = None,
    *,
    by_box: bool = False,
) -> dict[int, tuple[int, ...]]:
    """Assign shards to ranks, so that each box is pushed once and the bytes are spread evenly.

    A box that several ranks hold goes to the rank with the fewest bytes so far; the largest boxes are assigned first.
    The result depends only on the arguments.

    Args:
        layouts: layout of each rank.
        prefer: returns whether a rank is preferred for a box of a tensor. If any ranks that hold a box are preferred,
            one of them pushes it.
        by_box: whether all ranks that hold the same box hold replicas of it, regardless of which one is marked as main.

    Returns:
        For each rank, the indexes of the shards that it pushes, ascending.

    Raises:
        LayoutError: shards overlap without being replicas of each other, or a box does not have exactly one main
            replica (with ``by_box``: a rank holds one box twice).
    """
    specs = merge_specs(layouts.values())
    holders: dict[str, dict[Box, list[tuple[int, int]]]] = {name: {} for name in specs}
    mains: set[tuple[int, int]] = set()
    for rank, layout in sorted(layouts.items()):
        for index, (shard, _, _, _) in enumerate(layout.placements):
            holder = rank, index
            of_tensor = holders[shard.tensor]
            held = of_tensor.get(shard.box)
            if held is None:
                of_tensor[shard.box] = [holder]
            else:
                held.append(holder)
            if shard.main:
                mains.add(holder)
    problems = []
    for tensor, of_tensor in holders.items():
        for box, held in of_tensor.items():
            if by_box:
                if len({rank for rank, _ in held}) < len(held):
                    problems.append(f"{specs[tensor]}: box {box} occurs twice on one rank")
                continue
            count = sum([holder in mains for holder in held])
            if count != 1:
                problems.append(
                    f"{specs[tensor]}: box {box} is held by rank {', '.join(str(r) for r, _ in held[:8])}, "
                    + ("none of them" if count == 0 else f"{count} of them")
                    + " as main replica"
                )
    for tensor, of_tensor in holders.items():
        boxes = list(of_tensor)
        common = first_overlap(boxes) if len(boxes) > 1 else None
        if common is not None:
            one, other = boxes[common[0]], boxes[common[1]]
            problems.append(
                f"{specs[tensor]}: boxes {one} (rank {of_tensor[one][0][0]}) and {other} "
                f"(rank {of_tensor[other][0][0]}) overlap in {common[2]} and are not replicas of each other"
            )
    if problems:
        raise LayoutError(
            counted(len(problems), "shard overlaps", "shards overlap") + " without being replicas of one main shard",
            details=first_lines(problems),
        )
    load = dict.fromkeys(layouts, 0)
    chosen: dict[int, list[int]] = {rank: [] for rank in layouts}
    shared = []
    for tensor, of_tensor in holders.items():
        for box, held in of_tensor.items():
            if prefer is not None and len(held) > 1:
                held = [holder for holder in held if prefer(tensor, box, holder[0])] or held
            rank, index = held[0]
            nbytes = layouts[rank].placements[index].nbytes
            if len(held) > 1:
                shared.append((nbytes, held))
            else:  # only one rank has the box, so its bytes are counted before shared boxes are assigned
                load[rank] += nbytes
                chosen[rank].append(index)
    for nbytes, held in sorted(shared, key=lambda item: -item[0]):
        rank, index = min(held, key=lambda holder: (load[holder[0]], holder))
        load[rank] += nbytes
        chosen[rank].append(index)
    return {rank: tuple(sorted(indexes)) for rank, indexes in chosen.items()}


def join_streams(streams: Mapping[int, Layout]) -> Layout:
    """The streams of several ranks as one layout, each in a buffer named like its rank."""
    placements = [
        Placement(placement.shard, str(rank), placement.offset, placement.nbytes)
        for rank, stream in streams.items()
        for placement in stream.placements
    ]
    return Layout(merge_specs(streams.values()), tuple(placements))
