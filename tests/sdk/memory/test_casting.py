"""Are tensors in memory what torch casts them to, wherever their rows lie and whatever kind of tensor they are?"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from weighbridge._core.byte_copies import ByteCopy
from weighbridge._core.dtypes import parse
from weighbridge._core.nonfinite import encoding_of
from weighbridge._memory import casting
from weighbridge._memory.casting import write_cast
from weighbridge._memory.mappings import MappedMemory, Use
from weighbridge._memory.strided import count_written

ROWS, COLUMNS = 37, 24
PAIRS = [
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float16),
    (torch.float64, torch.float32),
    (torch.bfloat16, torch.float32),
    (torch.bfloat16, torch.float16),
]
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


@pytest.fixture
def memory() -> Iterator[MappedMemory]:
    descriptor = os.memfd_create("casts")
    os.ftruncate(descriptor, 1 << 20)
    made = MappedMemory(descriptor, "test", 1 << 20, Use.WRITE)
    os.close(descriptor)
    yield made
    made.close()


def numbers(dtype: torch.dtype) -> torch.Tensor:
    """Numbers of all sizes, with what has no number among them."""
    bits = torch.randint(-(1 << 31), 1 << 31, (ROWS, COLUMNS), generator=torch.Generator().manual_seed(2))
    made = bits.to(torch.int32).view(torch.float32)
    made[0, :4] = torch.tensor([float("nan"), float("inf"), -0.0, 1e-42])
    return made.to(dtype)


def rows_apart(width: int, gap: int, offset: int) -> ByteCopy[int]:
    """A copy of all rows, with gaps between them in memory; all in bytes."""
    return ByteCopy((ROWS, width), 0, (width, 1), 0, offset, (width + gap, 1))


def found(memory: MappedMemory, copy: ByteCopy[int]) -> np.ndarray:
    rows, width = copy.extent
    pitch = copy.file_strides[0]
    there = memory.bytes[copy.file_offset : copy.file_offset + rows * pitch].reshape(rows, pitch)
    assert (there[:, width:] == 0).all()
    return there[:, :width]


def raw(tensor: torch.Tensor) -> np.ndarray:
    return tensor.contiguous().view(torch.uint8).numpy()


@pytest.mark.parametrize(("source", "target"), PAIRS)
@pytest.mark.parametrize(("gap", "offset"), [(0, 8), (40, 8), (3, 8), (40, 5)])
def test_rows_in_memory_are_the_cast_wherever_they_lie(
    memory: MappedMemory, source: torch.dtype, target: torch.dtype, gap: int, offset: int
) -> None:
    """Gaps and offsets that are no multiple of an element, too."""
    shard = numbers(source)
    copy = rows_apart(COLUMNS * target.itemsize, gap, offset)
    write_cast([(shard, target, [copy])], [memory])
    assert np.array_equal(found(memory, copy), raw(shard.to(target)))


@pytest.mark.parametrize("threads", [1, 3])
def test_float32_that_stays_finite_is_narrowed_to_bfloat16_by_the_extension_and_needs_no_count(
    memory: MappedMemory, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    if not casting._narrows_as_torch():
        pytest.skip("the C extension is not built: make install")
    chance = np.random.default_rng(threads)
    encoding = encoding_of(parse("bf16"))
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    for rows, columns, gap, offset in (
        (1, 100_000, 0, 3),
        (37, 24, 3, 5),
        (200, 1, 2, 0),
        (120, 1100, 40, 64),
    ):
        bits = chance.integers(0, 1 << 32, (rows, columns), np.uint32) & np.uint32(0xBFFF_FFFF)
        bits.ravel()[:4] = [
            0x7F7F_7FFF,
            0xFF7F_7FFF,
            0x0000_0001,
            0x8000_8000,
        ]  # the largest that stay finite, and subnormal ones
        shard = torch.from_numpy(bits.view(np.float32))
        copy = ByteCopy((rows, 2 * columns), 0, (2 * columns, 1), 0, offset, (2 * columns + gap, 1))
        for value in (None, float("nan"), float("inf"), 3.4e38, -3.4e38):
            if value is not None:
                shard[rows // 2, columns // 2] = value
            memory.bytes[...] = 0
            counts = write_cast([(shard, torch.bfloat16, [copy])] * 2, [memory], [encoding] * 2)
            cast = raw(shard.to(torch.bfloat16)).reshape(rows, -1)
            there = np.ndarray(copy.extent, np.uint8, memory.bytes, offset, copy.file_strides)
            assert np.array_equal(there, cast)
            later = sum(count_written(counts.uncounted, memory.bytes))
            assert sum(counts.counts) + later == (0 if value is None else 2)
            assert value is not None or not counts.uncounted


def test_what_torch_narrows_otherwise_the_extension_does_not_narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    casting._narrows_as_torch.cache_clear()
    monkeypatch.setattr(casting, "_narrowed", lambda plans, memories, threads: [0])  # writes nothing
    assert not casting._narrows_as_torch()
    casting._narrows_as_torch.cache_clear()


@pytest.mark.parametrize("kind", ["parameter", "transposed", "part", "negated"])
def test_tensors_of_every_kind_are_cast(memory: MappedMemory, kind: str) -> None:
    values = numbers(torch.float32)
    shard = {
        "parameter": lambda: torch.nn.Parameter(values),
        "transposed": lambda: values.t().contiguous().t(),
        "part": lambda: torch.cat([values, values])[ROWS:],
        "negated": lambda: torch.imag(torch.complex(values, -values).conj()),  # its sign is only noted down
    }[kind]()
    copy = rows_apart(COLUMNS * 2, 6, 16)
    write_cast([(shard, torch.bfloat16, [copy])], [memory])
    assert np.array_equal(found(memory, copy), raw(shard.detach().resolve_neg().to(torch.bfloat16)))


def test_a_column_is_cast_as_rows_are(memory: MappedMemory) -> None:
    """A sample of a push is compared with what is written, not-a-numbers included."""
    shard = torch.full((ROWS, 1), float("nan"))
    copy = rows_apart(2, 14, 0)
    write_cast([(shard, torch.bfloat16, [copy])], [memory])
    assert np.array_equal(found(memory, copy), raw(shard.view(-1).to(torch.bfloat16)).reshape(ROWS, 2))


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("held", [1, 4096, 1 << 28])
def test_tensors_on_a_gpu_are_cast_there(memory: MappedMemory, held: int) -> None:
    shards, copies = [], []
    for number, (source, target) in enumerate(PAIRS):
        shards.append(numbers(source).cuda())
        copies.append(rows_apart(COLUMNS * target.itemsize, 40, number << 16))
    write_cast(
        [(shard, target, [copy]) for shard, copy, (_, target) in zip(shards, copies, PAIRS, strict=True)],
        [memory],
        held_bytes=held,
    )
    for shard, copy, (_, target) in zip(shards, copies, PAIRS, strict=True):
        assert np.array_equal(found(memory, copy), raw(shard.to(target).cpu()))


def test_casts_that_are_not_made_on_the_way_are_held_up_to_a_limit(
    memory: MappedMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches: list[int] = []

    def written(made: list[Any], memories: object, encodings: object) -> list[int]:
        batches.append(len(made))
        return [0] * len(made)

    monkeypatch.setattr(casting, "write_tensors", written)
    transposed = numbers(torch.float32).t()
    write_cast([(transposed, torch.bfloat16, [])] * 7, [memory], held_bytes=3 * ROWS * COLUMNS * 2)
    assert batches == [3, 3, 1]
