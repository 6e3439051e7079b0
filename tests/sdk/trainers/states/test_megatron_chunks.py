"""Are the shards of wrapped chunks those of Megatron-core, and is its notion of the virtual stage what it was
before?
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.megatron_families import build_family_model
from tests.support.megatron_ranks import run_ranks
from tests.support.reference import tiny_config
from weighbridge._trainers.states.megatron_chunks import sharded_chunks
from weighbridge_demo.megatron_cpu import Parallel

PARALLEL = Parallel(pp=2, vpp=2)


def keys(found: Any) -> set[str]:
    return {each.key for each in found.values() if hasattr(each, "key")}


def shards(rank: int, config: Any) -> None:
    del rank
    from megatron.core import parallel_state
    from megatron.core.transformer.module import Float16Module

    chunks = [build_family_model(config, PARALLEL, dtype=torch.bfloat16, vp_stage=stage) for stage in range(2)]
    parallel_state.set_virtual_pipeline_model_parallel_rank(0)
    found = sharded_chunks([Float16Module(chunk.config, chunk) for chunk in chunks])
    assert list(found) == ["model0", "model1"]
    for number, chunk in enumerate(chunks):
        assert keys(found[f"model{number}"]) == keys(chunk.sharded_state_dict())
    assert parallel_state.get_virtual_pipeline_model_parallel_rank() == 0

    stages = []

    def fails(**_: Any) -> Any:
        stages.append(parallel_state.get_virtual_pipeline_model_parallel_rank())
        raise ValueError("no shards")

    with pytest.raises(ValueError, match="no shards"):
        sharded_chunks([chunks[0], SimpleNamespace(sharded_state_dict=fails)])
    assert stages == [1]
    assert parallel_state.get_virtual_pipeline_model_parallel_rank() == 0


def test_shards_are_megatrons_own_and_the_virtual_stage_is_put_back() -> None:
    run_ranks(PARALLEL, shards, tiny_config("qwen3", num_hidden_layers=4, tied=False))
