"""Models that only transformers 5 knows, of parts of transformers 4: what they compute, and their weights by their
official names.

`tests/service/families/test_maps.py` compares the names and shapes with transformers' own models where it has them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    MixtralConfig,
    PretrainedConfig,
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
    """MiniMax-M2: GLM-4.5's routing and partial rotation, without shared experts, and with norms over all heads
    together.
    """

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
    """A layer with an indexer, which computes nothing: its attention is to all tokens, as where there are fewer than
    `index_topk`.
    """

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


class NemotronHConfig(PretrainedConfig):  # type: ignore[misc]
    """Nemotron-H, with the fields of its published config."""

    model_type = "nemotron_h"


class NemotronH(torch.nn.Module):
    """The weights of Nemotron-H by their names in files, of which nothing is computed: of a state space model, experts,
    attention, an MLP.
    """

    def __init__(self, config: NemotronHConfig) -> None:
        super().__init__()
        self.config = config
        hidden, heads = config.hidden_size, config.mamba_num_heads
        inner, states = heads * config.mamba_head_dim, config.n_groups * config.ssm_state_size
        queries, keys = (n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
        shapes: dict[str, tuple[int, ...]] = {
            "embeddings.weight": (config.vocab_size, hidden),
            "layers.0.mixer.A_log": (heads,),
            "layers.0.mixer.D": (heads,),
            "layers.0.mixer.dt_bias": (heads,),
            "layers.0.mixer.conv1d.weight": (inner + 2 * states, 1, config.conv_kernel),
            "layers.0.mixer.conv1d.bias": (inner + 2 * states,),
            "layers.0.mixer.in_proj.weight": (2 * inner + 2 * states + heads, hidden),
            "layers.0.mixer.norm.weight": (inner,),
            "layers.0.mixer.out_proj.weight": (hidden, inner),
            "layers.1.mixer.gate.weight": (config.n_routed_experts, hidden),
            "layers.1.mixer.gate.e_score_correction_bias": (config.n_routed_experts,),
            "layers.2.mixer.q_proj.weight": (queries, hidden),
            "layers.2.mixer.k_proj.weight": (keys, hidden),
            "layers.2.mixer.v_proj.weight": (keys, hidden),
            "layers.2.mixer.o_proj.weight": (hidden, queries),
            "norm_f.weight": (hidden,),
            **{f"layers.{layer}.norm.weight": (hidden,) for layer in range(4)},
        }
        read = hidden
        if config.moe_latent_size is not None:
            read = config.moe_latent_size
            shapes["layers.1.mixer.fc1_latent_proj.weight"] = (read, hidden)
            shapes["layers.1.mixer.fc2_latent_proj.weight"] = (hidden, read)
        mlps = {f"1.mixer.experts.{n}": (read, config.moe_intermediate_size) for n in range(config.n_routed_experts)}
        mlps["1.mixer.shared_experts"] = hidden, config.moe_shared_expert_intermediate_size
        mlps["3.mixer"] = hidden, config.intermediate_size
        for name, (outer, inside) in mlps.items():
            shapes[f"layers.{name}.up_proj.weight"] = (inside, outer)
            shapes[f"layers.{name}.down_proj.weight"] = (outer, inside)
        for name, shape in {"lm_head.weight": (config.vocab_size, hidden)}.items() | {
            (f"backbone.{name}", shape) for name, shape in shapes.items()
        }:
            self._add(name, torch.zeros(shape))

    def _add(self, name: str, tensor: Tensor) -> None:
        module: torch.nn.Module = self
        *path, leaf = name.split(".")
        for part in path:
            if part not in module._modules:
                module.add_module(part, torch.nn.Module())
            module = module.get_submodule(part)
        if leaf == "e_score_correction_bias":
            module.register_buffer(leaf, tensor)
        else:
            module.register_parameter(leaf, torch.nn.Parameter(tensor))

    def save_pretrained(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        save_file(self.state_dict(), folder / "model.safetensors", {"format": "pt"})
        (folder / "config.json").write_text(self.config.to_json_string())


def later_model(config: Any) -> PreTrainedModel:
    """A model of one of the configs of this module."""
    models: dict[str, Any] = {"minimax_m2": MinimaxM2, "deepseek_v32": DeepseekV32}
    made: PreTrainedModel = models[config.model_type](config)
    return made
