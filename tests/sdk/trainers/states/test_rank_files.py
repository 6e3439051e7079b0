"""Checkpoints of FSDP2 of which each rank has written its own files, as verl does: are module and optimizer what torch
itself gathers of them?
"""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)

from tests.support.torch_ranks import run_ranks
from tests.support.training_states import Whole, same_bits
from weighbridge._trainers.states.checkpoints.checkpoint_folder import CheckpointFolder
from weighbridge._trainers.states.torch_training import TorchRestore
from weighbridge._trainers.states.training_state import read_blob
from weighbridge.errors import DataLoss, InvalidArgument, LayoutError, NotFound

RANKS, STEP = 2, 40


class Net(nn.Module):
    """A tied head, a parameter of fewer rows than ranks, and a buffer."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(7, 6)
        self.register_buffer("seen", torch.arange(3.0))
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.scale = nn.Parameter(torch.rand(1))
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = hidden + self.scale * torch.tanh(layer(hidden))
        return self.head(hidden)  # type: ignore[no-any-return]


def _adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=0.05, betas=(0.8, 0.9))


def _sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)


def _save(rank: int, to: str) -> Any:
    """Train and save as verl's ``FSDPCheckpointManager`` does; what torch gathers."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    gathered = {}
    for name, make in (("adamw", _adamw), ("sgd", _sgd)):
        module = fully_shard(Net(1), mesh=init_device_mesh("cpu", (RANKS,)))
        optimizer = make(module)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        for step in range(3):
            module(torch.arange(5) + step % 2).square().sum().backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        folder = Path(to) / f"global_step_{STEP}" / name
        folder.mkdir(parents=True, exist_ok=True)
        random_states = {
            "cpu": torch.get_rng_state(),
            "numpy": np.random.get_state(),
            "random": random.getstate(),
        }
        for kind, saved in (
            ("model", module.state_dict()),
            ("optim", optimizer.state_dict()),
            ("extra_state", {"lr_scheduler": scheduler.state_dict(), "rng": random_states}),
        ):
            torch.save(saved, folder / f"{kind}_world_size_{RANKS}_rank_{rank}.pt")
        options = StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=True)
        gathered[name] = (
            get_model_state_dict(module, options=options),
            get_optimizer_state_dict(module, optimizer, options=options),
            scheduler.state_dict(),
        )
    return gathered


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("saved")
    return folder / f"global_step_{STEP}", run_ranks(RANKS, _save, str(folder))[0]


def _whole(found: CheckpointFolder) -> Whole:
    """The tensors that would be pushed."""
    source = found.shards.select(range(len(found.layout.placements)), found.layout)
    stream = source.stage([(0, found.layout.nbytes)])
    tensors = {name: torch.empty(spec.shape, dtype=spec.dtype.torch) for name, spec in found.layout.tensors.items()}
    for place in found.layout.placements:
        name, box, _ = place.shard
        held = bytearray(stream.read(place.offset, place.offset + place.nbytes))
        part = torch.frombuffer(held, dtype=tensors[name].dtype).reshape(box.extent)
        tensors[name][tuple(slice(a, b) for a, b in zip(box.offset, box.end, strict=True))] = part
    return Whole(found.layout.tensors, tensors)


