"""Gemma 3 with images."""

from __future__ import annotations

from weighbridge_service.families.from_mbridge import MBridgeFamily


class Gemma3(MBridgeFamily):
    """Gemma 3 from 4B on. Norms are stored as offsets from one on both sides (``layernorm_zero_centered_gamma``)."""
