"""Is a config compared with the arguments that Megatron-LM has noted in a checkpoint, where tensors of the same shapes
do not tell models apart?
"""

from __future__ import annotations

import argparse
import enum
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.service.converting.test_converting import hf_folder, weights_of
from weighbridge._core import dtypes
from weighbridge._core.boxes import Box
from weighbridge._core.layouts import Shard, TensorSpec
from weighbridge._trainers.torch_dist.folder import lay_out_torch_dist, read_torch_dist
from weighbridge._trainers.torch_dist.noted_values import common_values, trained_arguments
from weighbridge._trainers.torch_dist.writing import write_torch_dist
from weighbridge.errors import InvalidArgument
from weighbridge_service.converting.conversions import ConvertOptions, plan_conversion
from weighbridge_service.converting.convert import convert_folder
from weighbridge_service.converting.pushing import CheckpointToPush
from weighbridge_service.converting.trained_model import contradictions

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
CONFIG: dict[str, Any] = {
    "model_type": "llama", "num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 64, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "num_experts_per_tok": 4,
}  # fmt: skip
ARGS: dict[str, Any] = {
    "num_attention_heads": 8, "group_query_attention": True, "num_query_groups": 2, "kv_channels": 8, "norm_epsilon": 1e-5,
    "rotary_base": 10000, "position_embedding_type": "rope", "multi_latent_attention": False, "num_experts": None,
    "moe_router_topk": 2, "qk_head_dim": 128,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "args", "said"),
    [
        ({}, {}, []),
        ({}, {"num_attention_heads": 4}, ["num_attention_heads is 8"]),
        ({}, {"num_query_groups": 8}, ["num_key_value_heads is 2"]),
        ({}, {"group_query_attention": False}, ["num_key_value_heads is 2"]),
        ({"num_key_value_heads": None}, {"group_query_attention": False, "num_query_groups": 1}, []),
        ({}, {"kv_channels": 16}, ["head_dim is 8"]),
        ({"head_dim": 16}, {"kv_channels": 16}, []),
        ({}, {"rotary_base": 1000000}, ["rope_theta is 10000"]),
        ({"rope_theta": None, "rope_parameters": {"rope_theta": 5e5}}, {}, ["rope_theta is 500000"]),
        ({}, {"rotary_base": 1000000, "position_embedding_type": "none"}, []),
        ({}, {"norm_epsilon": 1e-6}, ["rms_norm_eps is 1e-05"]),
        ({"rope_theta": 10**400}, {}, ["rope_theta is inf"]),
        ({}, {"num_experts": 8}, ["num_experts_per_tok is 4"]),
        ({}, {"num_experts": 8, "moe_router_topk": 4}, []),
        (
            {"qk_nope_head_dim": 64, "head_dim": 99},
            {"multi_latent_attention": True},
            ["qk_nope_head_dim is 64"],
        ),
        ({"num_attention_heads": 1, "text_config": {"num_attention_heads": 8, "head_dim": 8}}, {}, []),
        ({}, {"num_attention_heads": "8", "rotary_base": None, "kv_channels": True}, []),
    ],
)
def test_what_a_config_and_the_trainer_say_differently_is_named(
    config: Mapping[str, Any], args: Mapping[str, Any], said: list[str]
) -> None:
    found = contradictions({**CONFIG, **config}, {**ARGS, **args})
    assert [line.partition(" here")[0] for line in found] == said


def test_nothing_is_compared_where_nothing_is_noted() -> None:
    assert contradictions(CONFIG, {}) == []


class Backend(enum.Enum):
    """As Megatron's arguments have enumerations."""

    FLASH = 1


def noted() -> argparse.Namespace:
    return argparse.Namespace(**ARGS, params_dtype=torch.bfloat16, backend=Backend.FLASH, made_by=print, names=["a"])


@pytest.mark.parametrize("entry", [False, True], ids=["common.pt", "an entry, as of 0.19"])
def test_arguments_are_read_as_data(tmp_path: Path, entry: bool) -> None:
    torch.save({"iteration": 3, "args": noted(), "rng": torch.ones(2)}, tmp_path / "common.pt")
    torch.save([{"iteration": 3, "args": noted()}], tmp_path / "entry")
    files = lay_out_torch_dist(
        [Shard("w", Box.whole((2,)))],
        [TensorSpec("w", dtypes.parse("fp32"), (2,))],
        common={} if entry else (tmp_path / "common.pt").read_bytes(),
        objects={"common_state/shard_0_1": (tmp_path / "entry").read_bytes()} if entry else {},
    )
    (tmp_path / "saved").mkdir()
    write_torch_dist(tmp_path / "saved", files, [memoryview(bytes(8))])
    found = trained_arguments(common_values(tmp_path / "saved", read_torch_dist(tmp_path / "saved")))
    assert {name: found[name] for name in ARGS} == ARGS


@pytest.mark.parametrize("content", [None, b"", b"PK", b"x" * 5000])
def test_a_common_state_that_cannot_be_read_says_nothing(tmp_path: Path, content: bytes | None) -> None:
    dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "saved", no_dist=True)
    if content is not None:
        (tmp_path / "saved/common.pt").write_bytes(content)
    assert trained_arguments(common_values(tmp_path / "saved", read_torch_dist(tmp_path / "saved"))) == {}


def test_a_config_of_other_heads_neither_converts_nor_imports(tmp_path: Path) -> None:
    source = hf_folder(tmp_path / "hf", *weights_of("llama", tied=False))
    config = json.loads((source / "config.json").read_text())
    convert_folder(source, tmp_path / "checkpoint", memory_budget=64 << 30)  # of all in this process
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    args = {"num_attention_heads": heads, "num_query_groups": groups, "group_query_attention": True}
    torch.save({"args": argparse.Namespace(**args)}, tmp_path / "checkpoint/common.pt")
    shutil.copytree(source, tmp_path / "other")
    changes = {
        "num_attention_heads": heads // 2,
        "num_key_value_heads": groups // 2,
        "head_dim": 2 * config["head_dim"],
    }
    (tmp_path / "other/config.json").write_text(json.dumps({**config, **changes}))
    for read in (
        lambda folder: plan_conversion(tmp_path / "checkpoint", ConvertOptions(config=folder)),
        lambda folder: CheckpointToPush.read(tmp_path / "checkpoint", folder),
    ):
        read(source)
        with pytest.raises(InvalidArgument, match="does not describe the model that was trained") as refused:
            read(tmp_path / "other")
        assert any(f"num_attention_heads={heads}" in line for line in refused.value.details)
        assert "--config" in refused.value.fix
