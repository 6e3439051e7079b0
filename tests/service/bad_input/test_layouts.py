"""Layouts that contradict themselves, each other or the model: is each refused with the tensor and the box by name?"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.service.bad_input.bench import (
    EMBEDDING,
    GOOD,
    Bench,
    assert_never_visible,
    resident_bytes,
    session_of,
)
from tests.support.raw_clients import RawClient, assert_equal, cut, pb, rows_layout, stream_of, whole_layout
from tests.support.waiting import eventually, processor_seconds
from weighbridge._core.boxes import Box
from weighbridge._core.dtypes import parse
from weighbridge._core.layouts import Layout, Shard, TensorSpec
from weighbridge._core.resources import VersionState
from weighbridge._core.tensor_spaces import TensorSpace
from weighbridge._transport import wire
from weighbridge.errors import InvalidArgument, LayoutError, VersionFailed
from weighbridge.v1 import resources_pb2

SPACES = {"megatron": TensorSpace.MEGATRON, "hugging_face": TensorSpace.HUGGING_FACE}


def messages_that_no_layout_has() -> dict[str, resources_pb2.Layout]:
    def layout(space: int = resources_pb2.TENSOR_SPACE_HUGGING_FACE, **fields: Any) -> resources_pb2.Layout:
        spec = {"name": "a", "dtype": "F32", "shape": [4, 4]}
        shard = {"tensor": 0, "offset": [0, 0], "extent": [4, 4]}
        spec |= {k: v for k, v in fields.items() if k in spec}
        shard |= {k: v for k, v in fields.items() if k in shard}
        return resources_pb2.Layout(
            space=space,  # type: ignore[arg-type]
            tensors=[resources_pb2.TensorSpec(**spec)],
            shards=[resources_pb2.Shard(**shard)],
        )

    def axes(n: int, value: int) -> dict[str, list[int]]:
        return {"shape": [value] * n, "offset": [0] * n, "extent": [value] * n}

    twice = layout()
    twice.tensors.add(name="a", dtype="BF16", shape=[4, 4])
    return {
        "index out of range": layout(tensor=1),
        "index far out of range": layout(tensor=2**32 - 1),
        "negative extent": layout(extent=[4, -4]),
        "negative offset": layout(offset=[0, -1]),
        "beyond the end": layout(offset=[0, 1]),
        "sum overflows": layout(offset=[2**62, 0], extent=[2**62, 4]),
        "fewer axes in the box": layout(offset=[0], extent=[4]),
        "fewer axes in the offset": layout(offset=[0]),
        "fewer axes in the extent": layout(extent=[4]),
        "more axes in the box": layout(offset=[0, 0, 0], extent=[4, 4, 4]),
        "negative shape": layout(shape=[-4, 4]),
        "shape 2**62": layout(shape=[2**62, 4], extent=[2**62, 4]),
        "shape 2**62 on each axis": layout(**axes(8, 2**62)),
        "100 axes": layout(**axes(100, 1)),
        "empty name": layout(name=""),
        "long name": layout(name="x" * 10_000),
        "name with NUL": layout(name="a\0b"),
        "unknown dtype": layout(dtype="EVIL"),
        "empty dtype": layout(dtype=""),
        "no space": layout(space=0),
        "unknown space": layout(space=99),
        "one name, two tensors": twice,
    }


@pytest.mark.parametrize("what", messages_that_no_layout_has())
def test_a_message_that_is_no_layout_is_refused_and_spoils_nothing(
    bench: Bench, raw: RawClient, model: str, what: str
) -> None:
    message = messages_that_no_layout_has()[what]
    number = raw.open(model)
    with pytest.raises(InvalidArgument):
        raw.declare_message(model, number, message, "0" * 64)
    if message.space == resources_pb2.TENSOR_SPACE_HUGGING_FACE:
        message.space = resources_pb2.TENSOR_SPACE_MEGATRON
    with pytest.raises(InvalidArgument):
        raw.call(raw.checkpoints.Restore, pb.RestoreRequest(model=GOOD, version="1", layout=message))
    layout = whole_layout(bench.source.arrays)
    raw.push(model, number, cut(stream_of(bench.source.arrays, layout, raw.declare(model, number, layout))))
    raw.seal(model, number)
    assert_equal(bench.engine, model, number, bench.source.arrays)


def test_a_layout_that_is_not_what_its_digest_says_is_refused(bench: Bench, raw: RawClient, model: str) -> None:
    layout = whole_layout(bench.source.arrays)
    with pytest.raises(LayoutError, match="digest"):
        raw.declare_message(model, raw.open(model), wire.layout_to_proto(layout, TensorSpace.HUGGING_FACE), "0" * 64)


def spoilt(layout: Layout, tensor: str, **changes: Any) -> Layout:
    """The layout with one tensor changed; its first shard fills what it is then."""
    specs = {name: replace(spec, **changes) if name == tensor else spec for name, spec in layout.tensors.items()}
    shards = [
        p.shard._replace(tensor=specs[tensor].name, box=Box.whole(specs[tensor].shape)) if p.shard.tensor == tensor
        else p.shard
        for p in layout.placements
    ]  # fmt: skip
    return Layout.stream(specs.values(), shards)


def layout_in(bench: Bench, space: str) -> Layout:
    """The whole model as one rank holds it."""
    if space == "hugging_face":
        return whole_layout(bench.source.arrays)
    layout = bench.trainer.describe_shards(GOOD)
    # a gated projection comes as two boxes: make it one, so that each tensor has one shard
    return Layout.stream(layout.tensors.values(), [Shard(n, Box.whole(s.shape)) for n, s in layout.tensors.items()])


CONTRADICTIONS: dict[str, Callable[[Layout, str], tuple[Layout, list[str]]]] = {
    # what is declared, and what the error has to say
    "wrong shape": lambda layout, t: (spoilt(layout, t, shape=(3, 5)), [t, "[3, 5]"]),
    "more axes": lambda layout, t: (spoilt(layout, t, shape=(*layout.tensors[t].shape, 1)), [t]),
    "fewer axes": lambda layout, t: (spoilt(layout, t, shape=()), [t]),
    "wrong dtype": lambda layout, t: (spoilt(layout, t, dtype=parse("bf16")), [t, "BF16"]),
    "unknown tensor": lambda layout, t: (spoilt(layout, t, name="evil.weight"), ["evil.weight"]),
}


@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("what", CONTRADICTIONS)
def test_a_tensor_that_contradicts_the_model_is_named(
    bench: Bench, raw: RawClient, model: str, space: str, what: str
) -> None:
    good = layout_in(bench, space)
    for tensor in [next(iter(good.tensors)), list(good.tensors)[-1]]:
        bad, expected = CONTRADICTIONS[what](good, tensor)
        number = raw.open(model)
        with pytest.raises(LayoutError) as caught:
            raw.declare(model, number, bad, space=SPACES[space])
        assert all(text in str(caught.value) for text in expected), caught.value
        assert_never_visible(bench, model, number)
        failed = bench.trainer.version(model, number)
        assert failed.state is VersionState.FAILED
        assert all(text in " ".join((failed.error, *failed.error_details)) for text in expected)
        with pytest.raises(VersionFailed, match="failed"):
            bench.trainer.wait_for(model, number, VersionState.READY, timeout=5)


def test_what_nobody_holds_is_named_with_its_box(bench: Bench, raw: RawClient, model: str) -> None:
    whole = whole_layout(bench.source.arrays)
    shards = [p.shard for p in whole.placements]
    rows, columns = bench.source.arrays[EMBEDDING].shape
    half = Box((0, 0), (rows // 2, columns))
    incomplete = {
        f"box [0:{rows}, 0:{columns}] has no source": [s for s in shards if s.tensor != EMBEDDING],
        f"box [{rows // 2}:{rows}, 0:{columns}] has no source": [
            s._replace(box=half) if s.tensor == EMBEDDING else s for s in shards
        ],
    }
    for expected, kept in incomplete.items():
        number = raw.open(model)
        with pytest.raises(LayoutError) as caught:
            raw.declare(model, number, Layout.stream(whole.tensors.values(), kept))
        assert f"{EMBEDDING} F32[{rows}, {columns}]: {expected}" in str(caught.value)
        assert_never_visible(bench, model, number)


def test_overlaps_and_boxes_that_a_rank_holds_twice_are_named(bench: Bench, raw: RawClient, model: str) -> None:
    whole = whole_layout(bench.source.arrays)
    others = [p.shard for p in whole.placements if p.shard.tensor != EMBEDDING]
    all_of_it = Box.whole(bench.source.arrays[EMBEDDING].shape)
    rows, columns = all_of_it.extent
    part = Box((10, 0), (rows - 10, columns))
    upper = Box((0, 0), (20, columns))
    cases = {
        f"overlap in [10:20, 0:{columns}]": [Shard(EMBEDDING, upper), Shard(EMBEDDING, part)],
        f"box [0:{rows}, 0:{columns}] occurs twice on one rank": [Shard(EMBEDDING, all_of_it)] * 2,
    }
    for expected, shards in cases.items():
        number = raw.open(model)
        with pytest.raises(LayoutError) as caught:
            raw.declare(model, number, Layout.stream(whole.tensors.values(), [*others, *shards]))
        assert expected in str(caught.value)
        assert EMBEDDING in str(caught.value)
        assert_never_visible(bench, model, number)


@pytest.mark.parametrize(("mains", "said"), [((), "none of them"), ((True,), "2 of them")])
def test_megatron_cores_replicas_without_one_main_shard_are_named(
    bench: Bench, raw: RawClient, model: str, mains: tuple[bool, ...], said: str
) -> None:
    layout = bench.trainer.describe_shards(model)
    first, *others = (placement.shard for placement in layout.placements)
    shards = [first._replace(main=bool(mains)), *(first._replace(main=each) for each in mains), *others]
    number = raw.open(model)
    with pytest.raises(LayoutError, match=f"{said} as main replica") as caught:
        raw.declare(model, number, Layout.stream(layout.tensors.values(), shards), space=TensorSpace.MEGATRON)
    assert first.tensor in str(caught.value)
    assert_never_visible(bench, model, number)


def test_an_error_with_the_longest_names_reaches_the_client_whole(bench: Bench, raw: RawClient, model: str) -> None:
    # errors travel in headers, of which gRPC refuses those above 8 KiB
    good = whole_layout(bench.source.arrays)
    for letter in ("x", "é", "模", "🚂"):
        specs = [replace(spec, name=f"{i:02}" + letter * 500) for i, spec in enumerate(good.tensors.values())]
        bad = Layout.stream(specs, [Shard(spec.name, Box.whole(spec.shape)) for spec in specs])
        with pytest.raises(LayoutError) as caught:
            raw.declare(model, raw.open(model), bad)
        assert "00" + letter * 50 in str(caught.value)


@pytest.mark.parametrize("rows", [2**31, 10**9, 4 * 10**12])
def test_a_vocabulary_padded_beyond_belief_is_refused_without_eating_memory(
    bench: Bench, raw: RawClient, model: str, rows: int
) -> None:
    good = layout_in(bench, "megatron")
    name = "embedding.word_embeddings.weight"
    number = raw.open(model)
    before = resident_bytes()
    with pytest.raises(LayoutError, match=name):
        raw.declare(model, number, spoilt(good, name, shape=(rows, 32)), space=TensorSpace.MEGATRON)
    assert resident_bytes() - before < 500 << 20
    assert_never_visible(bench, model, number)


@pytest.mark.parametrize(
    "name",
    [
        "decoder.layers.mlp.linear_fc2.weight",
        "decoder.layers.mlp.experts.experts.linear_fc2.weight",
        "decoder.layers.0.mlp.experts.experts.linear_fc2.weight",
    ],
)
def test_layers_and_experts_beyond_count_are_refused_by_name_and_at_once(
    bench: Bench, raw: RawClient, model: str, name: str
) -> None:
    good = layout_in(bench, "megatron")
    spec = TensorSpec(name, parse("fp32"), (1 << 34, 64, 128))
    shards = [*(p.shard for p in good.placements), Shard(name, Box((0, 0, 0), (1, 64, 128)))]
    bad = Layout.stream([*good.tensors.values(), spec], shards)
    restore = pb.RestoreRequest(model=GOOD, version="latest", layout=wire.layout_to_proto(bad, TensorSpace.MEGATRON))
    numbers: list[int] = []

    def refuse() -> None:
        numbers.append(raw.open(model))
        with pytest.raises(LayoutError, match=re.escape(name)):
            raw.declare(model, numbers[-1], bad, space=TensorSpace.MEGATRON)
        with pytest.raises(LayoutError, match=re.escape(name)):
            raw.call(raw.checkpoints.Restore, restore)

    before = resident_bytes()
    assert processor_seconds(refuse) < 5.0
    assert resident_bytes() - before < 500 << 20
    for number in numbers:
        assert_never_visible(bench, model, number)


def test_ranks_that_contradict_each_other_all_hear_of_it(bench: Bench, raw: RawClient, model: str) -> None:
    layouts = [rows_layout(bench.source.arrays, rank, 2) for rank in range(2)]
    name = "model.norm.weight"
    layouts[1] = Layout.stream(
        [replace(s, shape=(64,)) if s.name == name else s for s in layouts[1].tensors.values()],
        [p.shard for p in layouts[1].placements],
    )
    number = raw.open(model, ranks=2)
    heard: list[BaseException] = []

    def declare(rank: int) -> None:
        try:
            raw.declare(model, number, layouts[rank], rank=rank)
        except LayoutError as error:
            heard.append(error)

    threads = [threading.Thread(target=declare, args=(rank,)) for rank in range(2)]
    threads[0].start()
    eventually(lambda: session_of(bench, model, number).state.declarations.absent == [1])
    threads[1].start()
    for thread in threads:
        thread.join()
    assert len(heard) == 2
    assert all(name in str(error) and "[64]" in str(error) for error in heard)
    assert_never_visible(bench, model, number)
