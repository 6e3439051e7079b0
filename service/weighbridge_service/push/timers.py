"""Timers of all pushes: one thread that wakes each push at its requested time."""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
from typing import Protocol

log = logging.getLogger(__name__)

_SPARE = 64
"""The queue is rebuilt without cancelled entries once there are this many more of them than of active ones."""


class Sleeper(Protocol):
    """Object that a timer wakes."""

    def tick(self) -> None:
        """Handle the wake-up. Must not block."""


class Timers:
    """Wake-ups at given times. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._queue: list[tuple[float, int]] = []  # times and serials; entries that are not in `_waiting` are cancelled
        self._waiting: dict[int, Sleeper] = {}
        self._asked: dict[Sleeper, tuple[float, int]] = {}
        self._serials = itertools.count()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="push-timers", daemon=True)
        self._thread.start()

    def wake(self, sleeper: Sleeper, at: float) -> None:
        """Wake an object once, at the earliest time requested since its last wake-up.

        Args:
            sleeper: the object to wake.
            at: when, in seconds of the monotonic clock.
        """
        with self._changed:
            there = self._asked.get(sleeper)
            if self._stopped or (there is not None and there[0] <= at):
                return
            self._drop(sleeper)
            asked = at, next(self._serials)
            self._asked[sleeper] = asked
            self._waiting[asked[1]] = sleeper
            heapq.heappush(self._queue, asked)
            if self._queue[0] == asked:
                self._changed.notify()

    def forget(self, sleeper: Sleeper) -> None:
        """Cancel the wake-up of an object."""
        with self._changed:
            self._drop(sleeper)

    def _drop(self, sleeper: Sleeper) -> None:
        there = self._asked.pop(sleeper, None)
        if there is None:
            return
        del self._waiting[there[1]]
        if len(self._queue) > 2 * len(self._waiting) + _SPARE:
            self._queue = sorted(self._asked.values())

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._stopped and (not self._queue or self._queue[0][0] > time.monotonic()):
                    self._changed.wait(self._queue[0][0] - time.monotonic() if self._queue else None)
                if self._stopped:
                    return
                sleeper = self._waiting.pop(heapq.heappop(self._queue)[1], None)
                if sleeper is None:
                    continue  # cancelled, or replaced by an earlier time
                del self._asked[sleeper]
            try:
                sleeper.tick()
            except Exception:  # one failure must not stop the wake-ups of other pushes
                log.exception("a timer failed")
            del sleeper  # keep no reference while this thread waits for the next one

    def stop(self) -> None:
        """Cancel all wake-ups and end the thread."""
        with self._changed:
            self._stopped = True
            self._queue.clear()
            self._waiting.clear()
            self._asked.clear()
            self._changed.notify()
        self._thread.join()
