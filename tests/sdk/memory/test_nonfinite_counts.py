"""Are non-finite elements counted as torch counts them, in C and by torch, in every dtype and wherever they lie?"""

from __future__ import annotations

import importlib.util
import os
import random
from collections.abc import Callable, Iterator, Sequence
from unittest.mock import patch

import numpy as np
import pytest
import torch

from weighbridge._core.byte_copies import ByteCopy
from weighbridge._core.dtypes import DTYPES, DType, parse
from weighbridge._core.nonfinite import Encoding, count_nonfinite, encoding_of
from weighbridge._memory import native_copies
from weighbridge._memory.casting import write_cast
from weighbridge._memory.copying import write_tensors
from weighbridge._memory.mappings import MappedMemory, Use
from weighbridge._memory.native_copies import (
    AddressRange,
    copy_natively,
    count_natively,
    packed_encodings,
    region_of,
)
from weighbridge._memory.strided import Bytes, ShardCopies, Uncounted, count_written, write_bytes
from weighbridge._memory.tensor_counts import TensorCounts

FLOATS = [dtype for dtype in DTYPES if encoding_of(dtype) is not None]
needs_extension = pytest.mark.skipif(
    importlib.util.find_spec("weighbridge._memory._native") is None,
    reason="the C extension is not built: make install",
)
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
Count = Callable[[Bytes, Encoding], int]


