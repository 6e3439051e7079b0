"""Ranges of a file that an HTTP request asks for (RFC 9110, section 14)."""

from __future__ import annotations

import re
from dataclasses import dataclass

from weighbridge.errors import WeighbridgeError

_RANGE = re.compile(r"\s*bytes\s*=\s*([0-9]*)\s*-\s*([0-9]*)\s*", re.IGNORECASE)
_MOST_DIGITS = 19
"""Larger numbers lie behind the end of any file."""


class RangeNotSatisfiable(WeighbridgeError):
    """No byte of the file lies in the range that was asked for.

    Attributes:
        size: the file's, in bytes.
    """

    reason = "RANGE_NOT_SATISFIABLE"
    http_status = 416

    def __init__(self, size: int) -> None:
        super().__init__(
            f"the file has {size} bytes, and the range begins behind them", fix="ask for bytes it has"
        )
        self.size = size


@dataclass(frozen=True, slots=True)
class ByteRange:
    """The bytes from ``start`` up to, not including, ``end``; ``partial`` if they were asked for, and not the whole file."""

    start: int
    end: int
    partial: bool = True


def byte_range(header: str | None, size: int) -> ByteRange:
    """The bytes that a Range header asks for.

    A header that is malformed, has another unit or several ranges is passed over, as the standard allows: the whole file is sent.

    Args:
        header: its value; None if there is none.
        size: the file's, in bytes.

    Raises:
        RangeNotSatisfiable: none of the bytes exist.
    """
    whole = ByteRange(0, size, partial=False)
    match = _RANGE.fullmatch(header) if header is not None else None
    if match is None:
        return whole
    first, last = (_number(digits) for digits in match.groups())
    if first is None:
        if last is None:
            return whole
        start, end = max(size - last, 0), size
    else:
        if last is not None and last < first:
            return whole
        start, end = first, size if last is None else min(last + 1, size)
    if start >= end:
        raise RangeNotSatisfiable(size)
    return ByteRange(start, end)


def _number(digits: str) -> int | None:
    digits = digits.lstrip("0") or digits[:1]
    if len(digits) > _MOST_DIGITS:
        return int(10**_MOST_DIGITS)
    return int(digits) if digits else None
