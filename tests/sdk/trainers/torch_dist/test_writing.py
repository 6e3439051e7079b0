"""Is a checkpoint that is written from a stream what torch loads, whatever pieces the stream comes in, and without
holding it?
"""

from __future__ import annotations

import math
import tracemalloc
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.support.alone import alone
from weighbridge._core import dtypes
from weighbridge._core.layouts import TensorSpec
from weighbridge._trainers.torch_dist.chunks import chunks_of
from weighbridge._trainers.torch_dist.folder import TorchDistFiles, lay_out_torch_dist, read_torch_dist
from weighbridge._trainers.torch_dist.writing import write_torch_dist
from weighbridge.errors import DataLoss, InvalidArgument

SHAPES = [(), (5,), (3, 7), (2, 3, 4, 5), (4, 1, 6), (0, 3), (1, 1, 1000)]


def spec_of(name: str, shape: tuple[int, ...]) -> TensorSpec:
    return TensorSpec(name, dtypes.parse("fp32"), shape)


@pytest.mark.parametrize("max_bytes", [1, 4, 16, 60, 100, 10_000])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_chunks_one_behind_the_other_are_the_tensor(shape: tuple[int, ...], max_bytes: int) -> None:
    tensor = np.arange(math.prod(shape), dtype=np.float32).reshape(shape)
    parts = [
        tensor[tuple(slice(o, e) for o, e in zip(shard.box.offset, shard.box.end, strict=True))]
        for shard in chunks_of(spec_of("w", shape), max_bytes)
    ]
    assert b"".join(part.tobytes() for part in parts) == tensor.tobytes()
    assert all(part.nbytes <= max(max_bytes, 4) for part in parts)


def test_the_largest_chunk_has_at_least_a_byte() -> None:
    with pytest.raises(InvalidArgument):
        list(chunks_of(spec_of("w", (2,)), 0))


def laid_out(specs: list[TensorSpec], max_chunk: int) -> TorchDistFiles:
    shards = [shard for spec in specs for shard in chunks_of(spec, max_chunk)]
    return lay_out_torch_dist(shards, specs, 3_000, objects={"rng": b"x" * 70}, aliases={"tied": specs[2].name})


def pieces_of(data: bytes, size: int) -> Iterator[memoryview]:
    for start in range(0, len(data), size):
        yield memoryview(data)[start : start + size]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("size", [1, 7, 64, 1 << 20])
def test_torch_loads_what_was_streamed(tmp_path: Path, size: int) -> None:
    specs = [spec_of(f"t{index}", shape) for index, shape in enumerate(SHAPES)]
    tensors = {spec.name: torch.randn(spec.shape) for spec in specs}
    files = laid_out(specs, 100)
    assert len(files.files) > 2
    stream = b"".join(tensor.numpy().tobytes() for tensor in tensors.values())
    progress: list[tuple[int, int]] = []

    write_torch_dist(tmp_path, files, pieces_of(stream, size), lambda *seen: progress.append(seen))

    found = {name: torch.empty_like(tensor) for name, tensor in tensors.items()} | {"tied": torch.empty(SHAPES[2])}
    dcp.load(found, checkpoint_id=tmp_path, no_dist=True)
    expected = {**tensors, "tied": tensors["t2"]}
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    total = sum(file.nbytes for file in files.files)
    assert progress[-1] == (total, total)
    assert read_torch_dist(tmp_path).file_sizes == files.file_sizes


@pytest.mark.parametrize("change", [-1, 1])
def test_a_stream_of_another_length_is_refused_before_the_checkpoint_counts(tmp_path: Path, change: int) -> None:
    files = laid_out([spec_of("a", (4,)), spec_of("b", (5,)), spec_of("c", (6,))], 100)
    with pytest.raises(DataLoss, match="stream of tensors"):
        write_torch_dist(tmp_path, files, pieces_of(bytes(60 + change), 8))
    assert not (tmp_path / ".metadata").exists()


@alone
def test_no_more_is_held_than_a_piece(tmp_path: Path) -> None:
    spec = spec_of("w", (64, 1 << 18))
    files = lay_out_torch_dist(list(chunks_of(spec, 1 << 22)), [spec])

    def stream() -> Iterable[memoryview]:
        for _ in range(64):
            yield memoryview(bytes(1 << 20))

    tracemalloc.start()
    try:
        write_torch_dist(tmp_path, files, stream())
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()
