"""Rates, as token buckets: calls that a host begins, answers that it waits for, bytes of weights of an identity."""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from weighbridge.errors import ResourceExhausted

_MOST_NAMES = 10_000


@dataclass(frozen=True, slots=True)
class Bucket:
    """Amount that is left at a rate.

    Attributes:
        level: how much that was at the moment; less than nothing if more was taken than there was.
        at: the moment, in seconds.
    """

    level: float
    at: float

    def filled(self, now: float, rate: float, most: float) -> Bucket:
        """The bucket at a later moment.

        Args:
            now: the moment, in seconds.
            rate: what comes in a second.
            most: what it holds.
        """
        return Bucket(min(self.level + (now - self.at) * rate, most), now)

    def without(self, amount: float) -> Bucket:
        """The bucket after something was taken."""
        return Bucket(self.level - amount, self.at)

    def seconds_until(self, level: float, rate: float) -> float:
        """Seconds until it holds so much; 0 if it does."""
        return max((level - self.level) / rate, 0.0)


class Rates:
    """Token buckets by name. Thread-safe.

    Args:
        rate: what comes in a second; 0 where each call says it.
        burst: what a bucket holds, after a pause.
        clock: seconds.
        most_names: that are remembered; the one that has taken longest ago is forgotten first.
    """

    def __init__(
        self,
        rate: float = 0.0,
        burst: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        most_names: int = _MOST_NAMES,
    ) -> None:
        self._rate = rate
        self._burst = burst
        self._clock = clock
        self._most_names = most_names
        self._lock = threading.Lock()
        self._buckets: OrderedDict[str, Bucket] = OrderedDict()

    def take(
        self,
        name: str,
        amount: float = 1.0,
        *,
        least: float = -math.inf,
        rate: float | None = None,
        slack: float = 0.0,
    ) -> float:
        """Take something; if that has to wait, nothing, and the seconds after which to ask again.

        Args:
            name: whose it is.
            amount: how much.
            least: what the bucket must hold before.
            rate: what comes in a second, and the most that it holds; by default as given.
            slack: a shorter wait than this counts as none, in seconds.
        """
        with self._lock:
            bucket = self._filled(name, rate)
            seconds = bucket.seconds_until(least, rate or self._rate)
            if seconds <= slack:
                bucket, seconds = bucket.without(amount), 0.0
            self._buckets[name] = bucket
            self._buckets.move_to_end(name)
            if len(self._buckets) > self._most_names:
                self._buckets.popitem(last=False)
        return seconds

    def left(self, name: str, rate: float | None = None) -> float:
        """The level of a bucket now."""
        with self._lock:
            return self._filled(name, rate).level

    def count(self, host: str) -> None:
        """A host begins a call. Raises ResourceExhausted, which says when to try again, if it has begun too many."""
        if wait := self.take(host, least=1):
            raise ResourceExhausted(
                f"{host} begins more than {self._rate:g} calls a second",
                fix="ask less often, or watch instead",
                retry_after=max(wait, 0.1),
            )

    def delay(self, host: str) -> float:
        """Count something of a host that is put off instead of refused: by so many seconds, behind all that were counted before."""
        self.take(host)
        return max(-self.left(host) / self._rate, 0.0)

    def _filled(self, name: str, rate: float | None) -> Bucket:
        """The lock is held."""
        now, most = self._clock(), rate or self._burst
        return self._buckets.get(name, Bucket(most, now)).filled(now, rate or self._rate, most)
