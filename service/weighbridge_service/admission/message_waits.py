"""Waits for messages of callers. Each has a timeout, which is shorter while memory grows unexpectedly.

gRPC buffers a whole message, whatever its announced length, and rejects it for its size only at the end. So a caller
that announces a long message and withholds its last byte occupies that much memory. The service cannot see which call
that is. It sees only that memory grows, and which calls have waited for a message longer than a well-behaved client
takes.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from weighbridge_service.runtime import process_memory

log = logging.getLogger(__name__)

MOST_GROWTH = 64 << 20
"""Bytes by which unaccounted memory may grow while calls wait for messages."""
_SLOW_SECONDS, _QUICK_SECONDS = 0.1, 0.02
"""Seconds that a message of 1 MiB takes at 10 and at 50 MB/s. Once memory has grown too much, waits longer than the
first are ended. The more it has grown, the shorter this limit is, but never shorter than the second."""
_LOOK_SECONDS = 0.03
_ALERT_SECONDS = 0.01
"""Interval between two checks while memory grows; otherwise `_LOOK_SECONDS`."""
_TRIM_SECONDS = 10.0
"""Interval at which freed memory is returned to the system."""
_GROWN_TRIM_SECONDS = 0.5
"""The same interval once memory has grown too much, so that memory of ended calls is not counted as growth for long."""
_KEPT_BYTES = 32 << 20
"""Freed bytes that the process keeps for the next messages, in addition to as many as are in flight."""


@dataclass(eq=False, frozen=True, slots=True)
class Wait:
    """A wait for one message.

    Attributes:
        since: start of the wait, in seconds of the monotonic clock.
        until: deadline of the wait, by the same clock.
        end: ends the waiting call, from any thread.
    """

    since: float
    until: float
    end: Callable[[], object]


def overdue(waits: Iterable[Wait], now: float, growth: int) -> list[Wait]:
    """The waits that must be ended.

    Args:
        waits: all current waits.
        now: current time in seconds of the monotonic clock.
        growth: bytes by which unaccounted memory has grown during the waits.
    """
    grown = MOST_GROWTH / growth if growth > MOST_GROWTH else float("inf")
    slow = max(_SLOW_SECONDS * grown**2, _QUICK_SECONDS)
    return [wait for wait in waits if now >= wait.until or now - wait.since > slow]


class MessageWaits:
    """All waits of one process. Thread-safe.

    Args:
        accounted: returns the number of bytes in flight, which have a budget of their own.
    """

    def __init__(self, accounted: Callable[[], int]) -> None:
        self._accounted = accounted
        self._changed = threading.Condition()
        self._waits: dict[Wait, None] = {}
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="message-waits", daemon=True)
        self._thread.start()

    @contextmanager
    def waiting(self, end: Callable[[], object], seconds: float = float("inf")) -> Iterator[None]:
        """Mark the block as a wait for a message.

        Args:
            end: ends the call, from any thread, if the message takes too long.
            seconds: timeout of the wait.
        """
        now = time.monotonic()
        wait = Wait(now, now + seconds, end)
        with self._changed:
            self._waits[wait] = None
            if len(self._waits) == 1:
                self._changed.notify()
        try:
            yield
        finally:
            with self._changed:
                self._waits.pop(wait, None)

    def close(self) -> None:
        """Stop the thread that ends waits."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        least = process_memory.private_bytes()
        trimmed, kept, grown = time.monotonic(), 0, False
        while True:
            with self._changed:
                if not self._waits and not self._closed:
                    self._changed.wait(_GROWN_TRIM_SECONDS if grown else _TRIM_SECONDS)
                if self._closed:
                    return
                waits = list(self._waits)
            now, accounted = time.monotonic(), self._accounted()
            settled = grown and now - trimmed > _GROWN_TRIM_SECONDS
            if settled:
                trimmed, grown = now, False
                process_memory.trim()
            if now - trimmed > _TRIM_SECONDS:
                trimmed = now
                kept = process_memory.give_back(kept, _KEPT_BYTES + accounted)
            held = process_memory.private_bytes() - accounted
            # memory that is left after slow calls were ended does not belong to the remaining ones, so it becomes the
            # new baseline
            waited = not settled and any(now - wait.since > _QUICK_SECONDS for wait in waits)
            least = min(least, held) if waited else held
            growth = held - least
            ended = overdue(waits, now, growth)
            grown = grown or growth > MOST_GROWTH
            if ended:
                log.info("%d calls did not send the expected message in time", len(ended))
            with self._changed:
                for wait in ended:
                    self._waits.pop(wait, None)
            for wait in ended:
                wait.end()
            if waits:
                time.sleep(_LOOK_SECONDS if growth < MOST_GROWTH // 2 else _ALERT_SECONDS)