@pytest.mark.parametrize(("name", "make"), [("adamw", _adamw), ("sgd", _sgd)])
def test_module_optimizer_and_scheduler_are_what_torch_gathers(saved: tuple[Path, Any], name: str, make: Any) -> None:
    folder, gathered = saved
    weights, state, schedule = gathered[name]
    found = CheckpointFolder.read(folder / name)
    assert (found.format, found.step) == ("rank_files", STEP)
    whole = _whole(found)
    expected = {f"model.{key}": value for key, value in weights.items() if key != "head.weight"}
    expected |= {f"optimizer.{key}": value for key, value in state.items() if isinstance(value, Tensor)}
    assert whole.tensors.keys() - {"rank_state.00000"} == expected.keys()
    for key, tensor in expected.items():
        assert same_bits(whole.tensors[key], tensor), key
    values = read_blob(whole.tensors["rank_state.00000"], "blob")
    (group,) = values.trainer["optimizer"]["param_groups"]
    assert group["params"] == [key for key, _ in Net(1).named_parameters()]
    assert {key: group[key] for key in ("lr", "weight_decay")} == {
        key: state[f"param_groups.scale.{key}"] for key in ("lr", "weight_decay")
    }
    assert values.state == {"lr_scheduler": {**schedule, "lr_lambdas": [None]}}

    module = Net(2)
    optimizer = make(module)
    whole.fill(TorchRestore(module, optimizer))
    again = get_optimizer_state_dict(module, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
    assert again.keys() == state.keys()
    for key, value in state.items():
        assert same_bits(again[key], value) if isinstance(value, Tensor) else again[key] == value, key
    assert all(same_bits(module.state_dict()[key], value) for key, value in weights.items())


def _rewritten(folder: Path, to: Path, kind: str, change: Any) -> Path:
    """A copy in which the file of rank 1 is changed."""
    shutil.copytree(folder / "adamw", to)
    path = to / f"{kind}_world_size_{RANKS}_rank_1.pt"
    state = torch.load(path, weights_only=False)
    change(state)
    torch.save(state, path)
    return to


def test_what_is_no_optimizer_of_this_module_is_refused_by_name(saved: tuple[Path, Any], tmp_path: Path) -> None:
    folder, _ = saved

    def plain(state: Any) -> None:
        state["state"][1]["exp_avg"] = torch.ones(18)

    def another(state: Any) -> None:
        state["state"][17] = state["state"].pop(1)

    def swapped(state: Any) -> None:
        state["state"][0], state["state"][1] = state["state"][1], state["state"][0]

    with pytest.raises(InvalidArgument, match=r"state.embedding.weight.exp_avg. is a plain tensor"):
        CheckpointFolder.read(_rewritten(folder, tmp_path / "plain", "optim", plain))
    with pytest.raises(LayoutError, match=r"has state of parameter .17., but the model has 6"):
        CheckpointFolder.read(_rewritten(folder, tmp_path / "another", "optim", another))
    with pytest.raises(LayoutError, match="cannot be read"):
        CheckpointFolder.read(_rewritten(folder, tmp_path / "swapped", "optim", swapped))


def test_a_rank_that_is_missing_or_there_twice_is_named(saved: tuple[Path, Any], tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(saved[0] / "adamw", folder)
    shutil.copy(folder / "optim_world_size_2_rank_0.pt", folder / "optim_world_size_2_rank_00.pt")
    with pytest.raises(InvalidArgument, match="two files of rank 0: optim_world_size_2_rank_0"):
        CheckpointFolder.read(folder)
    (folder / "optim_world_size_2_rank_00.pt").unlink()
    (folder / "optim_world_size_2_rank_1.pt").unlink()
    with pytest.raises(NotFound) as missing:
        CheckpointFolder.read(folder)
    assert missing.value.details == ("optim_world_size_2_rank_1.pt is missing",)
    (folder / "optim_world_size_2_rank_0.pt").unlink()
    assert not any(name.startswith("optimizer.") for name in CheckpointFolder.read(folder).layout.tensors)


def test_tensors_that_lie_partly_in_each_other_and_too_many_of_one_memory_are_refused(tmp_path: Path) -> None:
    held = torch.arange(1 << 14, dtype=torch.float32)
    path = tmp_path / "model_world_size_1_rank_0.pt"
    torch.save({"one": held[:600], "other": held[500:700]}, path)
    with pytest.raises(LayoutError) as error:
        CheckpointFolder.read(tmp_path)
    assert error.value.details == (f"'other' in {path.name}: it shares some of its elements with 'one'",)
    torch.save({f"name{number}": held for number in range(9)}, path)
    with pytest.raises(DataLoss, match="but its files together"):
        CheckpointFolder.read(tmp_path)
