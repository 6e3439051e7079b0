"""GLM-4.5 and 4.6: mixtures of experts with dense first layers and layers for multi-token prediction."""

from __future__ import annotations

from weighbridge_service.families.deepseek_v3 import LayersForPrediction
from weighbridge_service.families.dense import ATTENTION_BIASES


class Glm4Moe(LayersForPrediction):
    """GLM-4.5 and 4.6."""

    experts_field = "n_routed_experts"
    one_key_for_all_layers = False
    further_names = ATTENTION_BIASES
