"""Is what ranks say of Megatron's optimizers what Megatron itself says of them, and does it come back at any parallelism?

Megatron's own answer is what it would write to a checkpoint: the state of its distributed optimizer gathered over data parallelism.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.megatron_families import build_family_model
from tests.support.megatron_ranks import run_ranks
from tests.support.megatron_training import Piece, TrainingRank, wholes
from tests.support.reference import tiny_config
from weighbridge._core.dtypes import from_torch
from weighbridge._core.layouts import TensorSpec
from weighbridge._formats.training.megatron_training import megatron_fit, training_tensors
from weighbridge._formats.training.training_state import StoredState
from weighbridge_demo.megatron_cpu import Parallel, build_model

STEPS = 2


@dataclass(frozen=True)
class Case:
    """A model and its optimizer, in one job and in another one."""

    family: str
    here: Parallel
    there: Parallel
    distributed: bool = True
    dtype: torch.dtype = torch.bfloat16
    tied: bool = False

    def rank(self, parallel: Parallel, **options: Any) -> TrainingRank:
        config = tiny_config(self.family, tied=self.tied, num_hidden_layers=2)
        build = build_family_model if "moe" in self.family else build_model
        return TrainingRank(
            config, parallel, distributed=self.distributed, dtype=self.dtype, build=build, **options
        )


CASES = {
    "distributed, bf16": Case("llama", Parallel(tp=2, dp=2), Parallel(tp=1, dp=3)),
    "distributed, fp32": Case("qwen2", Parallel(dp=3), Parallel(tp=2), dtype=torch.float32),
    "distributed, tied over stages": Case("qwen2", Parallel(pp=2, dp=2), Parallel(tp=2, dp=2), tied=True),
    "distributed, experts": Case("qwen3_moe", Parallel(dp=4, ep=2), Parallel(tp=2, dp=2, ep=4, etp=1)),
    "plain, bf16": Case("llama", Parallel(tp=2, dp=2), Parallel(pp=2), distributed=False),
    "plain, tied over stages": Case(
        "qwen3", Parallel(tp=2, pp=2), Parallel(dp=2), False, torch.float32, True
    ),
    "plain, experts": Case("qwen3_moe", Parallel(dp=2, ep=2), Parallel(dp=4, ep=4), distributed=False),
}


def _pushed(training: TrainingRank) -> tuple[dict[str, list[Piece]], Mapping[str, Any]]:
    """What a rank would push: of replicas the main one, and its values."""
    held = training_tensors(training.sharded_state_dict(), training.optimizer)
    found: dict[str, list[Piece]] = {}
    for placement, tensor in zip(held.layout.placements, held.tensors, strict=True):
        name, box, main = placement.shard
        if main:
            data = tensor.detach().clone().reshape(box.extent)
            found.setdefault(name, []).append(Piece(held.layout.tensors[name].shape, box.offset, data))
    return found, held.values


def _train(rank: int, case: Case) -> tuple[Any, Any, Any]:
    del rank
    training = case.rank(case.here)
    for number in range(STEPS):
        training.step(number)
    own = training.own_state()
    gathered = []
    torch.distributed.all_gather = lambda *args, **_: gathered.append(args)  # type: ignore[assignment]
    pushed, values = _pushed(training)
    assert not gathered
    return own, pushed, values


def _resume(rank: int, case: Case, stored: Mapping[str, Tensor], values: Mapping[str, Any]) -> Any:
    del rank
    training = case.rank(case.there, seed=1)
    specs = {
        name: TensorSpec(name, from_torch(each.dtype), tuple(each.shape)) for name, each in stored.items()
    }
    fit = megatron_fit(training.sharded_state_dict(), training.optimizer)
    filling = fit(StoredState("tests/tiny:training@1", specs, values))
    for placement, tensor in zip(filling.layout.placements, filling.tensors, strict=True):
        name, box, _ = placement.shard
        where = tuple(slice(o, e) for o, e in zip(box.offset, box.end, strict=True))
        tensor.copy_(stored[name][where].view(tensor.shape))
    filling.finish()
    own = training.own_state()
    steps = {
        float(state["step"])
        for each in training.optimizer.chained_optimizers
        for state in each.optimizer.state.values()
    }
    training.step(STEPS)
    after = {
        float(state["step"])
        for each in training.optimizer.chained_optimizers
        for state in each.optimizer.state.values()
    }
    return own, steps, after


def _same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        # what Megatron gathers it makes float32 of
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_ranks_hold_what_megatron_gathers_and_take_it_at_another_parallelism(case: Case) -> None:
    results = run_ranks(case.here, _train, case)
    expected = wholes(own for own, _, _ in results)
    stored = wholes(pushed for _, pushed, _ in results)
    assert sum(name.startswith("optimizer.state.exp_avg.") for name in expected) > 5
    _same(stored, expected)

    resumed = run_ranks(case.there, _resume, case, stored, results[0][2])
    _same(wholes(own for own, _, _ in resumed), expected)
    assert [steps for _, steps, _ in resumed] == [{float(STEPS)}] * case.there.world_size
    assert [steps for _, _, steps in resumed] == [{float(STEPS + 1)}] * case.there.world_size
