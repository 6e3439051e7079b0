"""Do plain values in a rank's blob come back unchanged, and is a value whose loading would run code refused by its
name?
"""

from __future__ import annotations

import collections
import datetime as dt
import io
import random
from typing import Any

import numpy as np
import pytest
import torch

from weighbridge._core import dtypes
from weighbridge._core.boxes import Box
from weighbridge._core.layouts import Layout, Shard, TensorSpec
from weighbridge._core.tensor_spaces import TensorSpace
from weighbridge._trainers.states import blobs
from weighbridge._trainers.states.training_state import (
    RankValues,
    TrainingState,
    TrainingTensors,
    blob_name,
    read_blob,
    without_blobs,
)
from weighbridge.errors import DataLoss, InvalidArgument

PLAIN: dict[str, Any] = {
    "python": random.Random(3).getstate(),
    "torch": torch.Generator().manual_seed(4).get_state(),
    "scheduler": {"last_epoch": 3, "base_lrs": [1e-3, 2e-3], "_last_lr": (0.5, None, True)},
    "by number": {0: {"step": 1}, 1: {"step": 2**70}},
    "ordered": collections.OrderedDict(b=b"bytes", a="text"),
    "half": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
}


def test_plain_values_are_read_by_torchs_own_loader_with_weights_only() -> None:
    blob = blobs.encode(PLAIN)
    read = torch.load(io.BytesIO(blob.numpy().tobytes()), weights_only=True)
    for found in (read, blobs.decode(blob, "blob")):
        assert torch.equal(found.pop("half"), PLAIN["half"])
        assert torch.equal(found.pop("torch"), PLAIN["torch"])
        assert found == {name: value for name, value in PLAIN.items() if name not in ("half", "torch")}
        assert type(found["ordered"]) is collections.OrderedDict


def test_a_view_takes_the_bytes_of_its_own_elements_and_a_blob_does_not_change_with_its_tensors() -> None:
    large = torch.ones(1 << 20)
    blob = blobs.encode({"view": large[3:5], "parameter": torch.nn.Parameter(large[:1])})
    assert blob.nbytes < 1 << 14
    large.zero_()
    read = blobs.decode(blob, "blob")
    assert torch.equal(read["view"], torch.ones(2))
    assert type(read["parameter"]) is torch.Tensor


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (np.ones(3), "numpy.ndarray"),
        (np.float64(1.0), "numpy.float64"),
        (dt.date(2026, 1, 1), "datetime.date"),
        (len, "builtins.builtin_function_or_method"),
        (collections.defaultdict(int), "collections.defaultdict"),
        (torch.Generator(), "torch._C.Generator"),
        (io.BytesIO(), "_io.BytesIO"),
        (torch.nn.Linear(1, 1), "torch.nn.modules.linear.Linear"),
    ],
)
def test_what_would_run_code_when_it_is_loaded_is_refused_by_the_name_of_its_entry(value: object, named: str) -> None:
    values = {"fine": [1, 2], "loader": {"workers": [{"seed": 1}, {"seed": value}]}}
    with pytest.raises(InvalidArgument) as error:
        blobs.encode(values)
    assert f"loader.workers[1].seed is a {named}" in error.value.message
    assert "from_numpy" in error.value.fix


class Subclass(torch.Tensor):
    """A tensor whose loading would run its own code."""


def test_tensors_of_subclasses_are_refused_by_the_name_of_their_entry() -> None:
    with pytest.raises(InvalidArgument, match=r"ema\[0\] is a Subclass, which is not a plain tensor"):
        blobs.encode({"ema": [torch.ones(2).as_subclass(Subclass)]})


@pytest.mark.parametrize("data", [b"", b"no archive", bytes(range(256)) * 8])
def test_bytes_that_are_no_blob_are_told_by_name(data: bytes) -> None:
    blob = torch.tensor(list(data), dtype=torch.uint8)
    with pytest.raises(DataLoss, match=r"rank_state\.00003 is not a file that torch\.load"):
        blobs.decode(blob, "rank_state.00003")


def test_a_blob_that_would_run_code_is_not_loaded() -> None:
    written = io.BytesIO()
    torch.save({"state": dt.date(2026, 1, 1)}, written)
    with pytest.raises(DataLoss, match=r"is not a file that torch\.load\(weights_only=True\) can read"):
        blobs.decode(torch.frombuffer(bytearray(written.getvalue()), dtype=torch.uint8), "blob")


def test_a_ranks_blob_is_a_tensor_of_its_own_behind_its_shards() -> None:
    spec = TensorSpec("optimizer.state.w.exp_avg", dtypes.parse("fp32"), (4, 2))
    shard = Shard(spec.name, Box((2, 0), (2, 2)))
    held = TrainingTensors(Layout.stream([spec], [shard]), (torch.ones(2, 2),), {"lr": 0.1}, TensorSpace.HUGGING_FACE)
    state = TrainingState.of(held, RankValues(state={"epoch": 3}, rank_state={"seed": 7}), 12)
    assert blob_name(12) == "rank_state.00012"
    assert [each.shard for each in state.layout.placements] == [
        shard,
        Shard("rank_state.00012", Box((0,), (state.tensors[-1].numel(),))),
    ]
    assert [tensor.nbytes for tensor in state.tensors] == [each.nbytes for each in state.layout.placements]
    assert without_blobs(state.layout.tensors) == {spec.name: spec}
    assert read_blob(state.tensors[-1], "blob") == RankValues({"lr": 0.1}, {"epoch": 3}, {"seed": 7})


@pytest.mark.parametrize(
    ("parts", "told"),
    [
        ({}, "trainer of rank_state.00000 contains a NoneType"),
        ({"trainer": 3, "state": [], "rank_state": None}, "trainer of rank_state.00000 contains a int"),
        ({"trainer": {}, "state": [], "rank_state": {}}, "state of rank_state.00000 contains a list"),
        ({"trainer": {}, "state": {}, "rank_state": {0: 1}}, "rank_state of rank_state.00000 contains a dict"),
    ],
)
def test_a_blob_without_values_by_name_is_refused_by_the_part_that_has_none(parts: dict[str, Any], told: str) -> None:
    with pytest.raises(DataLoss) as error:
        read_blob(blobs.encode({"format": 1, **parts}), "rank_state.00000")
    assert error.value.message == f"{told}, not values by name"


def test_a_blob_of_a_later_format_is_refused() -> None:
    with pytest.raises(DataLoss, match="format 2"):
        read_blob(blobs.encode({"format": 2}), "rank_state.00000")
