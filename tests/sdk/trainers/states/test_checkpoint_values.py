"""Are values of a training state written as Megatron-core's and torch's loaders expect them, and understood as these
write them?
"""

from __future__ import annotations

import argparse
import io
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from weighbridge._trainers.states.checkpoints.checkpoint_values import (
    CheckpointValues,
    checkpoint_ranks,
    opened,
)
from weighbridge._trainers.states.training_state import RankValues
from weighbridge.errors import DataLoss, InvalidArgument

DENSE = {"wd_mult": 1.0, "lr": 0.1, "is_expert_parallel": False}
EXPERTS = {"wd_mult": 1.0, "lr": 0.2, "is_expert_parallel": True}
SCALER = {"scale": torch.tensor([8.0]), "growth_tracker": 3}


def saved(value: object) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def group(kind: str, values: Mapping[str, Any], step: float | None) -> dict[str, Any]:
    return {"kind": f"{kind} of AdamW", "values": dict(values), "step": step}


def megatron(groups: list[dict[str, Any]], scalers: list[Any], **state: Any) -> RankValues:
    return RankValues({"optimizer": {"groups": groups, "grad_scalers": scalers}, "objects": {}}, state)


def common_of(values: RankValues, tensors: tuple[str, ...] = ("decoder.layers.mlp.linear_fc1.weight",)) -> Any:
    common = CheckpointValues.of([values], tensors, 7).common
    assert common is not None
    with torch.serialization.safe_globals([argparse.Namespace]):
        return torch.load(io.BytesIO(common), weights_only=True)


def test_experts_have_an_optimizer_of_their_own_and_each_its_scaler() -> None:
    groups = [group("Float16OptimizerWithFloat16Params", each, 3.0) for each in (DENSE, EXPERTS)]
    common = common_of(megatron(groups, [SCALER, {**SCALER, "growth_tracker": 4}]))
    assert common["optimizer"] == {
        number: {
            "optimizer": {"state": {"common_step": torch.tensor(3.0)}, "param_groups": [values]},
            "grad_scaler": {**SCALER, "growth_tracker": 3 + number},
        }
        for number, values in enumerate((DENSE, EXPERTS))
    }
    assert (common["iteration"], common["checkpoint_version"]) == (7, 3.0)


def test_the_distributed_optimizer_says_its_steps_in_its_groups() -> None:
    common = common_of(megatron([group("DistributedOptimizer", DENSE, 3.0)], []))
    assert common["optimizer"] == {
        "optimizer": {"param_groups": [{**DENSE, "step": 3.0}]},
        "param_state_sharding_type": "fully_reshardable",
    }
    fused = common_of(megatron([group("DistributedOptimizer", {**DENSE, "step": 3}, None)], []))
    assert fused["optimizer"]["optimizer"]["param_groups"] == [{**DENSE, "step": 3}]


def test_a_model_alone_has_no_optimizer() -> None:
    assert "optimizer" not in common_of(megatron([], []))


@pytest.mark.parametrize(
    ("tensor", "stacked", "whole"),
    [
        ("decoder.layers.mlp.linear_fc1.weight", True, True),
        ("decoder.layers.0.mlp.linear_fc1.weight", False, True),
        ("decoder.layers.mlp.linear_fc1.weight_w", True, False),
    ],
)
def test_the_form_of_keys_is_said_as_megatron_says_it(tensor: str, stacked: bool, whole: bool) -> None:
    content = common_of(megatron([], []), (tensor,))["content_metadata"]
    assert (content["non_homogeneous_layers"], content["singleton_local_shards"]) == (not stacked, not whole)


def test_arguments_are_a_namespace_on_disk_and_a_dict_for_trainers() -> None:
    found = CheckpointValues.of([megatron([], [], args={"hidden_size": 8}, iteration=9)], ["w"], 7)
    assert found.common is not None
    with torch.serialization.safe_globals([argparse.Namespace]):
        common = torch.load(io.BytesIO(found.common), weights_only=True)
    assert (common["args"], common["iteration"]) == (argparse.Namespace(hidden_size=8), 9)
    state = opened(found.kept(), "tests/tiny:training@1").state
    assert (state["args"], state["iteration"]) == ({"hidden_size": 8}, 9)


