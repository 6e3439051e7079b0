"""fp8 weights with one scale for each block, as DeepSeek-V3 publishes them: their names and shapes.

A matrix in float8_e4m3fn has a tensor ``<its name>_scale_inv`` with one factor for each block of rows and columns. A
weight is the product of both. ``quantization_config.weight_block_size`` in config.json is the size of a block.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from weighbridge.errors import InvalidArgument

QUANTIZED = "F8_E4M3"
"""safetensors' name of the dtype of quantised weights."""
QUANTIZED_WITH_SCALES = "fp8"
"""The ``quant_method`` of such weights in configs."""
SCALE_SUFFIX = "_scale_inv"
"""Suffix that is appended to the name of a weight for the name of its tensor of scales."""
_QUANTIZATION = ("quantization_config", "compression_config", "quantization")
"""Keys of configs for quantised weights: transformers, older ones of compressed-tensors, and MLX."""
DEFAULT_BLOCK = (128, 128)
"""Rows and columns of a block if the config does not contain them."""


def is_quantized(config: Mapping[str, Any]) -> bool:
    """Whether a config describes weights that are fp8 with scales."""
    return quantization_of(config) == QUANTIZED_WITH_SCALES


def quantization_of(config: Mapping[str, Any]) -> str:
    """Return the quantisation method that a config names, such as ``fp8`` or ``mxfp4``; empty if it does not name
    one.
    """
    quantization = config.get("quantization_config")
    return str(quantization.get("quant_method", ""))[:40] if isinstance(quantization, Mapping) else ""


def says_quantized(config: Mapping[str, Any]) -> bool:
    """Whether a config, or a config inside it, describes quantised weights, by any method."""
    texts = (config, *(value for value in config.values() if isinstance(value, Mapping)))
    return any(isinstance(text.get(name), Mapping) for text in texts for name in _QUANTIZATION)


def block_of(config: Mapping[str, Any]) -> tuple[int, int]:
    """Return the numbers of rows and columns that share a scale.

    Raises:
        InvalidArgument: the size in the config is not a valid block size.
    """
    quantization = config.get("quantization_config")
    size = quantization.get("weight_block_size") if isinstance(quantization, Mapping) else None
    if size is None:
        return DEFAULT_BLOCK
    if not isinstance(size, list) or len(size) != 2 or any(type(n) is not int or n < 1 for n in size):
        raise InvalidArgument(f"config.json has weight_block_size = {str(size)[:40]}, not two positive integers")
    return size[0], size[1]


def scale_shape(shape: Sequence[int], block: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of the scales of a weight.

    Raises:
        InvalidArgument: the weight and the block have different numbers of axes.
    """
    if len(shape) != len(block):
        raise InvalidArgument(f"a tensor of shape {list(shape)} cannot have scales for blocks of {list(block)}")
    return tuple(math.ceil(n / b) for n, b in zip(shape, block, strict=True))
