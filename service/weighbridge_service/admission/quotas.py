"""Shares in what there is a limited number of: calls, watches, streams, bytes, connections. A host that holds much leaves a fourth to others."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

from weighbridge.errors import ResourceExhausted

K = TypeVar("K")

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


class Shares(Generic[K]):
    """Amounts that holders have of something limited. Not thread-safe.

    Args:
        total: how much there is.

    Attributes:
        total: as given.
        held: how much all have together.
        of: how much each has; those that have nothing are not there.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self.held = 0
        self.of: dict[K, int] = {}

    def has_room(self, holder: K, more: int = 1) -> bool:
        """Whether a holder may have more; see `may_have`."""
        return may_have(self.total, self.held, self.of.get(holder, 0), more)

    def add(self, holder: K, more: int = 1) -> None:
        """A holder has more, or less, from now on."""
        self.held += more
        self.of[holder] = self.of.get(holder, 0) + more
        if not self.of[holder]:
            del self.of[holder]


class HostQuota(Shares[str]):
    """Quota of each host in one thing, and what it holds. Thread-safe.

    Args:
        what: the thing, for people, in the plural.
        total: how many there are.
    """

    def __init__(self, what: str, total: int) -> None:
        super().__init__(total)
        self._what = what
        self._lock = threading.Lock()

    def try_take(self, host: str, count: int = 1) -> bool:
        """Take some, unless others need them; whether that was so."""
        with self._lock:
            there = self.has_room(host, count)
            if there:
                self.add(host, count)
            return there

    def give(self, host: str, count: int = 1) -> None:
        """Give some back."""
        with self._lock:
            self.add(host, -count)

    def take(self, host: str, count: int = 1) -> None:
        """As `try_take`. Raises ResourceExhausted, which says when to try again."""
        if not self.try_take(host, count):
            raise self.refusal(host)

    def refusal(self, host: str) -> ResourceExhausted:
        """What a host is told that can have no more."""
        return ResourceExhausted(
            f"{self.held} of {self.total} {self._what} are taken, {self.of.get(host, 0)} of them by {host or 'you'}",
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
