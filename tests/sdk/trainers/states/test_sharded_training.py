"""Training state of ranks that share a model: does each hold its boxes of what torch itself gathers, and fill any mesh
from them?

Real ranks over gloo. What is compared with is torch's own ``full_state_dict``, which gathers every tensor.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)

from tests.support.reference import tiny_config, tiny_model
from tests.support.torch_ranks import run_ranks, shared
from tests.support.training_states import same_bits
from weighbridge._core import dtypes
from weighbridge._core.layouts import TensorSpec
from weighbridge._trainers.states.torch_training import TorchRestore, training_tensors
from weighbridge._trainers.states.training_state import StoredState
from weighbridge.errors import InvalidArgument

pytestmark = pytest.mark.process

UNEVEN = 131
"""Tokens that neither two, four nor eight ranks share evenly."""
SIZES = {"fsdp": 2, "fsdp3": 3, "fsdp4": 4, "fsdp8": 8, "hsdp": 4, "tp_fsdp": 4, "ddp": 2}
FULL = StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=True)


def made(way: str, tied: bool, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model that ranks share in one of `torch_ranks.WAYS`, and AdamW with two groups."""
    # under tensor parallelism each rank would have gradients of its own for qwen3's norms of heads
    config = tiny_config("qwen3" if tied else "llama", tied=tied, num_hidden_layers=2, vocab_size=UNEVEN)
    model = tiny_model(config, seed=seed)
    # by `shared` it would be compiled, too, which takes longer than all the rest
    module = nn.parallel.DistributedDataParallel(model) if way == "ddp" else shared(model, way)
    matrices = [each for each in module.parameters() if each.dim() > 1]
    others = [each for each in module.parameters() if each.dim() < 2]
    return module, torch.optim.AdamW([{"params": matrices}, {"params": others, "weight_decay": 0.0}], lr=1e-3)


def train(module: nn.Module, optimizer: torch.optim.Optimizer, share: int, steps: range) -> list[Tensor]:
    """Losses of steps with a share of the data; ranks of one tensor-parallel group have the same one."""
    losses = []
    for step in steps:
        tokens = torch.randint(0, UNEVEN, (2, 9), generator=torch.Generator().manual_seed(100 * step + share))
        loss = module(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def _share(way: str, rank: int) -> int:
    return rank // 2 if way == "tp_fsdp" else rank


def gathered(module: nn.Module, optimizer: torch.optim.Optimizer, tied: bool) -> dict[str, Tensor]:
    """All tensors, whole, as torch gathers and names them; all ranks call it."""
    state = {f"model.{key}": value for key, value in get_model_state_dict(module, options=FULL).items()}
    of_optimizer = get_optimizer_state_dict(module, optimizer, options=FULL)
    state |= {f"optimizer.{key}": value for key, value in of_optimizer.items() if key.startswith("state.")}
    return {key: value.clone() for key, value in state.items() if key != "model.lm_head.weight" or not tied}


def _push(rank: int, way: str, tied: bool, folder: Path) -> list[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    """Trains, compares what a rank holds with what torch gathers, and keeps that for ranks to come; gives the rank's
    boxes.
    """
    module, optimizer = made(way, tied, 5)
    train(module, optimizer, _share(way, rank), range(3))
    held = training_tensors(module, optimizer)
    whole = gathered(module, optimizer, tied)
    assert held.layout.tensors.keys() == whole.keys()
    for placement, tensor in zip(held.layout.placements, held.tensors, strict=True):
        name, box, _ = placement.shard
        where = tuple(slice(a, b) for a, b in zip(box.offset, box.end, strict=True))
        assert same_bits(tensor, whole[name][where]), name
    if rank == 0:
        torch.save({"whole": whole, "values": held.values}, folder / "pushed")
    losses = train(module, optimizer, _share(way, rank), range(3, 6))
    torch.save(losses, folder / f"losses-{rank}")
    return [(shard.tensor, *shard.box) for shard, _, _, _ in held.layout.placements]


def _fill(rank: int, way: str, tied: bool, folder: Path, used: int) -> list[Tensor]:
    """Fills a rank of another model from the boxes of what was kept, and compares all that torch gathers; gives
    losses.
    """
    kept: dict[str, Any] = torch.load(folder / "pushed", weights_only=True)
    whole = kept["whole"]
    specs = {name: TensorSpec(name, dtypes.from_torch(each.dtype), tuple(each.shape)) for name, each in whole.items()}
    module, optimizer = made(way, tied, 6)
    train(module, optimizer, _share(way, rank), range(50, 50 + used))
    filling = TorchRestore(module, optimizer).fit(StoredState("tests/m:training@1", specs, kept["values"]))
    with torch.no_grad():
        for placement, tensor in zip(filling.layout.placements, filling.tensors, strict=True):
            name, box, _ = placement.shard
            tensor.copy_(whole[name][tuple(slice(a, b) for a, b in zip(box.offset, box.end, strict=True))])
    filling.finish()
    found = gathered(module, optimizer, tied)
    assert found.keys() == whole.keys()
    for name, tensor in whole.items():
        assert same_bits(found[name], tensor), name
    return train(module, optimizer, _share(way, rank), range(3, 6))


@pytest.mark.parametrize(
    ("way", "tied", "others"),
    [
        ("fsdp4", True, ("fsdp", "fsdp8", "ddp")),
        ("hsdp", True, ("fsdp3",)),
        ("tp_fsdp", False, ("hsdp",)),
        ("ddp", False, ("tp_fsdp",)),
    ],
)
def test_ranks_fill_any_mesh_and_go_on_bit_for_bit_on_their_own(
    way: str, tied: bool, others: tuple[str, ...], tmp_path: Path
) -> None:
    boxes = run_ranks(SIZES[way], _push, way, tied, tmp_path)
    whole = torch.load(tmp_path / "pushed", weights_only=True)["whole"]
    for name, tensor in whole.items():
        held = torch.zeros(tensor.shape, dtype=torch.int32)
        found = {(offset, extent) for rank in boxes for key, offset, extent in rank if key == name}
        for offset, extent in found:
            held[tuple(slice(a, a + n) for a, n in zip(offset, extent, strict=True))] += 1
        assert bool((held == 1).all()), name
    # of optimizers that have made steps here, and none below
    for rank, losses in enumerate(run_ranks(SIZES[way], _fill, way, tied, tmp_path, 2)):
        expected = torch.load(tmp_path / f"losses-{rank}", weights_only=True)
        assert all(map(same_bits, losses, expected))
    for other in others:
        run_ranks(SIZES[other], _fill, other, tied, tmp_path, 0)


def _fsdp1(rank: int) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    module = FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu"), use_orig_params=True)
    optimizer = torch.optim.AdamW(module.parameters())
    with pytest.raises(InvalidArgument, match=r"FSDP1.* is not supported"):
        training_tensors(module, optimizer)


def test_fsdp1_is_refused() -> None:
    run_ranks(1, _fsdp1)
