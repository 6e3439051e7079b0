"""Does DeepSpeed's own ZeRO-3 engine push what it trains and go on from it, as the recipe says? Skipped where it is not
installed.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.reference import tiny_config, tiny_model
from tests.support.services import running_service
from tests.support.torch_ranks import run_ranks
from weighbridge import EngineClient, InvalidArgument, TrainerClient

pytestmark = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")
PAGE = Path(__file__).parents[2] / "docs" / "recipes" / "deepspeed.md"
CONFIG = tiny_config("llama", tied=False, num_hidden_layers=2, vocab_size=131)


def _as_torchrun(rank: int, size: int) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_SIZE=str(size), DS_ACCELERATOR="cpu"
    )
    import deepspeed  # noqa: F401

    # its collectives in shared memory would be compiled first, which takes minutes
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]


def _train(rank: int, size: int, address: str, hf_dir: str) -> dict[str, Any]:
    _as_torchrun(rank, size)
    from deepspeed.runtime.zero import GatheredParameters

    model = tiny_model(CONFIG, seed=5).train()
    tokens = torch.randint(0, 131, (10, 1, 8), generator=torch.Generator().manual_seed(rank))
    names: dict[str, Any] = {
        "model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "hf_dir": hf_dir,
        "loader": [{"input_ids": each, "labels": each} for each in tokens],
        "config": {
            "train_micro_batch_size_per_gpu": 1, "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 100},
        },
    }  # fmt: skip
    code = re.search(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    assert code is not None
    before, after = (
        code[1].replace("127.0.0.1:50051", address).replace("acme/smol", f"tests/zero{size}").split("# to go on")
    )

    def whole() -> dict[str, Tensor]:
        module = names["engine"].module
        with GatheredParameters(list(module.parameters())):
            return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}

    exec(compile(before, PAGE.name, "exec"), names)
    trained = whole()
    engine = names["engine"]
    batch = names["loader"][0]
    # weights that a restore has to undo, masters among them, and copies that the engine keeps of small ones
    engine.backward(engine(**batch).loss)
    engine.step()
    changed = whole()
    engine.backward(engine(**batch).loss)
    engine.step()
    exec(compile("# to go on" + after, PAGE.name, "exec"), names)
    kept = {name: each for name, each in engine.module.named_parameters() if each.ds_persist}
    copies = {name: parameter.detach().clone() for name, parameter in kept.items()}
    restored = whole()
    for group in engine.optimizer.param_groups:
        group["lr"] = 0.0
    engine.backward(engine(**batch).loss)
    engine.step()  # writes the masters back
    return {
        "trained": trained,
        "changed": changed,
        "restored": restored,
        "copies": copies,
        "stepped": whole(),
    }


@pytest.mark.parametrize("size", [2, 3])
def test_the_recipe_pushes_and_restores_what_zero_3_has_partitioned(tmp_path: Path, size: int) -> None:
    CONFIG.save_pretrained(tmp_path)
    with running_service(tmp_path / "store") as service:
        ranks = run_ranks(size, _train, size, service.address, str(tmp_path))
        with EngineClient(service.address) as engine:
            pulled = dict(engine.pull(f"tests/zero{size}"))
    initial = tiny_model(CONFIG, seed=5).state_dict()
    assert pulled.keys() == initial.keys()
    assert not any(torch.equal(pulled[name], tensor) for name, tensor in initial.items())
    for rank in ranks:
        assert rank["copies"]
        for name, tensor in pulled.items():
            assert torch.equal(rank["trained"][name], tensor), name
            assert not torch.equal(rank["changed"][name], tensor), name
            assert torch.equal(rank["restored"][name], tensor), name
            assert torch.equal(rank["stepped"][name], tensor), name
        assert all(torch.equal(copy, pulled[name]) for name, copy in rank["copies"].items())


# -- training states ------------------------------------------------------------------------------------------------------


def _engine(rank: int, size: int, stage: int, dtype: str, seed: int) -> Any:
    _as_torchrun(rank, size)
    import deepspeed

    model = tiny_model(CONFIG, seed=seed).to(getattr(torch, dtype)).train()
    matrices = [each for each in model.parameters() if each.dim() > 1]
    others = [each for each in model.parameters() if each.dim() < 2]
    optimizer = torch.optim.AdamW([{"params": matrices}, {"params": others, "weight_decay": 0.0}], lr=0.01)
    config = {
        "train_micro_batch_size_per_gpu": 1, "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": dtype == "bfloat16"}, "data_types": {"grad_accum_dtype": "bf16" if dtype == "bfloat16" else "fp32"},
        # several flat tensors, in which ranges begin and end inside of parameters
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 100, "sub_group_size": 9000},
    }  # fmt: skip
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return engine


def _steps(engine: Any, rank: int, numbers: range) -> list[float]:
    losses = []
    for number in numbers:
        generator = torch.Generator().manual_seed(100 * number + rank)
        tokens = torch.randint(0, 131, (1, 8), generator=generator)
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    return losses


def _gathered(engine: Any) -> dict[str, Tensor]:
    """All that the engine holds, whole, as DeepSpeed gathers it; all ranks call it."""
    from deepspeed.runtime.zero import GatheredParameters
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    # DeepSpeed finds these after the step of the first group
    if hasattr(engine.optimizer, "_hp_optimizer_states_linked"):
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    found = {}
    for name, parameter in engine.module.named_parameters():
        with GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
            found[name] = parameter.detach().clone()
        found[f"{name}.fp32"] = safe_get_full_fp32_param(parameter).clone()
        for key in ("exp_avg", "exp_avg_sq"):
            found[f"{name}.{key}"] = safe_get_full_optimizer_state(parameter, key).clone()
    return found


def _options(engine: Any) -> list[dict[str, Any]]:
    return [{k: v for k, v in g.items() if k != "params"} for g in engine.optimizer.optimizer.param_groups]


def _train_and_push(rank: int, size: int, address: str, model: str, stage: int, dtype: str) -> Any:
    engine = _engine(rank, size, stage, dtype, 5)
    _steps(engine, rank, range(3))
    for group in engine.optimizer.param_groups:
        group["lr"] = 0.02
    with TrainerClient(address) as trainer:
        if stage == 3:
            with pytest.raises(InvalidArgument, match="ZeRO-3 has partitioned"):
                trainer.push_state_dict(model, engine.module, step=2, optimizer=torch.optim.SGD([torch.ones(1)]))
        handle = trainer.push_state_dict(model, engine.module, step=3, optimizer=engine.optimizer, state={"at": 3})
        assert handle.training is not None
        handle.training.wait(timeout=120)
    return _gathered(engine), _options(engine), _steps(engine, rank, range(3, 6))


def _restore_and_train(rank: int, size: int, address: str, model: str, stage: int, dtype: str) -> Any:
    engine = _engine(rank, size, stage, dtype, 6)
    state = {"at": 0}
    with TrainerClient(address) as trainer:
        trainer.restore_state_dict(model, engine.module, optimizer=engine.optimizer, state=state)
    steps = {float(each["step"]) for each in engine.optimizer.optimizer.state.values() if "step" in each}
    return (
        (_gathered(engine), _options(engine)), (steps, state["at"]), _steps(engine, rank, range(3, 6)), _gathered(engine),
    )  # fmt: skip


@pytest.mark.parametrize("stage", [3, 2, 1])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_training_state_goes_on_to_the_bit_and_fills_other_numbers_of_ranks(
    tmp_path: Path, stage: int, dtype: str
) -> None:
    CONFIG.save_pretrained(tmp_path)
    model = f"tests/zero-{stage}-{dtype}"
    with running_service(tmp_path / "store") as service:
        with TrainerClient(service.address) as trainer:
            trainer.register_model(model, tmp_path, dtype=dtype)
        pushed = run_ranks(2, _train_and_push, 2, service.address, model, stage, dtype)
        restored = {
            size: run_ranks(size, _restore_and_train, size, service.address, model, stage, dtype) for size in (2, 3, 1)
        }
    expected, options, _ = pushed[0]
    for size, ranks in restored.items():
        for rank, ((found, found_options), kept, losses, after) in enumerate(ranks):
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
            assert found_options == options
            assert kept == ({3.0}, 3)
            assert not torch.equal(after["model.norm.weight.fp32"], found["model.norm.weight.fp32"])
            if size == 2:
                assert losses == pushed[rank][2]
