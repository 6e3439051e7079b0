"""Does a plan move every byte once, and is whatever is wrong with two layouts found and named?

Layouts are cut at random; the answer is what numpy says the bytes should be.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.raw_clients import mapped_files
from weighbridge._core import dtypes
from weighbridge._core.boxes import Box, Link
from weighbridge._core.layouts import Layout, Shard, TensorSpec
from weighbridge._formats.safetensors_files import lay_out_files
from weighbridge.errors import LayoutError
from weighbridge_service.plan.planning import join_streams, make_plan, share_out
from weighbridge_service.plan.relations import identity_links
from weighbridge_service.plan.transfers import Transfer

DTYPES = [dtypes.parse(name) for name in ("bf16", "fp32", "fp8_e4m3", "i64")]


def cut(rng: random.Random, box: Box, pieces: int) -> list[Box]:
    """Cut a box into up to so many boxes, by random straight cuts."""
    found = [box]
    for _ in range(pieces - 1):
        index = rng.randrange(len(found))
        b = found[index]
        axes = [a for a, n in enumerate(b.extent) if n > 1]
        if not axes:
            continue
        axis = rng.choice(axes)
        at = rng.randrange(1, b.extent[axis])
        first = (*b.extent[:axis], at, *b.extent[axis + 1 :])
        second = (*b.extent[:axis], b.extent[axis] - at, *b.extent[axis + 1 :])
        start = (*b.offset[:axis], b.offset[axis] + at, *b.offset[axis + 1 :])
        found[index : index + 1] = [Box(b.offset, first), Box(start, second)]
    rng.shuffle(found)
    return found


def random_specs(rng: random.Random) -> list[TensorSpec]:
    return [
        TensorSpec(f"t{i}", rng.choice(DTYPES), tuple(rng.randrange(1, 6) for _ in range(rng.randrange(4))))
        for i in range(rng.randrange(1, 5))
    ]


def random_bytes(rng: random.Random, specs: Sequence[TensorSpec]) -> dict[str, np.ndarray]:
    """For each tensor its bytes, with the bytes of an element as the last axis."""
    return {
        spec.name: np.frombuffer(rng.randbytes(spec.nbytes), np.uint8).reshape(*spec.shape, spec.dtype.itemsize)
        for spec in specs
    }


def stream_of(layout: Layout, tensors: dict[str, np.ndarray]) -> bytes:
    """The stream of a layout, by numpy alone."""
    parts = [
        tensors[p.shard.tensor][tuple(slice(o, e) for o, e in zip(p.shard.box.offset, p.shard.box.end, strict=True))]
        for p in layout.placements
    ]
    return b"".join(np.ascontiguousarray(part).tobytes() for part in parts)


def ranges(rng: random.Random, total: int) -> list[tuple[int, int]]:
    """The stream cut anywhere, in any order."""
    cuts = sorted({0, total, *(rng.randrange(total + 1) for _ in range(5))})
    found = list(itertools.pairwise(cuts))
    rng.shuffle(found)
    return found


@given(st.integers(0, 2**32))
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_cut_to_any_files_and_back_to_any_cut_keeps_every_byte(seed: int) -> None:
    rng = random.Random(seed)
    specs = random_specs(rng)
    tensors = random_bytes(rng, specs)
    files = lay_out_files(specs, max_shard_bytes=rng.randrange(1, 400))
    links = identity_links(specs)

    ranks: dict[int, list[Shard]] = {0: [], 1: [], 2: []}
    for spec in specs:
        for box in cut(rng, Box.whole(spec.shape), 4):
            holders = rng.sample(sorted(ranks), rng.randrange(1, 4))
            for holder in holders:
                ranks[holder].append(Shard(spec.name, box, main=holder == holders[0]))
    layouts = {rank: Layout.stream(specs, shards) for rank, shards in ranks.items()}
    chosen = share_out(layouts)
    streams = {rank: layout.select(chosen[rank]) for rank, layout in layouts.items()}
    assert sum(stream.nbytes for stream in streams.values()) == files.layout.nbytes  # each box once

    source = join_streams(streams)
    transfer = Transfer(make_plan(source, files.layout, links, use_all=True), scatter=True)
    image = {f.name: np.full(f.nbytes, 0xEE, np.uint8) for f in files.files}
    for rank, stream in streams.items():
        data = stream_of(stream, tensors)
        for start, stop in ranges(rng, len(data)):
            transfer.scatter(data[start:stop], start, image, str(rank))
    for p in files.layout.placements:
        assert image[p.buffer][p.offset : p.offset + p.nbytes].tobytes() == tensors[p.shard.tensor].tobytes()

    wanted = Layout.stream(
        specs, [Shard(spec.name, box) for spec in specs for box in cut(rng, Box.whole(spec.shape), 3)]
    )
    reading = Transfer(make_plan(files.layout, wanted, links), scatter=False)
    expected = stream_of(wanted, tensors)
    for start, stop in ranges(rng, len(expected)):
        assert reading.gather(start, stop - start, mapped_files(image)) == expected[start:stop]


@given(st.integers(0, 2**32))
@settings(max_examples=100, deadline=None)
def test_a_random_hole_is_found_and_named(seed: int) -> None:
    rng = random.Random(seed)
    spec = TensorSpec("layer.weight", DTYPES[0], (6, 4, 3))
    boxes = cut(rng, Box.whole(spec.shape), 6)
    hole = boxes.pop()
    source = Layout.stream([spec], [Shard(spec.name, box) for box in boxes])
    with pytest.raises(LayoutError) as error:
        make_plan(source, lay_out_files([spec]).layout, identity_links([spec]))
    named = [box_in(line) for line in error.value.details if "layer.weight" in line]
    assert all(box.intersect(hole) == box for box in named)
    assert sum(box.volume for box in named) == hole.volume


def box_in(line: str) -> Box:
    """The box that an error's line names, such as ``[0:2, 1:3]``."""
    bounds = [(int(a), int(b)) for a, b in re.findall(r"(\d+):(\d+)", line)]
    return Box(tuple(a for a, _ in bounds), tuple(b - a for a, b in bounds))


