"""Rates: how many calls a host may begin in a second, and how many answers it has to wait for (token buckets)."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable

from weighbridge.errors import ResourceExhausted
from weighbridge_service.admission.buckets import Bucket

_MOST_HOSTS = 10_000


class Rates:
    """Calls that hosts begin. Thread-safe.

    Args:
        rate: calls a second.
        burst: calls at once, after a pause.
        clock: seconds.
        most_hosts: hosts that are remembered; the one that has called longest ago is forgotten first.
    """

    def __init__(
        self,
        rate: float,
        burst: float,
        clock: Callable[[], float] = time.monotonic,
        most_hosts: int = _MOST_HOSTS,
    ) -> None:
        self._rate = rate
        self._burst = burst
        self._clock = clock
        self._most_hosts = most_hosts
        self._lock = threading.Lock()
        self._buckets: OrderedDict[str, Bucket] = OrderedDict()

    def count(self, host: str) -> None:
        """A host begins a call. Raises ResourceExhausted, which says when to try again, if it has begun too many."""
        with self._lock:
            bucket = self._filled(host)
            wait = bucket.seconds_until(1, self._rate)
            self._keep(host, bucket if wait else bucket.without(1))
        if wait:
            raise ResourceExhausted(
                f"{host} begins more than {self._rate:g} calls a second",
                fix="ask less often, or watch instead",
                retry_after=max(wait, 0.1),
            )

    def delay(self, host: str) -> float:
        """Count something of a host that is put off instead of refused: by so many seconds, behind all that were counted before."""
        with self._lock:
            bucket = self._filled(host).without(1)
            self._keep(host, bucket)
            return bucket.seconds_until(0, self._rate)

    def _filled(self, host: str) -> Bucket:
        """The lock is held."""
        now = self._clock()
        return self._buckets.get(host, Bucket(self._burst, now)).filled(now, self._rate, self._burst)

    def _keep(self, host: str, bucket: Bucket) -> None:
        """The lock is held."""
        self._buckets[host] = bucket
        self._buckets.move_to_end(host)
        if len(self._buckets) > self._most_hosts:
            self._buckets.popitem(last=False)
