"""Waiting in tests."""

from __future__ import annotations

import time
from collections.abc import Callable


def eventually(condition: Callable[[], object]) -> None:
    """Wait until something holds that must come to hold."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
