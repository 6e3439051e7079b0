"""Tensor spaces: naming schemes of a layout's tensors."""

from __future__ import annotations

from enum import StrEnum

__all__ = ["TensorSpace"]


class TensorSpace(StrEnum):
    """Naming scheme and shapes of a model's tensors."""

    MEGATRON = "megatron"
    """Names and shapes of Megatron-core, as in ``sharded_state_dict()``."""
    HUGGING_FACE = "hugging_face"
    """Names and shapes of the model's safetensors files."""
