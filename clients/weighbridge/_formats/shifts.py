"""Shifts: a constant that is added to each element of a tensor when it is converted from one tensor space to another.

For example, Megatron-core stores a norm's weights reduced by one, compared with the model's files. Pushes, restores and
conversions use this definition. The sum is computed in float32, for float64 in float64, and rounded to the tensor's
dtype, ties to even, as torch does. For elements of 16 bits, shifted by one, that is the exact sum, rounded once. NaN
becomes the positive quiet one without a payload, because additions leave different ones on different machines.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from weighbridge._core.dtypes import DType

Bytes = NDArray[np.uint8]
Shifts = Mapping[str, float]
"""Constants that are added to each element of some tensors, by the tensors' names."""
NO_SHIFTS: Shifts = MappingProxyType({})
_SIGNIFICAND_CUT = 16
"""Number of bits by which the significand of a float32 exceeds that of a bfloat16."""


def shifted(data: bytes | memoryview | Bytes, dtype: DType, shift: float) -> Bytes:
    """Add a constant to each element.

    Args:
        data: whole elements; at any address.
        dtype: of the elements: floating-point numbers of 16 bits or more.
        shift: the constant; a float32.

    Returns:
        The same number of bytes, in new memory.
    """
    elements = _widened(np.frombuffer(data, np.uint8), dtype)
    # non-finite elements stay non-finite, and are counted elsewhere
    with np.errstate(over="ignore", invalid="ignore"):
        total = elements + elements.dtype.type(shift)
        total[np.isnan(total)] = np.nan
        return _narrowed(total, dtype)


def _widened(data: Bytes, dtype: DType) -> NDArray[np.float32] | NDArray[np.float64]:
    """Elements converted to the dtype of the addition; exact."""
    match dtype.name:
        case "BF16":
            return (data.view("<u2").astype("<u4") << _SIGNIFICAND_CUT).view("<f4")
        case "F16":
            return data.view("<f2").astype("<f4")
        case "F32":
            return data.view("<f4")
        case _:
            return data.view("<f8")


def _narrowed(total: NDArray[np.float32] | NDArray[np.float64], dtype: DType) -> Bytes:
    """The bytes of sums, rounded to the dtype; NaN has no payload that a carry could run into."""
    narrowed: Bytes
    if dtype.name == "BF16":
        bits = total.view("<u4")
        odd = bits >> _SIGNIFICAND_CUT & 1
        narrowed = (bits + 0x7FFF + odd >> _SIGNIFICAND_CUT).astype("<u2").view(np.uint8)
    else:
        narrowed = (total.astype("<f2") if dtype.name == "F16" else total).view(np.uint8)
    return narrowed
