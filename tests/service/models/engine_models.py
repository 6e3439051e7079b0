"""Models of engines, and cuts of them made by hand."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.support.raw_clients import mapped_files
from tests.support.reference import in_files, tiny_model
from weighbridge import TensorParallel
from weighbridge._core import dtypes
from weighbridge._core.layouts import Layout, TensorSpec
from weighbridge._core.slices import LayoutRequest
from weighbridge._formats.safetensors_files import lay_out_files
from weighbridge_service.models.bridges import Bridge, bridge_for
from weighbridge_service.models.engine_layouts import EngineLayouts, padding_of
from weighbridge_service.plan.planning import make_plan
from weighbridge_service.plan.relations import identity_links
from weighbridge_service.plan.transfers import Transfer


def real_bridge(config: Any) -> Bridge:
    return bridge_for(config.to_json_string(use_diff=False).encode())


class PlainBridge:
    """A model without a plan."""

    model_type = "plain"
    experts = 0
    megatron: Mapping[str, Any] = {}

    def __init__(self, num_layers: int = 2, vocab_size: int = 64, heads: tuple[int, int] = (8, 8)) -> None:
        self.num_layers = num_layers
        self.vocab_size = vocab_size
        self.heads = heads

    def parallel_plan(self) -> Mapping[str, str]:
        return {}

    def head_counts(self) -> tuple[int, int]:
        return self.heads


def weights_of(config: Any) -> dict[str, Tensor]:
    model = tiny_model(config, seed=1)
    state = in_files(model, model.state_dict())
    if config.tie_word_embeddings:
        del state["lm_head.weight"]
    return state


def specs_of(state: Mapping[str, Tensor]) -> dict[str, TensorSpec]:
    return {n: TensorSpec(n, dtypes.from_torch(t.dtype), tuple(t.shape)) for n, t in state.items()}


class Source:
    """A state dict as the files of a version, and what plans read from it."""

    def __init__(self, bridge: Any, state: Mapping[str, Tensor]) -> None:
        self.bridge = bridge
        self.state = state
        self.specs = specs_of(state)
        self.files = lay_out_files(list(self.specs.values()))
        self.buffers = {name: np.zeros(n, np.uint8) for name, n in self.files.file_sizes.items()}
        for p in self.files.layout.placements:
            raw = state[p.shard.tensor].contiguous().reshape(-1).view(torch.uint8).numpy()
            self.buffers[p.buffer][p.offset : p.offset + p.nbytes] = raw

    def layout(self, request: LayoutRequest) -> Layout:
        return EngineLayouts(self.specs, lambda: self.bridge).layout(request)

    def transfer(self, layout: Layout) -> Transfer:
        links = identity_links(self.specs[name] for name in layout.tensors)
        source = self.files.layout
        plan = make_plan(source, layout, links, padding=padding_of(source, layout))
        return Transfer(plan, scatter=False)

    def slices(self, request: LayoutRequest) -> list[tuple[str, Tensor]]:
        layout = self.layout(request)
        stream = bytearray(self.transfer(layout).gather(0, layout.nbytes, mapped_files(self.buffers)))
        return [
            (
                p.shard.tensor,
                torch.frombuffer(
                    stream,
                    dtype=layout.tensors[p.shard.tensor].dtype.torch,
                    count=p.shard.box.volume,
                    offset=p.offset,
                ).reshape(p.shard.box.extent),
            )
            for p in layout.placements
        ]

    def rank(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        found = self.slices(TensorParallel(*args, **kwargs))
        assert len(dict(found)) == len(found)
        return dict(found)


def same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


def moe_config(family: str, **overrides: Any) -> Any:
    from transformers import (
        DeepseekV3Config,
        Ernie4_5_MoeConfig,
        MixtralConfig,
        Qwen2MoeConfig,
        Qwen3MoeConfig,
    )

    fields: dict[str, Any] = {
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "intermediate_size": 48,
        "moe_intermediate_size": 16,
        "vocab_size": 64,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    match family:
        case "mixtral":
            return MixtralConfig(**{**fields, "num_local_experts": 8, **overrides})
        case "qwen2_moe":
            return Qwen2MoeConfig(**{**fields, "num_experts": 8, "shared_expert_intermediate_size": 24, **overrides})
        case "qwen3_moe":
            return Qwen3MoeConfig(**{**fields, "num_experts": 8, "head_dim": 16, **overrides})
        case "ernie4_5_moe":
            return Ernie4_5_MoeConfig(**{**fields, "moe_num_experts": 8, **overrides})
        case "deepseek_v3":
            latent = {
                "num_key_value_heads": 8,
                "n_routed_experts": 8,
                "n_group": 2,
                "topk_group": 1,
                "num_experts_per_tok": 2,
                "q_lora_rank": 12,
                "kv_lora_rank": 16,
                "qk_nope_head_dim": 8,
                "qk_rope_head_dim": 4,
                "v_head_dim": 6,
                "first_k_dense_replace": 1,
            }
            return DeepseekV3Config(**{**fields, **latent, **overrides})
    raise ValueError(family)


ROWS = ("q_proj", "q_b_proj", "kv_b_proj", "gate_proj", "up_proj", "w1", "w3", "lm_head")
COLUMNS = ("o_proj", "down_proj", "w2")


def by_hand(
    state: Mapping[str, Tensor],
    kv_heads: int,
    size: int,
    rank: int,
    experts: tuple[int, int, int, int] | None = None,
    count: int = 8,
) -> dict[str, Tensor]:
    """The tensors that vLLM's loaders keep of a state dict, computed independently."""
    expected = {}
    for name, whole in state.items():
        parts, part = size, rank
        of_expert = re.search(r"\.experts\.(\d+)\.", name)
        if of_expert and experts is not None:
            ep_size, ep_rank, parts, part = experts
            mine = torch.arange(count).chunk(ep_size)[ep_rank].tolist()
            if int(of_expert[1]) not in mine:
                continue
        module = name.split(".")[-2]
        if module in ROWS:
            whole = whole.chunk(parts, dim=0)[part]
        elif module in ("k_proj", "v_proj"):
            heads = whole.chunk(kv_heads, dim=0)
            each = max(kv_heads // parts, 1)
            first = part * kv_heads // parts
            whole = torch.cat(heads[first : first + each])
        elif module in COLUMNS and whole.dim() == 2:
            whole = whole.chunk(parts, dim=1)[part]
        expected[name] = whole
    return expected
