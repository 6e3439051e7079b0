"""ERNIE 4.5, the mixtures of experts for text: interleaved rotation, shared experts, a bias for the selection of
experts.

Megatron-core's names are those of Megatron-Bridge. Attention needs no permutation: both sides rotate neighbouring
elements (Megatron-core with ``rotary_interleaved``). Layers for multi-token prediction are not supported: names for
them are not published, and transformers omits them, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from weighbridge_service.families.decoders import Decoder
from weighbridge_service.families.family import Family
from weighbridge_service.families.rules import OneRow, Rule, Shape

_BIAS = "e_score_correction_bias"


class Ernie45Moe(Family):
    """ERNIE 4.5 of 21B-A3B and 300B-A47B."""

    experts_field = "moe_num_experts"
    keep_in_fp32 = (_BIAS,)
    one_key_for_all_layers = False

    def hugging_face_shapes(self) -> dict[str, Shape]:
        """Shapes of transformers, with the bias before a layer's router; transformers 5 lists it after the router."""
        shapes = super().hugging_face_shapes()
        found: dict[str, Shape] = {}
        for name, shape in shapes.items():
            bias = name.removesuffix("gate.weight") + f"moe_statics.{_BIAS}"
            if name.endswith(".mlp.gate.weight") and bias in shapes:
                found[bias] = shapes[bias]
            found.setdefault(name, shape)
        return found

    def rules(self) -> Sequence[Rule]:
        """Rules of a decoder with experts, and of the bias."""
        ours, theirs = "decoder.layers.{layer}.mlp.router.expert_bias", "model.layers.{layer}.mlp.moe_statics"
        return [
            *self._decoder.rules(),
            *self._decoder.experts(),
            Rule(ours, (f"{theirs}.{_BIAS}",), OneRow()),
        ]

    def parallel_plan(self) -> Mapping[str, str]:
        """transformers' plan plus the usual plan of attention and dense layers."""
        return {**super().parallel_plan(), **self._decoder.parallel_plan()}

    @property
    def _decoder(self) -> Decoder:
        return Decoder(self.head_counts())
