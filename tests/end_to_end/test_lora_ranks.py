"""LoRA with peft on ranks that share the model by FSDP2: is what is pushed what peft would merge in one process, and
does a training state come back?
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.ports import reserved_port
from tests.support.reference import tiny_config, tiny_model
from tests.support.services import running_service
from tests.support.torch_ranks import run_ranks
from weighbridge import EngineClient, LayoutError, TrainerClient
from weighbridge.integrations.peft import merged_weights

peft = pytest.importorskip("peft")
MODEL = "tests/lora"
CONFIG = tiny_config("llama", tied=False, num_hidden_layers=2, vocab_size=131)


def adapted(**options: Any) -> Any:
    """A model with adapters that change what it computes; the same on all ranks."""
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False, **options)
    torch.manual_seed(3)
    return peft.get_peft_model(tiny_model(CONFIG, seed=1), config)


def _shared(**options: Any) -> Any:
    """The same, over the two ranks of this job."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, mesh = adapted(**options), init_device_mesh("cpu", (2,))
    for layer in model.base_model.model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _whole(model: Any) -> dict[str, Tensor]:
    return {name: tensor.full_tensor().clone() for name, tensor in model.state_dict().items()}


def _loss(model: Any, optimizer: Any) -> float:
    """The loss before a step, which is made."""
    tokens = torch.randint(0, 131, (2, 9), generator=torch.Generator().manual_seed(5))
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def _optimizer(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-2)


def _rank(rank: int, address: str, nowhere: str) -> dict[str, Any]:
    """Trains, pushes apart and merged in place, and restores into a model that was made anew."""
    model = _shared()
    optimizer = _optimizer(model)
    with TrainerClient(nowhere if rank else address, retry_seconds=0.5) as half:
        # to merge is a collective, which would wait for a rank that does not come
        skipped = half.push_state_dict(MODEL, model, step=1, on_failure="warn", max_hold_s=60).skipped
    with TrainerClient(address) as trainer:
        _loss(model, optimizer)
        before = _whole(model)
        handle = trainer.push_state_dict(MODEL, model, step=1, optimizer=optimizer)
        assert handle.training is not None
        apart, _ = handle.wait(timeout=100), handle.training.wait(timeout=100)
        after = _whole(model)
        with torch.no_grad():
            model.merge_adapter()
            in_place = trainer.push_state_dict(MODEL, model, step=2).wait(timeout=100)
            merged = {name: tensor.full_tensor().clone() for name, tensor in merged_weights(model)}
            with pytest.raises(LayoutError, match="4 layers have adapters that are merged into") as refused:
                trainer.push_state_dict(MODEL, model, step=3, optimizer=optimizer)
            assert "unmerge_adapter" in refused.value.fix
            model.unmerge_adapter()
        fresh = _shared()
        renewed = _optimizer(fresh)
        trainer.restore_state_dict(MODEL, fresh, optimizer=renewed)
        restored = _whole(fresh)
        dora = _shared(use_dora=True)
        doras = {name: tensor.full_tensor().clone() for name, tensor in merged_weights(dora)}
    return {
        "numbers": (apart.number, in_place.number),
        "skipped": str(skipped),
        "unchanged": all(torch.equal(before[name], after[name]) for name in before),
        "trained": before,
        "restored": restored,
        "losses": [_loss(fresh, renewed) for _ in range(2)],
        "merged": merged,
        "dora": doras,
    }


def _close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Products of matrices whose rows are elsewhere are summed up in another order."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.allclose(found[name], tensor, rtol=0, atol=1e-6), name


def test_a_shared_model_with_adapters_is_pushed_merged_and_restored_apart(tmp_path: Path) -> None:
    CONFIG.save_pretrained(tmp_path / "hf")
    nowhere = f"127.0.0.1:{reserved_port()}"
    with running_service(tmp_path / "store") as service:
        with TrainerClient(service.address) as trainer:
            trainer.register_model(MODEL, tmp_path / "hf", dtype="fp32")
        first, second = run_ranks(2, _rank, service.address, nowhere)
        assert first["numbers"] == second["numbers"]
        with EngineClient(service.address) as engine:
            apart, in_place = (dict(engine.pull(MODEL, number)) for number in first["numbers"])

    assert nowhere in second["skipped"]
    assert f"rank 1: the service at {nowhere}" in first["skipped"]
    assert first["unchanged"]
    assert second["unchanged"]
    alone = adapted()
    alone.load_state_dict(first["trained"])
    expected = copy.deepcopy(alone).merge_and_unload().state_dict()
    base = tiny_model(CONFIG, seed=1).state_dict()
    assert len([name for name in expected if not torch.equal(expected[name], base[name])]) == 4
    _close(apart, expected)
    _close(in_place, expected)
    assert all(torch.equal(in_place[name], tensor) for name, tensor in first["merged"].items())
    _close(first["dora"], adapted(use_dora=True).merge_and_unload().state_dict())

    for result in (first, second):
        assert all(torch.equal(result["restored"][name], tensor) for name, tensor in first["trained"].items())
    whole = adapted()  # never interrupted, and in one process
    optimizer = _optimizer(whole)
    right = [_loss(whole, optimizer) for _ in range(3)][1:]
    assert first["losses"] == pytest.approx(right, abs=1e-4)
