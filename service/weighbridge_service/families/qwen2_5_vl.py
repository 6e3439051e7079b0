"""Qwen2.5-VL: a language model and a vision tower, both with Megatron-core's layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weighbridge_service.families.from_mbridge import MBridgeFamily


class Qwen25VL(MBridgeFamily):
    """Qwen2.5-VL."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        if "text_config" not in config:
            # published configs contain the language model's fields at the top level, next to `vision_config`
            config = {**config, "text_config": config}
        if "tie_word_embeddings" not in config and "tie_word_embeddings" in config["text_config"]:
            # transformers 4, and transformers 5 since 5.16, read it from the language model's config
            config = {**config, "tie_word_embeddings": config["text_config"]["tie_word_embeddings"]}
        super().__init__(config)