def by_torch(data: Bytes, dtype: DType) -> int:
    """The independent answer."""
    elements = torch.from_numpy(data[: len(data) // dtype.itemsize * dtype.itemsize].copy()).view(dtype.torch)
    widened = elements.float() if dtype.itemsize == 1 else elements
    return int((~torch.isfinite(widened)).sum())


def random_bits(dtype: DType, elements: int, seed: int, share: float) -> Bytes:
    """Finite elements of all sizes, and this share of others."""
    chance = np.random.default_rng(seed)
    encoding = encoding_of(dtype)
    assert encoding is not None
    patterns = chance.integers(0, 256, elements * dtype.itemsize, np.uint8).view(f"<u{encoding.itemsize}")
    mask = np.array(encoding.mask, patterns.dtype)
    lowest = mask & (~mask + np.array(1, patterns.dtype))
    patterns[(patterns & mask) == mask] ^= lowest  # finite
    patterns[chance.random(len(patterns)) < share] |= mask
    found: Bytes = patterns.view(np.uint8)
    return found


def count_by_extension(data: Bytes, encoding: Encoding) -> int:
    found = count_natively(np.array([[data.ctypes.data, len(data)]], np.int64), packed_encodings([encoding]))
    assert found is not None
    return int(found[0])


def count_by_torch(data: Bytes, encoding: Encoding, device: str = "cpu") -> int:
    whole = len(data) // encoding.element_bytes * encoding.element_bytes
    flat = torch.from_numpy(data[:whole].copy()).to(device)
    counts = TensorCounts()
    counts.add(3, flat, [ByteCopy((len(flat),), 0, (1,), 0, 0, (1,))], encoding)
    return counts.take().get(3, 0)


def count_many_at_a_time(data: Bytes, encoding: Encoding) -> int:
    """As GPUs do, on the processor."""
    with patch("weighbridge._memory.tensor_counts._reduces_many", lambda _device: True):
        return count_by_torch(data, encoding)


def count_on_gpu(data: Bytes, encoding: Encoding) -> int:
    return count_by_torch(data, encoding, "cuda")


WAYS = [
    pytest.param(count_by_extension, marks=needs_extension),
    count_by_torch,
    count_many_at_a_time,
    pytest.param(count_on_gpu, marks=[needs_gpu, pytest.mark.gpu]),
    count_nonfinite,
]


@pytest.mark.parametrize("count", WAYS)
@pytest.mark.parametrize("name", [dtype.short for dtype in FLOATS if dtype.itemsize <= 2])
def test_every_bit_pattern_of_a_small_dtype_counts_if_it_does_for_torch(count: Count, name: str) -> None:
    """Alone, and among finite ones in a place of every line."""
    dtype = parse(name)
    encoding = encoding_of(dtype)
    assert encoding is not None
    patterns = np.arange(1 << (8 * dtype.itemsize), dtype=f"<u{dtype.itemsize}")
    data = patterns.view(np.uint8)
    assert count(data, encoding) == by_torch(data, dtype) > 0
    step = 1 if dtype.itemsize == 1 else 257
    for pattern in {
        *patterns[::step].tolist(),
        encoding.mask,
        encoding.mask - 1,
        encoding.mask | encoding.sign,
    }:
        among = np.zeros(200, patterns.dtype)
        among[pattern % 200] = pattern
        assert count(among.view(np.uint8), encoding) == by_torch(among.view(np.uint8), dtype), hex(pattern)


@pytest.mark.parametrize("count", WAYS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("share", [0.0, 0.001, 0.3, 1.0])
def test_random_bits_of_every_length_are_counted_as_torch_counts_them(count: Count, dtype: DType, share: float) -> None:
    encoding = encoding_of(dtype)
    assert encoding is not None
    for seed, elements in enumerate([1, 2, 7, 8, 31, 63, 64, 65, 129, 1000, 16_385, 70_001]):
        room = np.zeros(elements * dtype.itemsize + 16, np.uint8)
        for offset in (0, 1, 7):  # what lies in a file need not be aligned
            data = room[offset : offset + elements * dtype.itemsize]
            data[:] = random_bits(dtype, elements, seed, share)
            assert count(data, encoding) == by_torch(data, dtype), (elements, offset)


@pytest.mark.parametrize("count", WAYS)
def test_what_is_left_of_an_element_is_not_counted(count: Count) -> None:
    encoding = Encoding(4, 0x7F80_0000)
    assert [count(np.full(n, 0xFF, np.uint8), encoding) for n in (3, 4, 7, 8, 65, 67)] == [0, 1, 1, 2, 16, 16]


def strided(dtype: DType, chance: random.Random) -> tuple[ByteCopy[int], int, int]:
    """Rows of whole elements that lie apart on both sides, at any offset in memory; and the bytes that both sides
    have.
    """
    size = dtype.itemsize
    rows = [chance.choice([1, 1, 2, 5]), chance.choice([1, 3, 40])]
    width = size * chance.choice([1, 2, 9, 31, 64, 130, 700, 5000])
    shard_gap, file_gap = size * chance.choice([0, 0, 3]), chance.choice([0, 0, size, 3])
    shard, file = width + shard_gap, width + file_gap
    offset, file_offset = size * chance.randrange(4), chance.randrange(70)
    copy = ByteCopy((*rows, width), offset, (rows[1] * shard, shard, 1), 0, file_offset, (rows[1] * file, file, 1))
    return copy, offset + rows[0] * rows[1] * shard, file_offset + rows[0] * rows[1] * file


@pytest.mark.parametrize("extension", [pytest.param(True, marks=needs_extension), False])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_copies_count_the_elements_that_they_take_and_no_others(
    monkeypatch: pytest.MonkeyPatch, dtype: DType, extension: bool
) -> None:
    if not extension:
        monkeypatch.setattr(native_copies, "_extension", lambda: None)
    encoding = encoding_of(dtype)
    for seed in range(60):
        chance = random.Random(seed)
        copy, shard_bytes, memory_bytes = strided(dtype, chance)
        share = chance.choice([0.0, 0.01, 0.5])
        shard = random_bits(dtype, -(-shard_bytes // dtype.itemsize), seed, share)
        memory = np.zeros(memory_bytes, np.uint8)
        plain = np.ndarray(copy.extent, np.uint8, shard, copy.stream_offset, copy.stream_strides)
        expected = by_torch(np.ascontiguousarray(plain).reshape(-1), dtype)
        assert write_bytes(shard, [copy], [memory], encoding) == expected
        assert write_bytes(shard, [copy], [memory]) == 0
        assert count_written([Uncounted(0, copy, encoding)] * 2, memory) == [expected, expected]
        counts = TensorCounts()
        counts.add(0, torch.from_numpy(shard), [copy, copy], encoding)
        assert counts.take().get(0, 0) == 2 * expected


@needs_extension
@pytest.mark.parametrize("threads", [1, 3])
def test_chunks_that_cut_elements_count_each_of_them_once(threads: int) -> None:
    """Threads share a plan out by bytes: behind an odd number of them each chunk cuts an element."""
    f64, u8 = parse("fp64"), parse("u8")
    odd = np.zeros(3, np.uint8)
    shard = random_bits(f64, 1 << 20, 1, 0.2)
    memory = np.zeros(3 + len(shard) + 5, np.uint8)
    for at in (3, 8):  # beside the elements in memory, and not
        plans = [
            (region_of(odd, written=False), ShardCopies([ByteCopy((3,), 0, (1,), 0, 0, (1,))]).packed),
            (
                region_of(shard, written=False),
                ShardCopies([ByteCopy((len(shard),), 0, (1,), 0, at, (1,))]).packed,
            ),
        ]
        counts = copy_natively(
            plans,
            [region_of(memory, written=True)],
            into_memory=True,
            threads=threads,
            encodings=[encoding_of(u8), encoding_of(f64)],
        )
        assert counts == [0, by_torch(shard, f64)]
        assert np.array_equal(memory[at : at + len(shard)], shard)


@needs_extension
def test_a_copy_that_cuts_elements_and_an_encoding_that_cannot_be_are_refused() -> None:
    data, memory = np.zeros(64, np.uint8), np.zeros(64, np.uint8)
    plan = ShardCopies([ByteCopy((7,), 0, (1,), 0, 0, (1,))]).packed
    for encoding in (
        Encoding(2, 0x7C00),
        Encoding(3, 0x7C00),
        Encoding(2, 0),
        Encoding(2, 1 << 17),
        Encoding(4, 1),
    ):
        with pytest.raises(ValueError, match=r"cuts elements|can be counted"):
            copy_natively(
                [(AddressRange(data.ctypes.data, 64), plan)],
                [region_of(memory, written=True)],
                into_memory=True,
                threads=1,
                encodings=[encoding],
            )
    with pytest.raises(ValueError, match="one encoding"):
        count_natively(np.array([[data.ctypes.data, 64]], np.int64), packed_encodings([None, None]))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_large_tensors_are_counted_a_part_at_a_time(dtype: DType) -> None:
    shard = random_bits(dtype, 3 * 1000, 4, 0.1)
    flat = torch.from_numpy(shard).view(dtype.torch)
    width = 1000 * dtype.itemsize
    half = width // 2
    boxes: Sequence[ByteCopy[int]] = [
        ByteCopy((3 * width,), 0, (1,), 0, 0, (1,)),
        ByteCopy((3, half), half, (width, 1), 0, 0, (half, 1)),
        ByteCopy((1, 3, half), 0, (3 * width, width, 1), 0, 0, (3 * half, half, 1)),
    ]
    for copy in boxes:
        plain = np.ndarray(copy.extent, np.uint8, shard, copy.stream_offset, copy.stream_strides)
        counts = TensorCounts(at_once=100)
        counts.add(1, flat, [copy], encoding_of(dtype))
        counts.add(2, flat, [copy], None)
        counts.add(5, flat[:0], [], encoding_of(dtype))
        assert counts.take() == {1: by_torch(np.ascontiguousarray(plain).reshape(-1), dtype)}
        assert counts.take() == {}


@pytest.fixture
def memory() -> Iterator[MappedMemory]:
    nbytes = 16 << 20
    descriptor = os.memfd_create("counts")
    os.ftruncate(descriptor, nbytes)
    made = MappedMemory(descriptor, "test", nbytes, Use.WRITE)
    os.close(descriptor)
    yield made
    made.close()


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_shards_on_a_gpu_are_counted_there_whatever_part_of_them_is_copied(memory: MappedMemory, dtype: DType) -> None:
    """Several at once; views that are not contiguous; and what is computed just before, on the stream of the caller."""
    shards, encodings, expected = [], [], []
    for seed in range(40):
        chance = random.Random(seed)
        copy, shard_bytes, _ = strided(dtype, chance)
        elements = -(-shard_bytes // dtype.itemsize)
        bits = random_bits(dtype, elements, seed, chance.choice([0.0, 0.0, 0.01, 0.5]))
        on_card = torch.from_numpy(bits).cuda()
        if seed % 3 == 0:
            torch.cuda._sleep(20_000_000)
            on_card = on_card ^ torch.zeros_like(on_card)
        patterns = on_card.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize])
        if seed % 4 == 0:
            patterns = torch.stack([patterns, torch.zeros_like(patterns)], dim=-1)[..., 0]
        shard = patterns.view(dtype.torch)
        plain = np.ndarray(copy.extent, np.uint8, bits, copy.stream_offset, copy.stream_strides)
        shards.append((shard, [copy, copy]))
        encodings.append(None if seed % 5 == 4 else encoding_of(dtype))
        expected.append(2 * by_torch(np.ascontiguousarray(plain).reshape(-1), dtype) if seed % 5 < 4 else 0)
    assert write_tensors(shards, [memory], encodings) == expected
    assert any(expected)


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("name", ["bf16", "fp16", "fp32"])
def test_casts_on_a_gpu_are_counted_as_they_arrive(memory: MappedMemory, name: str) -> None:
    """3.4e38 is a number in float32, and infinite in bfloat16."""
    dtype = parse(name)
    shards = []
    for source, value in (
        (torch.float32, 3.4e38),
        (torch.float64, float("nan")),
        (torch.bfloat16, float("inf")),
    ):
        shard = torch.randn(37, 24, dtype=torch.float32).to(source).cuda()
        shard[5, 1:8] = value
        shards.append(shard)
    copies = [ByteCopy((37 * 24 * dtype.itemsize,), 0, (1,), 0, number << 20, (1,)) for number in range(3)]
    found = write_cast(
        [(shard, dtype.torch, [copy]) for shard, copy in zip(shards, copies, strict=True)],
        [memory],
        [encoding_of(dtype)] * 3,
    )
    assert found.counts == [int((~shard.to(dtype.torch).isfinite()).sum()) for shard in shards]
    assert not found.uncounted
