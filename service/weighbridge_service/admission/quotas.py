"""Shares in limited resources: calls, watches, streams, bytes, connections.

A host with a large share must leave a fourth to others.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

from weighbridge.errors import ResourceExhausted

K = TypeVar("K")

_RESERVED = 4
"""One part in this many of the total, a fourth, is reserved for holders with small shares."""
RETRY_SECONDS = 1.0
"""Seconds after which a refused caller should retry."""


def may_have(total: int, held: int, held_by_host: int, more: int = 1) -> bool:
    """Whether a host may have more of a resource.

    A host that would have more than a fourth of the total must leave a fourth free, so that no host alone can shut out
    the others.

    Args:
        total: total amount.
        held: amount that all hosts hold together.
        held_by_host: amount that this host holds.
        more: additional amount that it asks for.
    """
    if held + more > total:
        return False
    return held_by_host + more <= total // _RESERVED or held + more <= total - total // _RESERVED


class Shares(Generic[K]):
    """Amounts of a limited resource by holder. Not thread-safe.

    Args:
        total: total amount.

    Attributes:
        total: as given.
        held: amount that all holders have together.
        of: amount by holder; holders with nothing are left out.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self.held = 0
        self.of: dict[K, int] = {}

    def has_room(self, holder: K, more: int = 1) -> bool:
        """Whether a holder may have more; see `may_have`."""
        return may_have(self.total, self.held, self.of.get(holder, 0), more)

    def add(self, holder: K, more: int = 1) -> None:
        """Add an amount, which may be negative, to a holder."""
        self.held += more
        self.of[holder] = self.of.get(holder, 0) + more
        if not self.of[holder]:
            del self.of[holder]


class HostQuota(Shares[str]):
    """Amounts of one resource by host. Thread-safe.

    Args:
        what: name of the resource for messages, in the plural.
        total: total amount.
    """

    def __init__(self, what: str, total: int) -> None:
        super().__init__(total)
        self._what = what
        self._lock = threading.Lock()

    def try_take(self, host: str, count: int = 1) -> bool:
        """Take an amount for a host. Returns False, and takes nothing, if `may_have` forbids it."""
        with self._lock:
            there = self.has_room(host, count)
            if there:
                self.add(host, count)
            return there

    def give(self, host: str, count: int = 1) -> None:
        """Give an amount back."""
        with self._lock:
            self.add(host, -count)

    def take(self, host: str, count: int = 1) -> None:
        """Take an amount as `try_take` does. Raises ResourceExhausted, which states when to retry, if that fails."""
        if not self.try_take(host, count):
            raise self.refusal(host)

    def refusal(self, host: str) -> ResourceExhausted:
        """The error for a host that can have no more."""
        return ResourceExhausted(
            f"{self.held} of {self.total} {self._what} are taken, {self.of.get(host, 0)} of them by {host or 'you'}",
            fix="try again later, or ask another replica",
            retry_after=RETRY_SECONDS,
        )

    @contextmanager
    def taking(self, host: str, count: int = 1) -> Iterator[None]:
        """Hold an amount while the block runs. Raises the same errors as `take`."""
        self.take(host, count)
        try:
            yield
        finally:
            self.give(host, count)
