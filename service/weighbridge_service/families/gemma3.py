"""Gemma 3 with images."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from weighbridge_service.families.from_mbridge import MBridgeFamily
from weighbridge_service.families.rules import Rule


class Gemma3(MBridgeFamily):
    """Gemma 3 from 4B on. Norms are stored as offsets from one on both sides (``layernorm_zero_centered_gamma``)."""

    def rules(self) -> Sequence[Rule]:
        """What mbridge's tables say, with the name in files of an output layer that is not the embedding."""
        return [
            dataclasses.replace(rule, hugging_face=("language_model.lm_head.weight",))
            if rule.megatron == "language_model.output_layer.weight"
            else rule
            for rule in super().rules()
        ]
