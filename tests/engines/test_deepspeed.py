"""Does DeepSpeed's own ZeRO-3 engine push what it trains and go on from it, as the recipe says? Skipped where it is not installed."""

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
from weighbridge import EngineClient

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed"
)
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
        code[1]
        .replace("127.0.0.1:50051", address)
        .replace("acme/smol", f"tests/zero{size}")
        .split("# to go on")
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
