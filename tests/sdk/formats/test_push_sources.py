"""Are the parts of a stream that go over gRPC the bytes that the shards have there, whatever else is written to
memory?
"""

from __future__ import annotations

import itertools
import os

import numpy as np
import pytest
import torch

from weighbridge._clients.push_routes import without
from weighbridge._core import dtypes
from weighbridge._core.boxes import Box
from weighbridge._core.byte_copies import ByteCopy
from weighbridge._core.layouts import Layout, Shard, TensorSpec
from weighbridge._formats.push_sources import MappedSource, ShardSource, StagingPool, TensorSource
from weighbridge._lane.plans import LanePlans
from weighbridge._memory.mappings import MappedMemory, Use
from weighbridge._memory.strided import ShardCopies
from weighbridge.errors import DataLoss, LayoutError
from weighbridge.v1 import local_lane_pb2 as pb

SHAPES = {"a": (3, 5), "empty": (0, 4), "b": (7,), "c": (2, 2, 3)}
SPECS = [TensorSpec(name, dtypes.parse("bf16"), shape) for name, shape in SHAPES.items()]
LAYOUT = Layout.stream(SPECS, [Shard(spec.name, Box.whole(spec.shape)) for spec in SPECS])


def tensors(*, contiguous: bool) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    made = [torch.randn(shape, generator=generator).to(torch.bfloat16) for shape in SHAPES.values()]
    return made if contiguous else [torch.stack([each, each], dim=-1)[..., 1] for each in made]


def stream(of: list[torch.Tensor]) -> bytes:
    return b"".join(each.contiguous().view(torch.uint8).numpy().tobytes() for each in of if each.numel())


@pytest.mark.parametrize("contiguous", [True, False])
def test_staged_parts_are_those_of_the_stream_wherever_they_begin_and_end(contiguous: bool) -> None:
    held = tensors(contiguous=contiguous)
    whole = stream(held)
    pool = StagingPool()
    cuts = [0, 1, 6, 30, 31, 44, len(whole)]
    for ranges in (
        [],
        [(0, len(whole))],
        *([each] for each in itertools.combinations(cuts, 2)),
        list(itertools.pairwise(cuts))[::2],
        list(itertools.pairwise(cuts)),
    ):
        staged = TensorSource(pool, LAYOUT, held).stage(ranges)
        for start, stop in ranges:
            assert bytes(staged.read(start, stop)) == whole[start:stop]
            middle = (start + stop) // 2
            assert bytes(staged.read(middle, stop)) == whole[middle:stop]
        staged.release()


def test_staging_takes_no_more_room_than_the_parts_that_are_wanted() -> None:
    pool = StagingPool()
    pool.stage(LAYOUT, tensors(contiguous=True), [(2, 4), (20, 26)]).release()
    assert [len(buffer) for buffer in pool._free] == [8]


def test_a_tensor_of_another_size_than_its_shard_is_refused_by_name() -> None:
    held = tensors(contiguous=True)
    held[2] = held[2][:-1]
    with pytest.raises(LayoutError, match="b: a tensor of 12 bytes"):
        TensorSource(StagingPool(), LAYOUT, held).stage([(0, LAYOUT.nbytes)])


def test_what_is_sent_again_is_what_was_to_be_streamed_and_has_not_come() -> None:
    random = np.random.default_rng(1)
    for _ in range(300):
        wanted, received = (
            [(int(a), int(b)) for a, b in np.sort(random.choice(60, 2 * n, replace=False)).reshape(-1, 2)]
            for n in random.integers(0, 6, 2)
        )
        left = {at for a, b in wanted for at in range(a, b)} - {at for a, b in received for at in range(a, b)}
        found = without(wanted, received)
        assert sorted(at for a, b in found for at in range(a, b)) == sorted(left)
        assert all(a < b for a, b in found)


@pytest.mark.parametrize("ranges", [[(0, LAYOUT.nbytes + 1)], [(5, 4)], [(4, 8), (7, 9)], [(8, 9), (2, 3)]])
def test_ranges_that_no_service_would_leave_to_be_streamed_are_refused(ranges: list[tuple[int, int]]) -> None:
    loan = pb.WriteLoan(plan_id="p")
    for _ in LAYOUT.placements:
        loan.plan.shards.add()
    for start, end in ranges:
        loan.plan.streamed.add(start=start, end=end)
    with pytest.raises(DataLoss, match="streamed"):
        LanePlans().placed(loan, None, [1], LAYOUT, "rank 0")


