"""DeepSeek-V3 and models with its architecture: multi-head latent attention, shared experts, layers for multi-token
prediction.

DeepSeek-V3.2 also has an indexer in its attention, with Megatron-core's own names
(``experimental_attention_variant="dsa"``). Its elements are not reordered: in each head of the indexer, rotated
elements come first on both sides, in Megatron-core since the releases after 0.16.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import ClassVar

from weighbridge.errors import InvalidArgument
from weighbridge_service.families.family import MTP, mtp_rules
from weighbridge_service.families.from_mbridge import MBridgeFamily
from weighbridge_service.families.rules import Rule, Shape
from weighbridge_service.families.shapes import label_count

_OWN = {
    "enorm.weight": "enorm.weight",
    "hnorm.weight": "hnorm.weight",
    "eh_proj.weight": "eh_proj.weight",
    "final_layernorm.weight": "shared_head.norm.weight",
}
_INDEXER = "self_attention.core_attention.indexer"
_INDEXER_THERE = "model.layers.{layer}.self_attn.indexer"
_EMBEDDING = "embedding.word_embeddings.weight"
_SHARED = {
    # each layer for prediction has copies of the embedding and the output layer
    _EMBEDDING: "embed_tokens.weight",
    "output_layer.weight": "shared_head.head.weight",
}

_INDEX_HEADS, _INDEX_HEAD_DIM = 64, 128
"""Default number of heads of the indexer, and their default size."""


class LayersForPrediction(MBridgeFamily):
    """A family whose files contain layers for multi-token prediction after the decoder's layers. transformers omits
    them.
    """

    keep_in_fp32 = ("e_score_correction_bias",)

    @property
    def mtp_layers(self) -> int:
        """Number of layers for multi-token prediction: 0 for a model with a value or reward head, even if its config
        contains the field.
        """
        return 0 if label_count(self.config) is not None else int(self.config.get("num_nextn_predict_layers") or 0)

    def rules(self) -> Sequence[Rule]:
        """Rules from mbridge's tables, and the same rules for any number of layers for multi-token prediction."""
        found = list(super().rules())
        first = self.num_layers
        copies = {ours: [theirs] for ours, theirs in _SHARED.items()}
        if self.text_config.tie_word_embeddings:
            copies = {_EMBEDDING: list(_SHARED.values())}
        with_copies = [
            dataclasses.replace(
                rule,
                copies=tuple(
                    f"model.layers.{first + layer}.{copy}"
                    for layer in range(self.mtp_layers)
                    for copy in copies[rule.megatron]
                ),
                part_of_copies=MTP,
            )
            if rule.megatron in copies
            else rule
            for rule in found
        ]
        # these come first, because the decoder's rules also match the names of these layers
        return [*mtp_rules(found, f"model.layers.{{layer+{first}}}", _OWN), *with_copies]

    def decoder_shapes(self) -> dict[str, Shape]:
        """Shapes without layers for multi-token prediction, which transformers does not implement."""
        return super().hugging_face_shapes()

    def hugging_face_shapes(self) -> dict[str, Shape]:
        """Shapes of the decoder and of the layers for multi-token prediction."""
        shapes = self.decoder_shapes()
        hidden, last = self.text_config.hidden_size, f"model.layers.{self.num_layers - 1}."
        of_layer = {name.removeprefix(last): s for name, s in shapes.items() if name.startswith(last)}
        own = {
            "embed_tokens.weight": (self.vocab_size, hidden),
            "enorm.weight": (hidden,),
            "hnorm.weight": (hidden,),
            "eh_proj.weight": (hidden, 2 * hidden),
        }
        behind = {"shared_head.norm.weight": (hidden,), "shared_head.head.weight": (self.vocab_size, hidden)}
        mtp = {
            f"model.layers.{self.num_layers + layer}.{name}": shape
            for layer in range(self.mtp_layers)
            for name, shape in (own | of_layer | behind).items()
        }
        return _behind_the_layers(shapes, mtp)


def _behind_the_layers(shapes: dict[str, Shape], further: dict[str, Shape]) -> dict[str, Shape]:
    """The shapes with ``further`` inserted after the last tensor of the layers."""
    names = list(shapes)
    last = max(index for index, name in enumerate(names) if name.startswith("model.layers."))
    return (
        {name: shapes[name] for name in names[: last + 1]}
        | further
        | {name: shapes[name] for name in names[last + 1 :]}
    )


class DeepseekV3(LayersForPrediction):
    """DeepSeek-V3 and R1, and Kimi K2 with the ``model_type`` kimi_k2."""

    transformers_type = "deepseek_v3"
    mbridge_type = "deepseek_v3"
    one_key_for_all_layers = False
    experts_field = "n_routed_experts"


class DeepseekV32(DeepseekV3):
    """DeepSeek-V3.2 (in transformers since 5): DeepSeek-V3 with an indexer that selects the tokens to attend to."""

    further_names: ClassVar[Mapping[str, tuple[str, ...]]] = {
        f"{_INDEXER}.linear_wq_b.weight": (f"{_INDEXER_THERE}.wq_b.weight",),
        f"{_INDEXER}.linear_wk.weight": (f"{_INDEXER_THERE}.wk.weight",),
        f"{_INDEXER}.k_norm.weight": (f"{_INDEXER_THERE}.k_norm.weight",),
        f"{_INDEXER}.k_norm.bias": (f"{_INDEXER_THERE}.k_norm.bias",),
        f"{_INDEXER}.linear_weights_proj.weight": (f"{_INDEXER_THERE}.weights_proj.weight",),
    }

    def decoder_shapes(self) -> dict[str, Shape]:
        """Shapes of DeepSeek-V3, with an indexer after the projections of each layer's attention."""
        heads = self.config.get("index_n_heads") or _INDEX_HEADS
        size = self.config.get("index_head_dim") or _INDEX_HEAD_DIM
        hidden, rank = self.text_config.hidden_size, self.text_config.q_lora_rank
        if not rank:
            raise InvalidArgument(
                f"config.json has q_lora_rank = {rank}, and the indexer reads what has that many elements"
            )
        indexer = {
            "wq_b.weight": (heads * size, rank),
            "wk.weight": (size, hidden),
            "k_norm.weight": (size,),
            "k_norm.bias": (size,),
            "weights_proj.weight": (heads, hidden),
        }
        found: dict[str, Shape] = {}
        for name, shape in super().decoder_shapes().items():
            found[name] = shape
            if name.endswith(".self_attn.o_proj.weight"):
                there = name.removesuffix("o_proj.weight")
                found |= {f"{there}indexer.{own}": shape for own, shape in indexer.items()}
        return found
