"""Non-finite elements: the bit patterns of each dtype that are NaN or infinite, and functions that count them.

The pushing rank, which counts in C or on its GPU, and the service, which counts again, use the same definition.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from weighbridge._core.dtypes import DType

Bytes = NDArray[np.uint8]
_WINDOW = 4 << 20
"""Number of bytes that are counted at a time, which limits the memory for an exact count."""


class Encoding(NamedTuple):
    """Encoding of non-finite values in a dtype: a bit pattern is non-finite if all bits of a mask are set in it.

    The mask covers the highest bits of the magnitude. Therefore a pattern is non-finite exactly if its magnitude, as an
    unsigned integer, is at least the mask.

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
        """The sign bit, which is the bit above the mask; 0 if the dtype does not have one."""
        return 1 << self.mask.bit_length() & (1 << 8 * self.itemsize) - 1

    @property
    def element_bytes(self) -> int:
        """Bytes of one element."""
        return self.itemsize * self.width


# IEEE 754 for 16 to 64 bits; OCP 8-bit Floating Point Specification 1.0 (E4M3 has one NaN and no infinity, E5M2 is as
# IEEE 754); OCP Microscaling Formats 1.0 (E8M0 has no sign, and one NaN)
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
    """Return the encoding of a dtype's non-finite values; None if all of its values are finite."""
    return _ENCODINGS.get(dtype.name)


class NonfiniteCounter:
    """Counts the non-finite elements of a tensor whose bytes arrive in order, in pieces of any size.

    Args:
        encoding: encoding of the elements; None if all are finite.

    Attributes:
        count: number of non-finite elements so far.
    """

    def __init__(self, encoding: Encoding | None) -> None:
        self.count = 0
        self._encoding = encoding
        self._begun = np.empty(0, np.uint8)
        self._expected = False

    def update(self, piece: Bytes) -> None:
        """Count the next bytes."""
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
        """Count whole elements, at least one.

        If the previous bytes contained non-finite elements, these probably do too.
        """
        found = 0 if not self._expected and _all_finite(data, encoding) else _count_exactly(data, encoding)
        self._expected = found > 0
        self.count += found


def count_nonfinite(data: Bytes, encoding: Encoding) -> int:
    """Return the number of non-finite elements in some bytes. A remainder shorter than an element is ignored."""
    counter = NonfiniteCounter(encoding)
    counter.update(data)
    return counter.count


def _windows(data: Bytes) -> Iterator[Bytes]:
    for start in range(0, len(data), _WINDOW):
        yield data[start : start + _WINDOW]


def _all_finite(data: Bytes, encoding: Encoding) -> bool:
    """Whether all elements are finite, which is nearly always true.

    This takes two reductions without a temporary array.

    The maximum of the patterns as signed integers belongs to the largest positive value, and as unsigned integers to
    the negative value with the largest magnitude.
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
