"""Do the shares of all ranks make up the model, and does each gathered tensor reach its place in the stream?"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weighbridge._core import dtypes
from weighbridge._core.boxes import Box
from weighbridge._core.layouts import TensorSpec
from weighbridge._formats.gathered_shards import (
    LEAST_SHARE_BYTES,
    GatheredShards,
    _sums,
    held_layout,
    share_layout,
)
from weighbridge._formats.memory_forms import TensorForms
from weighbridge._formats.passing_chunks import PassingChunks
from weighbridge._formats.push_sources import Bytes, StagingPool, StreamSource
from weighbridge._formats.tensor_stream import Ranges
from weighbridge.errors import LayoutError, Unavailable

SHAPES = st.lists(st.integers(1, 6), max_size=1).flatmap(
    lambda tail: st.tuples(st.integers(1, 3 * LEAST_SHARE_BYTES // 2), *map(st.just, tail))
) | st.just(())


@given(shapes=st.lists(SHAPES, min_size=1, max_size=8), ranks=st.integers(1, 9))
def test_shares_are_disjoint_and_complete_and_none_is_small(shapes: list[tuple[int, ...]], ranks: int) -> None:
    specs = {f"t{i}": TensorSpec(f"t{i}", dtypes.parse("bf16"), shape) for i, shape in enumerate(shapes)}
    boxes: dict[str, list[Box]] = {name: [] for name in specs}
    for rank in range(ranks):
        for placement in share_layout(specs, rank, ranks).placements:
            boxes[placement.shard.tensor].append(placement.shard.box)
            whole = placement.shard.box.extent == specs[placement.shard.tensor].shape
            assert whole or placement.nbytes > LEAST_SHARE_BYTES // 2
    for name, found in boxes.items():
        shape = specs[name].shape
        if not shape:
            assert found == [Box((), ())]
            continue
        edges = sorted((box.offset[0], box.end[0]) for box in found)
        assert [start for start, _ in edges] == [0, *(end for _, end in edges[:-1])]
        assert edges[-1][1] == shape[0]
        assert sum(box.volume for box in found) == math.prod(shape)


class CountingPool(StagingPool):
    """A pool that records the most bytes in use at one time."""

    def __init__(self) -> None:
        super().__init__()
        self.out = self.most = 0

    def take(self, nbytes: int, *, pinned: bool) -> Bytes:
        self.out += nbytes
        self.most = max(self.most, self.out)
        return super().take(nbytes, pinned=pinned)[:nbytes]

    def give(self, buffer: Bytes) -> None:
        self.out -= len(buffer)
        super().give(buffer)


MODEL = TensorForms(
    {
        "bytes": TensorSpec("bytes", dtypes.parse("u8"), (5,)),
        "large": TensorSpec("large", dtypes.parse("fp32"), (1500, 1001)),
        "small": TensorSpec("small", dtypes.parse("bf16"), (3, 7)),
    }
)


def passing() -> Iterator[tuple[str, torch.Tensor]]:
    """In another order than the stream."""
    yield "small", torch.arange(21).view(3, 7).bfloat16()
    yield "large", torch.arange(1500 * 1001, dtype=torch.float64).view(1500, 1001)
    yield "bytes", torch.arange(5, dtype=torch.uint8)


def bring(shards: GatheredShards, chunks: PassingChunks) -> None:
    with chunks:
        for part in shards.parts():
            chunks.take(part)
        chunks.finish()


@pytest.mark.parametrize(
    "streamed", [[(0, 6006047)], [(2, 5), (1005, 3000001), (6006005, 6006009)]], ids=["all", "some"]
)
def test_chunks_bring_each_byte_once_and_hold_no_more_than_they_may(streamed: list[tuple[int, int]]) -> None:
    stream = share_layout(MODEL, 0, 1)
    assert stream.nbytes == 6006047
    expected = np.concatenate([tensor.to(MODEL[name].dtype.torch).view(-1).view(torch.uint8).numpy() for name, tensor in sorted(passing())])  # fmt: skip
    arrived = np.zeros(stream.nbytes, np.uint8)
    sent: list[tuple[int, int]] = []

    def send(source: StreamSource, ranges: Ranges) -> None:
        for start, stop in ranges:
            sent.append((start, stop))
            arrived[start:stop] = np.frombuffer(source.read(start, stop), np.uint8)

    pool = CountingPool()
    shards = GatheredShards(passing(), MODEL, stream, rank=0, ranks=1, cast="allow")
    bring(shards, PassingChunks(stream, streamed, pool, 2 << 20, send))
    for start, stop in streamed:
        assert np.array_equal(arrived[start:stop], expected[start:stop])
    assert sum(stop - start for start, stop in sent) == sum(stop - start for start, stop in streamed)
    assert pool.most <= 2 << 20
    assert pool.out == 0
    assert shards.casts == (1, 0)


def test_what_cannot_be_sent_ends_the_push_and_gives_buffers_back() -> None:
    stream = share_layout(MODEL, 0, 1)

    def send(source: StreamSource, ranges: Ranges) -> None:
        raise Unavailable("the service is gone")

    pool = CountingPool()
    shards = GatheredShards(passing(), MODEL, stream, rank=0, ranks=1, cast="allow")
    with pytest.raises(Unavailable, match="gone"):
        bring(shards, PassingChunks(stream, [(0, stream.nbytes)], pool, 2 << 20, send))
    assert pool.out == 0


@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
            ],
        ),
    ],
)
@pytest.mark.parametrize("ranks", [1, 3])
def test_a_head_is_tied_only_if_each_of_its_bits_is_the_embedding_s(device: str, ranks: int) -> None:
    rows, width = 4099, 2056
    model = TensorForms({"embed": TensorSpec("embed", dtypes.parse("bf16"), (rows, width))})
    embedding = torch.randn(rows, width, device=device).bfloat16()

    def problems(head: torch.Tensor) -> list[str]:
        """The error details of all ranks."""
        found = []
        for rank in range(ranks):
            stream = share_layout(model, rank, ranks)
            given = iter([("head", head), ("embed", embedding)])
            try:
                list(GatheredShards(given, model, stream, rank=rank, ranks=ranks, cast="allow").parts())
            except LayoutError as error:
                found.extend(error.details)
        return found

    assert problems(embedding.clone()) == []
    packed = torch.cat([torch.zeros(1, device=device).bfloat16(), embedding.view(-1)])[1:]
    assert problems(packed.view(rows, width)) == []
    for row, column in ((0, 0), (rows // 2, 7), (rows - 1, width - 1)):
        changed = embedding.clone()
        changed[row, column] += 1
        assert problems(changed) == ["head: the model has no such tensor"]
    swapped = embedding.clone()
    swapped[[10, 11]] = swapped[[11, 10]]
    assert problems(swapped) == ["head: the model has no such tensor"]
    assert problems(embedding.float()) == ["head: the model has no such tensor"] * ranks


def test_a_tied_head_passes_where_the_embedding_is_on_another_rank_and_nothing_else_does() -> None:
    specs = [
        TensorSpec("embed", dtypes.parse("fp32"), (11, 3)),
        TensorSpec("norm", dtypes.parse("fp32"), (3,)),
    ]
    model = TensorForms({spec.name: spec for spec in specs})
    embedding, norm = torch.randn(11, 3), torch.randn(3)

    def problems(**given: torch.Tensor) -> list[str]:
        stream = held_layout(model, given)
        weights = iter(given.items())
        shards = GatheredShards(weights, model, stream, rank=0, ranks=1, cast="allow", expected=stream.tensors)
        try:
            passed = [index for part in shards.parts() for index in part.indexes]
        except LayoutError as error:
            return list(error.details)
        assert sorted(passed) == list(range(len(stream.placements)))
        return []

    unknown = "head: the model has no such tensor"
    assert problems(norm=norm, head=embedding) == []
    assert problems(norm=norm, head=embedding[:5]) == [unknown]
    assert problems(embed=embedding, head=embedding.clone()) == []
    assert problems(embed=embedding, head=embedding + 1) == [unknown]


def test_a_digest_of_a_tensor_does_not_depend_on_where_it_lies() -> None:
    packed = torch.randint(0, 256, (1 + 64,), dtype=torch.uint8)
    assert torch.equal(_sums(packed[1:]), _sums(packed[1:].clone()))
    changed = packed[1:].clone()
    changed[-1] ^= 1
    assert not torch.equal(_sums(packed[1:]), _sums(changed))
