"""Non-finite elements: which bit patterns of each dtype are NaN or infinite, and how many of some bytes are.

One definition for the rank that pushes, which counts in C or on its GPU, and the service, which counts again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from weighbridge._core.dtypes import DType

Bytes = NDArray[np.uint8]
_WINDOW = 4 << 20
"""Bytes that are counted at a time, which bounds what an exact count takes."""


class Encoding(NamedTuple):
    """Encoding of non-finite values in a dtype: a bit pattern is non-finite if all bits of a mask are set in it.

    The mask covers the highest bits of the magnitude. So a pattern is also non-finite exactly if its magnitude, as an unsigned integer,
    is at least the mask.

    Attributes:
        itemsize: bytes of one pattern.
        mask: bits that are all set in a non-finite pattern.
        width: number of patterns in one element, which is finite if all of them are.
    """

    itemsize: int
    mask: int
    width: int = 1

    @property
    def sign(self) -> int:
        """The sign bit, which is the one above the mask; 0 if there is none."""
        return 1 << self.mask.bit_length() & (1 << 8 * self.itemsize) - 1

    @property
    def element_bytes(self) -> int:
        """Bytes of one element."""
        return self.itemsize * self.width


# IEEE 754 for 16 to 64 bits; OCP 8-bit Floating Point Specification 1.0 (E4M3 has one NaN and no infinity, E5M2 is as IEEE 754);
# OCP Microscaling Formats 1.0 (E8M0 has no sign, and one NaN)
_ENCODINGS: Mapping[str, Encoding] = {
    "F8_E4M3": Encoding(1, 0x7F),
    "F8_E5M2": Encoding(1, 0x7C),
    "F8_E8M0": Encoding(1, 0xFF),
    "F16": Encoding(2, 0x7C00),
    "BF16": Encoding(2, 0x7F80),
    "F32": Encoding(4, 0x7F80_0000),
    "F64": Encoding(8, 0x7FF0_0000_0000_0000),
    "C64": Encoding(4, 0x7F80_0000, width=2),
}


def encoding_of(dtype: DType) -> Encoding | None:
    """The non-finite patterns of a dtype; None if all of its values are finite."""
    return _ENCODINGS.get(dtype.name)


class NonfiniteCounter:
    """Number of non-finite elements of a tensor whose bytes come in order, in pieces of any size.

    Args:
        encoding: of the elements; None if all are finite.

    Attributes:
        count: so far.
    """

    def __init__(self, encoding: Encoding | None) -> None:
        self.count = 0
        self._encoding = encoding
        self._begun = np.empty(0, np.uint8)
        self._expected = False

    def update(self, piece: Bytes) -> None:
        """Take the next bytes."""
        encoding = self._encoding
        if encoding is None:
            return
        if len(self._begun):
            missing = encoding.element_bytes - len(self._begun)
            self._begun = np.concatenate([self._begun, piece[:missing]])
            piece = piece[missing:]
            if len(self._begun) < encoding.element_bytes:
                return
            self._count(self._begun, encoding)
        whole = len(piece) // encoding.element_bytes * encoding.element_bytes
        self._begun = piece[whole:].copy()
        for part in _windows(piece[:whole]):
            self._count(part, encoding)

    def _count(self, data: Bytes, encoding: Encoding) -> None:
        """Count whole elements, at least one. Where some were non-finite a moment ago, others probably are as well."""
        found = 0 if not self._expected and _all_finite(data, encoding) else _count_exactly(data, encoding)
        self._expected = found > 0
        self.count += found


def count_nonfinite(data: Bytes, encoding: Encoding) -> int:
    """Number of non-finite elements in some bytes. A remainder shorter than an element is ignored."""
    counter = NonfiniteCounter(encoding)
    counter.update(data)
    return counter.count


def _windows(data: Bytes) -> Iterator[Bytes]:
    for start in range(0, len(data), _WINDOW):
        yield data[start : start + _WINDOW]


def _all_finite(data: Bytes, encoding: Encoding) -> bool:
    """Whether all elements are finite, which is nearly always so: two reductions without a temporary.

    The largest pattern as a signed integer is that of the largest positive value, and as an unsigned one that of the largest
    negative.
    """
    itemsize, mask, sign = encoding.itemsize, encoding.mask, encoding.sign
    largest = data.view(f"<u{itemsize}").max()
    return bool(largest < sign | mask and (not sign or data.view(f"<i{itemsize}").max() < mask))


def _count_exactly(data: Bytes, encoding: Encoding) -> int:
    itemsize, mask, width = encoding
    patterns = data.view(f"<u{itemsize}")
    bits = np.array(mask, patterns.dtype)
    nonfinite = (patterns & bits) == bits
    if width > 1:
        nonfinite = nonfinite.reshape(-1, width).any(axis=1)
    return int(np.count_nonzero(nonfinite))
