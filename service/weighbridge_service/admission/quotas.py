"""Quotas of hosts in what there is a limited number of: calls, watches, streams, bytes, connections."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from weighbridge.errors import ResourceExhausted

_RESERVED = 4
"""The part of a whole that is left to those who have little: a fourth."""
RETRY_SECONDS = 1.0
"""After how long it is worth asking again."""


def may_have(total: int, held: int, held_by_host: int, more: int = 1) -> bool:
    """Whether a host may have more of something.

    A host that has, or would have, more than a fourth of all must leave a fourth free: so no host can shut the others out by itself.

    Args:
        total: how much there is.
        held: how much all have together.
        held_by_host: of this, how much the host has.
        more: how much it wants besides.
    """
    if held + more > total:
        return False
    return held_by_host + more <= total // _RESERVED or held + more <= total - total // _RESERVED


class HostQuota:
    """Quota of each host in one thing, and what it holds. Thread-safe.

    Args:
        what: the thing, for people, in the plural.
        total: how many there are.
    """

    def __init__(self, what: str, total: int) -> None:
        self._what = what
        self._total = total
        self._lock = threading.Lock()
        self._held: dict[str, int] = {}
        self._sum = 0

    @property
    def held(self) -> int:
        """How many are held."""
        return self._sum

    def try_take(self, host: str, count: int = 1) -> bool:
        """Take some, unless others need them; whether that was so."""
        with self._lock:
            there = self._held.get(host, 0)
            if not may_have(self._total, self._sum, there, count):
                return False
            self._held[host] = there + count
            self._sum += count
            return True

    def give(self, host: str, count: int = 1) -> None:
        """Give some back."""
        with self._lock:
            self._sum -= count
            left = self._held[host] - count
            if left:
                self._held[host] = left
            else:
                del self._held[host]

    def take(self, host: str, count: int = 1) -> None:
        """As `try_take`. Raises ResourceExhausted, which says when to try again."""
        if not self.try_take(host, count):
            raise self.refusal(host)

    def refusal(self, host: str) -> ResourceExhausted:
        """What a host is told that can have no more."""
        held = self._held.get(host, 0)
        return ResourceExhausted(
            f"{self._sum} of {self._total} {self._what} are taken, {held} of them by {host or 'you'}",
            fix="try again later, or ask another replica",
            retry_after=RETRY_SECONDS,
        )

    @contextmanager
    def taking(self, host: str, count: int = 1) -> Iterator[None]:
        """Have some while the block runs. Raises as `take`."""
        self.take(host, count)
        try:
            yield
        finally:
            self.give(host, count)
