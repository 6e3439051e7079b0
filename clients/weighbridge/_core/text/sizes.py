"""Sizes and rates for people."""

from __future__ import annotations

import re

from weighbridge.errors import InvalidArgument

_UNITS = {
    **{unit: 1000**power for power, unit in enumerate(("b", "kb", "mb", "gb", "tb"))},
    **{unit: 1024**power for power, unit in enumerate(("kib", "mib", "gib", "tib"), start=1)},
}
_SIZE = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,6})?) ?([A-Za-z]*)", re.ASCII)


def readable_size(nbytes: int) -> str:
    """Bytes for people, in thousands: ``5.0 GB``."""
    size = float(nbytes)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 999.95:
            return f"{nbytes} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def readable_part(nbytes: int, total: int) -> str:
    """Bytes of so many: ``1.5 GB of 5.0 GB``; without these if they are not known."""
    return f"{readable_size(nbytes)} of {readable_size(total)}" if total else readable_size(nbytes)


def readable_rate(bytes_per_second: float) -> str:
    """A rate for people: ``1.5 MB/s``."""
    return f"{readable_size(round(bytes_per_second))}/s"


def parse_size(text: str) -> int:
    """Bytes of a size: ``5GB`` and ``500MB`` count in thousands, ``2GiB`` in 1024s; a bare number is bytes.

    Raises:
        InvalidArgument: it is not a number with such a unit, or less than one byte.
    """
    match = _SIZE.fullmatch(text.strip())
    scale = _UNITS.get(match[2].lower() or "b") if match else None
    size = int(float(match[1]) * scale) if match and scale else 0
    if size < 1:
        raise InvalidArgument(
            f"{text!r} is not a size", fix="write it like 5GB, 500MB or 2GiB, or as a number of bytes"
        )
    return size
