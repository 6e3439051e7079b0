"""LoRA on Megatron-core models in tests, with the modules, names and shards that Megatron-Bridge gives it.

Megatron-Bridge itself imports Transformer Engine. What matters here are its shards: both matrices cut by tensor
parallelism, `linear_in` along the rank, or along its columns where the layer's own input is cut; the rows of gate and
up in turns beside every ``linear_fc1``; experts' replica numbers counted apart.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterator
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from torch import Tensor

ALL = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
"""Layers that get adapters by default."""


class ParallelLinearAdapter(torch.nn.Module):
    """Two matrices beside a parallel linear layer.

    Args:
        inputs, outputs: features, of all ranks together.
        dim: the rank of the product.
        name: name of the layer.
        config: config of the model.
        input_is_parallel: whether ranks have parts of the input's features.
        alpha: scale, as of peft's ``lora_alpha``.
        is_expert: whether it is beside an expert's layer.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        dim: int,
        name: str,
        config: Any,
        *,
        input_is_parallel: bool,
        alpha: float,
        is_expert: bool,
    ) -> None:
        super().__init__()
        self.base_linear_name, self.dim, self.alpha, self.is_expert = name, dim, alpha, is_expert
        self.activation, self.dropout = torch.nn.Identity(), torch.nn.Identity()
        options = {
            "config": config,
            "bias": False,
            "init_method": torch.nn.init.zeros_,
            "is_expert": is_expert,
        }
        if input_is_parallel:
            self.linear_in = RowParallelLinear(inputs, dim, input_is_parallel=True, skip_bias_add=True, **options)
        else:
            self.linear_in = ColumnParallelLinear(inputs, dim, gather_output=True, **options)
        self.linear_out = ColumnParallelLinear(dim, outputs, gather_output=input_is_parallel, **options)

    def forward(self, hidden: Tensor) -> Tensor:
        within, _ = self.linear_in(hidden)
        out, _ = self.linear_out(within)
        return out * (self.alpha / self.dim)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        first = self.linear_in.sharded_state_dict(f"{prefix}linear_in.", sharded_offsets, metadata)
        second = self.linear_out.sharded_state_dict(f"{prefix}linear_out.", sharded_offsets, metadata)
        if self.is_expert:
            rank = parallel_state.get_expert_model_parallel_rank()
            for shard in (*first.values(), *second.values()):
                if hasattr(shard, "replica_id"):
                    shard.replica_id = (shard.replica_id[0], rank, shard.replica_id[2])
        if "linear_fc1" in self.base_linear_name:
            key = f"{prefix}linear_out.weight"
            second[key] = apply_swiglu_sharded_factory(second[key], sharded_offsets)
        return {**first, **second}


class Adapters(torch.nn.ModuleDict):
    """Adapters of layers that are fused, by names."""

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, adapter in self.items():
            found |= adapter.sharded_state_dict(f"{prefix}{key}.", sharded_offsets, metadata)
        return found


