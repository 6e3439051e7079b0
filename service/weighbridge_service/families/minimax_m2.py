"""MiniMax-M2: mixtures of experts with norms over all heads of queries, and of keys, and a bias for the selection of
experts.

Megatron-core's names are those of Megatron-Bridge, whose layer spec splits these norms by tensor parallelism. The
shapes are those of a Mixtral with the norms and the bias, because only transformers 5 supports the model type. Layers
for multi-token prediction are not supported: neither such layers nor names for them are published.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from weighbridge_service.families.decoders import Decoder
from weighbridge_service.families.family import Family
from weighbridge_service.families.rules import WHOLE, Rule, Shape

_BIAS = "e_score_correction_bias"
_MLP = "block_sparse_moe"
_HEAD_DIM = 128
"""Default head size."""


class MinimaxM2(Family):
    """MiniMax-M2, M2.1, M2.5 and M2.7."""

    transformers_type = "mixtral"
    experts_field = "num_local_experts"
    keep_in_fp32 = (_BIAS,)

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__({"head_dim": _HEAD_DIM, **config})

    def hugging_face_shapes(self) -> dict[str, Shape]:
        """Shapes of a Mixtral, with the norms after the projections of attention and the bias before the router."""
        shapes = super().hugging_face_shapes()
        found: dict[str, Shape] = {}
        for name, shape in shapes.items():
            router, projection = f"{_MLP}.gate.weight", ".o_proj.weight"
            if name.endswith(router):
                found[name.removesuffix(router) + f"{_MLP}.{_BIAS}"] = (self.experts,)
            found[name] = shape
            if name.endswith(projection):
                attention = name.removesuffix(projection)
                for part in "qk":
                    found[f"{attention}.{part}_norm.weight"] = shapes[f"{attention}.{part}_proj.weight"][:1]
        return found

    def rules(self) -> Sequence[Rule]:
        """Rules of a decoder with experts, and of the bias."""
        bias = f"model.layers.{{layer}}.{_MLP}.{_BIAS}"
        return [
            *self._decoder.rules(),
            *self._decoder.experts(),
            Rule("decoder.layers.{layer}.mlp.router.expert_bias", (bias,), WHOLE),
        ]

    def parallel_plan(self) -> Mapping[str, str]:
        """Mixtral's plan plus the norms, which engines split like the projections before them."""
        return {**super().parallel_plan(), **self._decoder.parallel_plan()}

    @property
    def _decoder(self) -> Decoder:
        return Decoder(self.head_counts(), mlp=_MLP, gated=("w1", "w3", "w2"), norm_of_all_heads=True)
