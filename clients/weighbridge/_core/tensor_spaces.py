"""Tensor spaces: whose names the tensors of a layout have."""

from __future__ import annotations

from enum import StrEnum

__all__ = ["TensorSpace"]


class TensorSpace(StrEnum):
    """Names and shapes of a model's tensors, as one side has them."""

    MEGATRON = "megatron"
    """Those of megatron-core, as in ``sharded_state_dict()``."""
    HUGGING_FACE = "hugging_face"
    """Those of the model's safetensors files."""
