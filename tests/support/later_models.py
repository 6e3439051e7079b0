"""Models that only transformers 5 knows, of parts of transformers 4: what they compute, and their weights by their official names.

`tests/service/families/test_maps.py` compares the names and shapes with transformers' own models where it has them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    MixtralConfig,
    PreTrainedModel,
)
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3DecoderLayer
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeRMSNorm


class MinimaxM2Config(MixtralConfig):  # type: ignore[misc]  # transformers is seen as untyped
    """MiniMax-M2, with the fields of its published config."""

    model_type = "minimax_m2"


class DeepseekV32Config(DeepseekV3Config):  # type: ignore[misc]
    """DeepSeek-V3.2, with the fields of its published config."""

    model_type = "deepseek_v32"


class _NormOfAllHeads(Glm4MoeRMSNorm):  # type: ignore[misc]
    """A norm over all heads together, of `[batch, tokens, heads, size of a head]`."""

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden.flatten(-2)).view_as(hidden)  # type: ignore[no-any-return]


class _NoSharedExperts(torch.nn.Module):
    def forward(self, hidden: Tensor) -> Tensor:
        return torch.zeros_like(hidden)


class MinimaxM2(Glm4MoeForCausalLM):  # type: ignore[misc]
    """MiniMax-M2: GLM-4.5's routing and partial rotation, without shared experts, and with norms over all heads together."""

    def __init__(self, config: MinimaxM2Config) -> None:
        fields = config.to_dict()
        fields |= {
            "n_routed_experts": config.num_local_experts,
            "moe_intermediate_size": config.intermediate_size,
            "first_k_dense_replace": 0,
            "partial_rotary_factor": config.rotary_dim / config.head_dim,
            "use_qk_norm": True,
        }
        del fields["model_type"]
        super().__init__(Glm4MoeConfig(**fields, attn_implementation="eager"))
        self.config.model_type = config.model_type
        for layer in self.model.layers:
            attention, eps = layer.self_attn, config.rms_norm_eps
            attention.q_norm = _NormOfAllHeads(config.num_attention_heads * config.head_dim, eps)
            attention.k_norm = _NormOfAllHeads(config.num_key_value_heads * config.head_dim, eps)
            layer.mlp.shared_experts = _NoSharedExperts()

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """The weights by the names that published files have."""
        names = {"mlp.gate.e_score": "mlp.e_score", "gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
        found = {}
        for name, tensor in super().state_dict(*args, **kwargs).items():
            for old, new in (names | {".mlp.": ".block_sparse_moe."}).items():
                name = name.replace(old, new)
            found[name] = tensor
        return found


class _SparseLayer(DeepseekV3DecoderLayer):  # type: ignore[misc]
    """A layer with an indexer, which computes nothing: its attention is to all tokens, as where there are fewer than `index_topk`."""

    def __init__(self, config: DeepseekV32Config, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        size, heads = config.index_head_dim, config.index_n_heads
        self.self_attn.indexer = torch.nn.ModuleDict(
            {
                "wq_b": torch.nn.Linear(config.q_lora_rank, heads * size, bias=False),
                "wk": torch.nn.Linear(config.hidden_size, size, bias=False),
                "k_norm": torch.nn.LayerNorm(size),
                "weights_proj": torch.nn.Linear(config.hidden_size, heads, bias=False),
            }
        )


class DeepseekV32(DeepseekV3ForCausalLM):  # type: ignore[misc]
    """DeepSeek-V3.2 for texts of fewer tokens than `index_topk`."""

    def __init__(self, config: DeepseekV32Config) -> None:
        super().__init__(config)
        self.config._attn_implementation = "eager"
        layers = range(config.num_hidden_layers)
        self.model.layers = torch.nn.ModuleList(_SparseLayer(config, layer) for layer in layers)


def later_model(config: Any) -> PreTrainedModel:
    """A model of one of the configs of this module."""
    models: dict[str, Any] = {"minimax_m2": MinimaxM2, "deepseek_v32": DeepseekV32}
    made: PreTrainedModel = models[config.model_type](config)
    return made