@pytest.mark.parametrize("contiguous", [True, False])
@pytest.mark.parametrize("source", [torch.float32, torch.float16, torch.float64])
def test_staged_parts_of_tensors_in_another_dtype_are_those_of_the_cast(source: torch.dtype, contiguous: bool) -> None:
    held = [each.to(source) * 3.1 for each in tensors(contiguous=True)]
    whole = stream([each.to(torch.bfloat16) for each in held])
    if not contiguous:
        held = [torch.stack([each, each], dim=-1)[..., 1] for each in held]
    cuts = [0, 1, 6, 30, 31, 44, len(whole)]
    made = TensorSource(StagingPool(), LAYOUT, held)
    for ranges in ([(0, len(whole))], *([each] for each in itertools.combinations(cuts, 2))):
        staged = made.stage(ranges)
        for start, stop in ranges:
            assert bytes(staged.read(start, stop)) == whole[start:stop]
        staged.release()


def test_casts_are_counted_by_tensor_and_widening_ones_are_exact() -> None:
    specs = [TensorSpec(name, dtypes.parse("fp32"), (4, 2)) for name in "abcde"]
    halves = [Box((0, 0), (2, 2)), Box((2, 0), (2, 2))]
    layout = Layout.stream(specs, [Shard(spec.name, box) for spec in specs for box in halves])
    kinds = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float32]
    held = [torch.ones(2, 2, dtype=kind) for kind in kinds for _ in halves]
    assert TensorSource(StagingPool(), layout, held).casts == (3, 2)


SHIFTS = {"b": 1.0, "c": -1.0}


def shifted_by_torch(held: list[torch.Tensor]) -> list[torch.Tensor]:
    return [each + SHIFTS.get(name, 0.0) for name, each in zip(SHAPES, held, strict=True)]


@pytest.mark.parametrize("contiguous", [True, False])
def test_staged_parts_of_tensors_with_a_constant_are_those_of_the_sums(contiguous: bool) -> None:
    held = tensors(contiguous=contiguous)
    whole = stream(shifted_by_torch(held))
    before = stream(held)
    made = TensorSource(StagingPool(), LAYOUT, held).shifted(SHIFTS)
    for ranges in ([(0, len(whole))], *([each] for each in itertools.combinations(range(0, 68, 3), 2))):
        staged = made.stage(ranges)
        for start, stop in ranges:
            assert bytes(staged.read(start, stop)) == whole[start:stop]
        staged.release()
    assert stream(held) == before  # the trainer's own are left as they are


@pytest.mark.parametrize("mapped", [True, False])
def test_tensors_with_a_constant_are_written_as_the_sums_and_counted_so(mapped: bool) -> None:
    held = tensors(contiguous=True)
    held[2][3] = torch.nan
    held[3][0, 0, 1] = torch.inf
    held[0][0, 0] = -torch.inf
    whole = stream(shifted_by_torch(held))
    nbytes = LAYOUT.nbytes
    descriptor = os.memfd_create("sums")
    os.ftruncate(descriptor, 4096)
    memory = MappedMemory(descriptor, "test", 4096, Use.WRITE)
    os.close(descriptor)
    copies = [[ByteCopy((p.nbytes,), 0, (1,), 0, 100 + p.offset, (1,))] if p.nbytes else [] for p in LAYOUT.placements]
    source: ShardSource = TensorSource(StagingPool(), LAYOUT, held)
    if mapped:
        file = np.frombuffer(b"!" + stream(held), np.uint8)
        places = [p._replace(buffer="f", offset=p.offset + 1) for p in LAYOUT.placements]
        source = MappedSource(LAYOUT, places, {"f": file})
    try:
        written = source.shifted(SHIFTS).write([ShardCopies(each) for each in copies], [memory])
        assert written is not None
        assert list(written.counts) == [1, 0, 1, 1]
        assert memory.bytes[100 : 100 + nbytes].tobytes() == whole
        assert not memory.bytes[:100].any()
        assert not memory.bytes[100 + nbytes :].any()
    finally:
        memory.close()


def test_a_stream_of_mapped_files_with_a_constant_can_be_read_from_any_byte_on() -> None:
    held = tensors(contiguous=True)
    whole = stream(shifted_by_torch(held))
    source = MappedSource(
        LAYOUT,
        [p._replace(buffer="f") for p in LAYOUT.placements],
        {"f": np.frombuffer(stream(held), np.uint8)},
    )
    made = source.shifted(SHIFTS)
    assert made.stage([(0, len(whole))]) is made
    for start, stop in itertools.combinations(range(len(whole) + 1), 2):
        assert bytes(made.read(start, stop)) == whole[start:stop]
