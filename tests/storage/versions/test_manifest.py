"""Does a manifest say what lies in the files, and is one that does not noticed?"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import save_file

from tests.support.heads import text_of
from weighbridge._core.dtypes import from_safetensors
from weighbridge._formats.safetensors_files import layout_of_files
from weighbridge.errors import DataLoss, FailedPrecondition, InvalidArgument
from weighbridge_storage.documents.entries import OpenEntry
from weighbridge_storage.documents.names import ModelName, version_key, version_prefix
from weighbridge_storage.stores.local import LocalStore
from weighbridge_storage.stores.objects import ObjectStore
from weighbridge_storage.versions.digests import digest_bytes, digest_file
from weighbridge_storage.versions.manifest import FileEntry, Manifest, TensorEntry
from weighbridge_storage.versions.writing import (
    Written,
    write_block_digests,
    write_manifest,
    write_side_files,
    write_weights,
)

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
            metadata={"loss": 1.25, "tokens": 10**18, "final": True, "data": "fineweb, é"},
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


def weights(document: Any) -> Any:
    return document["parts"]["weights"]


BREAKS: list[Any] = [
    lambda d: d.update(model="../../etc"),
    lambda d: d.update(model="smol"),
    lambda d: d.update(version=0),
    lambda d: d.update(version=10**12),
    lambda d: d.update(step="1"),
    lambda d: weights(d)["files"].update({"../config.json": weights(d)["files"]["config.json"]}),
    lambda d: weights(d)["files"].update({"weighbridge.json": weights(d)["files"]["config.json"]}),
    lambda d: weights(d)["files"].update({"model.safetensors.blake3": weights(d)["files"]["config.json"]}),
    lambda d: weights(d)["files"]["config.json"].update(size=-1),
    lambda d: weights(d)["files"]["config.json"].update(xxh3_128="A" * 32),
    lambda d: weights(d)["files"]["config.json"].update(xxh3_128="0" * 31),
    lambda d: weights(d)["files"]["config.json"].update(blake3="0" * 63),
    lambda d: weights(d)["files"]["config.json"].update(blake3="g" * 64),
    lambda d: weights(d)["files"]["config.json"].pop("blake3"),
    lambda d: weights(d)["files"].update({"config.json": []}),
    lambda d: weights(d)["files"].pop("model.safetensors"),
    lambda d: weights(d)["files"]["model.safetensors"].update(size=100),
    lambda d: weights(d)["tensors"]["steps"].update(dtype="F128"),
    lambda d: weights(d)["tensors"]["steps"].update(dtype="I32"),
    lambda d: weights(d)["tensors"]["steps"].update(shape=[2, -3]),
    lambda d: weights(d)["tensors"]["steps"].update(shape=[-2, -3]),
    lambda d: weights(d)["tensors"]["steps"].update(shape=[2, True, 3]),
    lambda d: weights(d)["tensors"]["steps"].update(shape=[2.0, 3]),
    lambda d: weights(d)["tensors"]["steps"].update(shape=6),
    lambda d: weights(d)["tensors"]["steps"].update(shape=[1] * 9),
    lambda d: weights(d)["tensors"]["steps"].update(shape=[10**30, 10**30]),
    lambda d: weights(d)["tensors"]["steps"].update(nbytes=47),
    lambda d: weights(d)["tensors"]["steps"].update(offset=-1),
    lambda d: weights(d)["tensors"]["steps"].update(offset=10**9),
    lambda d: weights(d)["tensors"]["steps"].update(offset=weights(d)["tensors"]["model.norm.weight"]["offset"]),
    lambda d: weights(d)["tensors"]["steps"].update(file="config.json"),
    lambda d: weights(d)["tensors"]["steps"].update(file="/etc/passwd"),
    lambda d: weights(d)["tensors"]["steps"].update(xxh3_128=""),
    lambda d: weights(d)["tensors"]["steps"].update(nonfinite=-1),
    lambda d: weights(d)["tensors"]["steps"].update(nonfinite=7),
    lambda d: weights(d)["tensors"].update({"a\nb": weights(d)["tensors"].pop("steps")}),
    lambda d: weights(d)["tensors"].update({"": weights(d)["tensors"].pop("steps")}),
    lambda d: d.update(lineage=[]),
    lambda d: d["lineage"].update(parent=None),
    lambda d: d["lineage"].update(parent=True),
    lambda d: d["lineage"].update(parent=0),
    lambda d: d["lineage"].update(parent="16"),
    lambda d: d.update(metadata=[]),
    lambda d: d["metadata"].update({"": 1}),
    lambda d: d["metadata"].update({"a\nb": 1}),
    lambda d: d["metadata"].update({"a" * 257: 1}),
    lambda d: d["metadata"].update(a=None),
    lambda d: d["metadata"].update(a=[1]),
    lambda d: d["metadata"].update(a={"b": 1}),
    lambda d: d["metadata"].update(a="x" * 4097),
    lambda d: d["metadata"].update(a=2**63),
    lambda d: d["metadata"].update({str(i): i for i in range(256)}),
    lambda d: d.update(requires=None),
    lambda d: d.update(requires=[1]),
    lambda d: d.update(parts=[]),
    lambda d: d["parts"].update(weights=[]),
    lambda d: d["parts"].pop("weights"),
    lambda d: weights(d).pop("files"),
    lambda d: weights(d).pop("tensors"),
    *[
        lambda d, name=name: weights(d)["tensors"]["steps"].pop(name)
        for name in ("dtype", "shape", "file", "offset", "nbytes", "xxh3_128", "nonfinite")
    ],
    *[
        lambda d, name=name: d.pop(name)
        for name in (
            "format",
            "requires",
            "model",
            "version",
            "step",
            "run",
            "created_ms",
            "parts",
            "lineage",
            "metadata",
        )
    ],
]


def test_a_manifest_is_refused_whichever_byte_of_it_is_another_one(tmp_path: Path) -> None:
    text = manifest_of(tmp_path)[0].to_json()
    for place, flips in itertools.product(range(len(text)), (0x01, 0x02, 0x10, 0xFF)):
        damaged = bytearray(text)
        damaged[place] ^= flips
        with pytest.raises(DataLoss, match=r"^weighbridge\.json "):
            Manifest.from_json(bytes(damaged))
    for cut in range(len(text)):
        with pytest.raises(DataLoss):
            Manifest.from_json(text[:cut])


@pytest.mark.parametrize("number", range(len(BREAKS)))
def test_a_manifest_that_contradicts_itself_is_data_loss(tmp_path: Path, number: int) -> None:
    document = json.loads(manifest_of(tmp_path)[0].to_json())
    BREAKS[number](document)
    with pytest.raises(DataLoss) as caught:
        Manifest.from_json(text_of(document), "the manifest of acme/smol@17")
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


# -- other releases --------------------------------------------------------------------------------------------------

unknown = st.dictionaries(
    st.text(min_size=1).map("new ".__add__),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(), inner, max_size=2),
        max_leaves=5,
    ),
    max_size=3,
)


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_what_a_later_release_has_added_anywhere_is_written_back(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    document = json.loads(manifest_of(tmp_path_factory.mktemp("hf"))[0].to_json())
    for place in (
        document,
        document["parts"],
        weights(document),
        weights(document)["files"]["config.json"],
        weights(document)["tensors"]["steps"],
        document["lineage"],
    ):
        place.update(data.draw(unknown))
    read = Manifest.from_json(text_of(document))
    written = json.loads(read.to_json())
    del written["digest"], document["digest"]
    assert written == document


def test_a_feature_that_is_lacking_here_is_refused_by_its_name(tmp_path: Path) -> None:
    document = json.loads(manifest_of(tmp_path)[0].to_json())
    document["requires"] = ["base", "signature"]
    # whatever else may be different then is not looked at
    document["parts"] = {}
    with pytest.raises(FailedPrecondition, match=r"weighbridge\.json requires 'base', 'signature'") as caught:
        Manifest.from_json(text_of(document))
    assert caught.value.fix == "use a newer Weighbridge"


@pytest.mark.parametrize("number", [1, 3])
def test_another_format_is_refused_by_its_number(tmp_path: Path, number: int) -> None:
    document = json.loads(manifest_of(tmp_path)[0].to_json())
    document["format"] = number
    with pytest.raises(FailedPrecondition, match=f"format {number}") as caught:
        Manifest.from_json(text_of(document))
    assert caught.value.fix == f"use a Weighbridge that reads format {number}"


# -- writing ---------------------------------------------------------------------------------------------------------


def test_a_manifest_is_not_replaced_by_another_one_of_the_same_files(store: ObjectStore) -> None:
    name = ModelName("acme", "smol")
    entry, content = OpenEntry(17, "r", 300, "r1", 1, 1_767_225_600_000, 0, "", 2), b'{"a": 1}'
    plain = digest_bytes(content)
    key = version_key(name, 17, "weighbridge.json")

    def write(file: FileEntry, layouts: str = "") -> Manifest:
        return write_manifest(store, name, entry, Written({"config.json": file}, {}), layouts)

    first = write(replace(plain, sha256=""))
    text, _ = store.get(key)
    # of a replica that makes other digests, or knows more of the version
    late = write(replace(plain, sha256=hashlib.sha256(content).hexdigest()), "layouts")
    assert late == first
    assert store.get(key)[0] == text
    # what is of other files, or damaged, was left by an attempt that came to nothing
    for left in (replace(first, files={"other.json": plain}).to_json(), text[:-9]):
        store.put(key, left, mode="overwrite")
        written = write(plain)
        assert Manifest.from_json(store.get(key)[0]) == written
        assert written.files == {"config.json": plain}


# -- what the documentation says -------------------------------------------------------------------------------------


def blocks_of_documentation() -> dict[str, str]:
    """The examples of docs/manifest.md by the lines above them."""
    text = (Path(__file__).parents[3] / "docs/manifest.md").read_text()
    return dict(re.findall(r"\n([^\n]+):\n\n```\n(.*?)\n```", text, re.DOTALL))


def bytes_of_dump(dump: str) -> bytes:
    """The bytes of a dump: offset, two spaces, up to 16 bytes as hexadecimal digits, two spaces, text."""
    lines = [line.split("  ") for line in dump.splitlines()]
    assert [int(line[0], 16) for line in lines] == list(range(0, 16 * len(lines), 16))
    return b"".join(bytes.fromhex(line[1]) for line in lines)


def test_the_worked_example_is_what_is_written(tmp_path: Path) -> None:
    shown = blocks_of_documentation()
    content = bytes_of_dump(shown["`model.safetensors`, 198 bytes"])
    # the file is what safetensors itself reads, and what the text says
    (tmp_path / "model.safetensors").write_bytes(content)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.get_tensor("bias").tolist() == [0.5, math.inf, -2.0]
        assert file.get_tensor("steps").tolist() == [[1, 2], [3, 4]]
    name = ModelName("acme", "tiny")
    entry = OpenEntry(3, "r", 300, "r1", 1, 1_767_225_600_000, 1_767_225_700_000, "", 2)
    files = layout_of_files({"model.safetensors": memoryview(content)})
    data = np.frombuffer(content, np.uint8)
    with closing(LocalStore(tmp_path / "store")) as store:
        store.put("config", b"{}\n", mode="create")
        digests = digest_file(files, "model.safetensors", data, lambda: None)
        write_weights(store, name, 3, "model.safetensors", data, lambda: None)
        write_block_digests(store, name, 3, "model.safetensors", digests)
        written = Written.of({"model.safetensors": digests})
        written |= write_side_files(store, name, 3, files, {"config.json": "config"})
        write_manifest(store, name, entry, written)
        folder = tmp_path / "store" / version_prefix(name, 3)
    manifest = (folder / "weighbridge.json").read_bytes()
    assert manifest.decode() == shown["`weighbridge.json`, without the line breaks"].replace("\n", "")
    blocks = (folder / "model.safetensors.blake3").read_bytes()
    assert blocks == bytes_of_dump(shown["`model.safetensors.blake3`, 32 bytes"]) == blake3(content).digest()
    found = json.loads(manifest)["parts"]["weights"]
    assert found["files"]["model.safetensors"]["blake3"] == blake3(blocks).hexdigest()
    assert found["files"]["model.safetensors"]["xxh3_128"] == xxhash.xxh3_128_hexdigest(content)


def test_the_example_of_a_root_is_right() -> None:
    zeros = bytes(2_500_000)
    text = (Path(__file__).parents[3] / "docs/manifest.md").read_text()
    found = re.search(r"has 96 bytes,\n\n```\n(.*?)\n```\n\nand the file's root is `(\w+)`", text, re.DOTALL)
    assert found
    assert found[1].split() == [blake3(zeros[i : i + 2**20]).hexdigest() for i in (0, 2**20, 2**21)]
    assert found[2] == blake3(bytes.fromhex(found[1])).hexdigest() == digest_bytes(zeros).blake3
