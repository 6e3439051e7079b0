"""Pushes whose copies are begun before it is known where they go: is what arrives what the trainer held, although it
changed it at once?

Copies made in this process when it pushed are the independent answer.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.support.services import RunningService, running_service
from tests.support.training_states import same_bits
from weighbridge import EngineClient, PushHandle, TrainerClient
from weighbridge._clients.copying import ahead
from weighbridge._clients.copying.ahead import CopiesAhead
from weighbridge._core import dtypes
from weighbridge._core.boxes import Box
from weighbridge._core.layouts import Layout, Shard, TensorSpec
from weighbridge._formats.push_sources import StagingPool

MODEL = "tests/ahead"


def trainer() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(64, 512), nn.BatchNorm1d(512), nn.Linear(512, 16))
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    module(torch.randn(8, 64)).square().sum().backward()
    optimizer.step()
    return module, optimizer


@pytest.fixture(params=["local", "grpc"])
def service(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[RunningService]:
    lane = {"local_socket": str(tmp_path / "lane.sock")} if request.param == "local" else {}
    with running_service(tmp_path / "store", **lane) as running:
        yield running


@pytest.fixture
def client(service: RunningService, tmp_path: Path) -> Iterator[TrainerClient]:
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text("{}")
    with TrainerClient(service.address) as client:
        client.register_model(MODEL, tmp_path / "hf", tensors=trainer()[0], dtype="bf16", weight_map=False)
        yield client


def waited(handle: PushHandle) -> PushHandle:
    handle.wait("ready", timeout=60)
    assert handle.training is not None
    handle.training.wait("ready", timeout=60)
    return handle


def test_what_is_changed_as_soon_as_a_push_returns_arrives_as_it_was(client: TrainerClient) -> None:
    module, optimizer = trainer()
    pushed = {}
    for step in range(4):
        handle = client.push_state_dict(MODEL, module, step=step, optimizer=optimizer, state={"at": "x" * step})
        assert handle.copied(timeout=0)
        pushed[handle.number] = deepcopy((module.state_dict(), optimizer.state_dict()))
        with torch.no_grad():
            for tensor in (*module.state_dict().values(), *optimizer.state[module[0].weight].values()):
                tensor.add_(1)
        waited(handle)
    for pool in (client._pushes.pusher._ahead, client._pushes.training._ahead):
        assert pool._free, "nothing was copied ahead"
    for number, (held, state) in pushed.items():
        with EngineClient(client.server) as engine:
            found = dict(engine.pull(MODEL, number))
        assert all(same_bits(found[name], tensor.to(found[name].dtype)) for name, tensor in held.items())
        module, optimizer = trainer()
        client.restore_state_dict(MODEL, module, optimizer=optimizer, version=number)
        assert all(same_bits(tensor, held[name]) for name, tensor in module.state_dict().items())
        own = optimizer.state_dict()["state"]
        assert all(
            same_bits(own[index][name], value) for index, of in state["state"].items() for name, value in of.items()
        )


def test_a_push_takes_no_more_memory_than_it_may(client: TrainerClient) -> None:
    module, optimizer = trainer()
    client._pushes._ahead_bytes = 1000
    for step in range(2):
        waited(client.push_state_dict(MODEL, module, step=step, optimizer=optimizer))
    assert not client._pushes.pusher._ahead._free
    assert not client._pushes.training._ahead._free


def test_tensors_that_were_not_expected_arrive_as_they_were(client: TrainerClient) -> None:
    """An optimizer that makes its state with its first step pushes more than before."""
    module, optimizer = trainer()
    waited(client.push_state_dict(MODEL, module, step=1, optimizer=torch.optim.AdamW(module.parameters())))
    handle = client.push_state_dict(MODEL, module, step=2, optimizer=optimizer)
    expected = deepcopy(optimizer.state[module[0].weight])
    with torch.no_grad():
        for value in optimizer.state[module[0].weight].values():
            value.add_(1)
    waited(handle)
    other = trainer()
    client.restore_state_dict(MODEL, other[0], optimizer=other[1], version=handle.number)
    found = other[1].state[other[0][0].weight]
    assert all(same_bits(found[name], expected[name]) for name in expected)


def test_a_failed_copy_is_raised_in_the_call_and_gives_both_versions_up(
    client: TrainerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, optimizer = trainer()
    waited(client.push_state_dict(MODEL, module, step=1, optimizer=optimizer))

    def gone(*_: object) -> None:
        raise RuntimeError("the device is gone")

    with monkeypatch.context() as patched:
        patched.setattr(ahead, "_copy", gone)
        with pytest.raises(RuntimeError, match="the device is gone"):
            client.push_state_dict(MODEL, module, step=2, optimizer=optimizer)
    waited(client.push_state_dict(MODEL, module, step=3, optimizer=optimizer))
    for name in (MODEL, f"{MODEL}:training"):
        assert [each.step for each in client.versions(name)] == [3, 1]


def test_a_push_says_that_it_keeps_the_rank_until_all_is_copied(
    client: TrainerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, optimizer = trainer()
    waited(client.push_state_dict(MODEL, module, step=1, optimizer=optimizer))
    copy = ahead._copy

    def slowly(copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        time.sleep(0.5)
        copy(copies)

    monkeypatch.setattr(ahead, "_copy", slowly)
    handle = waited(client.push_state_dict(MODEL, module, step=2, optimizer=optimizer))
    assert handle.report().held_seconds > 0.7  # weights, and the state beside them


def test_memory_goes_back_once_and_when_the_last_user_is_done() -> None:
    pool, tensor = StagingPool(), torch.arange(1000.0)
    with CopiesAhead(10_000) as copies:
        copies.begin([tensor, tensor.view(1000), tensor[:500]], pool)
        copies.begin([tensor, torch.arange(2000.0)], pool)
        spec = TensorSpec("tensor", dtypes.parse("f32"), (1000,))
        layout = Layout.stream([spec], [Shard("tensor", Box.whole((1000,)))])
        pushes = [copies.shards(layout, [tensor], pool)[1] for _ in range(2)]
    for push in pushes:
        assert not pool._free
        push.release()
    [buffer] = pool._free
    assert len(buffer) == 4032 + 2048, "both different ones, aligned, and not what would be too much"
