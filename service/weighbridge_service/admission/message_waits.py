"""Waits for messages of callers: for how long each may go on, and that it ends sooner when memory runs away.

gRPC takes in all of a message that a caller has announced, whatever its length, and says only then that it is longer than the limit. So who
announces much and holds back the last byte takes that much memory. Which call it is cannot be seen from here, but that memory grows, and which
calls wait for a message longer than honest ones do.
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
"""Bytes by which memory may grow, besides what is accounted for, while callers are waited for."""
_SLOW_SECONDS, _QUICK_SECONDS = 0.1, 0.02
"""A message of 1 MiB takes this long at 10 and at 50 MB/s. Who is slower than the first is ended when memory has grown; the faster, the more it
has; who is quicker than the second, never."""
_LOOK_SECONDS = 0.03
_ALERT_SECONDS = 0.01
"""The same while memory grows."""
_TRIM_SECONDS = 10.0
"""How often what was freed goes back to the system."""
_GROWN_TRIM_SECONDS = 0.5
"""The same once memory has run away: what ended callers have freed must not count as theirs for long."""
_KEPT_BYTES = 32 << 20
"""Freed bytes that are kept, besides as many as are in flight: messages that come next use them again."""


@dataclass(eq=False, frozen=True, slots=True)
class Wait:
    """A wait for one message.

    Attributes:
        since: when it began, in seconds of the monotonic clock.
        until: when it has lasted too long.
        end: ends the call that is waited for, from any thread.
    """

    since: float
    until: float
    end: Callable[[], object]


def overdue(waits: Iterable[Wait], now: float, growth: int) -> list[Wait]:
    """The waits that must end.

    Args:
        waits: all that there are.
        now: in seconds of the monotonic clock.
        growth: bytes by which memory has grown while they last, besides what is accounted for.
    """
    grown = MOST_GROWTH / growth if growth > MOST_GROWTH else float("inf")
    slow = max(_SLOW_SECONDS * grown**2, _QUICK_SECONDS)
    return [wait for wait in waits if now >= wait.until or now - wait.since > slow]


class MessageWaits:
    """All waits of one process. Thread-safe.

    Args:
        accounted: bytes that have their own budget, and are in flight now.
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
        """In the block, a message is waited for.

        Args:
            end: ends the call, from any thread, if it takes too long.
            seconds: how long it may take.
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
        """End no more waits."""
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
            # what is left once those who were slow have been ended is not theirs
            waited = not settled and any(now - wait.since > _QUICK_SECONDS for wait in waits)
            least = min(least, held) if waited else held
            growth = held - least
            ended = overdue(waits, now, growth)
            grown = grown or growth > MOST_GROWTH
            if ended:
                log.info("%d calls have not sent the message that was due", len(ended))
            with self._changed:
                for wait in ended:
                    self._waits.pop(wait, None)
            for wait in ended:
                wait.end()
            if waits:
                time.sleep(_LOOK_SECONDS if growth < MOST_GROWTH // 2 else _ALERT_SECONDS)