def test_of_objects_the_first_rank_that_has_one_is_taken() -> None:
    ranks = [
        RankValues({"optimizer": {"groups": [], "grad_scalers": []}, "objects": objects}, {}, own)
        for objects, own in (
            ({"a/shard_0_1": [1]}, {"seed": 0}),
            ({"a/shard_0_1": [2], "b/shard_0_1": b"x"}, {"seed": 1}),
        )
    ]
    objects = CheckpointValues.of(ranks, ["w"], 0).objects
    with torch.serialization.safe_globals([io.BytesIO]):
        found = {name: torch.load(io.BytesIO(each), weights_only=True) for name, each in objects.items()}
    (file,) = found.pop("b/shard_0_1")
    assert file.getvalue() == b"x"  # as Transformer Engine once gave its extra state
    assert found == {
        "a/shard_0_1": [[1]],
        "rank_state/shard_0_2": [{"seed": 0}],
        "rank_state/shard_1_2": [{"seed": 1}],
    }


def test_each_rank_gets_its_own_values_of_a_checkpoint_back() -> None:
    megatrons = [
        RankValues({"optimizer": {"groups": [], "grad_scalers": []}, "objects": {}}, {}, own)
        for own in ({"seed": 0}, {}, {"seed": 2})
    ]
    torchs = [RankValues({"model": {}}, {}, {"seed": rank, "loader": {"at": [rank, 5]}}) for rank in range(3)]
    for ranks in (megatrons, torchs):
        kept = CheckpointValues.of(ranks, ["w"], 0).kept()
        assert checkpoint_ranks(kept, "tests/tiny:training@1") == 3
        for rank, values in enumerate(ranks):
            assert dict(opened(kept, "tests/tiny:training@1", rank).rank_state) == values.rank_state
        assert not opened(kept, "tests/tiny:training@1").rank_state
    assert checkpoint_ranks(torchs[0], "tests/tiny:training@1") is None
    without = CheckpointValues.of([RankValues({"model": {}})], ["w"], 0).kept()
    assert checkpoint_ranks(without, "tests/tiny:training@1") == 0


def test_the_common_state_is_found_where_later_releases_have_it() -> None:
    common = {
        "iteration": 4,
        "optimizer": {"state": {"common_step": 2}, "param_groups": [{**DENSE, "params": [0]}]},
    }
    kept = CheckpointValues("torch_dist", {"common_state/shard_0_1": saved([common])}, {}, None).kept()
    values = opened(kept, "tests/tiny:training@1")
    assert values.trainer["optimizer"] == {
        "groups": [{"kind": None, "values": DENSE, "step": 2.0}],
        "grad_scalers": [],
    }
    assert dict(values.state) == {"iteration": 4}
    again = CheckpointValues.of([kept], ["w"], 0)
    assert again.common is not None
    assert torch.load(io.BytesIO(again.common), weights_only=True) == common


@pytest.mark.parametrize("common", [[1, 2], {"optimizer": 3}, {"optimizer": {"param_groups": 3}}])
def test_a_common_state_that_is_none_is_refused(common: object) -> None:
    kept = CheckpointValues("torch_dist", {}, {}, saved(common)).kept()
    with pytest.raises(DataLoss, match="tests/tiny:training@1"):
        opened(kept, "tests/tiny:training@1")


def test_a_name_that_means_the_module_is_refused_for_torch() -> None:
    values = RankValues({"model": {}, "tied": {}}, {"optimizer": 1})
    with pytest.raises(InvalidArgument, match="state= has values with the names optimizer"):
        CheckpointValues.of([values], ["model.w"], 0)


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"objects": None}, "objects of checkpoint of .* contains a NoneType"),
        ({"objects": {"a": 3}}, "a of checkpoint of .* is a int, not a tensor of bytes"),
        ({"objects": {"a": torch.ones(2)}}, "a of checkpoint of .* is a Tensor, not a tensor of bytes"),
        ({"paths": []}, "paths of checkpoint of .* contains a list"),
        ({"paths": {"a": "scheduler"}}, "the path of a of checkpoint of .* is a str"),
        ({"common": "text"}, "common of checkpoint of .* is a str"),
        ({"format": "zip"}, "has format 'zip', which is not one of torch_dist, dcp"),
        ({"format": []}, r"has format \[\]"),
    ],
)
def test_what_was_not_kept_of_a_checkpoint_is_refused(changed: dict[str, Any], told: str) -> None:
    kept = CheckpointValues("dcp", {}, {}, None).kept().trainer["checkpoint"]
    for refused, message in ((3, "checkpoint of .* contains a int"), ({**kept, **changed}, told)):
        values = RankValues({"checkpoint": refused})
        with pytest.raises(DataLoss, match=message):
            opened(values, "tests/tiny:training@1")
        with pytest.raises(DataLoss, match=message):
            CheckpointValues.of([values], [], 0)


def test_values_of_an_unknown_trainer_are_refused() -> None:
    with pytest.raises(DataLoss, match="trainer"):
        CheckpointValues.of([RankValues({"weights": {}})], ["w"], 0)
