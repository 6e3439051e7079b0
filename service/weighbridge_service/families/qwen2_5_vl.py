"""Qwen2.5-VL: a language model and a vision tower, both of them Megatron-core's."""

from __future__ import annotations

from weighbridge_service.families.from_mbridge import MBridgeFamily


class Qwen25VL(MBridgeFamily):
    """Qwen2.5-VL."""
