"""Sizes for people."""

from __future__ import annotations


def readable_size(nbytes: int) -> str:
    """Bytes for people, in thousands: ``5.0 GB``."""
    size = float(nbytes)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 999.95:
            return f"{nbytes} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
