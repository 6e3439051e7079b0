"""Do the constants of a weight map reach the files and the trainer, over each lane?

Qwen3-Next's gated delta nets have a norm whose weights Megatron-core holds less one.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
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
from weighbridge import EngineClient, TrainerClient
from weighbridge._core.layouts import Layout
from weighbridge._core.megatron_rank import MegatronRank
from weighbridge._formats.megatron_state import sharded_tensors
from weighbridge._formats.safetensors_files import lay_out_files
from weighbridge_service.converting.convert import convert_folder
from weighbridge_service.converting.pushing import CheckpointToPush
from weighbridge_service.models import registered_model

MODEL = "tests/next"
NORM = "model.layers.{}.linear_attn.norm.weight"
HELD = "decoder.layers.{}.self_attention.out_norm.weight"
"""As `Held` spells it, with the layer's number in the place of the braces."""
LAYERS = range(3)
GRID = Grid(tp=2)
PATIENCE = 60.0


@dataclass(frozen=True)
class Source:
    """A model's folder, its weights in bfloat16, and what ranks hold of them."""

    folder: Path
    weights: dict[str, Tensor]
    held: list[Held]

    def with_norms(self) -> list[Held]:
        """The same with norms that have numbers of all sizes."""
        return [
            replace(item, data=numbers(item.layer[0])) if item.layer is not None and item.key == HELD else item
            for item in self.held
        ]

    def norms_plus_one(self) -> dict[str, Tensor]:
        """The norms that the files must have: plus one, as torch adds in bfloat16."""
        return {NORM.format(layer): numbers(layer) + 1 for layer in LAYERS}


def numbers(layer: int) -> Tensor:
    made = torch.randn(20, generator=torch.Generator().manual_seed(layer)) * 10.0 ** (1 - layer)
    return made.bfloat16()


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    model = qwen3_next_model()
    make_random(model, seed=5)
    folder = tmp_path_factory.mktemp("hf")
    model.bfloat16().save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    return Source(folder, weights, list(qwen3_next(weights)))


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, source: Source) -> Iterator[RunningService]:
    folder = tmp_path_factory.mktemp("store")
    with running_service(folder, local_socket=str(folder / "lane.sock")) as running:
        with TrainerClient(running.address) as trainer:
            trainer.register_model(MODEL, source.folder)
        yield running


def push(service: RunningService, held: list[Held], lane: str, step: int, **options: Any) -> Any:
    def one(rank: int) -> Any:
        with TrainerClient(service.address, lane=lane) as trainer:
            shards = shards_of(held, GRID, rank)
            handle = trainer.push(MODEL, shards, step=step, rank=rank, world_size=2, **options)
            return handle.wait(timeout=PATIENCE), handle.report()

    with ThreadPoolExecutor(2) as ranks:
        found = list(ranks.map(one, range(2)))
    assert {report.lane for _, report in found} == {lane}
    return found[0][0], [report for _, report in found]


def pulled(service: RunningService, number: int) -> dict[str, Tensor]:
    with EngineClient(service.address) as engine:
        return dict(engine.pull(MODEL, number))


def assert_holds(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("lane", ["local", "grpc"])
def test_pushed_norms_are_in_the_files_plus_one(service: RunningService, source: Source, lane: str) -> None:
    """The service verifies samples of what ranks have written."""
    version, _ = push(service, source.with_norms(), lane, step=1 + ("local", "grpc").index(lane))
    assert_holds(pulled(service, version.number), {**source.weights, **source.norms_plus_one()})


def test_ranks_that_push_to_several_replicas_add_it_once(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever part of a rank's stream goes to which of them, and by which lane."""
    small = functools.partial(lay_out_files, max_shard_bytes=50_000)
    monkeypatch.setattr(registered_model, "lay_out_files", small)
    with ExitStack() as stack:
        replicas = [
            stack.enter_context(
                running_service(
                    tmp_path / "store",
                    advertise="127.0.0.1:0",
                    local_socket=str(tmp_path / f"lane{number}.sock"),
                )
            )
            for number in range(2)
        ]
        trainers = [stack.enter_context(TrainerClient(each.address)) for each in replicas]
        trainers[0].register_model(MODEL, source.folder)

        def one(rank: int) -> Any:
            shards = shards_of(source.with_norms(), GRID, rank)
            handle = trainers[rank].push(MODEL, shards, step=1, rank=rank, world_size=2)
            return handle.wait(timeout=PATIENCE), handle.report()

        with ThreadPoolExecutor(2) as ranks:
            found = list(ranks.map(one, range(2)))
        assert "mixed" in {report.lane for _, report in found}
        for replica in replicas:
            expected = {**source.weights, **source.norms_plus_one()}
            assert_holds(pulled(replica, found[0][0].number), expected)


@pytest.mark.parametrize("lane", ["local", "grpc"])
def test_what_is_not_finite_is_counted_with_the_constant_as_without_it(
    service: RunningService, source: Source, lane: str
) -> None:
    held = source.with_norms()
    for item in held:
        if item.key == HELD:
            item.data[:3] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    version, reports = push(service, held, lane, step=11 + ("local", "grpc").index(lane))
    assert version.nonfinite_elements == 9
    assert sum(report.nonfinite_elements for report in reports) == 9
    assert version.held == ("nonfinite",)
    found = pulled(service, version.number)
    for layer in LAYERS:
        norm = found[NORM.format(layer)]
        assert norm[0].isnan()
        assert norm[1:3].tolist() == [torch.inf, -torch.inf]


def test_restored_norms_are_those_of_the_files_less_one(service: RunningService, source: Source) -> None:
    """Of numbers on the grid that both have, a push and a restore leave each bit as it was; with a model and without
    one.
    """
    version, _ = push(service, source.held, "local", step=21)
    assert_holds(pulled(service, version.number), source.weights)
    with TrainerClient(service.address) as trainer:
        for rank in range(2):
            expected, found = (shards_of(source.held, GRID, rank) for _ in range(2))
            for shard in (shard for shards in found.values() for shard in shards):
                shard.data.fill_(torch.nan)
            trainer.restore(MODEL, found, version=version.number)
            for key, shards in found.items():
                for one, other in zip(shards, expected[key], strict=True):
                    assert torch.equal(one.data, other.data), key
        layout = trainer.describe_shards(MODEL, MegatronRank())
        made = [torch.empty(p.shard.box.extent, dtype=torch.bfloat16) for p in layout.placements]
        for _ in trainer.restore_layout(MODEL, layout, made.__getitem__, version=version.number):
            pass
        by_name = {p.shard.tensor: tensor for p, tensor in zip(layout.placements, made, strict=True)}
        for layer in LAYERS:
            assert torch.equal(by_name[HELD.format(layer)], source.weights[NORM.format(layer)] - 1)


def test_a_checkpoint_is_converted_and_pushed_with_the_constant(
    service: RunningService, source: Source, tmp_path: Path
) -> None:
    convert_folder(source.folder, tmp_path / "checkpoint")
    checkpoint = CheckpointToPush.read(tmp_path / "checkpoint", None)
    for lane in ("local", "grpc"):
        with TrainerClient(service.address, lane=lane) as trainer:
            version = checkpoint.push(trainer, f"{MODEL}-{lane}", step=1, run="r").wait(timeout=PATIENCE)
        with EngineClient(service.address) as engine:
            assert_holds(dict(engine.pull(f"{MODEL}-{lane}", version.number)), source.weights)


def layout_of(source: Source, rank: int) -> Layout:
    return sharded_tensors(shards_of(source.held, GRID, rank)).layout
