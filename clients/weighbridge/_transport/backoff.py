"""Backoff between tries: growing pauses with jitter, until nothing has come of them for too long.

It neither sleeps nor reads a clock, so that blocking and asyncio clients decide alike.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from weighbridge._core.pauses import Pauses
from weighbridge.errors import DataLoss, ResourceExhausted, Unavailable, WeighbridgeError

_FIRST_SECONDS = 0.1
_STEADY = 0.5


@dataclass(frozen=True, slots=True)
class Backoff:
    """How often something has failed, and for how long.

    Attributes:
        seconds: how long to go on without success.
        longest: longest pause, in seconds.
        tries: how often it has failed since it last succeeded.
        failing_since: moment of the first of these failures, by a monotonic clock, in seconds.
        doubtful_since: moment since which each has said that it may not help to try again; infinite if the last one has not.
    """

    seconds: float
    longest: float = 3.0
    tries: int = 0
    failing_since: float = 0.0
    doubtful_since: float = math.inf

    def renewed(self) -> Backoff:
        """After a success."""
        return replace(self, tries=0)

    def after_failure(self, now: float, jitter: float, *, at_least: float = 0.0) -> Retry | None:
        """The next try; None if there should be none.

        Args:
            now: the moment of the failure, by a monotonic clock, in seconds.
            jitter: a random number from 0 to 1, so that many clients do not come back at one moment.
            at_least: shortest pause, in seconds.
        """
        since = self.failing_since if self.tries else now
        pause = Pauses(_FIRST_SECONDS, self.longest, _STEADY).after(self.tries, jitter)
        pause = max(pause, at_least * (1.0 + 0.25 * jitter))
        if now + pause > since + self.seconds:
            return None
        return Retry(pause, replace(self, tries=self.tries + 1, failing_since=since))

    def after_error(self, error: WeighbridgeError, now: float, jitter: float) -> Retry | None:
        """The next try of a stream or a call that has failed so; None if there should be none.

        What broke on its way is tried again, and what had no room if the service has said when: not before that.
        """
        if isinstance(error, ResourceExhausted) and error.retry_after is not None:
            return self.after_failure(now, jitter, at_least=error.retry_after)
        if not isinstance(error, Unavailable | DataLoss):
            return None
        retry = self.after_failure(now, jitter)
        worth = error.worth_retrying
        since = math.inf if worth == math.inf else min(self.doubtful_since, now) if self.tries else now
        if retry is None or now + retry.pause > since + worth:
            return None
        return replace(retry, backoff=replace(retry.backoff, doubtful_since=since))

    def left(self, now: float) -> float:
        """Seconds for which it is tried again, `now` by the clock of the failures."""
        return max(self.failing_since + self.seconds - now, 0.0) if self.tries else self.seconds


@dataclass(frozen=True, slots=True)
class Retry:
    """A further try.

    Attributes:
        pause: seconds until then.
        backoff: the state in which it is made.
    """

    pause: float
    backoff: Backoff
