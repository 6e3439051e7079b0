"""Are the digests of a file those of the algorithms they are named for, and is no non-finite element missed?"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash
from blake3 import blake3

from weighbridge._core.dtypes import DTYPES, DType, parse
from weighbridge._core.layouts import TensorSpec
from weighbridge._core.nonfinite import NonfiniteCounter, encoding_of
from weighbridge._formats.safetensors_files import FilesLayout, lay_out_files
from weighbridge_storage.documents.names import ModelName
from weighbridge_storage.stores.local import LocalStore
from weighbridge_storage.versions.digests import (
    FileDigester,
    FileDigests,
    block_digests,
    digest_bytes,
    digest_file,
    root_of,
)
from weighbridge_storage.versions.manifest import Manifest
from weighbridge_storage.versions.writing import (
    Written,
    copy_weights,
    differs_from,
    write_block_digests,
    write_weights,
)

MIB = 1 << 20
FLOATS = ("F8_E4M3", "F8_E5M2", "F8_E8M0", "F16", "BF16", "F32", "F64", "C64")


def goes_on() -> None:
    pass


def nonfinite_by_torch(dtype: DType, data: np.ndarray) -> int:
    tensor = torch.from_numpy(data.copy()).view(dtype.torch)
    widened = tensor.float() if dtype.itemsize == 1 else tensor
    return int((~torch.isfinite(widened)).sum())


def count(dtype: DType, data: np.ndarray) -> int:
    counter = NonfiniteCounter(encoding_of(dtype))
    counter.update(data)
    return counter.count


def model() -> tuple[FilesLayout, np.ndarray]:
    """Tensors of all dtypes, some without elements and some over several blocks, with random bits in them."""
    rng = np.random.default_rng(7)
    specs = [TensorSpec(f"{dtype.short}.{n}", dtype, (n, 3)) for dtype in DTYPES for n in (0, 1, 1001)]
    specs += [
        TensorSpec("embedding", parse("bf16"), (600_000, 3)),
        TensorSpec("head", parse("fp32"), (300_000, 1)),
    ]
    files = lay_out_files(specs)
    (file,) = files.files
    data = rng.integers(0, 256, file.nbytes, dtype=np.uint8)
    data[: len(file.header)] = np.frombuffer(file.header, np.uint8)
    return files, data


def check(found: FileDigests, files: FilesLayout, data: np.ndarray) -> None:
    content = data.tobytes()
    assert found.entry.size == len(content)
    assert found.entry.xxh3_128 == xxhash.xxh3_128_hexdigest(content)
    blocks = [blake3(content[start : start + MIB]).digest() for start in range(0, len(content), MIB)]
    assert found.blocks == b"".join(blocks)
    assert found.entry.blake3 == blake3(found.blocks).hexdigest()
    assert found.tensors.keys() == files.layout.tensors.keys()
    for p in files.layout.placements:
        spec, entry = files.layout.tensors[p.shard.tensor], found.tensors[p.shard.tensor]
        part = data[p.offset : p.offset + p.nbytes]
        assert (entry.dtype, entry.shape, entry.file) == (spec.dtype, spec.shape, "model.safetensors")
        assert (entry.offset, entry.nbytes) == (p.offset, p.nbytes)
        assert entry.xxh3_128 == xxhash.xxh3_128_hexdigest(part.tobytes())
        assert entry.nonfinite == (
            nonfinite_by_torch(spec.dtype, part) if spec.dtype.name in FLOATS and p.nbytes else 0
        )
    assert found.nonfinite == {name: t.nonfinite for name, t in found.tensors.items() if t.nonfinite}
    assert found.nonfinite["embedding"] > 1000


def test_one_pass_gives_what_each_algorithm_gives_alone() -> None:
    files, data = model()
    check(digest_file(files, "model.safetensors", data, goes_on), files, data)


@pytest.mark.parametrize("largest", [13, 70_001, 3 * MIB])
def test_it_does_not_matter_how_a_file_comes_in_pieces(largest: int) -> None:
    files, data = model()
    data = data[: 200_000 if largest == 13 else None]
    spans = [
        (files.layout.tensors[p.shard.tensor], p.offset)
        for p in files.layout.placements
        if p.offset + p.nbytes <= len(data)
    ]
    whole = FileDigester("model.safetensors", spans)
    whole.update(data.data)
    pieces = FileDigester("model.safetensors", spans)
    rng = np.random.default_rng(largest)
    position = 0
    while position < len(data):
        size = int(rng.integers(1, largest + 1))
        pieces.update(data[position : position + size].data)
        position += size
    found = pieces.finish()
    assert found == whole.finish()
    assert found.blocks == block_digests(data.tobytes())
    assert found.nonfinite


def test_a_pass_ends_with_what_the_caller_raises() -> None:
    files, data = model()

    def stop() -> None:
        raise KeyError("stopped")

    with pytest.raises(KeyError):
        digest_file(files, "model.safetensors", data, stop)


@pytest.mark.parametrize(
    ("content", "digest"),
    [
        (b"", "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"),
        (b"\0", "2d3adedff11b61f14c886e35afa036736dcd87a74d27b5c1510225d0f592e213"),
        (b"abc", "6437b3ac38465133ffb63b75273a8db548c558465d79db03fd359c6cd5bd9d85"),
    ],
)
def test_blocks_are_digested_as_the_authors_of_blake3_publish_it(content: bytes, digest: str) -> None:
    assert block_digests(content).hex() == (digest if content else "")
    assert root_of(content) == digest
    assert digest_bytes(content).blake3 == root_of(bytes.fromhex(digest) if content else b"")


@pytest.mark.parametrize("name", [n for n in FLOATS if parse(n).itemsize <= 2])
def test_every_bit_pattern_of_a_small_dtype_is_finite_if_torch_says_so(name: str) -> None:
    dtype = parse(name)
    patterns = np.arange(1 << (8 * dtype.itemsize), dtype=f"<u{dtype.itemsize}")
    tensor = torch.from_numpy(patterns.view(np.uint8)).view(dtype.torch)
    expected = (~torch.isfinite(tensor.float())).tolist()
    found = [count(dtype, patterns[i : i + 1].view(np.uint8)) for i in range(len(patterns))]
    assert found == expected
    assert 0 < sum(found) < len(found)
    assert count(dtype, patterns.view(np.uint8)) == sum(expected)


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), -0.0, 1e-45, 3e38, -3e38])
def test_one_element_among_many_is_found_wherever_it_is(name: str, value: float) -> None:
    dtype = parse(name)
    rng = np.random.default_rng(1)
    ordinary = torch.from_numpy(rng.uniform(-3, 3, 5000)).to(dtype.torch)
    one = torch.tensor(value, dtype=torch.float64).to(dtype.torch)
    for place in (0, 1, 2500, 4999):
        tensor = ordinary.clone().view(torch.uint8).reshape(5000, dtype.itemsize)
        tensor[place] = one.reshape(1).view(torch.uint8)
        data = tensor.flatten().numpy()
        assert count(dtype, data) == nonfinite_by_torch(dtype, data)


@pytest.mark.parametrize("name", FLOATS)
def test_random_bits_are_counted_as_torch_counts_them(name: str) -> None:
    dtype = parse(name)
    rng = np.random.default_rng(2)
    exponent = {"F32": 0x7F80_0000, "C64": 0x7F80_0000, "F64": 0x7FF0_0000_0000_0000}.get(name)
    for length in (1, 2, 77, 100_000):
        data = rng.integers(0, 256, length * dtype.itemsize, dtype=np.uint8)
        if exponent is not None:  # random bits of wide dtypes are hardly ever non-finite
            wide = data.view(f"<u{8 if name == 'F64' else 4}")
            wide[rng.random(len(wide)) < 0.3] |= exponent
        assert count(dtype, data) == nonfinite_by_torch(dtype, data)


def test_integers_have_no_non_finite_elements() -> None:
    for dtype in DTYPES:
        if dtype.name not in FLOATS:
            assert count(dtype, np.full(64, 0xFF, np.uint8)) == 0


# -- in a store -------------------------------------------------------------------------------------------------------


FILE = "model.safetensors"
NAME = ModelName("acme", "smol")


def version_of(files: FilesLayout, data: np.ndarray) -> Manifest:
    """Version 1, of one file."""
    written = Written.of({FILE: digest_file(files, FILE, data, goes_on)})
    return Manifest(NAME, 1, 0, "", 0, written.files, written.tensors)


def test_block_digests_lie_beside_the_file_and_a_file_of_the_parent_is_copied(tmp_path: Path) -> None:
    files, data = model()
    digests = digest_file(files, FILE, data, goes_on)
    folders = [tmp_path / "models/acme/smol/versions" / f"{number:012d}" for number in (1, 2)]
    parent = version_of(files, data)
    with closing(LocalStore(tmp_path)) as store:
        assert not copy_weights(store, NAME, 2, FILE, digests, parent), "it is not there"
        write_weights(store, NAME, 1, FILE, data, goes_on)
        assert copy_weights(store, NAME, 2, FILE, digests, parent)
        other = digest_file(files, FILE, np.roll(data, 1), goes_on)
        assert not copy_weights(store, NAME, 2, FILE, other, parent), "it is not the same"
        for number in (1, 2):
            write_block_digests(store, NAME, number, FILE, digests)
    for folder in folders:
        assert (folder / FILE).read_bytes() == data.tobytes()
        assert (folder / f"{FILE}.blake3").read_bytes() == digests.blocks
        assert sorted(path.name for path in folder.iterdir()) == [FILE, f"{FILE}.blake3"]


def test_a_file_differs_for_certain_if_one_of_its_tensors_does() -> None:
    files, data = model()
    parent = version_of(files, data)
    assert not differs_from(parent, FILE, data, goes_on)
    assert differs_from(parent, "another.safetensors", data, goes_on)
    assert differs_from(parent, FILE, data[:-1], goes_on)
    for place in (p for p in files.layout.placements if p.nbytes):
        for byte in (place.offset, place.offset + place.nbytes - 1):
            changed = data.copy()
            changed[byte] ^= 1
            assert differs_from(parent, FILE, changed, goes_on)
