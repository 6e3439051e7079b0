"""Time as heads, leases and versions count it."""

from __future__ import annotations

import time


def unix_ms() -> int:
    """The time in milliseconds since 1970 UTC."""
    return time.time_ns() // 1_000_000
