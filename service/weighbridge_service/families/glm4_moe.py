"""GLM-4.5 and 4.6: mixtures of experts with dense first layers and layers for multi-token prediction; and GLM-4.5V,
which has a vision tower.

Megatron-core's names of GLM-4.5V are those of Megatron-Bridge's model (``GLM45VModel``), whose vision tower is
transformers'.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from weighbridge_service.families.decoders import Decoder
from weighbridge_service.families.deepseek_v3 import LayersForPrediction
from weighbridge_service.families.dense import ATTENTION_BIASES
from weighbridge_service.families.family import Family
from weighbridge_service.families.rules import WHOLE, Rule

_TOWER, _TOWER_THERE = "visual.", "model.visual."


class Glm4Moe(LayersForPrediction):
    """GLM-4.5 and 4.6."""

    experts_field = "n_routed_experts"
    one_key_for_all_layers = False
    further_names = ATTENTION_BIASES


class Glm4vMoe(Family):
    """GLM-4.5V."""

    experts_field = "n_routed_experts"
    keep_in_fp32 = ("e_score_correction_bias",)
    one_key_for_all_layers = False

    def rules(self) -> Sequence[Rule]:
        """Rules of the language model, and one rule for each tensor of the vision tower."""
        return [
            *self._decoder.rules(),
            *self._decoder.experts(),
            *(
                Rule(_TOWER + name.removeprefix(_TOWER_THERE), (name,), WHOLE)
                for name in self.hugging_face_shapes()
                if name.startswith(_TOWER_THERE)
            ),
        ]

    def parallel_plan(self) -> Mapping[str, str]:
        """transformers' plan plus the dense layers, which transformers 4 omits from its plan."""
        return {**super().parallel_plan(), **self._decoder.parallel_plan()}

    @property
    def _decoder(self) -> Decoder:
        return Decoder(self.head_counts(), ours="language_model.", theirs="model.language_model.")
