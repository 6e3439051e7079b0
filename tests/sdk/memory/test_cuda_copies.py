"""Do copies by a GPU's copy engines put every byte where the strided copy says?

What the engines are asked to do is compared with numpy everywhere; that they do it, only where there is a GPU.
"""

from __future__ import annotations

import math
import os
import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from weighbridge._core.byte_copies import ByteCopy
from weighbridge._memory.copy_steps import steps_of
from weighbridge._memory.copying import fill_tensors, read_tensors, write_tensors
from weighbridge._memory.cuda_copies import CopyQueue, is_mapped, register
from weighbridge._memory.mappings import MappedMemory, Use
from weighbridge._memory.strided import view_bytes, write_bytes
from weighbridge.errors import WeighbridgeError

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
MEMORY_BYTES = 8 << 20


def random_copy(dice: random.Random) -> tuple[ByteCopy[int], int]:
    """A box of a dense shard that lies as a box of a larger dense tensor in memory; and the shard's bytes."""
    rank = dice.randint(1, 4)
    extent = [dice.randint(1, 5) for _ in range(rank - 1)] + [dice.choice([2, 64, 96, 512, 4096])]
    around = [n + dice.randint(0, 3) for n in extent[:-1]] + [extent[-1] + dice.choice([0, 32, 512])]
    strides = [math.prod(around[axis + 1 :]) for axis in range(rank)]
    ours = [math.prod(extent[axis + 1 :]) for axis in range(rank)]
    order = list(range(rank - 1))
    dice.shuffle(order)  # of the axes in the shard
    shape = [extent[axis] for axis in order] + [extent[-1]]
    theirs = [strides[axis] for axis in order] + [1]
    dense = [math.prod(shape[axis + 1 :]) for axis in range(rank)]
    assert math.prod(shape) == ours[0] * extent[0]
    offset = dice.randrange(0, 4096, 2)
    return ByteCopy(tuple(shape), 0, tuple(dense), 0, offset, tuple(theirs)), math.prod(shape)


@pytest.mark.parametrize("seed", range(200))
def test_the_steps_of_a_copy_move_the_same_bytes_as_the_copy(seed: int) -> None:
    dice = random.Random(seed)
    copy, nbytes = random_copy(dice)
    shard = np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)
    expected, found = np.zeros(MEMORY_BYTES, np.uint8), np.zeros(MEMORY_BYTES, np.uint8)
    target = view_bytes(expected, copy.file_offset, copy.extent, copy.file_strides)
    target[...] = view_bytes(shard, 0, copy.extent, copy.stream_strides)
    steps = steps_of(copy)
    if steps is None:
        assert copy.extent[-1] < 64 or copy.file_strides[-2] < copy.extent[-1]
        return
    for step in steps:
        for row in range(step.rows):
            source = step.shard_offset + row * step.shard_pitch
            into = step.memory_offset + row * step.memory_pitch
            found[into : into + step.width] = shard[source : source + step.width]
    assert np.array_equal(found, expected)


def test_copies_that_engines_cannot_make_or_only_slowly_are_left_to_others() -> None:
    assert steps_of(ByteCopy((1000, 2), 0, (2, 1), 0, 0, (4096, 1))) is None  # narrow rows
    assert steps_of(ByteCopy((4, 64), 0, (64, 1), 0, 0, (1 << 31, 1))) is None  # rows too far apart
    assert steps_of(ByteCopy((5000, 2, 64), 0, (128, 64, 1), 0, 0, (999, 100, 1))) is None  # too many steps
    assert steps_of(ByteCopy((1, 64), 0, (64, 1), 0, 0, (1 << 31, 1))) is not None


def test_memory_is_not_pinned_without_cuda() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is CUDA")
    fd = os.memfd_create("m")
    os.ftruncate(fd, 4096)
    memory = MappedMemory(fd, "m", 4096, Use.WRITE)
    os.close(fd)
    with pytest.raises((WeighbridgeError, RuntimeError, AssertionError)):
        memory.pin()
    assert not memory.pinned
    memory.close()


@pytest.fixture
def descriptor() -> Iterator[int]:
    fd = os.memfd_create("memory")
    os.posix_fallocate(fd, 0, MEMORY_BYTES)
    yield fd
    os.close(fd)


