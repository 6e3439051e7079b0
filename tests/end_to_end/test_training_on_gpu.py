"""Training states on a GPU: does training go on to the bit, whatever lies on the device and whatever in host memory?

One process with FSDP2 on a mesh of one GPU, over NCCL.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.services import RunningService, running_service
from tests.support.training_states import same_bits
from weighbridge import RandomStates, TrainerClient

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
]
MODEL = "acme/smol"
OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "foreach": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True, amsgrad=True),
    "capturable": lambda parameters: torch.optim.AdamW(
        parameters, lr=torch.tensor(0.01, device="cuda"), capturable=True
    ),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    folder = tmp_path_factory.mktemp("store")
    with running_service(folder, local_socket=str(folder / "lane.sock")) as running:
        (folder / "config.json").write_text("{}")
        with TrainerClient(running.address) as client:
            client.register_model(MODEL, folder, tensors=made(1), weight_map=False)
        yield running


def made(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Linear(33, 33) for _ in range(3)))


def train(module: nn.Module, optimizer: Any, steps: range) -> list[Tensor]:
    losses = []
    for step in steps:
        data = (
            torch.rand(5, 33, generator=torch.Generator().manual_seed(step)).cuda().to(next(module.parameters()).dtype)
        )
        loss = nn.functional.dropout(module(data), 0.3).float().square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().cpu())
    return losses


def _trained(address: str, folder: str, lane: str) -> dict[str, bool]:
    """For each optimizer, whether one that is filled gives the losses of the one that was pushed."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.cuda.set_device(0)
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=f"file://{folder}/job-{lane}", rank=0, world_size=1)
    mesh = init_device_mesh("cuda", (1,))
    found = {}
    with TrainerClient(address, lane=lane) as client:
        for step, (name, make) in enumerate(OPTIMIZERS.items(), start=1):
            for dtype in (torch.float32, torch.bfloat16):
                module, other = (fully_shard(made(seed).to("cuda", dtype), mesh=mesh) for seed in (1, 2))
                optimizer, filled = make(module.parameters()), make(other.parameters())
                train(module, optimizer, range(3))
                random = RandomStates()
                for again in range(2):  # the second time, copies are begun before it is known where they go
                    number = 4 * step + 2 * (dtype == torch.float32) + again
                    handle = client.push_state_dict(
                        MODEL,
                        module,
                        step=number,
                        run=lane,
                        optimizer=optimizer,
                        rank_state={"random": random},
                    )
                expected = train(module, optimizer, range(3, 8))
                assert handle.training is not None
                number = handle.training.wait(timeout=100).number
                client.restore_state_dict(MODEL, other, version=number, optimizer=filled, rank_state={"random": random})
                devices = [
                    {key: value.device for key, value in each.items() if isinstance(value, Tensor)}
                    for each in (*optimizer.state.values(), *filled.state.values())
                ]
                assert all(each == devices[0] for each in devices), devices
                found[f"{name} {dtype}"] = all(map(same_bits, train(other, filled, range(3, 8)), expected))
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize("lane", ["local", "grpc"])
def test_training_on_a_gpu_goes_on_to_the_bit(service: RunningService, tmp_path: Path, lane: str) -> None:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        found = pool.submit(_trained, service.address, str(tmp_path), lane).result(timeout=200)
    assert len(found) == 2 * len(OPTIMIZERS)
    assert all(found.values()), found
