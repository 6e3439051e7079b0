"""Are torch_dist checkpoints read as torch and Megatron wrote them, and written as they read them?"""

from __future__ import annotations

import io
import os
import pickle
import random
import tracemalloc
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from tests.support.alone import alone
from tests.support.megatron_ranks import run_ranks
from weighbridge._cli import commands
from weighbridge._core import dtypes
from weighbridge._core.boxes import Box
from weighbridge._core.layouts import Layout, Placement, Shard, TensorSpec
from weighbridge._formats.safetensors_files import read_folder
from weighbridge._trainers.torch_dist.folder import TorchDistFiles, lay_out_torch_dist, read_torch_dist
from weighbridge._trainers.torch_dist.metadata import read_entries
from weighbridge._trainers.torch_dist.pickles import allow, read_pickle
from weighbridge.errors import DataLoss, InvalidArgument, LayoutError, NotFound, WeighbridgeError
from weighbridge_demo.megatron_cpu import Parallel
from weighbridge_service.converting.conversions import kind_of_folder

CONFIG = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}


def raw(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def spec_of(name: str, tensor: Tensor) -> TensorSpec:
    return TensorSpec(name, dtypes.from_torch(tensor.dtype), tuple(tensor.shape))


def part(tensor: Tensor, box: Box) -> Tensor:
    return tensor[tuple(slice(o, o + e) for o, e in zip(box.offset, box.extent, strict=True))]


def bytes_at(folder: Path, placement: Placement) -> bytes:
    with (folder / placement.buffer).open("rb") as file:
        file.seek(placement.offset)
        return file.read(placement.nbytes)


def assemble(folder: Path, layout: Layout) -> dict[str, Tensor]:
    """Whole tensors, put together from the bytes at the placements."""
    found = {name: torch.zeros(spec.shape, dtype=spec.dtype.torch) for name, spec in layout.tensors.items()}
    for placement in layout.placements:
        target = part(found[placement.shard.tensor], placement.shard.box)
        data = torch.frombuffer(bytearray(bytes_at(folder, placement)), dtype=target.dtype)
        target.copy_(data.reshape(target.shape))
    return found


def write(folder: Path, files: TorchDistFiles, tensors: dict[str, Tensor]) -> None:
    """Do what a transfer does: write framing and raw bytes where they belong, each byte once."""
    folder.mkdir()
    buffers = {file.name: np.zeros(file.nbytes, np.uint8) for file in files.files}
    written = {file.name: np.zeros(file.nbytes, np.uint8) for file in files.files}
    pieces = [(file.name, offset, data) for file in files.files for offset, data in file.framing]
    for p in files.layout.placements:
        data = raw(part(tensors[p.shard.tensor], p.shard.box))
        assert len(data) == p.nbytes
        assert p.offset % 64 == 0
        pieces.append((p.buffer, p.offset, data))
    for name, offset, data in pieces:
        buffers[name][offset : offset + len(data)] = np.frombuffer(data, np.uint8)
        written[name][offset : offset + len(data)] += 1
    assert all((counts == 1).all() for counts in written.values())
    for name, buffer in buffers.items():
        buffer.tofile(folder / name)
    for name, content in files.metadata_files.items():
        (folder / name).write_bytes(content)


def cut(tensors: dict[str, Tensor], pieces: int) -> tuple[list[Shard], list[TensorSpec]]:
    """Shards that cut each tensor unevenly along its first and along its last axis."""
    shards = []
    for name, tensor in tensors.items():
        boxes = [Box.whole(tensor.shape)]
        for axis in {0, tensor.ndim - 1} if tensor.ndim and tensor.numel() else ():
            boxes = [half for box in boxes for half in halves(box, axis, pieces)]
        shards += [Shard(name, box) for box in boxes]
    return shards, [spec_of(name, tensor) for name, tensor in tensors.items()]


def halves(box: Box, axis: int, pieces: int) -> Iterable[Box]:
    extent = box.extent[axis]
    at = extent // pieces
    for begin, size in ((0, at), (at, extent - at)):
        if size:
            offset, extents = list(box.offset), list(box.extent)
            offset[axis], extents[axis] = offset[axis] + begin, size
            yield Box(tuple(offset), tuple(extents))


def samples() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(6, 4, 10, generator=generator)
    return {
        "fp32": values,
        "bf16": values.bfloat16(),
        "fp16": values[0].half(),
        "fp8": values.to(torch.float8_e4m3fn),
        "fp8_e5m2": values[1].to(torch.float8_e5m2),
        "optimizer.state.exp_avg.fp32": values * 2,
        "uint16": torch.arange(65000, 65100).to(torch.uint16),
        "bool": torch.tensor([True, False, True]),
        "int64": torch.arange(7),
        "scalar": torch.tensor(2.5),
        "one": torch.tensor([3.5]),
        "empty": torch.zeros(0, 3),
        "complex": torch.view_as_complex(values[..., :2].contiguous()),
    }


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A small checkpoint as torch.distributed.checkpoint writes it."""
    folder = tmp_path / "saved"
    dcp.save(
        {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(700, dtype=torch.bfloat16), "other": {"x": 1}},
        checkpoint_id=folder,
        no_dist=True,
    )
    return folder


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_what_torch_saves_lies_where_the_layout_says(tmp_path: Path) -> None:
    tensors = samples()
    # A view: torch writes only what is seen of it.
    tensors["view"] = torch.arange(100)[10:20]
    large = torch.randn(100, 100)
    dcp.save({**tensors, "large": large, "text": "x"}, checkpoint_id=tmp_path, no_dist=True)

    found = read_torch_dist(tmp_path)

    assert tuple(found.others) == ("text",)
    assert {p.shard.tensor: bytes_at(tmp_path, p) for p in found.layout.placements} == {
        name: raw(tensor) for name, tensor in {**tensors, "large": large}.items()
    }
    assert dict(found.layout.tensors) == {n: spec_of(n, t) for n, t in {**tensors, "large": large}.items()}
    assert dict(found.file_sizes) == {p.name: p.stat().st_size for p in tmp_path.glob("*.distcp")}


def _model(parallel: Parallel, seed: int) -> Any:
    from transformers import LlamaConfig

    from weighbridge_demo.megatron_cpu import build_model

    torch.manual_seed(seed)
    return build_model(LlamaConfig(**CONFIG), parallel, dtype=torch.bfloat16)


def _sharded_tensors(model: Any) -> list[Any]:
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    found = []
    for entry in model.sharded_state_dict().values():
        built = entry.build() if isinstance(entry, ShardedTensorFactory) else entry
        values = built.values() if isinstance(built, dict) else built if isinstance(built, list) else [built]
        found += [value for value in values if isinstance(value, ShardedTensor)]
    return found


def _held(shard: Any, data: Tensor) -> tuple[str, Box, bytes]:
    extent = (1,) * shard.prepend_axis_num + tuple(shard.local_shape)
    return shard.key, Box(tuple(shard.global_offset), extent), raw(data)


def _save(rank: int, parallel: Parallel, folder: str) -> list[tuple[str, Box, bytes]]:
    """Save a model as Megatron does, and say what its shards hold."""
    import multiprocessing
    import queue

    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    # Its writers are processes that report to a server process; ranks here are daemons, which may start none.
    filesystem_async._results_queue = queue.Queue()
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]

    model = _model(parallel, seed=0)
    state = torch.full((3, 4), float(rank))
    extra = ShardedTensor.from_rank_offsets("optimizer.state.exp_avg.x", state, (1, rank, parallel.tp))
    rng = ShardedObject("rng_state", [rank], (parallel.tp,), (rank,))
    dist_checkpointing.save(
        {"model": model.sharded_state_dict(), "optimizer": extra, "rng": rng, "iteration": 3}, folder
    )
    shards = [*_sharded_tensors(model), extra]
    return [_held(s, s.data) for s in shards if s.replica_id in (0, (0, 0, 0))]


def _load(rank: int, parallel: Parallel, folder: str) -> list[tuple[str, Box, bytes]]:
    """Load a model as Megatron does, over other weights, and say what its shards hold."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor

    model = _model(parallel, seed=1)
    model_state = {
        name: value
        for name, value in model.sharded_state_dict().items()
        if not isinstance(value, ShardedObject)  # the empty extra state of Transformer Engine
    }
    extra = ShardedTensor.from_rank_offsets(
        "optimizer.state.exp_avg.x", torch.zeros(3, 8 // parallel.tp), (1, rank, parallel.tp)
    )
    rng = ShardedObject("rng_state", None, (1,), (0,), replica_id=rank)
    loaded = dist_checkpointing.load({"model": model_state, "optimizer": extra, "rng": rng}, folder)
    assert loaded["iteration"] == 3
    assert loaded["rng"] == {"seed": 5}
    model.load_state_dict(loaded["model"], strict=False)
    return [*(_held(s, s.data) for s in _sharded_tensors(model)), _held(extra, loaded["optimizer"])]


def _object(value: object) -> bytes:
    stream = io.BytesIO()
    torch.save([value], stream)
    return stream.getvalue()


def test_megatrons_checkpoints_are_read_and_ours_are_loaded_by_megatron(tmp_path: Path) -> None:
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    theirs.mkdir()
    parallel = Parallel(tp=2)
    saved = [shard for rank in run_ranks(parallel, _save, parallel, str(theirs)) for shard in rank]

    found = read_torch_dist(theirs)

    assert {(p.shard.tensor, p.shard.box): bytes_at(theirs, p) for p in found.layout.placements} == {
        (name, box): data for name, box, data in saved
    }
    specs = found.layout.tensors
    # Layers are a stacked axis, and a rank has a piece of the gate and a piece of the other half.
    assert specs["decoder.layers.mlp.linear_fc1.weight"].shape == (2, 48, 16)
    boxes = {p.shard.box for p in found.layout.placements if p.shard.tensor == "decoder.layers.mlp.linear_fc1.weight"}
    assert boxes == {Box((layer, row, 0), (1, 12, 16)) for layer in (0, 1) for row in (0, 12, 24, 36)}
    assert {"rng_state/shard_0_2", "rng_state/shard_1_2"} < set(found.others)

    # The same weights, cut as no Megatron job cuts them.
    tensors = assemble(theirs, found.layout)
    objects = {"rng_state/shard_0_1": _object({"seed": 5})}
    files = lay_out_torch_dist(*cut(tensors, 3), 10_000, common={"iteration": 3}, objects=objects)
    assert len(files.files) > 2
    write(ours, files, tensors)
    for target in (Parallel(tp=1), Parallel(tp=2)):
        for rank in run_ranks(target, _load, target, str(ours)):
            for name, box, data in rank:
                assert data == raw(part(tensors[name], box)), (name, box)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("pieces", [1, 2, 3])
def test_torch_loads_what_is_laid_out(tmp_path: Path, pieces: int) -> None:
    tensors = samples()
    shards, specs = cut(tensors, pieces)
    files = lay_out_torch_dist(shards, specs, 3_000)
    write(tmp_path / "c", files, tensors)

    found = read_torch_dist(tmp_path / "c")
    target = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    dcp.load(target, checkpoint_id=tmp_path / "c", no_dist=True)

    assert {name: raw(tensor) for name, tensor in target.items()} == {n: raw(t) for n, t in tensors.items()}
    assert found.layout == Layout(files.layout.tensors, found.layout.placements)
    assert set(found.layout.placements) == set(files.layout.placements)
    assert dict(found.file_sizes) == files.file_sizes
    again = lay_out_torch_dist(*cut(samples(), pieces), 3_000)
    assert (again, again.metadata_files) == (files, files.metadata_files)


def test_a_chunk_of_more_than_four_gigabytes_can_be_loaded(tmp_path: Path) -> None:
    spec = TensorSpec("w", dtypes.parse("u8"), (3, (1 << 32) + 11))
    files = lay_out_torch_dist([Shard("w", Box((1, 0), (1, spec.shape[1])))], [spec])
    (file,) = files.files
    (placement,) = files.layout.placements
    # A sparse file: nothing but the framing and the last byte is really written.
    with (tmp_path / file.name).open("wb") as stream:
        stream.truncate(file.nbytes)
        for offset, data in (*file.framing, (placement.offset + placement.nbytes - 1, b"\x07")):
            stream.seek(offset)
            stream.write(data)
    for name, content in files.metadata_files.items():
        (tmp_path / name).write_bytes(content)

    tensor = torch.load(tmp_path / file.name, mmap=True, weights_only=True)

    assert (tuple(tensor.shape), int(tensor[0, -1])) == ((1, spec.shape[1]), 7)
    assert read_torch_dist(tmp_path).layout.placements == files.layout.placements


def by_hand(folder: Path, saved: Tensor | bytes, claimed: Tensor, **change: Any) -> Path:
    """A checkpoint of one tensor ``w`` whose description differs from its bytes."""
    folder.mkdir(exist_ok=True)
    stream = io.BytesIO(saved if isinstance(saved, bytes) else b"")
    if isinstance(saved, Tensor):
        torch.save(saved, stream)
    data = b"-" * 100 + stream.getvalue() + b"-" * 100
    (folder / "__0_0.distcp").write_bytes(data)
    size = torch.Size(claimed.shape)
    zeros = torch.Size([0] * claimed.ndim)
    chunk = ChunkStorageMetadata(change.get("offset", zeros), size)
    info = _StorageInfo(
        change.get("path", "__0_0.distcp"),
        100,
        len(data) - 200 + change.get("more", 0),
        change.get("transforms"),
    )
    metadata = Metadata(
        {"w": TensorStorageMetadata(TensorProperties(claimed.dtype), size, [chunk] * change.get("times", 1))},
        storage_data={MetadataIndex(change.get("stored", "w"), chunk.offsets): info},
    )
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    return folder


def test_a_view_into_a_larger_storage_is_found(tmp_path: Path) -> None:
    whole = torch.arange(60.0).reshape(10, 6)
    # torch.save writes all of the storage, DCP what is seen of it: either may be there.
    folder = by_hand(tmp_path / "c", whole[3:5], whole[3:5])
    (placement,) = read_torch_dist(folder).layout.placements
    assert bytes_at(folder, placement) == raw(whole[3:5])


W = torch.arange(6.0).reshape(2, 3)


def _compressed() -> bytes:
    stream = io.BytesIO()
    torch.save(W, stream)
    packed = io.BytesIO()
    with zipfile.ZipFile(stream) as old, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
    return packed.getvalue()


@pytest.mark.parametrize(
    ("stored", "claimed", "change", "message"),
    [
        (W.bfloat16(), W, {}, "a tensor .* of bfloat16 instead"),
        (W.reshape(3, 2), W, {}, r"a tensor \[3, 2\] of float32 instead"),
        (W.t().contiguous().t(), W, {}, "not dense and row-major"),
        (W.expand(2, 2, 3), W.expand(2, 2, 3), {}, "not dense and row-major"),
        (
            torch.zeros(2, dtype=torch.complex64).conj(),
            torch.zeros(2, dtype=torch.complex64),
            {},
            "conjugate",
        ),
        (_compressed(), W, {}, "compressed"),
        (b"", W, {}, "too few"),
        (b"x" * 5000, W, {}, "of another format"),
        (W, W, {"more": 101}, "the file has"),
        (W, W, {"more": -1}, "cut short"),
        (W, W, {"path": "../__0_0.distcp"}, "plain name"),
        (W, W, {"path": "/etc/passwd"}, "plain name"),
        (W, W, {"path": "a\0b"}, "plain name"),
        (W, W, {"transforms": ["zstd"]}, "transformed"),
        (W, W, {"offset": torch.Size([1, 0])}, "does not fit"),
        (W, W, {"times": 2}, "two chunks"),
        (W, W, {"stored": "v"}, "does not say where"),
    ],
)
def test_a_chunk_that_is_not_what_it_says_is_refused(
    tmp_path: Path, stored: Tensor | bytes, claimed: Tensor, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataLoss, match=message) as caught:
        read_torch_dist(by_hand(tmp_path / "c", stored, claimed, **change))
    assert "w F32[2, 3]" in caught.value.message or "w " in caught.value.message


def test_a_dtype_that_is_not_supported_is_named(tmp_path: Path) -> None:
    odd = torch.zeros(2, dtype=torch.complex128)
    with pytest.raises(InvalidArgument, match=r"'w'.*complex128"):
        read_torch_dist(by_hand(tmp_path / "c", odd, odd))


class _Runs:
    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> Any:
        return os.system, (self.command,)


def test_a_pickle_that_would_run_code_does_not(tmp_path: Path) -> None:
    command = f"touch {tmp_path / 'ran'}"
    metadata = Metadata({"w": BytesStorageMetadata()}, planner_data=_Runs(command), storage_data={})
    for number, content in enumerate((metadata, _Runs(command))):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / ".metadata").write_bytes(pickle.dumps(content))
        with pytest.raises(DataLoss, match=r"posix\.system"):
            read_torch_dist(folder)
    stream = io.BytesIO()
    torch.save(_Runs(command), stream)
    folder = by_hand(tmp_path / "c", stream.getvalue(), W)
    with pytest.raises(DataLoss, match=r"posix\.system"):
        read_torch_dist(folder)
    assert not (tmp_path / "ran").exists()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_what_is_missing_is_named(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no folder"):
        read_torch_dist(tmp_path / "nowhere")
    with pytest.raises(NotFound, match=r"has no \.metadata") as caught:
        read_torch_dist(tmp_path)
    assert "saved" in caught.value.fix
    (saved / "__0_0.distcp").rename(saved / "x")
    with pytest.raises(NotFound, match=r"__0_0\.distcp"):
        read_torch_dist(saved)
    os.mkfifo(saved / "__0_0.distcp")
    with pytest.raises(DataLoss, match="device"):
        read_torch_dist(saved)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_damage_is_never_anything_but_a_named_error(saved: Path) -> None:
    def check() -> bool:
        try:
            read_torch_dist(saved)
        except WeighbridgeError:
            return False
        return True

    randomness = random.Random(0)
    assert check()
    for name in (".metadata", "__0_0.distcp"):
        path = saved / name
        good = path.read_bytes()
        for _ in range(500):
            bad = bytearray(good)
            for _ in range(randomness.choice((1, 1, 2, 5))):
                bad[randomness.randrange(len(bad))] = randomness.randrange(256)
            path.write_bytes(bad)
            check()
        for length in range(0, len(good), 17):
            path.write_bytes(good[:length])
            assert not check()
        for _ in range(50):
            path.write_bytes(randomness.randbytes(randomness.randrange(300)))
            assert not check()
        path.write_bytes(good)
    assert check()


@pytest.mark.parametrize(
    "hostile",
    [
        b"\x80\x02r\xff\xff\xff\xff.",  # a memo index that Python's own unpickler makes an array for
        b"\x80\x04)" + b"\x86\x94h\x00" * 60 + b".",
        b"\x80\x04}()" + b"2\x86" * 200 + b"Nu.",  # tuples of tuples, hashed as a key
        b"\x80\x04" + b"(" * 100_000,
        b"\x80\x04" + b")" + b"\x85" * 200_000 + b".",
        b"\x80\x04\x8a\xff" + b"\x7f" * 255 + b".",
    ],
)
def test_a_hostile_pickle_costs_nothing(tmp_path: Path, hostile: bytes) -> None:
    (tmp_path / ".metadata").write_bytes(hostile)
    with pytest.raises(DataLoss):
        read_torch_dist(tmp_path)


def described(path: Path, entries: dict[str, Any], stored: dict[Any, Any]) -> Path:
    """A folder with nothing but this description."""
    path.mkdir()
    (path / ".metadata").write_bytes(pickle.dumps(Metadata(entries, storage_data=stored)))
    return path


def tensor_of(shape: tuple[int, ...], chunks: list[ChunkStorageMetadata]) -> TensorStorageMetadata:
    return TensorStorageMetadata(TensorProperties(torch.float32), torch.Size(shape), chunks)


def chunk(begin: int, size: int) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size([begin]), torch.Size([size]))


def test_a_list_of_chunks_that_many_tensors_refer_to_is_refused(tmp_path: Path) -> None:
    """A few kilobytes could describe millions of chunks: chunks without elements need no storage."""
    nothing = [chunk(0, 0) for _ in range(1000)]
    many = {f"w{number}": tensor_of((4,), nothing) for number in range(1000)}
    folder = described(tmp_path / "lists", many, {})
    assert (folder / ".metadata").stat().st_size < 200_000
    with pytest.raises(DataLoss, match="lists more chunks than can be in its"):
        read_torch_dist(folder)
    # the same where the tensors share the whole entry
    with pytest.raises(DataLoss, match="lists more chunks than can be in its"):
        read_torch_dist(described(tmp_path / "entries", dict.fromkeys(map(str, range(1000)), many["w0"]), {}))


def test_offsets_of_more_axes_than_a_tensor_has_are_refused(tmp_path: Path) -> None:
    """Thousands of entries could share one of thousands of numbers."""
    long = torch.Size([0] * 9)
    stored = {MetadataIndex("w", long): _StorageInfo("__0_0.distcp", 0, 1)}
    with pytest.raises(DataLoss, match="index with an invalid name or offset"):
        read_torch_dist(described(tmp_path / "index", {"w": tensor_of((4,), [chunk(0, 4)])}, stored))
    many = ChunkStorageMetadata(long, long)
    with pytest.raises(DataLoss, match=r"chunk of .* without offset or size"):
        read_torch_dist(described(tmp_path / "chunk", {"w": tensor_of((4,), [many])}, {}))


def test_tensors_of_one_shape_may_share_their_chunks() -> None:
    whole = [chunk(0, 3), chunk(3, 2)]
    names = [f"w{number}" for number in range(50)]
    stored = {
        MetadataIndex(name, torch.Size([begin])): _StorageInfo("__0_0.distcp", 0, 1)
        for name in names
        for begin in (0, 3)
    }
    found = read_entries(pickle.dumps(Metadata({name: tensor_of((5,), whole) for name in names}, storage_data=stored)))
    assert [shard.box for shard, _ in found.chunks] == [Box((0,), (3,)), Box((3,), (2,))] * 50


@pytest.mark.parametrize(
    "key",
    [
        lambda n: n << 61,  # Python's integers have a hash of 61 bits: these all have that of 0 or of another few
        lambda n: n * ((1 << 61) - 1),
        lambda n: -n * ((1 << 61) - 1),
        lambda n: (n * ((1 << 61) - 1), "w"),
        lambda n: (1 << 50) + n,
    ],
)
def test_integers_that_could_share_one_hash_are_no_keys(tmp_path: Path, key: Any) -> None:
    for content in (
        {key(n): n for n in range(1, 500)},
        {key(n) for n in range(1, 500)},
        Metadata({}, storage_data={key(n): n for n in range(1, 500)}),
    ):
        (tmp_path / ".metadata").write_bytes(pickle.dumps(content))
        with pytest.raises(DataLoss, match=r"a key is a (int|tuple)"):
            read_torch_dist(tmp_path)


def test_keys_of_up_to_fifty_bits_are_read() -> None:
    keys = [0, 1, -5, (1 << 50) - 1, 1 - (1 << 50), "w", ("w", 1 << 49)]
    data = pickle.dumps(dict.fromkeys(keys, 7))
    assert read_pickle(data, allow(), "x") == dict.fromkeys(keys, 7)


@alone
def test_containers_opened_within_each_other_for_ever_are_refused_before_memory_is_taken() -> None:
    nested: list[Any] = []
    for _ in range(300):
        nested = [nested, 1]  # two elements: appended between a mark and its end
    assert str(read_pickle(pickle.dumps(nested), allow(), "x")) == str(nested)
    endless = b"\x80\x04" + b"(" * 10_000_000
    tracemalloc.start()
    try:
        with pytest.raises(DataLoss, match="nested containers"):
            read_pickle(endless, allow(), "x")
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@alone
def test_a_pickle_takes_no_more_memory_than_its_length_allows() -> None:
    """One byte of a pickle makes a set of two hundred bytes: a pickle of 4 MB once took 900 MB."""
    units = {
        "sets": b"\x8f",
        "dicts": b"}",
        "lists": b"]",
        "tuples": b")\x85",
        "references": b"NQ",
        "in marks": b"(}",
    }
    for name, made in units.items():
        data = b"\x80\x04" + made * 100_000 + b"."
        tracemalloc.start()
        with pytest.raises(DataLoss):
            read_pickle(data, allow(), "x")
        taken = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert taken < 64 * len(data), f"{name}: {taken} bytes for {len(data)}"


@pytest.mark.parametrize("called", ["builtins\nset", "collections\nOrderedDict"])
def test_what_a_pickle_makes_by_calls_counts_as_well(called: str) -> None:
    calls = b"h\x00)R" * 100_000  # four bytes for two hundred of memory
    data = b"\x80\x02c" + called.encode() + b"\nq\x00" + calls + b"."
    with pytest.raises(DataLoss, match="more containers"):
        read_pickle(data, allow(), "x")


def test_a_pickle_of_many_small_containers_is_read() -> None:
    value = [{"a": (n,), "b": [n, (n, n)]} for n in range(50_000)]
    assert read_pickle(pickle.dumps(value, protocol=4), allow(), "x") == value


def test_shards_that_make_no_checkpoint_are_refused() -> None:
    spec = TensorSpec("w", dtypes.parse("f32"), (4,))
    half = Shard("w", Box((0,), (2,)))
    for shards, specs, message in (
        ([half, Shard("w", Box((0,), (4,)))], [spec], "begin at"),
        ([half], [spec, TensorSpec("v", spec.dtype, (1,))], "no stored shard"),
        ([Shard("w", Box((3,), (2,)))], [spec], "does not fit"),
        ([Shard("w", half.box, main=False)], [spec], "no stored shard"),
    ):
        with pytest.raises(LayoutError, match=message):
            lay_out_torch_dist(shards, specs)
    with pytest.raises(LayoutError, match="names of tensors"):
        lay_out_torch_dist([half], [spec], objects={"w": b""})
    with pytest.raises(InvalidArgument):
        lay_out_torch_dist([half], [spec], 0)
    with pytest.raises(InvalidArgument):
        lay_out_torch_dist([], [])


def test_a_save_that_was_interrupted_is_told_from_a_folder_of_another_kind_at_every_door(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "step_5"
    dcp.save({"model": {"w": torch.ones(4)}}, checkpoint_id=str(folder), no_dist=True)
    assert read_torch_dist(folder).layout.tensors.keys() == {"model.w"}
    (folder / ".metadata").unlink()  # torch writes it last
    doors: list[Callable[[Path], object]] = [read_torch_dist, read_folder, kind_of_folder]
    for door in doors:
        with pytest.raises(
            NotFound, match=r"save has not finished: it has \.distcp files, and no \.metadata"
        ) as refused:
            door(folder)
        assert "an earlier step" in refused.value.fix
    for options in ([], ["--config", str(tmp_path)], ["--training"]):
        said = CliRunner().invoke(commands, ["import", str(folder), "acme/smol", *options])
        assert said.exit_code == 1
        assert "save has not finished" in said.output
    save_file({"w": torch.ones(4)}, folder / "model.safetensors")  # other files in a model's folder are ignored
    assert read_folder(folder).layout.tensors.keys() == {"w"}
