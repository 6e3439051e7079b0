"""Refusals of ranks: a rank that cannot take part in a push reports it once, and every other rank of the push gets the
error.

Ranks that wait get the error when the version ends. A rank that opens the version later would open a new one and wait
for the refused rank. So `Refusals.check` raises the error to it, once for each process.
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
    """Recent refusals of ranks, by model and request. Thread-safe.

    Args:
        told_seconds: seconds for which later ranks get the error. The ranks of one step open it within seconds; a
            restarted job takes longer.
        clock: returns seconds of a monotonic clock.
    """

    def __init__(self, told_seconds: float = _TOLD_SECONDS, clock: Callable[[], float] = time.monotonic) -> None:
        self._told_seconds = told_seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._of: dict[tuple[ModelName, str], _Refusal] = {}

    def note(self, name: ModelName, request_id: str, ranks: int, error: VersionFailed, told: Iterable[str]) -> None:
        """Record that a rank cannot take part.

        Args:
            name: name of the model.
            request_id: id of the push.
            ranks: number of ranks of the push.
            error: the error that the other ranks get.
            told: ids of processes that have the error already.
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
        """Record that a process has the error. Returns whether there is one for this push."""
        with self._lock:
            refusal = self._of.get((name, request_id))
            if refusal is None or self._clock() > refusal.until:
                return False
            refusal.told.add(client_id)
            return True

    def check(self, name: ModelName, request_id: str, client_id: str) -> None:
        """Raise VersionFailed, once, to a process that has not got the error yet.

        A process that has got it restarts the push for all.
        """
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
        """Drop the refusal: the version is complete after all."""
        with self._lock:
            self._of.pop((name, request_id), None)
