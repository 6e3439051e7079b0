"""Targets that are layouts: whatever boxes ranks declare and engines ask for, a plan is made or refused, in time."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from tests.fuzz import mutators
from tests.fuzz.target import Bounds, Target, stateless
from weighbridge._core import dtypes
from weighbridge._core.boxes import Box, Link
from weighbridge._core.layouts import Layout, Shard, TensorSpec
from weighbridge._core.tensor_spaces import TensorSpace
from weighbridge._formats.safetensors_files import lay_out_files
from weighbridge._transport import wire
from weighbridge.errors import LayoutError, WeighbridgeError
from weighbridge.v1 import resources_pb2
from weighbridge_service.plan.planning import make_plan
from weighbridge_service.plan.push_plan import prepare_push
from weighbridge_service.plan.relations import WeightMap, identity_links
from weighbridge_service.plan.transfers import Transfer

_FP32 = dtypes.parse("fp32")
_FILES = lay_out_files([TensorSpec("a", _FP32, (6, 8)), TensorSpec("b", _FP32, (5,)), TensorSpec("c", _FP32, ())])


def _relate(tensors: Mapping[str, TensorSpec]) -> WeightMap:
    ours = _FILES.layout.tensors
    if dict(tensors) != dict(ours):
        raise LayoutError("other tensors")
    return WeightMap(ours, ours, identity_links(ours.values()), ())


def _whole() -> list[list[list[Any]]]:
    """Ranks' shards as JSON: tensor, offset, extent, and whether it is the main replica."""
    return [
        [["a", [0, 0], [3, 8], 1], ["b", [0], [5], 1], ["c", [], [], 1]],
        [["a", [3, 0], [3, 4], 1], ["a", [3, 4], [3, 4], 1], ["b", [0], [5], 0]],
    ]


def _plan(data: bytes) -> None:
    """Layouts that ranks declare lead to a plan that fills each byte of the files once, or are refused."""
    try:
        ranks = json.loads(data)
        layouts = [
            Layout.stream(
                _FILES.layout.tensors.values(),
                [Shard(str(name), Box(tuple(o), tuple(e)), main=bool(m)) for name, o, e, m in shards],
            )
            for shards in ranks
        ]
        _ = [layout.digest for layout in layouts]
    except (ValueError, TypeError, AttributeError, RecursionError):  # on the wire they are integers
        return
    if any(
        type(n) is not int
        for layout in layouts
        for p in layout.placements
        for n in (*p.shard.box.offset, *p.shard.box.extent)
    ):
        return
    for space in (TensorSpace.HUGGING_FACE, TensorSpace.MEGATRON):
        try:
            prepared = prepare_push(layouts, _FILES, _relate, space=space)
        except WeighbridgeError:
            continue
        written = np.zeros(_FILES.layout.nbytes, np.int32)
        header = len(_FILES.files[0].header)
        for rank, stream in prepared.streams.items():
            for copy in prepared.transfer.pieces(0, stream.nbytes, str(rank)):
                index = np.array(copy.file_offset - header)
                for extent, stride in zip(copy.extent, copy.file_strides, strict=True):
                    index = index[..., None] + np.arange(extent) * stride
                np.add.at(written, index, 1)
        assert (written == 1).all(), "a plan does not fill each byte once"


def _mutate(choose: random.Random, data: bytes) -> bytes:
    """Cut, move, double or leave out shards, or change any number."""
    try:
        ranks = json.loads(data)
        shards = [(rank, index) for rank, found in enumerate(ranks) for index in range(len(found))]
        if not shards or choose.random() < 0.3:
            return _JSON(choose, data)
        rank, index = choose.choice(shards)
        name, offset, extent, main = ranks[rank][index]
        match choose.randrange(5):
            case 0 if offset:  # in two
                axis = choose.randrange(len(offset))
                at = choose.randrange(extent[axis] + 1)
                one, other, behind = [*extent], [*extent], [*offset]
                one[axis], other[axis], behind[axis] = at, extent[axis] - at, offset[axis] + at
                ranks[rank][index : index + 1] = [[name, offset, one, main], [name, behind, other, main]]
            case 1:
                choose.choice(ranks).append(ranks[rank].pop(index))
            case 2:
                choose.choice(ranks).append([name, offset, extent, choose.choice((0, 1))])
            case 3 if offset:
                axis = choose.randrange(len(offset))
                which = choose.choice((offset, extent))
                which[axis] += choose.choice((-1, 1, 2, -which[axis]))
            case _:
                del ranks[rank][index]
        return json.dumps(ranks).encode()
    except (ValueError, TypeError, AttributeError, LookupError, RecursionError):  # no shards any more
        return _JSON(choose, data)


