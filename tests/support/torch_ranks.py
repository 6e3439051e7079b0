"""Small torch jobs in tests: models of transformers that ranks share as FSDP2, HSDP, tensor parallelism and DDP do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.support.forked import run_jobs
from weighbridge_demo.ranks import gloo_job

WAYS = ("fsdp", "fsdp3", "fsdp4", "fsdp8", "hsdp", "tp_fsdp", "ddp", "compiled_fsdp")
"""Ways in which `shared` distributes a model over its ranks: two, or as many as the name says, or four for HSDP and
tensor parallelism.
"""


def run_ranks(size: int, fn: Callable[..., Any], *args: Any, timeout: float = 200) -> list[Any]:
    """Result of ``fn(rank, *args)`` on each rank of a gloo job."""
    return run_jobs([gloo_job(size, fn, *args)], timeout=timeout)[0]


def shared(model: PreTrainedModel, way: str) -> torch.nn.Module:
    """A model whose tensors are distributed over the ranks of this job in one of `WAYS`; all ranks give the same
    model.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    module: Any = model
    layers = model.model.layers
    match way:
        case "fsdp" | "fsdp3" | "fsdp4" | "fsdp8" | "compiled_fsdp":
            mesh = init_device_mesh("cpu", ({"fsdp3": 3, "fsdp4": 4, "fsdp8": 8}.get(way, 2),))
        case "hsdp":
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        case "tp_fsdp":
            whole = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
            _cut_by_tensor_parallelism(model, whole["tp"])
            mesh = whole["dp"]
        case "ddp":
            return DistributedDataParallel(torch.compile(module))
        case _:
            raise ValueError(way)
    for index, layer in enumerate(layers):
        fully_shard(layer, mesh=mesh)
        if way == "compiled_fsdp":
            layers[index] = torch.compile(layer)
    return fully_shard(module, mesh=mesh)  # type: ignore[no-any-return]


def _cut_by_tensor_parallelism(model: PreTrainedModel, mesh: Any) -> None:
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan: dict[str, Any] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "lm_head": ColwiseParallel(output_layouts=Replicate()),
    }
    for column in (
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        "mlp.gate_proj",
        "mlp.up_proj",
    ):
        plan[f"model.layers.*.{column}"] = ColwiseParallel()
    for row in ("self_attn.o_proj", "mlp.down_proj"):
        plan[f"model.layers.*.{row}"] = RowwiseParallel()
    parallelize_module(model, mesh, plan)


def full_tensors(module: torch.nn.Module | Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A copy of every tensor, whole, by transformers' names; all ranks call it. torch gathers them."""
    from torch.distributed.tensor import DTensor

    state = module.state_dict() if isinstance(module, torch.nn.Module) else module
    return {
        name.replace("module.", "").replace("_orig_mod.", ""): (
            tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        ).detach().clone()
        for name, tensor in state.items()
    }  # fmt: skip


def fill(parameters: Iterable[Tensor], value: float) -> None:
    """Overwrite parameters, as training does."""
    with torch.no_grad():
        for parameter in parameters:
            parameter.fill_(value)
