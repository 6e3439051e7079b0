"""Does an adapter that ranks of one kind have pushed come back into ranks of another kind, and from ranks that hold
ranges of parameters?
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support.reference import tiny_config, tiny_model
from tests.support.services import RunningService, running_service
from tests.support.torch_ranks import run_ranks
from tests.support.zero3_ranges import gathered, partition
from weighbridge import (
    EngineClient,
    FailedPrecondition,
    InvalidArgument,
    LayoutError,
    TrainerClient,
    VersionFailed,
    WeighbridgeError,
)

peft = pytest.importorskip("peft")
BASE = "acme/smol"
CONFIG = tiny_config("llama", tied=False, num_hidden_layers=2, vocab_size=131)


def adapted(seed: int = 3, **options: Any) -> Any:
    """A model with an adapter; the same at each call with the same seed."""
    given = {"r": 4, "target_modules": ["q_proj", "down_proj"], "init_lora_weights": False, **options}
    torch.manual_seed(seed)
    return peft.get_peft_model(tiny_model(CONFIG, seed=1), peft.LoraConfig(**given))


def tensors_of(model: Any) -> dict[str, torch.Tensor]:
    return dict(peft.get_peft_model_state_dict(model, save_embedding_layers=False))


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    folder = tmp_path_factory.mktemp("ranks")
    tiny_model(CONFIG, seed=1).save_pretrained(folder / "base")
    with running_service(folder / "store") as running, TrainerClient(running.address) as trainer:
        trainer.import_folder(BASE, folder / "base").wait(timeout=60)
        yield running


def _sharded(seed: int) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, mesh = adapted(seed), init_device_mesh("cpu", (2,))
    for layer in model.base_model.model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _rank(rank: int, address: str, pushed: str) -> list[dict[str, torch.Tensor]]:
    """Restore one adapter into FSDP2 ranks, and pull it into others and under DDP; then push another from there."""
    from torch.nn.parallel import DistributedDataParallel

    model, filled, replicated = (
        _sharded(seed=5),
        _sharded(seed=6),
        DistributedDataParallel(adapted(seed=8)),
    )
    with TrainerClient(address) as trainer, EngineClient(address) as engine:
        trainer.restore_adapter("acme/one", model)
        for each in (filled, replicated):
            engine.pull("acme/one", 1).into(each)
        trainer.push_adapter(pushed, _sharded(seed=7), base=f"{BASE}@1", step=1).wait(timeout=60)
    whole = [{name: each.full_tensor() for name, each in tensors_of(ours).items()} for ours in (model, filled)]
    return [*whole, tensors_of(replicated.module)]


def test_an_adapter_goes_from_one_process_to_fsdp2_ranks_and_back(service: RunningService) -> None:
    with TrainerClient(service.address) as trainer:
        trainer.push_adapter("acme/one", adapted(), base=f"{BASE}@1", step=1).wait(timeout=60)
        for found in run_ranks(2, _rank, service.address, "acme/sharded"):
            assert all(same(each, tensors_of(adapted())) for each in found)
        back = adapted(seed=5)
        assert trainer.restore_adapter("acme/sharded", back).number == 1
        assert same(tensors_of(back), tensors_of(adapted(seed=7)))


def test_ranges_that_zero3_gives_ranks_are_one_adapter_and_are_filled_again(
    service: RunningService, tmp_path: Path
) -> None:
    def ranks(seed: int) -> list[Any]:
        models = [adapted(seed) for _ in range(3)]
        for rank, model in enumerate(models):
            for parameter in model.parameters():
                partition(parameter, rank, 3)
        return models

    def push(rank: int, model: Any) -> None:
        with TrainerClient(service.address) as trainer:
            given = {"step": 1, "rank": rank, "world_size": 3}
            trainer.push_adapter("acme/zero3", model, base=f"{BASE}@1", **given).wait(timeout=60)

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(push, range(3), ranks(seed=3)))
    with EngineClient(service.address) as engine:
        engine.export("acme/zero3", "latest", tmp_path / "out")
    assert same(load_file(tmp_path / "out" / "adapter_model.safetensors"), tensors_of(adapted()))
    filled = ranks(seed=5)
    with TrainerClient(service.address) as trainer:
        for rank, model in enumerate(filled):
            trainer.restore_adapter("acme/zero3", model, rank=rank, world_size=3)
    parameters = [dict(model.named_parameters()) for model in filled]
    for name, expected in adapted().named_parameters():
        if "lora_" in name:
            assert torch.equal(gathered([each[name] for each in parameters]), expected), name


def test_a_model_with_another_adapter_is_refused_and_stays_as_it_was(service: RunningService) -> None:
    with TrainerClient(service.address) as trainer:
        trainer.push_adapter("acme/kept", adapted(), base=f"{BASE}@1", step=1).wait(timeout=60)
        others: dict[str, tuple[type[WeighbridgeError], dict[str, Any]]] = {
            "is missing in the model": (LayoutError, {"target_modules": ["q_proj"]}),
            "has no such tensor": (LayoutError, {"target_modules": ["q_proj", "down_proj", "v_proj"]}),
            "acme/kept@1 has base_model": (LayoutError, {"r": 8}),
            "lora_alpha is 8 in the version and 3 in the model": (FailedPrecondition, {"lora_alpha": 3}),
            "use_rslora": (FailedPrecondition, {"use_rslora": True}),
        }
        for said, (kind, options) in others.items():
            model = adapted(seed=5, **options)
            with pytest.raises(kind) as refused:
                trainer.restore_adapter("acme/kept", model)
            assert said in str(refused.value)
            assert same(tensors_of(model), tensors_of(adapted(seed=5, **options)))
        merged = adapted()
        merged.merge_adapter()
        with pytest.raises(LayoutError, match="are merged into the weights"):
            trainer.restore_adapter("acme/kept", merged)
        with pytest.raises(InvalidArgument, match="acme/smol@1 is not an adapter"):
            trainer.restore_adapter(BASE, adapted())


def test_ranks_with_different_configs_push_no_version_with_one_of_them(service: RunningService) -> None:
    def push(rank: int) -> BaseException | None:
        model = adapted(lora_alpha=8 + rank)
        try:
            with TrainerClient(service.address) as trainer:
                handle = trainer.push_adapter("acme/mixed", model, base=f"{BASE}@1", step=1, rank=rank, world_size=2)
                handle.wait(timeout=60)
        except WeighbridgeError as error:
            return error
        return None

    with ThreadPoolExecutor(2) as pool:
        errors = list(pool.map(push, range(2)))
    assert all(errors)
    assert any("different adapter_config.json" in str(error) for error in errors)
    with TrainerClient(service.address) as trainer:
        assert not [each for each in trainer.versions("acme/mixed") if each.state.visible]
        again = trainer.push_adapter("acme/mixed", adapted(), base=f"{BASE}@1", step=2)
        assert again.wait(timeout=60).state.visible


def test_a_rank_that_comes_after_one_that_was_refused_is_told_so(service: RunningService) -> None:
    with TrainerClient(service.address) as trainer, TrainerClient(service.address) as other:
        trainer.push_adapter("acme/told", adapted(), base=f"{BASE}@1", step=1).wait(timeout=60)
        given: dict[str, Any] = {"base": f"{BASE}@1", "step": 2, "run": "again", "world_size": 2}
        with pytest.raises(FailedPrecondition, match="different tensors"):
            trainer.push_adapter("acme/told", adapted(r=8), rank=0, **given)
        with pytest.raises(VersionFailed, match="rank 0 was refused"):
            other.push_adapter("acme/told", adapted(), rank=1, **given)


def test_a_base_that_is_no_text_is_refused_by_name(service: RunningService, tmp_path: Path) -> None:
    model = adapted()
    model.save_pretrained(tmp_path)
    with TrainerClient(service.address) as trainer:
        for base in (None, 17):
            with pytest.raises(InvalidArgument, match="the base is"):
                trainer.push_adapter("acme/based", model, base=base, step=1)  # type: ignore[arg-type]
            with pytest.raises(InvalidArgument, match="the base is"):
                trainer.import_adapter("acme/based", tmp_path, base=base)  # type: ignore[arg-type]
