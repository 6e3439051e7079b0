"""Refusals of ranks: a rank that cannot take part in a push says so once, and every other rank of the push is told.

Ranks that wait are told by the end of the version. One that comes later would open a version anew, and wait for the rank that was refused: so it
is told here, once each.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from weighbridge.errors import VersionFailed
from weighbridge_storage.documents.names import ModelName

_TOLD_SECONDS = 10.0
_KEPT = 1000


@dataclass(frozen=True, slots=True)
class _Refusal:
    error: VersionFailed
    told: set[str]
    until: float


class Refusals:
    """What ranks were refused lately, by model and request. Thread-safe.

    Args:
        told_seconds: how long ranks are told that come later: those of one step come within seconds, and a job that is started again takes
            longer.
        clock: gives seconds of a monotonic clock.
    """

    def __init__(
        self, told_seconds: float = _TOLD_SECONDS, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._told_seconds = told_seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._of: dict[tuple[ModelName, str], _Refusal] = {}

    def note(
        self, name: ModelName, request_id: str, ranks: int, error: VersionFailed, told: Iterable[str]
    ) -> None:
        """A rank cannot take part.

        Args:
            name: of the model.
            request_id: of the push.
            ranks: how many belong to it.
            error: what the others are told.
            told: processes that know.
        """
        known, now = set(told), self._clock()
        if len(known) >= ranks:
            return
        with self._lock:
            for key in [key for key, refusal in self._of.items() if now > refusal.until]:
                del self._of[key]
            if len(self._of) >= _KEPT:
                del self._of[next(iter(self._of))]
            self._of[name, request_id] = _Refusal(error, known, now + self._told_seconds)

    def told(self, name: ModelName, request_id: str, client_id: str) -> bool:
        """A process knows; whether there was anything to be told."""
        with self._lock:
            refusal = self._of.get((name, request_id))
            if refusal is None or self._clock() > refusal.until:
                return False
            refusal.told.add(client_id)
            return True

    def check(self, name: ModelName, request_id: str, client_id: str) -> None:
        """Raise VersionFailed if a process that does not know comes in time. One that knows begins the push anew, and all others join it."""
        with self._lock:
            refusal = self._of.get((name, request_id))
            if refusal is None:
                return
            if client_id in refusal.told or self._clock() > refusal.until:
                del self._of[name, request_id]
                return
            refusal.told.add(client_id)
        raise refusal.error.anew()

    def forget(self, name: ModelName, request_id: str) -> None:
        """Nobody is to be told any more: the version is complete after all."""
        with self._lock:
            self._of.pop((name, request_id), None)
