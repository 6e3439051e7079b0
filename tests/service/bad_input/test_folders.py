"""Local folders with damaged files or indexes: does the client push nothing of them, and leave the folder never?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.service.bad_input.bench import EMBEDDING, Bench
from tests.support.raw_clients import tiny_folder
from weighbridge.errors import DataLoss, InvalidArgument, LayoutError, NotFound


def safetensors_bytes(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(shape: Any = (2,), offsets: Any = (0, 8), dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


DAMAGED: dict[str, bytes] = {
    "empty": b"",
    "seven bytes": b"\0" * 7,
    "header of 2**60": (2**60).to_bytes(8, "little") + b"{}",
    "header of 2**64 - 1": b"\xff" * 8 + b"{}",
    "header beyond the end": (100).to_bytes(8, "little") + b"{}",
    "no JSON": safetensors_bytes(b"{"),
    "no UTF-8": safetensors_bytes(b"\xff\xff"),
    "deep": safetensors_bytes(b"[" * 100_000),
    "a list": safetensors_bytes([]),
    "a number": safetensors_bytes(5),
    "no entry": safetensors_bytes({"a": 5}),
    "twice": safetensors_bytes(
        b'{"a":' + json.dumps(entry()).encode() + b',"a":' + json.dumps(entry()).encode() + b"}", b"\0" * 8
    ),
    "overlap": safetensors_bytes({"a": entry(), "b": entry(offsets=[4, 12])}, b"\0" * 12),
    "gap": safetensors_bytes({"a": entry(), "b": entry(offsets=[12, 20])}, b"\0" * 20),
    "too short": safetensors_bytes({"a": entry()}, b"\0" * 7),
    "too long": safetensors_bytes({"a": entry()}, b"\0" * 9),
    "three offsets": safetensors_bytes({"a": entry(offsets=[0, 4, 8])}, b"\0" * 8),
    "one offset": safetensors_bytes({"a": entry(offsets=[8])}, b"\0" * 8),
    "no offsets": safetensors_bytes({"a": entry(offsets=[])}, b"\0" * 8),
    "backwards": safetensors_bytes({"a": entry(offsets=[8, 0])}, b"\0" * 8),
    "negative": safetensors_bytes({"a": entry(offsets=[-8, 0])}, b"\0" * 8),
    "infinite offset": safetensors_bytes(b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,1e999]}}', b"\0" * 8),
    "shape and offsets disagree": safetensors_bytes({"a": entry(shape=[3])}, b"\0" * 8),
    "negative shape": safetensors_bytes({"a": entry(shape=[-1, -2])}, b"\0" * 8),
    "huge shape": safetensors_bytes({"a": entry(shape=[2**62, 2**62], offsets=[0, 2**126])}, b"\0" * 8),
    "100 axes": safetensors_bytes({"a": entry(shape=[1] * 99 + [2])}, b"\0" * 8),
    "text shape": safetensors_bytes({"a": entry(shape="2")}, b"\0" * 8),
    "fraction": safetensors_bytes({"a": entry(shape=[2.5])}, b"\0" * 8),
    "unknown dtype": safetensors_bytes({"a": entry(dtype="EVIL")}, b"\0" * 8),
    "list as dtype": safetensors_bytes({"a": entry(dtype=["F32"])}, b"\0" * 8),
    "empty name": safetensors_bytes({"": entry()}, b"\0" * 8),
    "name with NUL": safetensors_bytes({"a\0": entry()}, b"\0" * 8),
}


@pytest.mark.parametrize("what", DAMAGED)
def test_a_damaged_file_is_not_pushed(bench: Bench, tmp_path: Path, model: str, what: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(DAMAGED[what])
    before = bench.trainer.versions(model, include_invisible=True)
    with pytest.raises((DataLoss, InvalidArgument)) as caught:
        bench.trainer.push_folder(model, tmp_path)
    assert len(str(caught.value)) < 2000
    assert bench.trainer.versions(model, include_invisible=True) == before


def test_a_file_cut_short_is_not_pushed(bench: Bench, tmp_path: Path, model: str) -> None:
    whole = (bench.source.folder / "model.safetensors").read_bytes()
    for length in (len(whole) - 1, len(whole) // 2, 100, 8):
        (tmp_path / "model.safetensors").write_bytes(whole[:length])
        with pytest.raises(DataLoss):
            bench.trainer.push_folder(model, tmp_path)


BAD_INDEXES: dict[str, Any] = {
    "outside": {"weight_map": {"a": "../../etc/passwd"}},
    "absolute": {"weight_map": {"a": "/etc/passwd"}},
    "parent": {"weight_map": {"a": ".."}},
    "itself": {"weight_map": {"a": "."}},
    "empty": {"weight_map": {"a": ""}},
    "NUL": {"weight_map": {"a": "a\0b"}},
    "folder": {"weight_map": {"a": "folder"}},
    "long": {"weight_map": {"a": "x" * 10_000}},
    "missing": {"weight_map": {"a": "model-00001-of-00002.safetensors"}},
    "config": {"weight_map": {"a": "config.json"}},
    "number": {"weight_map": {"a": 5}},
    "mixed": {"weight_map": {"a": 5, "b": "x"}},
    "list": {"weight_map": ["a"]},
    "nothing": {},
    "no object": [],
    "deep": b"[" * 100_000,
    "no JSON": b"\xff",
}


@pytest.mark.parametrize("what", BAD_INDEXES)
def test_a_bad_index_is_refused_and_never_leaves_its_folder(
    bench: Bench, tmp_path: Path, model: str, what: str
) -> None:
    index = BAD_INDEXES[what]
    (tmp_path / "folder").mkdir()
    (tmp_path / "config.json").write_bytes(bench.source.files["config.json"])
    (tmp_path / "model.safetensors.index.json").write_bytes(
        index if isinstance(index, bytes) else json.dumps(index).encode()
    )
    with pytest.raises((DataLoss, NotFound, InvalidArgument)):
        bench.trainer.push_folder(model, tmp_path)


def test_a_folder_without_weights_or_of_another_model_is_refused(bench: Bench, tmp_path: Path, model: str) -> None:
    for folder, said in ((tmp_path / "nowhere", "there is no folder"), (tmp_path, r"config\.json")):
        with pytest.raises(NotFound):
            bench.trainer.push_folder(model, folder)
        with pytest.raises(NotFound, match=said):
            bench.trainer.register_model("acme/none", folder)
    other = tiny_folder(tmp_path / "other", hidden_size=64)
    with pytest.raises(LayoutError) as caught:
        bench.trainer.push_folder(model, other.folder)
    assert f"{EMBEDDING} is [128, 64], and the model has {EMBEDDING} F32[128, 32]" in str(caught.value)
    assert np.array_equal(other.arrays[EMBEDDING].shape, (128, 64))
