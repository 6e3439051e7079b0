"""Waiting in tests, and how long something takes on machines that have much else to do."""

from __future__ import annotations

import time
from collections.abc import Callable


def eventually(condition: Callable[[], object]) -> None:
    """Wait until something holds that must come to hold."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def is_done_within(seconds: float, action: Callable[[], object]) -> bool:
    """Whether something takes less than so long, be it once in five tries: a busy machine delays some of them, not all.

    For what does the same work in each try, and waits for no chance.
    """

    def took() -> float:
        begun = time.monotonic()
        action()
        return time.monotonic() - begun

    return any(took() < seconds for _ in range(5))
