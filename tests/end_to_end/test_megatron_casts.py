"""Are tensors of Megatron-core ranks that are of another dtype than the model's cast as torch casts them, both ways, as
those of torch trainers are?

Megatron-core keeps norms, routers or all of a model in float32 beside bf16 if so configured. The ranks hold what
Megatron-core would hold, by its own `ShardedTensor`.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.support.held_tensors import Grid, Held, shards_of
from tests.support.published_families import qwen3_next, qwen3_next_model
from tests.support.reference import make_random
from tests.support.services import RunningService, running_service
from weighbridge import EngineClient, LayoutError, TrainerClient
from weighbridge._core.references import training_of

MODEL = "tests/cast"
GRID = Grid(tp=2)
PATIENCE = 60.0


@dataclass(frozen=True)
class Source:
    """A model's folder, its weights in bfloat16, and what ranks hold of them: norms and routers in float32."""

    folder: Path
    weights: dict[str, Tensor]
    held: list[Held]


def is_wide(key: str) -> bool:
    return "norm" in key or "router" in key


def widened(item: Held) -> Held:
    """A norm or router in float32, off the grid that bfloat16 has."""
    return replace(item, data=item.data.float() * 1.001) if is_wide(item.key) else item


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    model = qwen3_next_model()
    make_random(model, seed=5)
    folder = tmp_path_factory.mktemp("hf")
    model.bfloat16().save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    return Source(folder, weights, [widened(each) for each in qwen3_next(weights)])


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, source: Source) -> Iterator[RunningService]:
    folder = tmp_path_factory.mktemp("store")
    with running_service(folder, local_socket=str(folder / "lane.sock")) as running:
        with TrainerClient(running.address) as trainer:
            trainer.register_model(MODEL, source.folder)
        yield running


def push(service: RunningService, held: list[Held], step: int, lane: str = "grpc", **options: Any) -> Any:
    """The handles of two ranks, which have arrived."""

    def one(rank: int) -> Any:
        with TrainerClient(service.address, lane=lane) as trainer:
            shards = shards_of(held, GRID, rank)
            handle = trainer.push(MODEL, shards, step=step, rank=rank, world_size=2, **options)
            handle.wait(timeout=PATIENCE)
            if handle.training is not None:
                handle.training.wait(timeout=PATIENCE)
            return handle

    with ThreadPoolExecutor(2) as ranks:
        return list(ranks.map(one, range(2)))


def pulled(service: RunningService, number: int, model: str = MODEL) -> dict[str, Tensor]:
    with EngineClient(service.address) as engine:
        return dict(engine.pull(model, number))


def narrow(held: list[Held]) -> list[Held]:
    """Tensors of a trainer that has cast everything itself, by torch."""
    return [replace(each, data=each.data.bfloat16()) for each in held]


@pytest.mark.parametrize("lane", ["local", "grpc"])
def test_wide_tensors_are_pushed_as_torch_casts_them(service: RunningService, source: Source, lane: str) -> None:
    step = 10 + ["local", "grpc"].index(lane)
    handles = push(service, source.held, step, lane)
    expected = push(service, narrow(source.held), step + 100, lane)
    found = pulled(service, handles[0].number)
    right = pulled(service, expected[0].number)
    assert found.keys() == right.keys() == source.weights.keys()
    assert [name for name, tensor in right.items() if not torch.equal(found[name], tensor)] == []
    assert all(handle.report().cast_tensors for handle in handles)
    assert not any(handle.report().cast_tensors for handle in expected)


def test_a_version_fills_wide_tensors_with_its_own_numbers(service: RunningService, source: Source) -> None:
    handles = push(service, source.held, 20)
    with TrainerClient(service.address) as trainer:
        for rank in range(2):
            found = shards_of(source.held, GRID, rank)
            expected = shards_of(narrow(source.held), GRID, rank)
            for shard in (shard for shards in (*found.values(), *expected.values()) for shard in shards):
                shard.data.fill_(torch.nan)
            trainer.restore(MODEL, found, version=handles[0].number)
            trainer.restore(MODEL, expected, version=handles[0].number)
            for key, shards in found.items():
                for one, other in zip(shards, expected[key], strict=True):
                    assert one.data.dtype == (torch.float32 if is_wide(key) else torch.bfloat16)
                    assert torch.equal(one.data, other.data.to(one.data.dtype)), key


def test_a_training_state_keeps_the_dtypes_that_ranks_have(service: RunningService, source: Source) -> None:
    handles = push(service, source.held, 30, state={"epoch": 1})
    kept = pulled(service, handles[0].training.number, training_of(MODEL))
    wide = {name: tensor for name, tensor in kept.items() if is_wide(name)}
    assert {tensor.dtype for tensor in wide.values()} == {torch.float32}
    assert any(not torch.equal(tensor, tensor.bfloat16().float()) for tensor in wide.values())


@pytest.mark.parametrize("cast", ["never", "exact"])
def test_casts_can_be_refused_as_those_of_torch_trainers(service: RunningService, source: Source, cast: str) -> None:
    with TrainerClient(service.address) as trainer, pytest.raises(LayoutError) as refused:
        trainer.push(MODEL, shards_of(source.held, Grid(), 0), step=40, rank=0, world_size=1, cast=cast)
    assert "norm" in str(refused.value)
    assert "cast='allow'" in refused.value.fix


def test_what_is_no_number_of_this_kind_is_not_cast(service: RunningService, source: Source) -> None:
    held = [
        replace(each, data=each.data.to(torch.int32)) if "final_layernorm" in each.key else each for each in source.held
    ]
    with TrainerClient(service.address) as trainer, pytest.raises(LayoutError, match="not cast"):
        trainer.push(MODEL, shards_of(held, Grid(), 0), step=50, rank=0, world_size=1)


def test_adapters_of_megatron_are_refused_by_name_with_and_without_a_training_state(
    service: RunningService, source: Source
) -> None:
    """By the names that Megatron-Bridge gives them beside the weights that they are for."""
    name = "decoder.layers.mlp.shared_experts.linear_fc1.adapter.linear_in.weight"
    held = [*source.held, Held(name, torch.ones(4, 64).bfloat16(), stage="last")]
    with TrainerClient(service.address) as trainer:
        for state in (None, {"epoch": 1}):
            shards = shards_of(held, Grid(), 0)
            with pytest.raises(LayoutError, match="1 tensor belongs to LoRA adapters") as refused:
                trainer.push(MODEL, shards, step=70, rank=0, world_size=1, state=state)
            assert refused.value.details == (name,)
        with pytest.raises(LayoutError, match="LoRA adapters") as refused:
            trainer.restore(MODEL, shards_of(held, Grid(), 0))
    assert "before adapters are added" in refused.value.fix
