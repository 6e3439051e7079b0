"""Sizes and rates as text."""

from __future__ import annotations

import re

from weighbridge.errors import InvalidArgument

_UNITS = {
    **{unit: 1000**power for power, unit in enumerate(("b", "kb", "mb", "gb", "tb"))},
    **{unit: 1024**power for power, unit in enumerate(("kib", "mib", "gib", "tib"), start=1)},
}
_SIZE = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,6})?) ?([A-Za-z]*)", re.ASCII)


def readable_size(nbytes: int) -> str:
    """Return a number of bytes as text, with decimal units: ``5.0 GB``."""
    size = float(nbytes)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 999.95:
            return f"{nbytes} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def readable_part(nbytes: int, total: int) -> str:
    """Return a number of bytes and the total: ``1.5 GB of 5.0 GB``; without the total if it is not known."""
    return f"{readable_size(nbytes)} of {readable_size(total)}" if total else readable_size(nbytes)


def readable_rate(bytes_per_second: float) -> str:
    """Return a rate as text: ``1.5 MB/s``."""
    return f"{readable_size(round(bytes_per_second))}/s"


def parse_size(text: str) -> int:
    """Parse a size into bytes: ``5GB`` and ``500MB`` use powers of 1000, ``2GiB`` powers of 1024; a number without a
    unit is bytes.

    Raises:
        InvalidArgument: the text is not a number with such a unit, or is less than one byte.
    """
    match = _SIZE.fullmatch(text.strip())
    scale = _UNITS.get(match[2].lower() or "b") if match else None
    size = int(float(match[1]) * scale) if match and scale else 0
    if size < 1:
        raise InvalidArgument(
            f"{text!r} is not a size", fix="write it like 5GB, 500MB or 2GiB, or as a number of bytes"
        )
    return size
