"""Quotas of identities, by the limits that the policy gives them: streams, bytes a second, versions an hour.

They are those of this process. What is decided is decided by values (`Places`, `rates.Bucket`, `seconds_until_next`). Streams that are
slowed wait before they take anything that others could need. Whoever is refused streams and asks again without a pause is slowed as well: each
refusal takes time of the service that others could need.
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
from weighbridge_service.access.identities import Identity, Limits
from weighbridge_service.admission.quotas import RETRY_SECONDS
from weighbridge_service.admission.rates import Rates

_HOUR = 3600.0
_KEPT_SECONDS = 5.0
"""How long a place is kept for a part of a stream whose first part has begun: the others follow at once."""
_REFUSALS_A_SECOND, _REFUSALS_AT_ONCE = 20.0, 100.0
"""Refusals of streams that cost an identity nothing. Clients that wait for the time that they are told make one a second each."""
_SLACK_SECONDS = 0.005
"""A stream that is ahead of its rate by less than this goes on: sleeps as short as a message cost more than they even out."""


@dataclass(frozen=True, slots=True)
class Places:
    """Places that the streams of an identity take.

    Attributes:
        held: streams that go on.
        kept: for each place that is kept for a part of a stream, until when, in seconds.
    """

    held: int = 0
    kept: tuple[float, ...] = ()

    def begun(
        self, asked: Striping, limit: int, now: float, *, whole: bool
    ) -> tuple[Places, Striping] | None:
        """After one more stream has begun; None if there is no place for it.

        A stream can be spread over several calls, and does not get on before all of them do. So the first call keeps places for the others;
        where there are too few it brings all of the stream itself.

        Args:
            asked: which part it is to bring.
            limit: how many places there are.
            now: in seconds.
            whole: whether it may bring all of the stream in place of its part.

        Returns:
            The places, and the part that it brings.
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
        """After a stream has ended."""
        return replace(self, held=self.held - 1)


def seconds_until_next(times: Sequence[float], limit: int, now: float) -> float:
    """Seconds until another thing may be done of which at most ``limit`` are done within an hour; 0 if it may be now.

    Args:
        times: when each was done, in seconds, in ascending order.
        limit: at least 1.
        now: in seconds.
    """
    return max(times[-limit] + _HOUR - now, 0.0) if len(times) >= limit else 0.0


class Streaming:
    """A stream of an identity, which may be slowed.

    Args:
        rates: of identities, in bytes.
        identity: whose it is.
        striping: the part of it that this call brings.

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
        """Count bytes that come next, unless they have to wait: then seconds after which to ask again. 0 where they need not."""
        if self._rate is None:
            return 0.0
        return self._rates.take(self._name, nbytes, least=0.0, rate=self._rate, slack=_SLACK_SECONDS)

    def wait(self, nbytes: int = 0) -> None:
        """Wait, in a thread, until bytes may come next, and count them. Raises Unavailable if the stream ends meanwhile."""
        while seconds := self.delay(nbytes):
            if self._ended.wait(seconds):
                raise Unavailable("the caller has gone")

    def count(self, nbytes: int) -> None:
        """Bytes have come whose number was not known before: what comes next waits for them."""
        if self._rate is not None:
            self._rates.take(self._name, nbytes, rate=self._rate)

    def end(self) -> None:
        """It ends, and need not be waited for; from any thread."""
        self._ended.set()


@dataclass(slots=True)
class Opening:
    """A version that is about to be opened, in the hour's number of its identity.

    Attributes:
        new: whether it may be one that was not open before; not set where there was no room for one, or it was found open: nothing is counted then.
    """

    new: bool = True


class IdentityQuotas:
    """What identities use of their limits, by their names. Thread-safe.

    Args:
        clock: seconds that go on evenly.

    Attributes:
        clock: as given.
        rates: in bytes of weights.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._lock = threading.Lock()
        self._places: defaultdict[str, Places] = defaultdict(Places)
        self._opened: defaultdict[str, deque[float]] = defaultdict(deque)
        self.rates = Rates(clock=self._now)
        self._refusals = Rates(_REFUSALS_A_SECOND, _REFUSALS_AT_ONCE, self._now)

    @contextmanager
    def streaming(
        self, identity: Identity, asked: Striping = WHOLE, *, whole: bool = False
    ) -> Iterator[Streaming]:
        """A place for a stream while the block runs.

        Args:
            identity: whose stream it is.
            asked: which part of a stream it is to bring.
            whole: whether it may bring all of it instead, where there are too few places; see `Streaming.striping`.

        Raises:
            ResourceExhausted: there is none; says when to try again.
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
            # of many that were begun together no more than a second's worth: then it is looked at again what the identity has
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
        """Seconds for which a call of an identity is put off, as it was refused too many streams lately; 0 for nearly everybody."""
        limited = identity.limits.streams is not None
        return RETRY_SECONDS if limited and self._refusals.left(identity.name) < 0.0 else 0.0

    def check_put_off(self, identity: Identity) -> None:
        """Raise ResourceExhausted if a stream of an identity is not even looked at, as `put_off` says."""
        if self.put_off(identity):
            raise _no_more_streams(identity)

    @contextmanager
    def opening(self, identity: Identity) -> Iterator[Opening]:
        """One of the versions that an identity may open in an hour; not counted if the block fails, or has found it open.

        Raises:
            ResourceExhausted: it has opened them; says when it may open another one.
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
                f"{identity.name} has opened {counted(limit, 'version')} within an hour, and may open the next one in {readable_duration(seconds, rough=True)}",
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

    def use_of(self, identity: Identity) -> Limits:
        """How much of its limits an identity uses now: the streams that go on, the bytes that are taken of a second's, the versions of this hour."""
        name, rate = identity.name, identity.limits.bytes_per_second
        taken = 0 if rate is None else round(min(rate - self.rates.left(name, rate), rate))
        with self._lock:
            now = self.clock()
            return Limits(
                self._places[name].held, taken, sum(each > now - _HOUR for each in self._opened[name])
            )


def _no_more_streams(identity: Identity) -> ResourceExhausted:
    return ResourceExhausted(
        f"{identity.name} has {counted(identity.limits.streams or 0, 'stream')} of weights, and may have no more at one time",
        fix="wait until one ends, or let the service's policy give it more `streams`",
        retry_after=RETRY_SECONDS,
    )