class LoRALinear(torch.nn.Module):
    """A linear layer with an adapter beside it."""

    def __init__(self, to_wrap: torch.nn.Module, adapter: torch.nn.Module) -> None:
        super().__init__()
        self.to_wrap, self.adapter = to_wrap, adapter

    def forward(self, hidden: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
        out, bias = self.to_wrap(hidden, *args, **options)
        return out + self.change(hidden).reshape(out.shape), bias

    def change(self, hidden: Tensor) -> Tensor:
        if isinstance(self.adapter, Adapters):
            parts = {key: adapter(hidden) for key, adapter in self.adapter.items()}
            if "adapter_q" in parts:
                return self._in_turns(*(parts[f"adapter_{each}"] for each in "qkv"))
            return torch.cat([parts["adapter_gate"], parts["adapter_up"]], dim=-1)
        return self.adapter(hidden)  # type: ignore[no-any-return]

    def _in_turns(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        size = self.to_wrap.config.kv_channels
        groups = key.shape[-1] // size
        heads = [each.unflatten(-1, (groups, -1)) for each in (query, key, value)]
        return torch.cat(heads, dim=-1).flatten(-2)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        return {
            **self.to_wrap.sharded_state_dict(prefix, sharded_offsets, metadata),
            **self.adapter.sharded_state_dict(f"{prefix}adapter.", sharded_offsets, metadata),
        }


def add_lora(
    model: torch.nn.Module,
    *,
    dim: int = 4,
    alpha: float = 8,
    targets: Collection[str] = ALL,
    layers: Collection[int] | None = None,
    canonical: bool = False,
    alpha_of: dict[str, float] | None = None,
    dim_of: dict[str, int] | None = None,
) -> None:
    """Add adapters to a rank's part of a model, with numbers that depend on the layer alone, and freeze all else.

    Args:
        model: this rank's part of the model, of any parallelism.
        dim, alpha: rank and scale of the adapters; ``dim_of`` and ``alpha_of`` override them by names of layers.
        targets: names of the layers.
        layers: numbers of the decoder's layers, from 0; all by default.
        canonical: whether layers that are fused have one adapter each.
    """
    model.requires_grad_(False)
    for path, number, expert, parent, name in list(_layers(model, targets)):
        if layers is not None and number not in layers:
            continue
        linear = getattr(parent, name)
        rank, scale = (dim_of or {}).get(name, dim), (alpha_of or {}).get(name, alpha)
        options = {
            "input_is_parallel": isinstance(linear, RowParallelLinear),
            "alpha": scale,
            "is_expert": expert is not None,
        }
        sizes = _fused(linear, name) if canonical else {}
        made = {
            key: ParallelLinearAdapter(linear.input_size, size, rank, path, linear.config, **options)
            for key, size in (sizes or {"": linear.output_size}).items()
        }
        for key, adapter in made.items():
            _fill(adapter, f"{number}.{expert}.{name}.{key}", gated=name == "linear_fc1" and not canonical)
        setattr(parent, name, LoRALinear(linear, Adapters(made) if sizes else made[""]))


def _layers(model: Any, targets: Collection[str]) -> Iterator[tuple[str, int, int | None, Any, str]]:
    """Path, number of the layer, global number of the expert, parent and name of each linear layer."""
    each = getattr(model.config, "num_moe_experts", None) or 0
    first = (
        each // parallel_state.get_expert_model_parallel_world_size() * parallel_state.get_expert_model_parallel_rank()
    )
    for layer_path, layer in model.named_modules():
        if not layer_path.startswith("decoder.layers.") or layer_path.count(".") != 2:
            continue
        for path, module in layer.named_modules():
            for name in targets:
                if isinstance(getattr(module, name, None), ColumnParallelLinear | RowParallelLinear):
                    at = path.split(".")
                    expert = first + int(at[at.index("local_experts") + 1]) if "local_experts" in at else None
                    yield f"{layer_path}.{path}.{name}", layer.layer_number - 1, expert, module, name


def _fused(linear: Any, name: str) -> dict[str, int]:
    config = linear.config
    if name == "linear_qkv":
        keys = config.kv_channels * config.num_query_groups
        return {
            "adapter_q": config.kv_channels * config.num_attention_heads,
            "adapter_k": keys,
            "adapter_v": keys,
        }
    if name == "linear_fc1":
        return dict.fromkeys(("adapter_gate", "adapter_up"), linear.output_size // 2)
    return {}


@torch.no_grad()
def _fill(adapter: ParallelLinearAdapter, seed: str, *, gated: bool) -> None:
    for side, linear in (("in", adapter.linear_in), ("out", adapter.linear_out)):
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}.{side}".encode()))
        whole = torch.randn(linear.output_size, linear.input_size, generator=generator) / 4
        size, index = _tensor_parallel(adapter.is_expert)
        if isinstance(linear, RowParallelLinear):
            part = whole.chunk(size, 1)[index]
        elif gated and side == "out":
            part = torch.cat([half.chunk(size)[index] for half in whole.chunk(2)])
        else:
            part = whole.chunk(size)[index]
        linear.weight.copy_(part)


def _tensor_parallel(is_expert: bool) -> tuple[int, int]:
    if is_expert:
        return (
            parallel_state.get_expert_tensor_parallel_world_size(),
            parallel_state.get_expert_tensor_parallel_rank(),
        )
    return (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_tensor_model_parallel_rank(),
    )
