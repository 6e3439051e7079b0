"""Does verification say which bytes of which file are damaged, and does what replicas hand in to each other survive
whole?
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from weighbridge._core.dtypes import parse
from weighbridge._core.layouts import TensorSpec
from weighbridge._formats.safetensors_files import lay_out_files
from weighbridge.errors import DataLoss, FailedPrecondition
from weighbridge_storage.documents.entries import OpenEntry
from weighbridge_storage.documents.names import ModelName, version_prefix
from weighbridge_storage.stores.local import LocalStore
from weighbridge_storage.versions.digests import digest_file
from weighbridge_storage.versions.verifying import verify_version
from weighbridge_storage.versions.writing import (
    Written,
    write_block_digests,
    write_manifest,
    write_side_files,
    write_weights,
)

MIB = 1 << 20
MODEL = ModelName("acme", "smol")
FILE = "model.safetensors"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LocalStore]:
    opened = LocalStore(tmp_path / "store")
    yield opened
    opened.close()


@pytest.fixture
def written(store: LocalStore) -> Written:
    """Version 1: a file of three and a half blocks, and a config."""
    files = lay_out_files(
        [TensorSpec("first", parse("bf16"), (MIB,)), TensorSpec("second", parse("u8"), (3 * MIB // 2,))]
    )
    (file,) = files.files
    body = np.random.default_rng(5).integers(0, 256, file.nbytes - len(file.header), dtype=np.uint8)
    data = np.concatenate([np.frombuffer(file.header, np.uint8), body])
    digests = digest_file(files, FILE, data, lambda: None)
    write_weights(store, MODEL, 1, FILE, data, lambda: None)
    write_block_digests(store, MODEL, 1, FILE, digests)
    found = Written.of({FILE: digests})
    store.put("config", b"{}", mode="create")
    found |= write_side_files(store, MODEL, 1, files, {"config.json": "config"})
    write_manifest(store, MODEL, OpenEntry(1, "r", 1, "", 1, 0, 0, "", 0), found)
    return found


@pytest.fixture
def folder(tmp_path: Path, written: Written) -> Path:
    return tmp_path / "store" / version_prefix(MODEL, 1)


def spoil(path: Path, *places: int) -> None:
    content = bytearray(path.read_bytes())
    for place in places:
        content[place] ^= 1
    path.write_bytes(content)


def problems(store: LocalStore) -> tuple[str, ...]:
    return verify_version(store, MODEL, 1).problems


def test_what_was_written_is_as_its_manifest_says(store: LocalStore, written: Written) -> None:
    found = verify_version(store, MODEL, 1)
    assert found.problems == ()
    assert found.tensors_checked == 2
    assert found.bytes_checked == written.files[FILE].size + 2


@pytest.mark.parametrize(
    ("places", "tensors", "told"),
    [
        ([MIB], ["first"], f"between bytes {MIB} and {2 * MIB}; 1 of its 4 blocks are"),
        ([2 * MIB - 1], ["first"], f"between bytes {MIB} and {2 * MIB}; 1 of its 4 blocks are"),
        ([-1], ["second"], f"between bytes {3 * MIB} and {{size}}; 1 of its 4 blocks are"),
        ([5000, -1], ["first", "second"], f"between bytes 0 and {MIB}; 2 of its 4 blocks are"),
        ([3], [], f"between bytes 0 and {MIB}; 1 of its 4 blocks are"),  # in the header
    ],
)
def test_the_first_damaged_block_is_named(
    store: LocalStore, folder: Path, written: Written, places: list[int], tensors: list[str], told: str
) -> None:
    spoil(folder / FILE, *places)
    assert problems(store) == (
        *(f"tensor {tensor} in {FILE} does not agree with its digest" for tensor in tensors),
        f"{FILE} does not agree with its digest",
        f"{FILE} is damaged " + told.format(size=written.files[FILE].size),
    )


def test_damaged_and_missing_block_digests_are_told_from_damaged_weights(store: LocalStore, folder: Path) -> None:
    blocks = folder / f"{FILE}.blake3"
    good = blocks.read_bytes()
    for bad in (b"", good[:-1], good + b"\0", good[32:] + good[:32]):
        blocks.write_bytes(bad)
        assert problems(store) == (f"{FILE}.blake3 does not agree with the manifest",)
    blocks.unlink()
    assert problems(store) == (f"{FILE}.blake3 is missing from the store",)


def test_other_files_are_compared_too(store: LocalStore, folder: Path) -> None:
    spoil(folder / "config.json", 0)
    assert problems(store) == ("config.json does not agree with its digest",)
    (folder / "config.json").write_bytes(b"")
    assert problems(store) == ("config.json has 0 bytes instead of 2",)


# -- between replicas ------------------------------------------------------------------------------------------------


def test_what_a_replica_hands_in_is_read_whole_also_that_of_a_later_release(written: Written) -> None:
    text = json.loads(written.to_json("the claim"))
    assert Written.from_json(json.dumps(text).encode(), "it") == ("the claim", written)
    text["files"][FILE]["blake2b"] = "0" * 64
    text["tensors"]["first"]["scale"] = {"block": 128}
    text["new"] = 1
    _, found = Written.from_json(json.dumps(text).encode(), "it")
    assert found.files[FILE].extra == {"blake2b": "0" * 64}
    assert found.tensors["first"].extra == {"scale": {"block": 128}}
    again = json.loads(found.to_json("the claim"))
    assert (again["files"], again["tensors"]) == (text["files"], text["tensors"])


def test_what_a_replica_hands_in_may_require_what_is_lacking_here(written: Written) -> None:
    text = json.loads(written.to_json("the claim"))
    text["requires"] = ["base"]
    with pytest.raises(FailedPrecondition, match="it requires 'base'"):
        Written.from_json(json.dumps(text).encode(), "it")
    text["requires"] = []
    text["tensors"]["first"]["dtype"] = "F3"
    with pytest.raises(DataLoss, match="it is malformed"):
        Written.from_json(json.dumps(text).encode(), "it")
