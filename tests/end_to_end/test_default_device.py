"""Trainers that have set torch's default device: is what they push and are filled with the same as without?

The meta device stands for a GPU: what is made there by mistake holds no data.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.support.services import RunningService, running_service
from tests.support.training_states import same_bits
from weighbridge import EngineClient, RandomStates, TrainerClient

MODEL = "tests/devices"


def made(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model that has made a step, in host memory."""
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    module(torch.randn(3, 8)).square().sum().backward()
    optimizer.step()
    return module, optimizer


@pytest.fixture(params=["local", "grpc"])
def service(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[RunningService]:
    lane = {"local_socket": str(tmp_path / "lane.sock")} if request.param == "local" else {}
    with running_service(tmp_path / "store", **lane) as running:
        yield running


@pytest.mark.parametrize("until", [None, "optimizer_step"])
def test_the_default_device_changes_nothing(service: RunningService, tmp_path: Path, until: str | None) -> None:
    (tmp_path / "config.json").write_text("{}")
    (module, optimizer), (other, other_optimizer) = made(0), made(1)
    state, rank_state = {"epoch": 3}, {"random": RandomStates()}
    with TrainerClient(service.address) as trainer, EngineClient(service.address) as engine:
        trainer.register_model(MODEL, tmp_path, tensors=module, dtype="bf16", weight_map=False)
        with torch.device("meta"):
            handle = trainer.push_state_dict(
                MODEL, module, step=1, optimizer=optimizer, state=state, rank_state=rank_state, until=until
            )
            assert handle.training is not None
            handle.wait(timeout=60)
            handle.training.wait(timeout=60)
            pulled = dict(engine.pull(MODEL, handle.number))
            trainer.restore_state_dict(MODEL, other, optimizer=other_optimizer, state=state, rank_state=rank_state)
    for name, tensor in module.state_dict().items():
        assert same_bits(pulled[name], tensor.to(torch.bfloat16))
        assert same_bits(other.state_dict()[name], tensor)
    for mine, theirs in zip(optimizer.state.values(), other_optimizer.state.values(), strict=True):
        assert all(same_bits(theirs[name], value) for name, value in mine.items())
