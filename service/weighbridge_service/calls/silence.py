"""Limits on silence for callers whose requests are read in threads: a thread that waits for a message cannot be given a time limit."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")

_LOOK_SECONDS = 0.5
"""Between two looks for callers that have been silent for too long."""


@dataclass(eq=False, slots=True)
class _Wait:
    """A message that is due.

    Attributes:
        until: when it must have come, in seconds of the monotonic clock.
        end: ends the call, from any thread.
    """

    until: float
    end: Callable[[], object]


class Silence:
    """Ends calls whose messages do not come in time. Thread-safe.

    Args:
        name: of the thread that looks; there is one while anything is waited for.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._waits: set[_Wait] = set()
        self._looking = False

    def limited(
        self, messages: Iterator[T], end: Callable[[], object], first: float, others: float
    ) -> Iterator[T]:
        """The same messages; the call is ended when one is overdue.

        Args:
            messages: those of a request; fail once the call has ended.
            end: ends the call, from any thread.
            first: for how many seconds the first one may be waited for.
            others: the same for each of the others, and for the end.
        """
        seconds = first
        while True:
            wait = self._begin(_Wait(time.monotonic() + seconds, end))
            try:
                message = next(messages, None)
            finally:
                with self._lock:
                    self._waits.discard(wait)
            if message is None:
                return
            yield message
            del message  # it need not wait in memory for the next one
            seconds = others

    def _begin(self, wait: _Wait) -> _Wait:
        with self._lock:
            self._waits.add(wait)
            begin, self._looking = not self._looking, True
        if begin:
            threading.Thread(target=self._look, name=self._name, daemon=True).start()
        return wait

    def _look(self) -> None:
        while True:
            time.sleep(_LOOK_SECONDS)
            now = time.monotonic()
            with self._lock:
                if not self._waits:
                    self._looking = False
                    return
                overdue = [wait for wait in self._waits if wait.until < now]
                self._waits.difference_update(overdue)
            for wait in overdue:
                wait.end()