@given(st.integers(0, 2**32))
@settings(max_examples=100, deadline=None)
def test_a_random_overlap_is_found_and_named(seed: int) -> None:
    rng = random.Random(seed)
    spec = TensorSpec("layer.weight", DTYPES[0], (6, 4, 3))
    boxes = cut(rng, Box.whole(spec.shape), 6)
    victim = rng.choice(boxes)
    extra = Box(victim.offset, (1, 1, 1))
    if extra in boxes:
        return  # that would be a replica
    layouts = {
        0: Layout.stream([spec], [Shard(spec.name, box) for box in boxes]),
        1: Layout.stream([spec], [Shard(spec.name, extra)]),
    }
    with pytest.raises(LayoutError) as error:
        share_out(layouts)
    assert any("layer.weight" in line and str(victim) in line and str(extra) in line for line in error.value.details)


@pytest.mark.parametrize("mains", [0, 2])
def test_of_replicas_exactly_one_is_the_main_one(mains: int) -> None:
    spec = TensorSpec("w", DTYPES[0], (4,))
    layouts = {r: Layout.stream([spec], [Shard("w", Box.whole((4,)), main=r < mains)]) for r in range(2)}
    with pytest.raises(LayoutError, match="main") as error:
        share_out(layouts)
    assert "w BF16[4]" in str(error.value)


@pytest.mark.parametrize("mains", [0, 1, 2, 4])
def test_by_box_ranks_hold_replicas_of_each_other_whichever_is_called_the_main_one(mains: int) -> None:
    """As under tensor parallelism with FSDP2: every rank has the norms, and halves of matrices are on two ranks
    each.
    """
    norm, matrix = TensorSpec("norm", DTYPES[0], (4,)), TensorSpec("matrix", DTYPES[0], (6, 4))
    halves = [Box((0, 0), (3, 4)), Box((3, 0), (3, 4))]
    layouts = {
        rank: Layout.stream(
            [norm, matrix],
            [
                Shard("norm", Box.whole((4,)), main=rank < mains),
                Shard("matrix", halves[rank % 2], main=rank < mains),
            ],
        )
        for rank in range(4)
    }
    chosen = share_out(layouts, by_box=True)
    pushed = [layouts[rank].placements[index].shard for rank, indexes in chosen.items() for index in indexes]
    boxes = sorted((shard.tensor, shard.box) for shard in pushed)
    assert boxes == sorted([("norm", Box.whole((4,))), *(("matrix", half) for half in halves)])


def test_by_box_a_rank_that_holds_a_box_twice_is_refused_and_so_are_boxes_that_overlap() -> None:
    spec = TensorSpec("w", DTYPES[0], (4,))
    twice = Layout.stream([spec], [Shard("w", Box.whole((4,)))] * 2)
    with pytest.raises(LayoutError, match=r"w BF16\[4\]: box \[0:4\] occurs twice on one rank"):
        share_out({0: twice}, by_box=True)
    layouts = {rank: Layout.stream([spec], [Shard("w", Box((rank,), (3,)))]) for rank in range(2)}
    with pytest.raises(LayoutError, match="not replicas of each other"):
        share_out(layouts, by_box=True)


