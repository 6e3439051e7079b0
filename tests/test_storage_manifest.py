"""Does a manifest say what lies in the files, and is one that does not noticed?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from blake3 import blake3
from safetensors import safe_open
from safetensors.numpy import save_file

from weighbridge.dtypes import from_safetensors
from weighbridge.errors import DataLoss, InvalidArgument
from weighbridge_storage.manifest import FileEntry, Manifest, TensorEntry
from weighbridge_storage.names import ModelName

NAMES = {"float32": "F32", "int64": "I64", "uint8": "U8"}


def manifest_of(folder: Path) -> tuple[Manifest, dict[str, np.ndarray]]:
    """A manifest of a file that safetensors itself wrote, with offsets found by searching for the bytes."""
    rng = np.random.default_rng(3)
    tensors: dict[str, np.ndarray] = {
        "model.norm.weight": rng.standard_normal(7).astype(np.float32),
        "steps": rng.integers(1 << 40, 1 << 50, (2, 3)),
        "flag": np.array(200, dtype=np.uint8),
        "empty": np.zeros((0, 4), dtype=np.float32),
    }
    save_file(tensors, folder / "model.safetensors")
    content = (folder / "model.safetensors").read_bytes()
    (folder / "config.json").write_bytes(b"{}")
    return (
        Manifest(
            model=ModelName("acme", "smol"),
            version=17,
            step=1700,
            run="run 1",
            created_ms=1_767_225_600_000,
            files={
                name: FileEntry(
                    (folder / name).stat().st_size,
                    xxhash.xxh3_128_hexdigest((folder / name).read_bytes()),
                    # a file of one block: the digest of the block's digest
                    blake3(blake3((folder / name).read_bytes()).digest()).hexdigest(),
                )
                for name in ("model.safetensors", "config.json")
            },
            tensors={
                name: TensorEntry(
                    from_safetensors(NAMES[str(value.dtype)]),
                    value.shape,
                    "model.safetensors",
                    content.rindex(value.tobytes()),
                    value.nbytes,
                    xxhash.xxh3_128_hexdigest(value.tobytes()),
                    nonfinite=2 if name == "model.norm.weight" else 0,
                )
                for name, value in tensors.items()
            },
            lineage={"parent": 16, "reason": "training"},
        ),
        tensors,
    )


def test_what_is_written_reads_back_the_same_and_finds_the_tensors(tmp_path: Path) -> None:
    manifest, tensors = manifest_of(tmp_path)
    read = Manifest.from_json(manifest.to_json())
    assert read == manifest
    with safe_open(tmp_path / "model.safetensors", "np") as file:
        content = (tmp_path / "model.safetensors").read_bytes()
        for name, entry in read.tensors.items():
            piece = content[entry.offset : entry.offset + entry.nbytes]
            found = np.frombuffer(piece, dtype=tensors[name].dtype).reshape(entry.shape)
            np.testing.assert_array_equal(found, file.get_tensor(name))
            assert entry.dtype.name == file.get_slice(name).get_dtype()


def test_digests_are_those_of_the_reference_implementation() -> None:
    # `xxhsum -H128` of an empty file.
    assert xxhash.xxh3_128_hexdigest(b"") == "99aa06d3014798d86001c324468d497f"


BREAKS: list[Any] = [
    lambda d: d.update(format=2),
    lambda d: d.update(model="../../etc"),
    lambda d: d.update(model="smol"),
    lambda d: d.update(version=0),
    lambda d: d.update(version=10**12),
    lambda d: d.update(step="1"),
    lambda d: d.update(extra={}),
    lambda d: d["files"].update({"../config.json": d["files"]["config.json"]}),
    lambda d: d["files"].update({"weighbridge.json": d["files"]["config.json"]}),
    lambda d: d["files"]["config.json"].update(size=-1),
    lambda d: d["files"]["config.json"].update(xxh3_128="A" * 32),
    lambda d: d["files"]["config.json"].update(xxh3_128="0" * 31),
    lambda d: d["files"]["config.json"].update(blake3="0" * 63),
    lambda d: d["files"]["config.json"].update(blake3="g" * 64),
    lambda d: d["files"]["config.json"].pop("blake3"),
    lambda d: d["files"]["config.json"].update(md5="0"),
    lambda d: d["files"].update({"config.json": []}),
    lambda d: d["files"].pop("model.safetensors"),
    lambda d: d["files"]["model.safetensors"].update(size=100),
    lambda d: d["tensors"]["steps"].update(dtype="F128"),
    lambda d: d["tensors"]["steps"].update(dtype="I32"),
    lambda d: d["tensors"]["steps"].update(shape=[2, -3]),
    lambda d: d["tensors"]["steps"].update(shape=[-2, -3]),
    lambda d: d["tensors"]["steps"].update(shape=[2, True, 3]),
    lambda d: d["tensors"]["steps"].update(shape=[2.0, 3]),
    lambda d: d["tensors"]["steps"].update(shape=6),
    lambda d: d["tensors"]["steps"].update(shape=[1] * 9),
    lambda d: d["tensors"]["steps"].update(shape=[10**30, 10**30]),
    lambda d: d["tensors"]["steps"].update(nbytes=47),
    lambda d: d["tensors"]["steps"].update(offset=-1),
    lambda d: d["tensors"]["steps"].update(offset=10**9),
    lambda d: d["tensors"]["steps"].update(offset=d["tensors"]["model.norm.weight"]["offset"]),
    lambda d: d["tensors"]["steps"].update(file="config.json"),
    lambda d: d["tensors"]["steps"].update(file="/etc/passwd"),
    lambda d: d["tensors"]["steps"].update(xxh3_128=""),
    lambda d: d["tensors"]["steps"].update(nonfinite=-1),
    lambda d: d["tensors"]["steps"].update(nonfinite=7),
    lambda d: d["tensors"].update({"a\nb": d["tensors"].pop("steps")}),
    lambda d: d["tensors"].update({"": d["tensors"].pop("steps")}),
    lambda d: d.update(lineage=[]),
    lambda d: d["lineage"].update(parent=None),
    lambda d: d["lineage"].update(parent=True),
    lambda d: d["lineage"].update(parent={"a": 1}),
    lambda d: d["tensors"]["steps"].update(more=1),
    *[
        lambda d, name=name: d["tensors"]["steps"].pop(name)
        for name in ("dtype", "shape", "file", "offset", "nbytes", "xxh3_128", "nonfinite")
    ],
    *[
        lambda d, name=name: d.pop(name)
        for name in ("format", "model", "version", "step", "run", "created_ms", "files", "tensors", "lineage")
    ],
]


@pytest.mark.parametrize("number", range(len(BREAKS)))
def test_a_manifest_that_contradicts_itself_is_data_loss(tmp_path: Path, number: int) -> None:
    document = json.loads(manifest_of(tmp_path)[0].to_json())
    BREAKS[number](document)
    with pytest.raises(DataLoss) as caught:
        Manifest.from_json(json.dumps(document).encode(), "the manifest of acme/smol@17")
    assert "the manifest of acme/smol@17" in str(caught.value)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("text", [b"", b"[]", b"\xff", b'{"a": 1, "a": 1}', b"[" * 100_000])
def test_text_that_is_no_manifest_is_data_loss(text: bytes) -> None:
    with pytest.raises(DataLoss):
        Manifest.from_json(text)


def test_a_manifest_with_overlapping_tensors_cannot_be_made(tmp_path: Path) -> None:
    manifest, _ = manifest_of(tmp_path)
    twice = {**manifest.tensors, "again": manifest.tensors["steps"]}
    with pytest.raises(InvalidArgument, match="share bytes"):
        Manifest(manifest.model, 1, 0, "", 0, manifest.files, twice)
