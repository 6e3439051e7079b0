"""MiMo: Qwen2 with layers for multi-token prediction, which transformers does not implement."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from weighbridge_service.families.dense import BIASES
from weighbridge_service.families.family import mtp_rules
from weighbridge_service.families.from_mbridge import MBridgeFamily
from weighbridge_service.families.rules import Rule, Shape, Swapped

_LAYER = "model.mtp_layers.{layer}"
_OWN = {
    "enorm.weight": "token_layernorm.weight",
    "hnorm.weight": "hidden_layernorm.weight",
    "eh_proj.weight": "input_proj.weight",
    "final_layernorm.weight": "final_layernorm.weight",
}


class Mimo(MBridgeFamily):
    """MiMo 7B."""

    transformers_type = "qwen2"
    further_names = BIASES

    def rules(self) -> Sequence[Rule]:
        """Rules from mbridge's tables, and the same rules for any number of layers for multi-token prediction."""
        found = list(super().rules())
        mtp = mtp_rules(found, _LAYER, _OWN)
        # Megatron-core concatenates the embedding and the hidden state in this order, MiMo in the opposite order
        # (mbridge ignores this)
        mtp = [
            dataclasses.replace(rule, conversion=Swapped(axis=1)) if rule.megatron.endswith("eh_proj.weight") else rule
            for rule in mtp
        ]
        return [*found, *mtp]

    def hugging_face_shapes(self) -> dict[str, Shape]:
        """Shapes of Qwen2, and of the layers for multi-token prediction."""
        shapes = super().hugging_face_shapes()
        hidden, last = self.text_config.hidden_size, f"model.layers.{self.num_layers - 1}."
        of_layer = {name.removeprefix(last): s for name, s in shapes.items() if name.startswith(last)}
        own = {
            "token_layernorm.weight": (hidden,),
            "hidden_layernorm.weight": (hidden,),
            "input_proj.weight": (hidden, 2 * hidden),
            "final_layernorm.weight": (hidden,),
        }
        for layer in range(int(self.config.get("num_nextn_predict_layers") or 0)):
            for name, shape in (of_layer | own).items():
                shapes[f"model.mtp_layers.{layer}.{name}"] = shape
        return shapes
