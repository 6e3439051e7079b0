"""Trainers and engines of one release, for tests of rolling upgrades: a program that is run with that release's SDK,
and imports nothing of the tests.

``trainer MODEL FOLDER RANK SERVERS``: one of two FSDP2 ranks that push weights and training states until FOLDER has a
file ``stop``. ``engine MODEL SERVERS``: follows ``latest``, and pulls each version that the ref moves to.
``restore MODEL SERVERS``: restores the newest training state in one process.

Each prints a line of JSON for each version, ``{"step", "number"}``. All values of a version are known from its step, so
each reader compares all of them.
"""

from __future__ import annotations

import json
import sys
import zlib
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn

from weighbridge import EngineClient, TrainerClient

RANKS = 2


def expected(name: str, shape: tuple[int, ...], step: int) -> torch.Tensor:
    """A tensor's values in the version of a step; float32."""
    count = torch.Size(shape).numel()
    return (torch.arange(count) % 251 + zlib.crc32(name.encode()) % 97 + step).float().view(shape)


def module() -> nn.Module:
    """A model of 2.4 MB."""
    return nn.Sequential(nn.Linear(512, 800), nn.Linear(800, 256))


def say(version: Any) -> None:
    """Print a version as one line."""
    print(json.dumps({"step": version.step, "number": version.number}), flush=True)


def fill(module: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Give parameters and moments the values of a step."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    def set_values(tensor: torch.Tensor, name: str) -> None:
        whole = expected(name, tuple(tensor.shape), step)
        if isinstance(tensor, DTensor):
            whole = distribute_tensor(whole, tensor.device_mesh, tensor.placements)
        tensor.copy_(whole)

    with torch.no_grad():
        for name, parameter in module.named_parameters():
            set_values(parameter, name)
            for key in ("exp_avg", "exp_avg_sq"):
                set_values(optimizer.state[parameter][key], f"{name} {key}")


def stepped(module: nn.Module) -> torch.optim.AdamW:
    """An optimizer that has made a step, so that it has moments."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    module(torch.ones(1, 512)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def train(model: str, folder: Path, rank: int, servers: str) -> None:
    """Push a version for each step until the file ``stop`` exists, and the training state with every third one."""
    from torch.distributed.fsdp import fully_shard

    distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=RANKS)
    sharded = module()
    for layer in sharded.children():
        fully_shard(layer)
    fully_shard(sharded)
    optimizer = stepped(sharded)
    with TrainerClient(servers, retry_seconds=60) as client:
        if rank == 0:
            (folder / "config.json").write_text("{}")
            client.register_model(model, folder, tensors=module(), weight_map=False)
        distributed.barrier()
        step = 0
        while True:
            stop = torch.tensor(float((folder / "stop").exists()))
            distributed.all_reduce(stop, distributed.ReduceOp.MAX)
            if stop.item():
                break
            step += 1
            fill(sharded, optimizer, step)
            saved = {"optimizer": optimizer, "state": {"step": step}} if step % 3 == 0 else {}
            handle = client.push_state_dict(model, sharded, step=step, **saved)
            version = handle.wait("durable", timeout=120)
            if handle.training is not None:
                handle.training.wait("durable", timeout=120)
            if rank == 0:
                say(version)
    distributed.destroy_process_group()


def follow(model: str, servers: str) -> None:
    """Pull and compare each version that ``latest`` names, until the process is ended."""
    shapes = {name: tuple(tensor.shape) for name, tensor in module().state_dict().items()}
    with EngineClient(servers, retry_seconds=60) as client:
        for version in client.watch(model, "latest"):
            pulled = dict(client.pull(model, version.number))
            assert pulled.keys() == shapes.keys()
            for name, shape in shapes.items():
                assert torch.equal(pulled[name], expected(name, shape, version.step)), (version, name)
            say(version)


def restore(model: str, servers: str) -> None:
    """Restore the newest training state, and compare all parameters and moments."""
    whole = module()
    optimizer = stepped(whole)
    with TrainerClient(servers, retry_seconds=60) as client:
        state = {"step": 0}
        restored = client.restore_state_dict(model, whole, optimizer=optimizer, state=state)
    step = state["step"]
    assert step == restored.step
    for name, parameter in whole.named_parameters():
        shape = tuple(parameter.shape)
        assert torch.equal(parameter, expected(name, shape, step)), name
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(optimizer.state[parameter][key], expected(f"{name} {key}", shape, step)), name
    say(restored)


def main() -> None:
    """Run the role that the command line names."""
    role, model, *others = sys.argv[1:]
    if role == "trainer":
        folder, rank, servers = others
        train(model, Path(folder), int(rank), servers)
    elif role == "engine":
        follow(model, *others)
    else:
        restore(model, *others)


if __name__ == "__main__":
    main()
