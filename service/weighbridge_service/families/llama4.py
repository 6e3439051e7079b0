"""Llama 4, which mbridge does not know: an example of a family that is written down rule by rule.

Hugging Face stacks the experts of a layer in one tensor and has their matrices the other way round. Attention needs no
permutation: both sides rotate neighbouring elements (Megatron-core with ``rotary_interleaved``). A trainer of the model with
images keeps its vision tower as transformers has it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from weighbridge_service.families.family import Family
from weighbridge_service.families.rules import WHOLE, GroupedQKV, Halves, Rule, Transposed


class Llama4(Family):
    """Llama 4 with images (``llama4``) and its language model alone (``llama4_text``)."""

    experts_field = "num_local_experts"

    def rules(self) -> Sequence[Rule]:
        """The language model's kinds of tensors, and the tensors of the vision tower one by one."""
        text = self.text_config is self.transformers_config
        rules = list(
            self._language_model("", "")
            if text
            else self._language_model("language_model.", "language_model.")
        )
        return rules + [
            Rule(name, (name,), WHOLE)
            for name in self.hugging_face_shapes()
            if name.startswith(("vision_model.", "multi_modal_projector."))
        ]

    def _language_model(self, ours: str, theirs: str) -> Iterator[Rule]:
        here, there = f"{ours}decoder.layers.{{layer}}", f"{theirs}model.layers.{{layer}}"
        attention, mlp = f"{there}.self_attn", f"{there}.feed_forward"
        shared, experts = f"{here}.mlp.shared_experts", f"{here}.mlp.experts.experts.{{expert}}"
        qkv = GroupedQKV(*self.head_counts())
        yield Rule(
            f"{ours}embedding.word_embeddings.weight",
            (f"{theirs}model.embed_tokens.weight",),
            WHOLE,
            vocabulary=True,
        )
        yield Rule(f"{ours}decoder.final_layernorm.weight", (f"{theirs}model.norm.weight",), WHOLE)
        yield Rule(f"{ours}output_layer.weight", (f"{theirs}lm_head.weight",), WHOLE, vocabulary=True)
        for kind in ("weight", "bias"):
            projections = tuple(f"{attention}.{p}_proj.{kind}" for p in "qkv")
            yield Rule(f"{here}.self_attention.linear_qkv.{kind}", projections, qkv)
            yield Rule(f"{here}.self_attention.linear_proj.{kind}", (f"{attention}.o_proj.{kind}",), WHOLE)
        yield Rule(
            f"{here}.self_attention.linear_qkv.layer_norm_weight", (f"{there}.input_layernorm.weight",), WHOLE
        )
        yield Rule(f"{here}.pre_mlp_layernorm.weight", (f"{there}.post_attention_layernorm.weight",), WHOLE)
        yield Rule(
            f"{here}.mlp.linear_fc1.weight",
            (f"{mlp}.gate_proj.weight", f"{mlp}.up_proj.weight"),
            Halves(),
            halves=True,
        )
        yield Rule(f"{here}.mlp.linear_fc2.weight", (f"{mlp}.down_proj.weight",), WHOLE)
        yield Rule(f"{here}.mlp.router.weight", (f"{mlp}.router.weight",), WHOLE)
        yield Rule(
            f"{shared}.linear_fc1.weight",
            (f"{mlp}.shared_expert.gate_proj.weight", f"{mlp}.shared_expert.up_proj.weight"),
            Halves(),
            halves=True,
        )
        yield Rule(f"{shared}.linear_fc2.weight", (f"{mlp}.shared_expert.down_proj.weight",), WHOLE)
        yield Rule(
            f"{experts}.linear_fc1.weight",
            (f"{mlp}.experts.gate_up_proj[{{expert}}]",),
            Transposed(),
            halves=True,
        )
        yield Rule(f"{experts}.linear_fc2.weight", (f"{mlp}.experts.down_proj[{{expert}}]",), Transposed())