def test_replicas_are_shared_out_evenly_over_those_that_hold_them() -> None:
    specs = [TensorSpec(f"w{i}", DTYPES[0], (1000,)) for i in range(40)]
    layouts = {
        rank: Layout.stream(specs, [Shard(s.name, Box.whole(s.shape), main=rank == 0) for s in specs])
        for rank in range(4)
    }
    chosen = share_out(layouts)
    assert [len(indexes) for indexes in chosen.values()] == [10, 10, 10, 10]
    assert sorted(i for indexes in chosen.values() for i in indexes) == list(range(40))


def test_a_source_of_which_a_part_would_go_nowhere_is_refused() -> None:
    wide, narrow = TensorSpec("a", DTYPES[0], (4, 2)), TensorSpec("b", DTYPES[0], (3, 2))
    link = Link("a", Box((0, 0), (3, 2)), "b", Box.whole((3, 2)), (0, 1))
    source = Layout.stream([wide], [Shard("a", Box.whole((4, 2)))])
    with pytest.raises(LayoutError, match=r"(?s)a BF16\[4, 2\]: box \[3:4, 0:2\] would go nowhere"):
        make_plan(source, lay_out_files([narrow]).layout, [link], use_all=True)


@pytest.mark.parametrize("axes", [(1, 0), (0, 1)])
def test_permuted_axes_move_every_element(axes: tuple[int, int]) -> None:
    rng = random.Random(1)
    shape = (4, 6)
    source_spec = TensorSpec("a", DTYPES[1], shape)
    target_spec = TensorSpec("b", DTYPES[1], tuple(shape[a] for a in axes))
    link = Link("a", Box.whole(shape), "b", Box.whole(target_spec.shape), axes)
    source = Layout.stream([source_spec], [Shard("a", box) for box in cut(rng, Box.whole(shape), 5)])
    files = lay_out_files([target_spec])
    tensors = random_bytes(rng, [source_spec])
    transfer = Transfer(make_plan(source, files.layout, [link], use_all=True), scatter=True)
    image = {f.name: np.zeros(f.nbytes, np.uint8) for f in files.files}
    data = stream_of(source, tensors)
    for start, stop in ranges(rng, len(data)):
        transfer.scatter(data[start:stop], start, image)
    [p] = files.layout.placements
    expected = np.ascontiguousarray(tensors["a"].transpose(*axes, 2))
    assert image[p.buffer][p.offset :].tobytes() == expected.tobytes()


# -- tensors that are named and laid out otherwise on the two sides ---------------------------------------------------------


@dataclass(frozen=True)
class Relation:
    """A tensor with layers and experts as leading axes, and the tensors that it becomes.

    Attributes:
        source: shape `[layers, experts, ...]`.
        targets: one for each layer, expert and part; or for each layer and part, stacked over the experts.
        links: from the one to the others.
        parts: for each part, the indexes of the first axis behind the experts that belong to it, in its order.
        axes: how the axes behind the experts are permuted in the targets.
        stacked: whether the targets are stacked over the experts.
    """

    source: TensorSpec
    targets: list[TensorSpec]
    links: list[Link]
    parts: list[list[int]]
    axes: tuple[int, ...]
    stacked: bool

    def convert(self, whole: np.ndarray) -> dict[str, np.ndarray]:
        """The targets by numpy alone; the array has one axis more, behind the others."""
        found = {}
        for layer, part in itertools.product(range(whole.shape[0]), range(len(self.parts))):
            axes = (*self.axes, len(self.axes))
            experts = [expert[self.parts[part]].transpose(axes) for expert in whole[layer]]
            if self.stacked:
                found[f"{layer}.{part}"] = np.stack(experts)
            else:
                found |= {f"{layer}.{part}.{e}": expert for e, expert in enumerate(experts)}
        return found


def random_relation(rng: random.Random) -> Relation:
    dtype = rng.choice(DTYPES)
    layers, experts = rng.randrange(1, 3), rng.randrange(1, 4)
    inner = tuple(rng.randrange(1, 6) for _ in range(rng.randrange(1, 4)))
    axes = tuple(rng.sample(range(len(inner)), len(inner)))
    stacked = rng.random() < 0.5
    # runs of rows go to this part or that one, as query, key and value do
    cuts = sorted({0, inner[0], *(rng.randrange(inner[0] + 1) for _ in range(2))})
    runs = [(start, stop, rng.randrange(3)) for start, stop in itertools.pairwise(cuts)]
    numbers = sorted({part for _, _, part in runs})
    rows = {p: [i for start, stop, part in runs if part == p for i in range(start, stop)] for p in numbers}
    source = TensorSpec("w", dtype, (layers, experts, *inner))
    specs, links = [], []
    for layer, (index, part) in itertools.product(range(layers), enumerate(numbers)):
        extent = (len(rows[part]), *inner[1:])
        shape = tuple(extent[axis] for axis in axes)
        name = f"{layer}.{index}"
        names = [name] * experts if stacked else [f"{name}.{expert}" for expert in range(experts)]
        specs += [TensorSpec(n, dtype, (experts, *shape) if stacked else shape) for n in dict.fromkeys(names)]
        for expert, (start, stop, _) in itertools.product(range(experts), (r for r in runs if r[2] == part)):
            box = Box((start, *(0 for _ in inner[1:])), (stop - start, *inner[1:]))
            moved = (rows[part].index(start), *(0 for _ in inner[1:]))
            there = Box(tuple(moved[a] for a in axes), tuple(box.extent[a] for a in axes))
            link = Link("", box, "", there, axes)
            links.append(link.placed("w", (layer, expert), names[expert], (expert,) if stacked else ()))
    rng.shuffle(links)
    return Relation(source, specs, links, [rows[part] for part in numbers], axes, stacked)


