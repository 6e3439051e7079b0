"""Does the contract hold for loaders that compute, fail, leave something out or can only be run?"""

from __future__ import annotations

import gc
import importlib.util
import threading
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support.example_engine import Llama, LlamaEngine
from tests.support.reference import tiny_config, tiny_model
from tests.support.services import RunningService, running_service
from tests.support.waiting import eventually
from weighbridge import TrainerClient
from weighbridge.errors import FailedPrecondition
from weighbridge.integrations.engine_rank.agreement import OneRank, RanksFailed
from weighbridge.integrations.engine_rank.rank import EngineRank, rank_of
from weighbridge.integrations.engine_rank.source import ModelSource

MODEL = "tests/alone"
CONFIG = tiny_config("llama", tied=False, head_dim=8)
Weights = Iterable[tuple[str, torch.Tensor]]


class Doubling(Llama):
    """Computes with one of its weights."""

    def load_weights(self, weights: Weights) -> None:
        super().load_weights((name, tensor * 2 if name == "lm_head.weight" else tensor) for name, tensor in weights)


class Refusing(Llama):
    """Does not know one of the tensors."""

    def load_weights(self, weights: Weights) -> None:
        for name, tensor in weights:
            if name == "model.norm.weight":
                raise KeyError(name)
            super().load_weights([(name, tensor)])


class LeavingOut(Llama):
    """Leaves out a half of a parameter."""

    def load_weights(self, weights: Weights) -> None:
        super().load_weights((name, tensor) for name, tensor in weights if "layers.2.mlp.up_proj" not in name)


class Alone(LlamaEngine):
    """An engine of one process."""

    ranks = OneRank()

    def configuration(self) -> str:
        return type(self.model).__name__


class OnlyRun(Alone):
    """Whose loader cannot be recorded before the model has weights."""

    def record_first(self, source: Any) -> None:
        return None


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    with running_service(tmp_path_factory.mktemp("store")) as running:
        yield running


@pytest.fixture(scope="module")
def versions(service: RunningService, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, torch.Tensor]]:
    """The tensors of versions 1 and 2, as transformers has written them."""
    found = []
    with TrainerClient(service.address) as trainer:
        for seed in (1, 2):
            folder = tmp_path_factory.mktemp("model")
            tiny_model(CONFIG, seed).save_pretrained(folder)
            if seed == 1:
                trainer.register_model(MODEL, folder)
            trainer.push_folder(MODEL, folder).wait(timeout=60)
            found.append(load_file(folder / "model.safetensors"))
    return found


@pytest.fixture
def source(service: RunningService, versions: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelSource:
    monkeypatch.setenv("WEIGHBRIDGE_CACHE", str(tmp_path))
    return ModelSource(MODEL, service.address)


def started(engine: Alone, source: ModelSource) -> EngineRank:
    """A rank that has version 1."""
    rank = EngineRank(engine)
    found, recording = rank.load(source, 1)
    engine.load(found.tensors(None if recording is None else recording.unrecorded))
    return rank


def check(model: Llama, tensors: dict[str, torch.Tensor]) -> None:
    """Whether a model is what its loader makes of real tensors."""
    expected = type(model)(CONFIG, 0, 1)
    expected.load_weights(tensors.items())
    for (name, mine), theirs in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(mine, theirs), name


def test_a_tensor_that_the_loader_computes_with_goes_through_the_loader_each_time(
    source: ModelSource, versions: list[dict[str, torch.Tensor]]
) -> None:
    model = Doubling(CONFIG, 0, 1)
    rank = started(Alone(model), source)
    check(model, versions[0])
    for number in (2, 1):
        rank.prepare(number)
        eventually(lambda: not rank.status().preparing)
        assert rank.status().nbytes == sum(tensor.nbytes for tensor in versions[0].values())
        rank.apply(number)
        check(model, versions[number - 1])


def test_a_loader_of_a_package_that_has_changed_is_recorded_anew(
    source: ModelSource, versions: list[dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    loader = """
from tests.support.example_engine import Llama

class Packaged(Llama):
    def load_weights(self, weights):
        super().load_weights((name, {tensor}) for name, tensor in weights)
"""
    first, second = "tensor", "tensor.flip(0) if name == 'model.norm.weight' else tensor"
    for release, tensor in enumerate((first, second)):
        file = tmp_path / f"release{release}" / "packaged.py"
        file.parent.mkdir()
        file.write_text(loader.format(tensor=tensor))
        spec = importlib.util.spec_from_file_location("packaged", file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        model = module.Packaged(CONFIG, 0, 1)
        started(Alone(model), source)
        check(model, versions[0])


def test_a_loader_that_fails_is_refused_by_the_tensor_at_which_it_did(source: ModelSource) -> None:
    model = Refusing(CONFIG, 0, 1)
    with pytest.raises(FailedPrecondition, match=r"failed at .*model\.norm\.weight.* with KeyError"):
        started(Alone(model), source)
    assert not any(parameter.is_meta for parameter in model.parameters())


def test_a_parameter_that_would_be_left_in_part_is_refused_by_name_and_nothing_is_touched(
    source: ModelSource,
) -> None:
    model = LeavingOut(CONFIG, 0, 1)
    for parameter in model.parameters():
        parameter.data.fill_(7)
    with pytest.raises(RanksFailed, match="has nothing for model_layers_2_mlp_gate_up: 6144 of 12288 elements"):
        EngineRank(Alone(model)).apply(1, source)
    assert all(bool((parameter == 7).all()) for parameter in model.parameters())


def test_a_loader_that_can_only_be_run_at_first_is_recorded_for_updates(
    source: ModelSource, versions: list[dict[str, torch.Tensor]]
) -> None:
    model = Llama(CONFIG, 0, 1)
    rank = started(OnlyRun(model), source)
    check(model, versions[0])
    assert rank.status().served == f"{MODEL}@1"
    rank.apply(2)
    check(model, versions[1])


def test_what_is_discarded_on_its_way_does_not_hold_up_the_next_version(
    source: ModelSource, versions: list[dict[str, torch.Tensor]]
) -> None:
    model = Llama(CONFIG, 0, 1)
    engine = Alone(model)
    rank = started(engine, source)
    bring_rest, go_on = engine.bring_rest, threading.Event()

    def slow(*args: Any) -> Any:
        assert go_on.wait(30)
        return bring_rest(*args)

    engine.bring_rest = slow  # type: ignore[method-assign]
    rank.prepare(1)
    there = rank._preparation
    assert there is not None
    rank.discard()
    assert not rank.status().preparing
    engine.bring_rest = bring_rest  # type: ignore[method-assign]
    rank.apply(2)
    check(model, versions[1])
    go_on.set()
    there.wait()
    eventually(lambda: not there.running)
    with pytest.raises(FailedPrecondition, match="has not been prepared"):
        _ = there.update  # its memory was given back


def test_a_rank_belongs_to_its_model_and_ends_with_it() -> None:
    model = Llama(CONFIG, 0, 1)
    rank = rank_of(model, Alone(model))
    assert rank_of(model, Alone(model)) is rank
    ended = weakref.ref(rank)
    del model, rank
    gc.collect()
    assert ended() is None
