"""Quotas of identities, by the limits of the policy: streams, bytes per second, versions per hour.

Each process counts its own. Decisions are made by immutable values and pure functions (`Places`, `rates.Bucket`,
`seconds_until_next`). A throttled stream waits before it takes any resource that other streams could need. A caller
that retries refused streams without a pause is throttled as well, because each refusal costs the service time.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from weighbridge._core.striping import WHOLE, Striping
from weighbridge._core.text.counts import counted
from weighbridge._core.text.durations import readable_duration
from weighbridge.errors import ResourceExhausted, Unavailable
from weighbridge_service.access.identities import Identity, IdentityLimits
from weighbridge_service.admission.quotas import RETRY_SECONDS
from weighbridge_service.admission.rates import Rates

_HOUR = 3600.0
_KEPT_SECONDS = 5.0
"""Seconds for which a place is reserved for another part of a stream whose first part has begun.

Clients start the other parts at once.
"""
_REFUSALS_A_SECOND, _REFUSALS_AT_ONCE = 20.0, 100.0
"""Rate (per second) and burst of refused streams after which an identity is throttled.

A client that obeys ``retry_after`` makes one a second.
"""
_SLACK_SECONDS = 0.005
"""A stream that is ahead of its rate by less than this does not wait: very short sleeps cost more than they smooth."""


@dataclass(frozen=True, slots=True)
class Places:
    """Places of an identity that its streams occupy.

    Attributes:
        held: number of running streams.
        kept: for each place that is reserved for a part of a stream, the time in seconds at which the reservation ends.
    """

    held: int = 0
    kept: tuple[float, ...] = ()

    def begun(self, asked: Striping, limit: int, now: float, *, whole: bool) -> tuple[Places, Striping] | None:
        """The places after one more call has begun; None if there is no place for it.

        A stream can be striped over several calls, and makes no progress before all of them have begun. So the first
        call reserves places for the others; if there are too few, it carries the whole stream itself.

        Args:
            asked: part of the stream that the call is to carry.
            limit: number of places.
            now: current time in seconds.
            whole: whether the call may carry the whole stream instead of its part.

        Returns:
            The places, and the part that the call carries.
        """
        kept = tuple(until for until in self.kept if until > now)
        if asked.index and kept:
            return Places(self.held + 1, kept[1:]), asked
        free = limit - self.held - len(kept)
        if free < 1:
            return None
        if asked.index or asked.count == 1 or not whole:
            return Places(self.held + 1, kept), asked
        if free < asked.count:
            return Places(self.held + 1, kept), WHOLE
        return Places(self.held + 1, (*kept, *[now + _KEPT_SECONDS] * (asked.count - 1))), asked

    def ended(self) -> Places:
        """The places after a stream has ended."""
        return replace(self, held=self.held - 1)


def seconds_until_next(times: Sequence[float], limit: int, now: float) -> float:
    """Seconds until the next event is allowed when at most ``limit`` are allowed within an hour; 0 if it is allowed
    now.

    Args:
        times: times of past events in seconds, ascending.
        limit: number of events per hour; at least 1.
        now: current time in seconds.
    """
    return max(times[-limit] + _HOUR - now, 0.0) if len(times) >= limit else 0.0


class Streaming:
    """A stream of an identity, throttled to the identity's rate.

    Args:
        rates: rates of identities, in bytes.
        identity: identity of the caller.
        striping: part of the stream that this call carries.

    Attributes:
        striping: as given.
    """

    def __init__(self, rates: Rates, identity: Identity, striping: Striping) -> None:
        self.striping = striping
        self._rates = rates
        self._name = identity.name
        self._rate = identity.limits.bytes_per_second
        self._ended = threading.Event()

    def delay(self, nbytes: int = 0) -> float:
        """Count the next bytes if they may be transferred now, and return 0.

        Otherwise count nothing, and return the seconds to wait.
        """
        if self._rate is None:
            return 0.0
        return self._rates.take(self._name, nbytes, least=0.0, rate=self._rate, slack=_SLACK_SECONDS)

    def wait(self, nbytes: int = 0) -> None:
        """Block until the next bytes may be transferred, and count them.

        Raises Unavailable if the stream ends first.
        """
        while seconds := self.delay(nbytes):
            if self._ended.wait(seconds):
                raise Unavailable("the caller has gone")

    def count(self, nbytes: int) -> None:
        """Count bytes after they were transferred, because their number was not known before.

        The next ones wait for them.
        """
        if self._rate is not None:
            self._rates.take(self._name, nbytes, rate=self._rate)

    def end(self) -> None:
        """End the stream, and wake a thread that blocks in `wait`. May be called from any thread."""
        self._ended.set()


@dataclass(slots=True)
class Opening:
    """A version that is about to be opened, and counts for the versions per hour of its identity.

    Attributes:
        new: whether the version was possibly not open before. False if the version was found open, or if the quota
            allowed no new one; then nothing is counted.
    """

    new: bool = True


class IdentityQuotas:
    """Usage of limits, by names of identities. Thread-safe.

    Args:
        clock: returns seconds of a monotonic clock.

    Attributes:
        clock: as given.
        rates: rates of identities, in bytes of weights.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._lock = threading.Lock()
        self._places: defaultdict[str, Places] = defaultdict(Places)
        self._opened: defaultdict[str, deque[float]] = defaultdict(deque)
        self.rates = Rates(clock=self._now)
        self._refusals = Rates(_REFUSALS_A_SECOND, _REFUSALS_AT_ONCE, self._now)

    @contextmanager
    def streaming(self, identity: Identity, asked: Striping = WHOLE, *, whole: bool = False) -> Iterator[Streaming]:
        """Hold a place for a stream while the block runs.

        Args:
            identity: identity of the caller.
            asked: part of the stream that the call is to carry.
            whole: whether the call may carry the whole stream instead if there are too few places; see
                `Streaming.striping`.

        Raises:
            ResourceExhausted: there is no place. The error states when to retry.
        """
        name, limit = identity.name, identity.limits.streams
        if limit is None:
            yield Streaming(self.rates, identity, asked)
            return
        with self._lock:
            begun = self._places[name].begun(asked, limit, self.clock(), whole=whole)
            if begun is not None:
                self._places[name] = begun[0]
        if begun is None:
            # a burst of refusals lowers the bucket by no more than a second's worth, so that the identity is throttled
            # for no longer
            self._refusals.take(name, least=1 - _REFUSALS_A_SECOND)
            raise _no_more_streams(identity)
        streaming = Streaming(self.rates, identity, begun[1])
        try:
            yield streaming
        finally:
            streaming.end()
            with self._lock:
                self._places[name] = self._places[name].ended()

    def put_off(self, identity: Identity) -> float:
        """Seconds for which a call of an identity is put off because too many of its streams were refused lately;
        usually 0.
        """
        limited = identity.limits.streams is not None
        return RETRY_SECONDS if limited and self._refusals.left(identity.name) < 0.0 else 0.0

    def check_put_off(self, identity: Identity) -> None:
        """Raise ResourceExhausted if streams of an identity are put off; see `put_off`."""
        if self.put_off(identity):
            raise _no_more_streams(identity)

    @contextmanager
    def opening(self, identity: Identity) -> Iterator[Opening]:
        """Count a version that an identity opens in the block.

        It does not count if the block fails, or sets `Opening.new` to False.

        Raises:
            ResourceExhausted: the identity has opened its number of versions within an hour. The error states when to
                retry.
        """
        limit, opening = identity.limits.versions_per_hour, Opening()
        if limit is None:
            yield opening
            return
        with self._lock:
            now, opened = self.clock(), self._opened[identity.name]
            while opened and opened[0] <= now - _HOUR:
                opened.popleft()
            seconds = seconds_until_next(opened, limit, now)
            if not seconds:
                opened.append(now)
        if seconds:
            raise ResourceExhausted(
                (
                    f"{identity.name} has opened {counted(limit, 'version')} within an hour, and "
                    f"may open the next one in {readable_duration(seconds, rough=True)}"
                ),
                fix="push less often, or let the service's policy give it more `versions_per_hour`",
                retry_after=seconds,
            )
        done = False
        try:
            yield opening
            done = opening.new
        finally:
            if not done:
                with self._lock:
                    opened.remove(now)

    def _now(self) -> float:
        return self.clock()

    def use_of(self, identity: Identity) -> IdentityLimits:
        """Current usage of an identity: running streams, bytes taken from its bucket of one second, and versions opened
        within the last hour.
        """
        name, rate = identity.name, identity.limits.bytes_per_second
        taken = 0 if rate is None else round(min(rate - self.rates.left(name, rate), rate))
        with self._lock:
            now = self.clock()
            return IdentityLimits(
                self._places[name].held, taken, sum(each > now - _HOUR for each in self._opened[name])
            )


def _no_more_streams(identity: Identity) -> ResourceExhausted:
    return ResourceExhausted(
        (
            f"{identity.name} has {counted(identity.limits.streams or 0, 'stream')} of weights, "
            "and may have no more at one time"
        ),
        fix="wait until one ends, or let the service's policy give it more `streams`",
        retry_after=RETRY_SECONDS,
    )