@needs_gpu
@pytest.mark.parametrize("seed", range(50))
def test_a_gpu_writes_and_reads_shared_memory_as_numpy_does(descriptor: int, seed: int) -> None:
    dice = random.Random(seed)
    copy, nbytes = random_copy(dice)
    values = np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)
    shard = torch.from_numpy(values).cuda().view(torch.int16)
    if seed % 3 == 0:  # not contiguous
        shard = torch.stack([shard, shard], dim=-1)[..., 0]
    expected = np.zeros(MEMORY_BYTES, np.uint8)
    write_bytes(values, [copy], [expected])

    memory = MappedMemory(descriptor, "m", MEMORY_BYTES, Use.WRITE)
    write_tensors([(shard, [copy])], [memory])
    assert memory.pinned
    assert np.array_equal(memory.bytes, expected)
    memory.close()

    reading = MappedMemory(descriptor, "m", MEMORY_BYTES, Use.READ)
    back = torch.full_like(shard, 7, memory_format=torch.contiguous_format)
    list(read_tensors([(back, [copy])], [reading]))
    assert reading.pinned
    assert np.array_equal(back.view(torch.uint8).cpu().numpy(), values)
    together = [torch.full_like(shard, 7, memory_format=torch.contiguous_format) for _ in range(3)]
    fill_tensors([(each, [copy]) for each in together], [reading])
    assert all(torch.equal(each, back) for each in together)
    part = ByteCopy(copy.extent[-1:], 0, (1,), 0, copy.file_offset, (1,))
    list(read_tensors([(back, [part])], [reading]))  # the rest becomes zeros
    assert not back.view(torch.uint8)[copy.extent[-1] :].any()
    reading.close()


@needs_gpu
def test_memory_of_a_gpu_is_told_from_addresses_that_have_none() -> None:
    there = torch.ones(1 << 20, device="cuda")
    assert is_mapped(there.data_ptr())
    assert not is_mapped(torch.ones(4).data_ptr())


@needs_gpu
def test_what_is_computed_before_a_copy_is_what_is_copied(descriptor: int) -> None:
    memory = MappedMemory(descriptor, "m", MEMORY_BYTES, Use.WRITE)
    matrix = torch.randn(4096, 4096, device="cuda")
    for value in range(5):
        torch.cuda._sleep(50_000_000)
        shard = (matrix @ matrix * 0 + value)[:256, :512].to(torch.int16).contiguous()
        copy = ByteCopy((shard.nbytes,), 0, (1,), 0, 0, (1,))
        write_tensors([(shard, [copy])], [memory])
        shard.fill_(99)
        assert (memory.bytes[: shard.nbytes].view(np.int16) == value).all()
    memory.close()


@needs_gpu
@pytest.mark.parametrize("seed", range(10))
def test_shards_on_gpus_are_filled_in_order_whoever_shares_memory_and_whatever_fails(
    descriptor: int, seed: int
) -> None:
    dice = random.Random(seed)
    values = np.random.default_rng(seed).integers(0, 256, MEMORY_BYTES, np.uint8)
    writing = MappedMemory(descriptor, "m", MEMORY_BYTES, Use.WRITE)
    writing.bytes[...] = values
    reading = MappedMemory(descriptor, "m", MEMORY_BYTES, Use.READ)
    ring = torch.zeros(3 << 20, dtype=torch.uint8, device="cuda")
    ranges: list[tuple[int, int]] = []
    broken = dice.randint(20, 40)

    def shards() -> Iterator[tuple[torch.Tensor, list[ByteCopy[int]]]]:
        for number in range(60):
            if number == broken:
                raise KeyError(number)
            nbytes = dice.choice([0, 1, 512, 4096, 1 << 20, 3 << 20])
            start = dice.randint(0, MEMORY_BYTES - nbytes)
            ranges.append((start, start + nbytes))
            where = dice.choice(["own", "ring", "apart", "host"])
            if where == "ring":
                at = dice.randint(0, len(ring) - nbytes)
                shard = ring[at : at + nbytes]
            elif where == "apart":
                shard = torch.zeros(nbytes, 3, dtype=torch.uint8, device="cuda")[:, 1]
            else:
                shard = torch.zeros(nbytes, dtype=torch.uint8, device="cuda" if where == "own" else "cpu")
            copies = [ByteCopy((nbytes,), 0, (1,), 0, start, (1,))] if nbytes else []
            yield shard, copies

    coming = read_tensors(shards(), [reading])
    for number in range(broken):
        shard = next(coming)
        start, end = ranges[number]
        assert np.array_equal(shard.cpu().numpy(), values[start:end]), number
    with pytest.raises(KeyError):
        next(coming)
    reading.close()
    writing.close()


@needs_gpu
def test_a_pull_that_is_left_in_the_middle_leaves_nothing_on_its_way(descriptor: int) -> None:
    reading = MappedMemory(descriptor, "m", MEMORY_BYTES, Use.READ)
    targets = [torch.ones(1 << 20, dtype=torch.uint8, device="cuda") for _ in range(64)]
    coming = read_tensors(((target, [ByteCopy((1 << 20,), 0, (1,), 0, 0, (1,))]) for target in targets), [reading])
    next(coming)
    coming.close()
    for target in targets:
        target.fill_(5)
    torch.cuda.synchronize()
    assert all((target == 5).all() for target in targets)
    reading.close()


@needs_gpu
def test_memory_that_cannot_be_registered_is_an_error_that_leaves_cuda_usable() -> None:
    with pytest.raises(WeighbridgeError, match="registering"):
        register(4096, 4096, read_only=False)
    assert torch.ones(3, device="cuda").sum().item() == 3
    with CopyQueue([]) as queue:
        assert queue.write(torch.ones(3, device="cuda"), [])