@given(st.integers(0, 2**32))
@settings(max_examples=200)
def test_stacked_permuted_and_interleaved_tensors_keep_every_byte(seed: int) -> None:
    rng = random.Random(seed)
    relation = random_relation(rng)
    tensors = random_bytes(rng, [relation.source])
    expected = relation.convert(tensors["w"])
    files = lay_out_files(relation.targets, max_shard_bytes=rng.randrange(1, 400))

    boxes = cut(rng, Box.whole(relation.source.shape), 6)
    source = Layout.stream([relation.source], [Shard("w", box) for box in boxes])
    transfer = Transfer(make_plan(source, files.layout, relation.links, use_all=True), scatter=True)
    image = {f.name: np.full(f.nbytes, 0xEE, np.uint8) for f in files.files}
    data = stream_of(source, tensors)
    for start, stop in ranges(rng, len(data)):
        transfer.scatter(data[start:stop], start, image)
    for p in files.layout.placements:
        written = image[p.buffer][p.offset : p.offset + p.nbytes].tobytes()
        assert written == np.ascontiguousarray(expected[p.shard.tensor]).tobytes()

    boxes = cut(rng, Box.whole(relation.source.shape), 6)
    wanted = Layout.stream([relation.source], [Shard("w", box) for box in boxes])
    back = [link.inverse() for link in relation.links]
    reading = Transfer(make_plan(files.layout, wanted, back), scatter=False)
    data = stream_of(wanted, tensors)
    for start, stop in ranges(rng, len(data)):
        assert reading.gather(start, stop - start, mapped_files(image)) == data[start:stop]


@given(st.integers(0, 2**32))
@settings(max_examples=100)
def test_a_hole_in_a_stacked_tensor_is_named_where_it_would_be_seen(seed: int) -> None:
    rng = random.Random(seed)
    relation = random_relation(rng)
    boxes = cut(rng, Box.whole(relation.source.shape), 6)
    hole = boxes.pop()
    inside = np.zeros((*relation.source.shape, 1), bool)
    inside[tuple(slice(o, e) for o, e in zip(hole.offset, hole.end, strict=True))] = True
    missing = relation.convert(inside)
    source = Layout.stream([relation.source], [Shard("w", box) for box in boxes])
    with pytest.raises(LayoutError) as error:
        make_plan(source, lay_out_files(relation.targets).layout, relation.links, use_all=True)
    total, lines = int(error.value.message.split()[0]), list(error.value.details)
    assert len(lines) == min(total, 20)
    if total > 20:
        assert lines.pop() == f"and {total - 19} more"
    for line in lines:
        assert "has no source" in line
        box = box_in(line.partition(": ")[2])
        region = missing[line.split()[0]][tuple(slice(o, e) for o, e in zip(box.offset, box.end, strict=True))]
        assert region.size == box.volume
        assert region.all()
        region[...] = False
    if total <= 20:
        assert not any(array.any() for array in missing.values())


@given(st.integers(0, 2**32))
@settings(max_examples=100)
def test_what_a_stacked_tensor_and_another_one_both_hold_is_named(seed: int) -> None:
    """As when a trainer declares a layer by itself and among the stacked ones."""
    rng = random.Random(seed)
    relation = random_relation(rng)
    victim = rng.choice(relation.targets)
    box = cut(rng, Box.whole(victim.shape), 4)[0]
    again = TensorSpec("again", victim.dtype, box.extent)
    links = [
        *relation.links,
        Link("again", Box.whole(again.shape), victim.name, box, tuple(range(len(box.extent)))),
    ]
    rng.shuffle(links)
    source = Layout.stream(
        [relation.source, again], [Shard(s.name, Box.whole(s.shape)) for s in (relation.source, again)]
    )
    with pytest.raises(LayoutError) as error:
        make_plan(source, lay_out_files(relation.targets).layout, links, use_all=True)
    [line] = error.value.details
    assert line.startswith(f"{victim}: ")
    assert line.endswith("would be written twice")
    named = box_in(line.partition(": ")[2])
    assert named.intersect(box) == named
