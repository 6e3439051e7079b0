"""Scales of quantised weights: factors and tables of packed tensors. Casting them would change all weights that are
computed from them. Pure functions.

bitsandbytes stores ``weight.absmax`` and ``weight.quant_map`` next to 4-bit weights and ``SCB`` next to 8-bit weights.
GPTQ and AWQ use ``scales``, compressed-tensors ``weight_scale``, FP8 in blocks ``weight_scale_inv``, MXFP4
``..._scales``. Most have floating-point dtypes like other tensors.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from weighbridge._core.layouts import TensorSpec

_PACKED = ("U8", "I8", "I32", "U32")
_NAMES = re.compile(r"(?:.*[._])?(?:scales?|scale_inv|scale_\d+|absmax|quant_map|zeros?|zero_points?|SCB)")
_BIAS = "bias"


def scales_of(specs: Iterable[TensorSpec], *, quantised: bool) -> frozenset[str]:
    """Names of the floating-point tensors that are scales.

    Args:
        specs: specs of all tensors of a model.
        quantised: whether the config declares quantised weights. If it does, a tensor is a scale if it has the name of
            a scale, or if it is next to packed tensors and not a bias. Otherwise, it must both have the name of a scale
            and be next to packed tensors.
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
