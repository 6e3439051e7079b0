"""LoRA with peft on ranks that share the model by FSDP2: is what is pushed what peft would merge in one process?"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.reference import tiny_config, tiny_model
from tests.support.services import running_service
from tests.support.torch_ranks import run_ranks
from weighbridge import EngineClient, LayoutError, TrainerClient
from weighbridge.integrations.peft import merged_weights

peft = pytest.importorskip("peft")
MODEL = "tests/lora"
CONFIG = tiny_config("llama", tied=False, num_hidden_layers=2, vocab_size=131)


def adapted() -> Any:
    """A model with adapters that change what it computes; the same on all ranks."""
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    torch.manual_seed(3)
    return peft.get_peft_model(tiny_model(CONFIG, seed=1), config)


def _rank(rank: int, address: str) -> tuple[int, dict[str, Tensor], bool]:
    """Merges, pushes and takes apart again; the version, what was merged, and whether the adapters are as they were."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, mesh = adapted(), init_device_mesh("cpu", (2,))
    for layer in model.base_model.model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)

    def adapters() -> dict[str, Tensor]:
        return {name: t.full_tensor().clone() for name, t in model.state_dict().items() if ".lora_" in name}

    before = adapters()
    with TrainerClient(address) as trainer, torch.no_grad():
        with pytest.raises(LayoutError, match="4 layers have adapters that are not merged"):
            trainer.push_state_dict(MODEL, model, step=1)
        model.merge_adapter()
        merged = {name: tensor.full_tensor().clone() for name, tensor in merged_weights(model)}
        handle = trainer.push_state_dict(MODEL, model, step=2)
        model.unmerge_adapter()
        number = handle.wait(timeout=100).number
    after = adapters()
    return number, merged, all(torch.equal(before[name], after[name]) for name in before)


def test_merged_adapters_of_a_shared_model_are_pushed_with_the_weights_below(tmp_path: Path) -> None:
    expected = copy.deepcopy(adapted()).merge_and_unload().state_dict()
    CONFIG.save_pretrained(tmp_path / "hf")
    with running_service(tmp_path / "store") as service:
        with TrainerClient(service.address) as trainer:
            trainer.register_model(MODEL, tmp_path / "hf", dtype="fp32")
        results = run_ranks(2, _rank, service.address)
        ((number, merged, _), _) = results
        assert [each[0] for each in results] == [number] * 2
        assert all(unchanged for _, _, unchanged in results)
        with EngineClient(service.address) as engine:
            pulled = dict(engine.pull(MODEL, number))
    assert pulled.keys() == expected.keys() == merged.keys()
    base = tiny_model(CONFIG, seed=1).state_dict()
    changed = [name for name in expected if not torch.equal(expected[name], base[name])]
    assert len(changed) == 4
    for name, tensor in expected.items():
        assert torch.equal(pulled[name], merged[name]), name
        # products of matrices whose rows are elsewhere are summed up in another order
        assert torch.allclose(pulled[name], tensor, rtol=0, atol=1e-6), name
