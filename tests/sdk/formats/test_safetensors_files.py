"""Do our files read like safetensors' own, and do we refuse files that lie?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from weighbridge._core import dtypes
from weighbridge._core.layouts import TensorSpec
from weighbridge._formats.safetensors_files import lay_out_files, layout_of_files, map_folder, read_header
from weighbridge.errors import DataLoss, NotFound, WeighbridgeError

ALL = [d for d in dtypes.DTYPES if d.name != "C64"]


def test_every_dtype_has_the_names_that_safetensors_and_torch_use(tmp_path: Path) -> None:
    for dtype in dtypes.DTYPES:
        tensor = torch.zeros(3, dtype=dtype.torch)
        assert tensor.element_size() == dtype.itemsize
        assert dtypes.from_torch(tensor.dtype) is dtype
        file = tmp_path / f"{dtype.name}.safetensors"
        safetensors.torch.save_file({"x": tensor}, file)
        [spec] = read_header(memoryview(file.read_bytes()), file.name)[1]
        assert spec.dtype is dtype


@pytest.mark.parametrize("max_shard_bytes", [10**9, 3000, 1])
def test_files_we_lay_out_load_with_safetensors_own_reader(tmp_path: Path, max_shard_bytes: int) -> None:
    rng = np.random.default_rng(0)
    specs = [TensorSpec(f"layer.{i}.{d.short}", d, (i + 1, 7)) for i, d in enumerate(ALL)]
    contents = {s.name: rng.integers(0, 2, s.nbytes, np.uint8) for s in specs}
    files = lay_out_files(specs, max_shard_bytes)
    for file in files.files:
        data = np.zeros(file.nbytes, np.uint8)
        data[: len(file.header)] = np.frombuffer(file.header, np.uint8)
        for p in files.layout.placements:
            if p.buffer == file.name:
                assert p.offset % 8 == 0 or p.offset % files.layout.tensors[p.shard.tensor].dtype.itemsize == 0
                data[p.offset : p.offset + p.nbytes] = contents[p.shard.tensor]
        (tmp_path / file.name).write_bytes(data.tobytes())
    loaded: dict[str, torch.Tensor] = {}
    for file in files.files:
        loaded |= safetensors.torch.load_file(tmp_path / file.name)
    assert loaded.keys() == contents.keys()
    for spec in specs:
        tensor = loaded[spec.name]
        assert (tuple(tensor.shape), tensor.dtype) == (spec.shape, spec.dtype.torch)
        assert tensor.reshape(-1).view(torch.uint8).numpy().tobytes() == contents[spec.name].tobytes()
    if files.index_json is not None:
        assert json.loads(files.index_json)["weight_map"].keys() == contents.keys()
    mapped = layout_of_files({f.name: memoryview((tmp_path / f.name).read_bytes()) for f in files.files})
    assert dict(mapped.layout.tensors) == dict(files.layout.tensors)


def _file(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def _entry(dtype: str = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"1234567", id="short"),
        pytest.param(_file({}, length=2**60), id="huge-header"),
        pytest.param(_file(b"not json"), id="no-json"),
        pytest.param(_file(b"[1, 2]"), id="no-object"),
        pytest.param(_file(b"[" * 100_000), id="deep"),
        pytest.param(
            _file(b'{"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}, "x": 1}', bytes(8)),
            id="twice",
        ),
        pytest.param(_file({"x": _entry(dtype="F99")}, bytes(8)), id="unknown-dtype"),
        pytest.param(_file({"x": _entry(shape=[3])}, bytes(8)), id="wrong-length"),
        pytest.param(_file({"x": _entry(shape=[-2])}, bytes(8)), id="negative"),
        pytest.param(_file({"x": _entry(shape=[2**40, 2**40], offsets=[0, 2**82])}, bytes(8)), id="enormous"),
        pytest.param(_file({"x": _entry()}, bytes(4)), id="truncated"),
        pytest.param(_file({"x": _entry()}, bytes(12)), id="trailing"),
        pytest.param(_file({"x": _entry(), "y": _entry()}, bytes(16)), id="overlap"),
        pytest.param(_file({"x": _entry(), "y": _entry(offsets=(12, 20))}, bytes(20)), id="gap"),
        pytest.param(_file({"": _entry()}, bytes(8)), id="no-name"),
        pytest.param(_file({"x" * 10_000: _entry()}, bytes(8)), id="long-name"),
        pytest.param(_file({"x\0y": _entry()}, bytes(8)), id="nul-name"),
        pytest.param(_file({"x": {"dtype": "F32"}}, bytes(8)), id="no-shape"),
    ],
)
def test_a_file_that_lies_is_refused_with_an_error_of_ours(content: bytes) -> None:
    with pytest.raises(WeighbridgeError):
        read_header(memoryview(content), "evil.safetensors")


def test_an_index_cannot_lead_out_of_its_folder(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "../../etc/passwd"}}))
    with pytest.raises(DataLoss, match="outside"):
        map_folder(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "gone.safetensors"}}))
    with pytest.raises(NotFound, match=r"gone\.safetensors"):
        map_folder(tmp_path)
