"""Gemma 3, with images and without."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

from weighbridge_service.families.from_mbridge import MBridgeFamily
from weighbridge_service.families.rules import Rule, Shape

_TOWER = re.compile(r"^vision_tower\.(?!vision_model\.)")
_OUTPUT = "language_model.output_layer.weight"


class Gemma3(MBridgeFamily):
    """Gemma 3 from 4B on. Norms are stored as offsets from one on both sides (``layernorm_zero_centered_gamma``)."""

    def hugging_face_shapes(self) -> dict[str, Shape]:
        """Shapes of transformers, with the vision tower's prefix of published files, which transformers 5 drops."""
        shapes = super().hugging_face_shapes()
        return {_TOWER.sub("vision_tower.vision_model.", name): shape for name, shape in shapes.items()}

    def rules(self) -> Sequence[Rule]:
        """Rules from mbridge's tables, with the name in files of an output layer that is not tied to the embedding."""
        return _with_output_layer(super().rules())


class Gemma3Text(MBridgeFamily):
    """Gemma 3 of 270M and 1B, which consist of the language model only."""

    def rules(self) -> Sequence[Rule]:
        """Rules of the language model in `Gemma3`, without its prefix."""
        import transformers

        inside = transformers.Gemma3Config(text_config=self.transformers_config.to_dict())
        prefix = "language_model."
        return [
            dataclasses.replace(
                rule,
                megatron=rule.megatron.removeprefix(prefix),
                hugging_face=tuple(name.removeprefix(prefix) for name in rule.hugging_face),
            )
            for rule in _with_output_layer(self.rules_of(inside, "gemma3"))
            if rule.megatron.startswith(prefix)
        ]


def _with_output_layer(rules: Sequence[Rule]) -> list[Rule]:
    name = ("language_model.lm_head.weight",)
    return [dataclasses.replace(rule, hugging_face=name) if rule.megatron == _OUTPUT else rule for rule in rules]
