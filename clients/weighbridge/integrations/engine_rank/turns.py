"""Scheduling of Python's threads while a version is prepared in the process of a computing engine."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

_SECONDS = 0.0005
"""A thread of the engine that requests the interpreter lock gets it after at most this time.

Python's default of 0.005 s is most of a decoding step.
"""


class ShortTurns:
    """Block in which threads of this process switch quickly, because an engine's step requests the interpreter lock
    several times. Blocks may overlap.

    Args:
        get: returns the switch interval in seconds.
        set_to: sets it.
    """

    def __init__(
        self,
        get: Callable[[], float] = sys.getswitchinterval,
        set_to: Callable[[float], None] = sys.setswitchinterval,
    ) -> None:
        self._get, self._set_to = get, set_to
        self._lock = threading.Lock()
        self._blocks = 0
        self._usual = 0.0

    def __enter__(self) -> None:
        with self._lock:
            if not self._blocks:
                self._usual = self._get()
                self._set_to(min(self._usual, _SECONDS))
            self._blocks += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._blocks -= 1
            if not self._blocks:
                self._set_to(self._usual)


short_turns = ShortTurns()
"""Instance for this process."""
