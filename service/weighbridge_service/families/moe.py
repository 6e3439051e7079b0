"""Mixtures of experts whose attention is that of a dense model: mixtral, qwen2_moe, qwen3_moe."""

from __future__ import annotations

from weighbridge_service.families.dense import ATTENTION_BIASES
from weighbridge_service.families.from_mbridge import MBridgeFamily

_MLP = "model.layers.{layer}.mlp"
_NAMES = {
    **ATTENTION_BIASES,
    # `mlp_only_layers` and `decoder_sparse_step` leave some layers without experts
    "mlp.linear_fc1.weight": (f"{_MLP}.gate_proj.weight", f"{_MLP}.up_proj.weight"),
    "mlp.linear_fc2.weight": (f"{_MLP}.down_proj.weight",),
    "mlp.linear_fc1.layer_norm_weight": ("model.layers.{layer}.post_attention_layernorm.weight",),
}


class Mixtral(MBridgeFamily):
    """Mixtral: every layer has experts, and none is shared."""

    experts_field = "num_local_experts"


class Qwen2Moe(MBridgeFamily):
    """Qwen2-MoE: a shared expert with a gate of its own."""

    experts_field = "num_experts"
    further_names = _NAMES


class Qwen3Moe(MBridgeFamily):
    """Qwen3-MoE: no shared expert, norms of queries and keys."""

    experts_field = "num_experts"
    further_names = _NAMES
