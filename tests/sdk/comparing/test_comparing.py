"""Comparison of folders: by tensor and by layer, in pieces of any size."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from weighbridge._comparing.comparing import compare
from weighbridge._comparing.differences import layer_of
from weighbridge._comparing.pictures import FORMATS, check_picture, draw_layers
from weighbridge._comparing.sides import FolderSide
from weighbridge._core.layouts import Shard
from weighbridge.errors import DataLoss, InvalidArgument, NotFound


def tensors() -> dict[str, Tensor]:
    torch.manual_seed(3)
    shapes = {
        "model.embed.weight": (37, 5),
        "model.layers.2.mlp.up.weight": (7, 3, 11),
        "model.layers.10.mlp.up.weight": (64,),
        "model.layers.10.mlp.codes": (),
        "model.norm.weight": (0,),
    }
    made = {name: torch.randn(shape).to(torch.bfloat16) for name, shape in shapes.items()}
    made["model.layers.10.mlp.codes"] = torch.tensor(7, dtype=torch.int32)
    return made


def folder(path: Path, content: dict[str, Tensor]) -> FolderSide:
    path.mkdir()
    save_file(content, path / "model.safetensors")
    return FolderSide.map(path)


@pytest.fixture
def changed(tmp_path: Path) -> tuple[FolderSide, FolderSide, dict[str, Tensor], dict[str, Tensor]]:
    before, after = tensors(), {name: each.clone() for name, each in tensors().items()}
    after["model.embed.weight"][4:, 1] += 1
    after["model.layers.2.mlp.up.weight"][6, 2, 10] = -30
    after["model.layers.10.mlp.codes"] += 1000
    return folder(tmp_path / "a", before), folder(tmp_path / "b", after), before, after


@pytest.mark.parametrize("piece_bytes", [1, 6, 64, 1 << 20])
def test_each_tensor_is_compared_whole_in_pieces_of_any_size(
    changed: tuple[FolderSide, FolderSide, dict[str, Tensor], dict[str, Tensor]], piece_bytes: int
) -> None:
    left, right, before, after = changed
    seen: list[tuple[int, int]] = []
    found = compare(left, right, piece_bytes=piece_bytes, on_progress=lambda *at: seen.append(at))
    assert {each.spec.name for each in found.tensors} == before.keys()
    for each in found.tensors:
        old, new = before[each.spec.name].double(), after[each.spec.name].double()
        assert each.found.elements == old.numel(), each
        assert each.found.changed == int((old != new).sum()), each
        assert each.found.step == (float((old - new).abs().max()) if old.numel() else 0), each
    nbytes = sum(each.numel() * each.element_size() for each in before.values())
    assert seen[0] == (0, nbytes)
    assert seen[-1] == (nbytes, nbytes)
    assert seen == sorted(seen)


def test_layers_are_sums_of_their_tensors_in_the_order_of_their_numbers(
    changed: tuple[FolderSide, FolderSide, dict[str, Tensor], dict[str, Tensor]],
) -> None:
    left, right, before, after = changed
    found = compare(left, right)
    assert [layer.name for layer in found.layers] == [
        "model.embed", "model.layers.2", "model.layers.10", "model.norm",
    ]  # fmt: skip
    ten = found.layers[2]
    assert (ten.tensors, ten.found.elements, ten.found.changed) == (2, 65, 1)
    assert ten.found.step == 0, "the step of an integer is none of a weight"
    assert found.total.changed == sum(int((before[n] != after[n]).sum()) for n in before)
    expected = before["model.layers.2.mlp.up.weight"].double() - after["model.layers.2.mlp.up.weight"].double()
    assert found.total.step == float(expected.abs().max())
    assert [each.spec.name for each in found.most_changed(2)] == [
        "model.layers.10.mlp.codes", "model.embed.weight",
    ]  # fmt: skip


def test_what_only_one_side_has_or_has_otherwise_is_named_and_not_compared(tmp_path: Path) -> None:
    before, after = tensors(), tensors()
    after["model.embed.weight"] = after["model.embed.weight"].float()
    after["model.layers.2.mlp.up.weight"] = after["model.layers.2.mlp.up.weight"].reshape(11, 3, 7)
    after["lm_head"] = after.pop("model.norm.weight")
    found = compare(folder(tmp_path / "a", before), folder(tmp_path / "b", after))
    assert (found.only_before, found.only_after) == (("model.norm.weight",), ("lm_head",))
    assert {each.before.name: (each.before.dtype.name, each.after.dtype.name) for each in found.others} == {
        "model.embed.weight": ("BF16", "F32"),
        "model.layers.2.mlp.up.weight": ("BF16", "BF16"),
    }
    assert {each.spec.name for each in found.tensors} == {
        "model.layers.10.mlp.up.weight", "model.layers.10.mlp.codes",
    }  # fmt: skip
    assert not found.total.changed


@dataclass(frozen=True)
class Digested:
    """A folder of whose tensors digests are known; says which of them are read."""

    folder: FolderSide
    digests: dict[str, str]
    read_of: list[str] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.folder, name)

    def read(self, shards: Sequence[Shard]) -> Iterator[np.ndarray]:
        self.read_of.extend(shard.tensor for shard in shards)
        return self.folder.read(shards)


def test_tensors_with_equal_digests_are_not_read(
    changed: tuple[FolderSide, FolderSide, dict[str, Tensor], dict[str, Tensor]],
) -> None:
    left, right, before, after = changed
    same = {name for name in before if torch.equal(before[name], after[name])}
    left, right = (
        Digested(side, {n: n if n in same else f"{n} of {side.title}" for n in before}) for side in (left, right)
    )
    plain, found = compare(left.folder, right.folder), compare(left, right)
    assert set(left.read_of) == set(right.read_of) == before.keys() - same
    assert found.tensors == plain.tensors
    assert found.bytes_read + found.bytes_known == plain.bytes_read
    assert found.bytes_known == sum(before[n].numel() * before[n].element_size() for n in same)


def test_a_tensor_whose_digest_one_side_does_not_know_is_read(tmp_path: Path) -> None:
    left = Digested(folder(tmp_path / "a", tensors()), {"model.embed.weight": "1"})
    right = folder(tmp_path / "b", tensors())
    found = compare(left, right)
    assert "model.embed.weight" in left.read_of
    assert found.bytes_known == 0


def test_the_layer_of_a_tensor_ends_in_the_first_number_of_its_name() -> None:
    layers = {
        "model.layers.3.mlp.experts.17.up_proj.weight": "model.layers.3",
        "optimizer.exp_avg.model.layers.3.mlp.weight": "optimizer.exp_avg.model.layers.3",
        "transformer.h.11.attn.c_attn.bias": "transformer.h.11",
        "model.embed_tokens.weight": "model.embed_tokens",
        "lm_head.weight": "lm_head",
        "lm_head": "lm_head",
    }
    assert {name: layer_of(name) for name in layers} == layers


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no safetensors"):
        FolderSide.map(tmp_path)


@pytest.mark.parametrize("suffix", FORMATS)
def test_a_picture_has_the_format_of_its_name(
    tmp_path: Path, suffix: str, changed: tuple[FolderSide, FolderSide, dict[str, Tensor], dict[str, Tensor]]
) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / f"picture{suffix}"
    check_picture(path)
    draw_layers(compare(*changed[:2]), path)
    begins = {".png": b"\x89PNG\r\n", ".svg": b"<?xml", ".pdf": b"%PDF-"}
    assert path.read_bytes().startswith(begins[suffix])
    if suffix == ".svg":
        assert b"elements changed" in path.read_bytes() or b"<use" in path.read_bytes()


def test_a_picture_of_another_format_is_refused_at_once() -> None:
    with pytest.raises(InvalidArgument, match=r"picture\.gif"):
        check_picture(Path("picture.gif"))


def test_nothing_to_compare_is_no_difference(tmp_path: Path) -> None:
    path = folder(tmp_path / "a", {"x.weight": torch.zeros(3)})
    found = compare(path, folder(tmp_path / "b", {"y.weight": torch.zeros(3)}))
    assert (found.total.elements, found.total.fraction) == (0, 0.0)
    assert not math.isnan(found.total.step)


def header(entries: object, data: bytes = b"", announced: int | None = None) -> bytes:
    """A safetensors file with this header, whatever it says."""
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return (len(text) if announced is None else announced).to_bytes(8, "little") + text + data


def entry(dtype: str = "F32", shape: object = (2,), offsets: object = (0, 8)) -> dict[str, object]:
    return {"a": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


@pytest.mark.parametrize(
    "content",
    [
        b"abc", b"", header(entry(), bytes(8), announced=1 << 60), header(entry(offsets=(8, 16)), bytes(16)),
        header(entry(shape=(200,), offsets=(0, 800)), bytes(8)), header(entry(shape=(1 << 40, 1 << 40)), bytes(8)),
        header(entry(shape=(-1, -2)), bytes(8)), header(entry(shape=(0, 10**300), offsets=(0, 0))), header(b"[" * 100_000),
        header(entry(dtype="F4"), bytes(8)), header({"a\x1b[2J": entry()["a"]}, bytes(8)), header([]), header({"a": 3}),
    ],
    ids=["short", "empty", "long header", "gap", "beyond the end", "huge", "negative", "no integer of 64 bits", "deep", "dtype", "name",
         "a list", "no entry"],
)  # fmt: skip
def test_a_header_that_lies_is_refused_with_its_path(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises((DataLoss, InvalidArgument)) as refused:
        FolderSide.map(tmp_path)
    assert str(tmp_path / "model.safetensors") in refused.value.message
    assert len(refused.value.message) < 1000


def test_what_is_no_file_of_weights_is_not_waited_for(tmp_path: Path) -> None:
    weights, index = tmp_path / "model.safetensors", tmp_path / "model.safetensors.index.json"
    os.mkfifo(weights)
    with pytest.raises(DataLoss, match="is not a regular file"):
        FolderSide.map(tmp_path)
    weights.unlink()
    weights.symlink_to("/dev/zero")
    with pytest.raises(DataLoss, match="is not a regular file"):
        FolderSide.map(tmp_path)
    os.mkfifo(index)
    with pytest.raises(DataLoss, match=r"index\.json is not a regular file"):
        FolderSide.map(tmp_path)
    index.unlink()
    with index.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(DataLoss, match="1099511627776 bytes, too many for an index"):
        FolderSide.map(tmp_path)
    index.write_text(json.dumps({"weight_map": {"a": "../model.safetensors"}}))
    with pytest.raises(DataLoss, match="outside"):
        FolderSide.map(tmp_path)
    weights.unlink()
    index.write_text(json.dumps({"weight_map": {"a": "model-00001-of-00002.safetensors"}}))
    with pytest.raises(NotFound, match="model-00001-of-00002") as missing:
        FolderSide.map(tmp_path)
    assert missing.value.fix
