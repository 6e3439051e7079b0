"""Rates, as token buckets: calls that a host begins, responses that it waits for, bytes of weights of an identity."""

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
    """A token bucket.

    Attributes:
        level: level at the time `at`; negative if more was taken than the bucket held.
        at: time in seconds.
    """

    level: float
    at: float

    def filled(self, now: float, rate: float, most: float) -> Bucket:
        """The bucket at a later time.

        Args:
            now: the later time in seconds.
            rate: amount added per second.
            most: capacity.
        """
        return Bucket(min(self.level + (now - self.at) * rate, most), now)

    def without(self, amount: float) -> Bucket:
        """The bucket after an amount was taken."""
        return Bucket(self.level - amount, self.at)

    def seconds_until(self, level: float, rate: float) -> float:
        """Seconds until the bucket holds at least `level`; 0 if it already does."""
        return max((level - self.level) / rate, 0.0)


class Rates:
    """Token buckets by name. Thread-safe.

    Args:
        rate: amount added per second; 0 if each call passes its own.
        burst: capacity of a bucket.
        clock: returns seconds of a monotonic clock.
        most_names: maximum number of buckets; the least recently used one is dropped first.
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
        """Take an amount and return 0. If that has to wait, take nothing and return the seconds after which to retry.

        Args:
            name: name of the bucket.
            amount: amount to take.
            least: level that the bucket must have before.
            rate: amount added per second, and also the capacity; by default `rate` and `burst` of the constructor.
            slack: seconds; a wait of at most this counts as none.
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
        """Current level of a bucket."""
        with self._lock:
            return self._filled(name, rate).level

    def count(self, host: str) -> None:
        """Count a call of a host. Raises ResourceExhausted, which states when to retry, if it has begun too many."""
        if wait := self.take(host, least=1):
            raise ResourceExhausted(
                f"{host} starts more than {self._rate:g} calls per second",
                fix="call less often, or watch instead",
                retry_after=max(wait, 0.1),
            )

    def delay(self, host: str) -> float:
        """Count an action of a host that is delayed instead of refused.

        Returns the delay in seconds, behind all actions counted before.
        """
        self.take(host)
        return max(-self.left(host) / self._rate, 0.0)

    def _filled(self, name: str, rate: float | None) -> Bucket:
        """The bucket now, without storing it. The caller holds the lock."""
        now, most = self._clock(), rate or self._burst
        return self._buckets.get(name, Bucket(most, now)).filled(now, rate or self._rate, most)
