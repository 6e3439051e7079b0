"""Timers of all pushes: one thread that wakes each at the time it has asked for."""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
from collections.abc import Callable

log = logging.getLogger(__name__)


class Timers:
    """Calls back at given times. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._next: dict[Callable[[], None], float] = {}
        self._serials = itertools.count()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="push-timers", daemon=True)
        self._thread.start()

    def wake(self, wake: Callable[[], None], at: float) -> None:
        """Call back once, at the earliest of the times that were asked for since the last call.

        Args:
            wake: what to call; it must not block.
            at: when, in seconds of the monotonic clock.
        """
        with self._changed:
            if self._stopped or self._next.get(wake, float("inf")) <= at:
                return
            self._next[wake] = at
            heapq.heappush(self._queue, (at, next(self._serials), wake))
            if self._queue[0][2] is wake:
                self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._stopped and (not self._queue or self._queue[0][0] > time.monotonic()):
                    self._changed.wait(self._queue[0][0] - time.monotonic() if self._queue else None)
                if self._stopped:
                    return
                at, _, wake = heapq.heappop(self._queue)
                if self._next.get(wake) != at:
                    continue  # it was called at an earlier time
                del self._next[wake]
            try:
                wake()
            except Exception:  # the others must not suffer from it
                log.exception("a timer failed")

    def stop(self) -> None:
        """Call nothing back any more."""
        with self._changed:
            self._stopped = True
            self._queue.clear()
            self._next.clear()
            self._changed.notify()
        self._thread.join()