_JSON = mutators.json_documents(texts=("a", "b", "c"))


def _message(name: str, shape: tuple[int, ...], boxes: Iterator[tuple[tuple[int, ...], tuple[int, ...]]]) -> bytes:
    shards = [resources_pb2.Shard(tensor=0, offset=offset, extent=extent) for offset, extent in boxes]
    tensors = [resources_pb2.TensorSpec(name=name, dtype="F32", shape=shape)]
    return resources_pb2.Layout(space=2, tensors=tensors, shards=shards).SerializeToString()


def _declared(data: bytes) -> None:
    """A layout of one rank, of whatever tensors, for a model that has them; and the same boxes asked for by an
    engine.
    """
    layout = wire.layout_from_proto(resources_pb2.Layout.FromString(data))
    specs = [spec for spec in layout.tensors.values() if spec.nbytes]
    files = lay_out_files(specs)

    def relate(tensors: Mapping[str, TensorSpec]) -> WeightMap:
        return WeightMap(tensors, files.layout.tensors, identity_links(files.layout.tensors.values()), ())

    prepared = None
    with contextlib.suppress(WeighbridgeError):
        prepared = prepare_push([layout], files, relate, space=TensorSpace.HUGGING_FACE)
    links: list[Link] = list(identity_links(files.layout.tensors.values()))
    if prepared is None:
        Transfer(make_plan(files.layout, layout, links), scatter=False)


def _heavy() -> Iterator[bytes]:
    """Layouts of one tensor in many boxes: a grid, a diagonal, a spiral, a pinwheel, boxes of nothing, and boxes that
    lie on each other.
    """
    side = 1 << 20
    many = 20_000
    yield _message("grid", (side, side), (((x * 1024, y * 1024), (1024, 1024)) for x in range(141) for y in range(141)))
    yield _message("diagonal", (side, side), (((n, n), (1, 1)) for n in range(many)))
    yield _message("rows", (side, side), (((n * 7, 0), (1, side)) for n in range(many)))
    yield _message("spiral", (side, side), _spiral(side, many))
    yield _message(
        "spiral of six axes",
        (side,) * 2 + (2,) * 4,
        (((*o, 0, 0, 0, 0), (*e, 2, 2, 2, 2)) for o, e in _spiral(side, many)),
    )
    yield _message("pinwheels", (side, side), _pinwheels(many // 5))
    yield _message("nothing", (side, side), (((n, 0), (0, 5)) for n in range(many)))
    yield _message("all at one place", (side, side), (((0, 0), (1 + n, 1)) for n in range(many)))
    yield _message("long ones and short ones", (side, side), (((0, n), (side if n % 2 else 1, 1)) for n in range(many)))
    yield _message("dust", (side, side), ((((n * 7919) % side, (n * 104_729) % side), (1, 1)) for n in range(many)))


def _spiral(side: int, many: int) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Each box takes one row or column of what the boxes before have left: a cut parts only one from the others."""
    x = y = 0
    for n in range(many):
        if n % 2:
            yield (x, y), (1, side - y)
            x += 1
        else:
            yield (x, y), (side - x, 1)
            y += 1


def _pinwheels(many: int) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Five boxes that no straight cut parts, again and again."""
    for n in range(many):
        x, y = n % 100 * 3, n // 100 * 3
        for o, e in (
            ((0, 0), (2, 1)),
            ((2, 0), (1, 2)),
            ((1, 2), (2, 1)),
            ((0, 1), (1, 2)),
            ((1, 1), (1, 1)),
        ):
            yield (x + o[0], y + o[1]), e


TARGETS = (
    Target("push-plans", stateless(_plan), lambda: [json.dumps(_whole()).encode()], _mutate, (WeighbridgeError,), weight=0.4),
    Target(
        "layouts", stateless(_declared), lambda: [_message("a", (6, 8), iter((((0, 0), (3, 8)), ((3, 0), (3, 8)))))], mutators.raw,
        (WeighbridgeError, DecodeError), _heavy, Bounds(seconds=3.0, seconds_per_mb=6.0, times=400.0), weight=0.1,
    ),
)  # fmt: skip
