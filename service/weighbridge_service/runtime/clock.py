"""The wall clock of heads, leases and versions."""

from __future__ import annotations

import time


def unix_ms() -> int:
    """Current time in milliseconds since 1970 UTC."""
    return time.time_ns() // 1_000_000
