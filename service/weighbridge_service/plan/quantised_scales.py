"""Scales of quantised weights: which tensors are factors and tables of packed ones, so that a cast would change every weight made of them. Pure.

bitsandbytes has ``weight.absmax`` and ``weight.quant_map`` beside 4-bit weights and ``SCB`` beside 8-bit ones; GPTQ and AWQ ``scales``, compressed-tensors
``weight_scale``, FP8 in blocks ``weight_scale_inv``, MXFP4 ``..._scales``. Most are floating-point numbers as other tensors are.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from weighbridge._core.layouts import TensorSpec

_PACKED = ("U8", "I8", "I32", "U32")
_NAMES = re.compile(r"(?:.*[._])?(?:scales?|scale_inv|scale_\d+|absmax|quant_map|zeros?|zero_points?|SCB)")
_BIAS = "bias"


def scales_of(specs: Iterable[TensorSpec], *, quantised: bool) -> frozenset[str]:
    """Names of the floating-point tensors among these that are scales.

    Args:
        specs: all tensors of a model.
        quantised: whether its config says that its weights are quantised. If not, it takes both, the name of a scale and packed numbers
            beside it; if so, either, but for biases.
    """
    found = list(specs)
    packed = {spec.name for spec in found if spec.dtype.name in _PACKED or spec.dtype.name.startswith("F8_")}
    modules = {name.rpartition(".")[0] for name in packed}

    def is_scale(name: str) -> bool:
        module = name.rpartition(".")[0]
        beside = module in modules or module in packed
        named = _NAMES.fullmatch(name) is not None
        return (named and beside) or (quantised and (named or (beside and not name.endswith(_BIAS))))

    return frozenset(spec.name for spec in found if spec.dtype.is_float and is_scale(spec.name))
