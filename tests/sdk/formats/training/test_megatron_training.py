"""Is what ranks say of Megatron's optimizers what Megatron itself says of them, and does it come back at any parallelism?

Megatron's own answer is what it would write to a checkpoint: the state of its distributed optimizer gathered over data parallelism.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
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
    layers: int = 2
    metadata: Mapping[str, Any] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def rank(self, parallel: Parallel, *, seed: int = 0) -> TrainingRank:
        """A rank of a job of this parallelism."""
        config = tiny_config(self.family, tied=self.tied, num_hidden_layers=self.layers)
        build = build_family_model if "moe" in self.family else build_model
        return TrainingRank(
            config,
            parallel,
            distributed=self.distributed,
            dtype=self.dtype,
            build=build,
            seed=seed,
            **self.options,
        )

    def train(self, training: TrainingRank, number: int) -> None:
        """One step."""
        if self.options.get("moe_grouped_gemm"):
            training.step_at_random()
        else:
            training.step(number)


_APART = {"singleton_local_shards": True}
_GROUPED = {"moe_grouped_gemm": True}
CASES = {
    "distributed": Case("llama", Parallel(tp=2, dp=2), Parallel(tp=1, dp=3)),
    "distributed, fp32": Case("qwen2", Parallel(dp=3), Parallel(tp=2), dtype=torch.float32),
    "distributed, a key for each layer and half": Case(
        "llama", Parallel(tp=2, dp=2), Parallel(dp=3), metadata=_APART
    ),
    "distributed, tied over stages": Case("qwen2", Parallel(pp=2, dp=2), Parallel(tp=2, dp=2), tied=True),
    "distributed, experts": Case("qwen3_moe", Parallel(dp=4, ep=2), Parallel(tp=2, dp=2, ep=4, etp=1)),
    "distributed, grouped experts": Case("qwen3_moe", Parallel(dp=4, ep=2), Parallel(dp=2), options=_GROUPED),
    "plain": Case("llama", Parallel(tp=2, dp=2), Parallel(pp=2), False),
    "plain, tied over stages": Case(
        "qwen3", Parallel(tp=2, pp=2), Parallel(dp=2), False, torch.float32, True
    ),
    "plain, experts": Case("qwen3_moe", Parallel(dp=2, ep=2), Parallel(dp=4, ep=4), False),
}


def _pushed(case: Case, training: TrainingRank) -> tuple[dict[str, list[Piece]], Mapping[str, Any]]:
    """What a rank would push: of replicas the main one, and its values."""
    held = training_tensors(training.sharded_state_dict(case.metadata), training.optimizer)
    found: dict[str, list[Piece]] = {}
    for placement, tensor in zip(held.layout.placements, held.tensors, strict=True):
        name, box, main = placement.shard
        if main:
            data = tensor.detach().clone().reshape(box.extent)
            found.setdefault(name, []).append(Piece(held.layout.tensors[name].shape, box.offset, data))
    return found, held.values


def _refuse(*_: Any, **__: Any) -> None:
    raise AssertionError("ranks communicate")


def _train(rank: int, case: Case) -> tuple[Any, Any, Any]:
    del rank
    training = case.rank(case.here)
    for number in range(STEPS):
        case.train(training, number)
    own = training.own_state(case.metadata)
    for name in (
        "all_gather",
        "gather",
        "all_gather_into_tensor",
        "all_gather_object",
        "all_reduce",
        "broadcast",
    ):
        setattr(torch.distributed, name, _refuse)
    return own, *_pushed(case, training)


def _filled(
    case: Case, training: TrainingRank, stored: Mapping[str, Tensor], values: Mapping[str, Any]
) -> None:
    specs = {
        name: TensorSpec(name, from_torch(each.dtype), tuple(each.shape)) for name, each in stored.items()
    }
    fit = megatron_fit(training.sharded_state_dict(case.metadata), training.optimizer)
    filling = fit(StoredState("tests/tiny:training@1", specs, values))
    with torch.no_grad():
        for placement, tensor in zip(filling.layout.placements, filling.tensors, strict=True):
            name, box, _ = placement.shard
            where = tuple(slice(o, e) for o, e in zip(box.offset, box.end, strict=True))
            tensor.copy_(stored[name][where].view(tensor.shape))
    filling.finish()


def _steps(training: TrainingRank) -> set[float]:
    optimizers = [each.optimizer for each in training.optimizer.chained_optimizers]
    return {float(state["step"]) for each in optimizers for state in each.state.values()}


def _resume(rank: int, case: Case, stored: Mapping[str, Tensor], values: Mapping[str, Any]) -> Any:
    del rank
    training = case.rank(case.there, seed=1)
    _filled(case, training, stored, values)
    own, steps = training.own_state(case.metadata), _steps(training)
    case.train(training, STEPS)
    return own, steps, _steps(training)


def _same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_ranks_hold_what_megatron_gathers_and_take_it_at_another_parallelism(case: Case) -> None:
    results = run_ranks(case.here, _train, case)
    expected = wholes(own for own, _, _ in results)
    assert sum(name.startswith("optimizer.state.exp_avg.") for name in expected) > 5
    stored = wholes(pushed for _, pushed, _ in results)
    _same(stored, expected)

    resumed = run_ranks(case.there, _resume, case, stored, results[0][2])
    _same(wholes(own for own, _, _ in resumed), expected)
    assert [steps for _, steps, _ in resumed] == [{float(STEPS)}] * case.there.world_size
    assert [steps for _, _, steps in resumed] == [{float(STEPS + 1)}] * case.there.world_size
