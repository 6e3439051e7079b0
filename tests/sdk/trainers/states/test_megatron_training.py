"""Do ranks push the state that Megatron itself saves of its optimizers, and is it restored at any parallelism?

Megatron's own answer is what it would write to a checkpoint: the state of its distributed optimizer gathered over data
parallelism.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping
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
from weighbridge._formats.megatron_state import ShardedTensors, sharded_tensors
from weighbridge._trainers.states.megatron_training import MegatronRestore, training_tensors
from weighbridge._trainers.states.training_state import StoredState
from weighbridge.errors import WeighbridgeError
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
    overrides: Mapping[str, Any] = field(default_factory=dict)
    metadata: Mapping[str, Any] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def rank(self, parallel: Parallel, *, seed: int = 0) -> TrainingRank:
        """A rank of a job of this parallelism."""
        config = tiny_config(self.family, tied=self.tied, **{"num_hidden_layers": 2, **self.overrides})
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
_LAST = {"mlp_only_layers": [0]}
CASES = {
    "distributed": Case("llama", Parallel(tp=2, dp=2), Parallel(tp=1, dp=3)),
    "distributed, fp32": Case("qwen2", Parallel(dp=3), Parallel(tp=2), dtype=torch.float32),
    "distributed, a key for each layer and half": Case("llama", Parallel(tp=2, dp=2), Parallel(dp=3), metadata=_APART),
    "distributed, tied over stages": Case("qwen2", Parallel(pp=2, dp=2), Parallel(tp=2, dp=2), tied=True),
    "distributed, experts": Case("qwen3_moe", Parallel(dp=4, ep=2), Parallel(tp=2, dp=2, ep=4, etp=1)),
    "distributed, grouped experts": Case("qwen3_moe", Parallel(dp=4, ep=2), Parallel(dp=2), options=_GROUPED),
    "plain": Case("llama", Parallel(tp=2, dp=2), Parallel(pp=2), False),
    "plain, tied over stages": Case("qwen3", Parallel(tp=2, pp=2), Parallel(dp=2), False, torch.float32, True),
    "plain, experts": Case("qwen3_moe", Parallel(dp=2, ep=2), Parallel(dp=4, ep=4), False),
    "plain, experts on the last stage": Case(
        "qwen3_moe", Parallel(pp=2, dp=2, ep=2), Parallel(dp=2, ep=2), False, overrides=_LAST
    ),
}


def _pushed(case: Case, training: TrainingRank) -> tuple[dict[str, list[Piece]], Mapping[str, Any]]:
    """The shards that a rank would push (main replicas only), and its values."""
    held = training_tensors(sharded_tensors(training.sharded_state_dict(case.metadata)), training.optimizer)
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
    case: Case,
    training: TrainingRank,
    stored: Mapping[str, Tensor],
    values: Mapping[str, Any],
    *,
    broken_off: bool = False,
) -> None:
    specs = {name: TensorSpec(name, from_torch(each.dtype), tuple(each.shape)) for name, each in stored.items()}
    restore = MegatronRestore(sharded_tensors(training.sharded_state_dict(case.metadata)), training.optimizer)
    filling = restore.fit(StoredState("tests/tiny:training@1", specs, values))
    each = list(zip(filling.layout.placements, filling.tensors, strict=True))
    with torch.no_grad():
        for placement, tensor in each[: len(each) // 2 if broken_off else None]:
            name, box, _ = placement.shard
            where = tuple(slice(o, e) for o, e in zip(box.offset, box.end, strict=True))
            tensor.copy_(stored[name][where].view(tensor.shape))
    if broken_off:
        filling.undo()
    else:
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


def _mistakes(rank: int) -> dict[str, str]:
    """The errors of mistakes, by name; training must go on after them."""
    del rank
    distributed = Case("llama", Parallel(), Parallel())
    plain = Case("llama", Parallel(), Parallel(), distributed=False)
    deeper = Case("llama", Parallel(), Parallel(), overrides={"num_hidden_layers": 4})
    found: dict[str, str] = {}

    def tried(name: str, call: Callable[..., Any], *args: Any) -> None:
        try:
            call(*args)
        except WeighbridgeError as error:
            found[name] = f"{type(error).__name__}: {error}"

    for kind, case in (("distributed", distributed), ("plain", plain)):
        training, other = case.rank(Parallel()), case.rank(Parallel())
        state = sharded_tensors(training.sharded_state_dict())
        tried(f"no step, {kind}", training_tensors, state, training.optimizer)
        other.step(0)
        tried(f"another model, {kind}", training_tensors, state, other.optimizer)
    tried("torch's", training_tensors, state, torch.optim.Adam(training.stage.parameters()))

    trained = distributed.rank(Parallel())
    trained.step(0)
    pushed, values = _pushed(distributed, trained)
    stored = wholes([pushed])
    for name, case in (("deeper", deeper), ("plain", plain), ("fresh", distributed)):
        training = case.rank(Parallel())
        kept = {each: tensor for each, tensor in stored.items() if name != "fresh" or ".exp_avg_sq." not in each}
        tried(f"{name} filled", _filled, case, training, kept, values)
        training.step(0)
        assert _steps(training) == {1.0}
    for case in (distributed, plain):  # a state without a step count would make the step fail
        training, other = case.rank(Parallel()), case.rank(Parallel())
        other.step(0)
        pushed, of_kind = _pushed(case, other)
        _filled(case, training, wholes([pushed]), of_kind, broken_off=True)
        training.step(0)
        assert _steps(training) == {1.0}
    without = {**values, "optimizer": {"groups": [], "grad_scalers": []}}
    tried("pushed without", _filled, distributed, trained, stored, without)
    tried("pushed of torch", _filled, distributed, trained, stored, {"model": {}})
    return found


def test_mistakes_are_named_and_leave_optimizers_as_they_were() -> None:
    [said] = run_ranks(Parallel(), _mistakes)
    expected = {
        "no step, distributed": (
            "FailedPrecondition: the DistributedOptimizer of AdamW has no state yet .*after its first step"
        ),
        "no step, plain": "FailedPrecondition: the Float16Optimizer.* has no state yet .*after its first step",
        "another model, distributed": (
            "LayoutError: 15 parameters of the Distr.*not in the sharded state dict.*all its chunks"
        ),
        "another model, plain": (
            "LayoutError: 15 parameters of the Float16Opt.*not in the sharded state dict.*all its chunks"
        ),
        "torch's": (
            "InvalidArgument: optimizer= is a torch.optim.adam.Adam, not an optimizer of "
            "Megatron-core.*get_megatron_optimizer"
        ),
        "deeper filled": r"LayoutError: tests/tiny:training@1 is the training state of a different model.*has shape \[4, .*\[2, ",
        "plain filled": (
            "LayoutError: the optimizer is a Float16Opt.*state is that of a DistributedOptimizer of AdamW.*settings"
        ),
        "fresh filled": "LayoutError: .*exp_avg_sq.*are not stored",
        "pushed without": (
            "LayoutError: the optimizer is a Distr.*no state of an optimizer was pushed.*leave optimizer= out"
        ),
        "pushed of torch": "LayoutError: .*was not pushed from a Megatron-core model.*restore_state_dict",
    }
    assert said.keys() == expected.keys()
    for name, pattern in expected.items():
        assert re.match(pattern, said[name], re.DOTALL), said[name]


def _rows(rank: int) -> list[dict[str, Tensor]]:
    """Tensors of a vocabulary of 128 padded to 144, and the rows that trainers with a padding to 160 and without
    padding hold.
    """
    del rank
    cases = [Case("llama", Parallel(), Parallel(), options={"padded_vocab_size": rows}) for rows in (144, 160, 128)]
    first, *others = [case.rank(Parallel(), seed=turn) for turn, case in enumerate(cases)]
    first.step(0)
    pushed, values = _pushed(cases[0], first)
    stored = wholes([pushed])
    found = [stored]
    for case, training in zip(cases[1:], others, strict=True):
        _filled(case, training, stored, values)
        found.append(wholes([training.own_state()]))
    return found


def test_rows_of_a_vocabulary_that_is_padded_differently_are_those_that_both_have() -> None:
    [(stored, longer, shorter)] = run_ranks(Parallel(), _rows)
    padded = [name for name, tensor in stored.items() if tensor.shape[0] == 144]
    assert len(padded) == 8  # of embedding and output layer: weights, their copies in float32, two moments
    for name, tensor in stored.items():
        if name in padded:
            assert torch.equal(longer[name][:144], tensor)
            assert longer[name].shape[0] == 160
            assert torch.equal(shorter[name], tensor[:128])
        else:
            assert torch.equal(longer[name], tensor)
            assert torch.equal(shorter[name], tensor)


def _objects(rank: int) -> list[Any]:
    del rank
    from megatron.core.dist_checkpointing import ShardedObject

    def with_objects(*data: Any) -> ShardedTensors:
        keys = [f"decoder.layers.{number}._extra_state" for number in range(len(data))]
        objects = [ShardedObject(key, each, (1,), (0,)) for key, each in zip(keys, data, strict=True)]
        return sharded_tensors({"model": training.sharded_state_dict(), "more": objects})

    training = Case("llama", Parallel(), Parallel()).rank(Parallel())
    training.step(0)
    held = training_tensors(with_objects(torch.arange(3), io.BytesIO(b"scales")), training.optimizer)
    model = with_objects(torch.zeros(1), io.BytesIO(), torch.ones(1))
    restore = MegatronRestore(model, training.optimizer)
    restore.fit(StoredState("tests/tiny:training@1", dict(held.layout.tensors), held.values)).finish()
    return [each.data for each in model.objects[-3:]]


def test_sharded_objects_get_what_was_kept_of_their_key() -> None:
    [(taken, file, other)] = run_ranks(Parallel(), _objects)
    assert torch.equal(taken, torch.arange(3))
    assert file.read() == b"scales"
    assert torch.equal(other, torch.ones(1))


def _scaled(rank: int) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """States of the gradient scaler: of a run, of a fresh run, and of that run after it was filled from the first."""
    del rank
    case = Case("llama", Parallel(), Parallel(), dtype=torch.float16)
    first, second = case.rank(Parallel()), case.rank(Parallel())
    first.step(0)
    scaler, other = (each.optimizer.chained_optimizers[0].grad_scaler for each in (first, second))
    for infinite in (True, True, True, False):
        scaler.update(infinite)
    before = {**other.state_dict()}
    pushed, values = _pushed(case, first)
    _filled(case, second, wholes([pushed]), values)
    return scaler.state_dict(), before, other.state_dict()


def test_gradients_are_scaled_as_they_were() -> None:
    [(pushed, before, after)] = run_ranks(Parallel(), _scaled)
    assert after == pushed
    assert before != pushed
