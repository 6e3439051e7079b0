"""Changed elements of two runs of bytes of one dtype, and the largest step between them, exact for the dtype.

An element has changed if its bits have: a transfer of changed elements would carry it. So zero and minus zero differ by
a step of 0, and a NaN with the same bits has not changed. A step is defined between finite numbers; changed elements
with a NaN or an infinity on either side are counted separately.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from weighbridge._comparing.differences import Difference
from weighbridge._core.dtypes import DType
from weighbridge._core.nonfinite import encoding_of

Bytes: TypeAlias = NDArray[np.uint8]
Bits: TypeAlias = NDArray[np.unsignedinteger[Any]]
_WINDOW = 1 << 20
"""Bytes that are compared at a time: they stay in a core's cache, and bound the temporary arrays."""


def difference(dtype: DType, before: Bytes, after: Bytes) -> Difference:
    """Difference between two runs of elements of one dtype.

    Args:
        dtype: dtype of the elements; little-endian.
        before, after: contiguous, of the same whole number of elements.

    Returns:
        The difference. Its step is a float64, correctly rounded; for integers, an integer. A step beyond the range of
        float64 is its largest number.
    """
    found = Difference(len(before) // dtype.itemsize)
    for start in range(0, len(before), _WINDOW):
        window = slice(start, start + _WINDOW)
        a, b = (each[window].view(f"<u{dtype.itemsize}") for each in (before, after))
        changed = np.flatnonzero(a != b)
        if len(changed):
            found = found.plus(_changed(dtype, a[changed], b[changed]))
    return found


def _changed(dtype: DType, before: Bits, after: Bits) -> Difference:
    """Difference of elements that have all changed, with 0 as the number of elements: these are counted already."""
    if encoding_of(dtype) is None:
        return Difference(0, len(before), step=_integer_step(dtype, before, after))
    values = _VALUES[dtype.name]
    with np.errstate(over="ignore", invalid="ignore"):  # casts of signalling NaNs are invalid
        old, new = values(before), values(after)
        finite = np.isfinite(old) & np.isfinite(new)
        steps = np.abs(new[finite] - old[finite])
    nonfinite = len(before) - len(steps)
    step = min(float(steps.max(initial=0.0)), float(np.finfo(np.float64).max))
    return Difference(0, len(before), nonfinite, step)


def _integer_step(dtype: DType, before: Bits, after: Bits) -> int:
    kind = f"<i{dtype.itemsize}" if dtype.name.startswith("I") else f"<u{dtype.itemsize}"
    rises = after.view(kind) > before.view(kind)
    # modulo 2 to the number of bits, in which differences of two's complement are exact
    return int(np.where(rises, after - before, before - after).max())


def _e4m3() -> NDArray[np.float64]:
    """Values of all patterns of FP8 E4M3 (OCP 8-bit Floating Point Specification 1.0): bias 7, no infinity, one NaN of
    either sign.
    """
    codes = np.arange(256)
    exponents, mantissas = codes >> 3 & 15, codes & 7
    magnitudes: NDArray[np.float64] = np.ldexp(
        np.where(exponents == 0, mantissas, mantissas + 8), np.maximum(exponents, 1) - 10
    )
    magnitudes[codes & 0x7F == 0x7F] = np.nan
    return np.where(codes & 0x80, -magnitudes, magnitudes)


def _e8m0() -> NDArray[np.float64]:
    """Values of all patterns of E8M0 (OCP Microscaling Formats 1.0): powers of two, and one NaN."""
    values: NDArray[np.float64] = np.ldexp(1.0, np.arange(256) - 127)
    values[255] = np.nan
    return values


_E4M3, _E8M0 = _e4m3(), _e8m0()
# BF16 and E5M2 are the upper halves of float32 and float16
_VALUES: Mapping[str, Callable[[Bits], NDArray[Any]]] = {
    "F8_E4M3": lambda bits: _E4M3[bits],
    "F8_E5M2": lambda bits: (bits.astype("<u2") << 8).view("<f2").astype(np.float64),
    "F8_E8M0": lambda bits: _E8M0[bits],
    "F16": lambda bits: bits.view("<f2").astype(np.float64),
    "BF16": lambda bits: (bits.astype("<u4") << 16).view("<f4").astype(np.float64),
    "F32": lambda bits: bits.view("<f4").astype(np.float64),
    "F64": lambda bits: bits.view("<f8"),
    "C64": lambda bits: bits.view("<c8").astype(np.complex128),
}
