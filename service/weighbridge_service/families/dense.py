"""Dense language models: llama, qwen2, qwen3."""

from __future__ import annotations

from weighbridge_service.families.from_mbridge import MBridgeFamily

_ATTENTION = "model.layers.{layer}.self_attn"
_MLP = "model.layers.{layer}.mlp"
BIASES = {
    "self_attention.linear_proj.bias": (f"{_ATTENTION}.o_proj.bias",),
    "mlp.linear_fc1.bias": (f"{_MLP}.gate_proj.bias", f"{_MLP}.up_proj.bias"),
    "mlp.linear_fc2.bias": (f"{_MLP}.down_proj.bias",),
}
"""Biases that configs can enable and mbridge's tables omit. The tables contain only the bias of QKV."""
ATTENTION_BIASES = {name: targets for name, targets in BIASES.items() if "self_attention" in name}
"""Biases of attention, for families whose MLPs are experts."""


class Llama(MBridgeFamily):
    """Llama and models with its architecture, such as Mistral's dense models saved as llama."""

    further_names = BIASES


class Qwen2(MBridgeFamily):
    """Qwen2 and Qwen2.5, with the bias of QKV."""

    further_names = BIASES


class Qwen3(MBridgeFamily):
    """Qwen3, with norms of queries and keys."""

    further_names = BIASES
