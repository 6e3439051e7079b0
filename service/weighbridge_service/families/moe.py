"""Mixtures of experts with the attention of a dense model: mixtral, qwen2_moe, qwen3_moe."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from weighbridge_service.families.dense import ATTENTION_BIASES
from weighbridge_service.families.from_mbridge import MBridgeFamily
from weighbridge_service.families.rules import Shape

_MLP = "model.layers.{layer}.mlp"
_NAMES = {
    **ATTENTION_BIASES,
    # `mlp_only_layers` and `decoder_sparse_step` leave some layers without experts
    "mlp.linear_fc1.weight": (f"{_MLP}.gate_proj.weight", f"{_MLP}.up_proj.weight"),
    "mlp.linear_fc2.weight": (f"{_MLP}.down_proj.weight",),
    "mlp.linear_fc1.layer_norm_weight": ("model.layers.{layer}.post_attention_layernorm.weight",),
}


class Mixtral(MBridgeFamily):
    """Mixtral: every layer has experts, but no shared experts."""

    experts_field = "num_local_experts"


class Qwen2Moe(MBridgeFamily):
    """Qwen2-MoE: a shared expert with a gate of its own."""

    experts_field = "num_experts"
    further_names = _NAMES


class Qwen3Moe(MBridgeFamily):
    """Qwen3-MoE: no shared expert, norms of queries and keys."""

    experts_field = "num_experts"
    further_names = _NAMES

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(with_num_experts(config))

    def hugging_face_shapes(self) -> dict[str, Shape]:
        """Shapes of transformers, with each layer's router before its experts."""
        return routers_first(super().hugging_face_shapes())


def routers_first(shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    """The same tensors with each layer's router before its experts; transformers 5 lists it after them."""
    found: dict[str, Shape] = {}
    for in_mlp, run in itertools.groupby(shapes.items(), lambda item: ".mlp." in item[0]):
        found |= sorted(run, key=lambda item: in_mlp and ".experts." in item[0])
    return found


def with_num_experts(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """The fields of a language model's config with ``num_experts``, for which transformers 5 writes
    ``num_local_experts``.
    """
    if "num_experts" in fields or "num_local_experts" not in fields:
        return fields
    return {**fields, "num_experts": fields["num_local_experts"]}
