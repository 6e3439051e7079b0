"""Qwen3-VL, dense and as a mixture of experts: a language model and a vision tower, both built from Megatron-core's
layers.

Megatron-core's names are those of the models of Megatron-Bridge and mbridge (``Qwen3VLModel``). The tower has one
tensor for query, key and value on both sides, whose rows Megatron-core orders by head. Mergers of its deeper layers are
stacked like layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from weighbridge_service.families.decoders import Decoder
from weighbridge_service.families.family import Family
from weighbridge_service.families.moe import routers_first, with_num_experts
from weighbridge_service.families.rules import WHOLE, MergedQKV, Rule, Shape

_BLOCK, _BLOCK_THERE = "vision_model.decoder.layers.{layer}", "model.visual.blocks.{layer}"
_MERGERS = {
    "vision_model.merger": "model.visual.merger",
    "vision_model.decoder.deepstack_merger_list.{layer}": "model.visual.deepstack_merger_list.{layer}",
}
_KINDS = ("weight", "bias")
_ROPE = {"rope_type": "default", "mrope_section": [24, 20, 20]}


class Qwen3VL(Family):
    """Qwen3-VL."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        text = config.get("text_config") or {}
        if not text.get("rope_scaling"):
            # transformers 5 writes this field under another name, and transformers 4 cannot create a model without it
            config = {**config, "text_config": {**text, "rope_scaling": _ROPE}}
        super().__init__(config)

    def rules(self) -> Sequence[Rule]:
        """Rules of the language model and of the vision tower."""
        return [*self._decoder.rules(), *self._tower()]

    def parallel_plan(self) -> Mapping[str, str]:
        """transformers' plan plus the usual plan of the decoder, because transformers does not define one for dense
        models.
        """
        return {**super().parallel_plan(), **self._decoder.parallel_plan()}

    @property
    def _decoder(self) -> Decoder:
        return Decoder(self.head_counts(), ours="language_model.", theirs="model.language_model.")

    def _tower(self) -> Iterator[Rule]:
        for part in ("patch_embed.proj", "pos_embed"):
            for kind in _KINDS:
                yield Rule(f"vision_model.{part}.{kind}", (f"model.visual.{part}.{kind}",), WHOLE)
        heads = int(self.transformers_config.vision_config.num_heads)
        for kind in _KINDS:
            attention, mlp = f"{_BLOCK}.self_attention", f"{_BLOCK}.mlp"
            yield Rule(f"{attention}.linear_qkv.{kind}", (f"{_BLOCK_THERE}.attn.qkv.{kind}",), MergedQKV(heads))
            for ours, theirs in {
                f"{attention}.linear_proj.{kind}": f"attn.proj.{kind}",
                f"{attention}.linear_qkv.layer_norm_{kind}": f"norm1.{kind}",
                f"{mlp}.linear_fc1.layer_norm_{kind}": f"norm2.{kind}",
                f"{mlp}.linear_fc1.{kind}": f"mlp.linear_fc1.{kind}",
                f"{mlp}.linear_fc2.{kind}": f"mlp.linear_fc2.{kind}",
            }.items():
                yield Rule(ours, (f"{_BLOCK_THERE}.{theirs}",), WHOLE)
            for here, there in _MERGERS.items():
                yield Rule(f"{here}.patch_norm.{kind}", (f"{there}.norm.{kind}",), WHOLE)
                yield Rule(f"{here}.linear_fc1.{kind}", (f"{there}.linear_fc1.{kind}",), WHOLE)
                yield Rule(f"{here}.linear_fc2.{kind}", (f"{there}.linear_fc2.{kind}",), WHOLE)


class Qwen3VLMoe(Qwen3VL):
    """Qwen3-VL as a mixture of experts.

    Hugging Face stacks the experts of a layer in one tensor, with transposed matrices.
    """

    experts_field = "num_experts"

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__({**config, "text_config": with_num_experts(config.get("text_config") or {})})

    def hugging_face_shapes(self) -> dict[str, Shape]:
        """Shapes of published files, whose experts are ``[experts, inputs, outputs]``; transformers 5 transposes
        them.
        """
        hidden, inner = self.text_config.hidden_size, self.text_config.moe_intermediate_size
        axes = {"gate_up_proj": (hidden, 2 * inner), "down_proj": (inner, hidden)}
        return {
            name: (shape[0], *axes[name.rpartition(".")[2]]) if ".experts." in name else shape
            for name, shape in routers_first(super().hugging_face_shapes()).items()
        }

    def rules(self) -> Sequence[Rule]:
        """Rules of the dense models, and of the experts."""
        return [*super().rules(), *self._decoder.stacked_experts()]
