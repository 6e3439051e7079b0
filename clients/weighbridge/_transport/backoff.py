"""Backoff between retries: growing pauses with jitter, for a limited time without progress.

It neither sleeps nor reads a clock, so that blocking and asyncio clients share it.
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
    """Failures since the last success, and the limits of retries.

    Attributes:
        seconds: how long to retry without success.
        longest: longest pause, in seconds.
        tries: number of failures since the last success.
        failing_since: time of the first of these failures, by a monotonic clock, in seconds.
        doubtful_since: start of the present run of errors with a finite `worth_retrying`; infinite if the last error
            had none.
    """

    seconds: float
    longest: float = 3.0
    tries: int = 0
    failing_since: float = 0.0
    doubtful_since: float = math.inf

    def renewed(self) -> Backoff:
        """State after a success."""
        return replace(self, tries=0)

    def after_failure(self, now: float, jitter: float, *, at_least: float = 0.0) -> Retry | None:
        """The next retry; None if there should be none.

        Args:
            now: time of the failure, by a monotonic clock, in seconds.
            jitter: a random number from 0 to 1, so that many clients do not retry at the same time.
            at_least: shortest pause, in seconds.
        """
        since = self.failing_since if self.tries else now
        pause = Pauses(_FIRST_SECONDS, self.longest, _STEADY).after(self.tries, jitter)
        pause = max(pause, at_least * (1.0 + 0.25 * jitter))
        if now + pause > since + self.seconds:
            return None
        return Retry(pause, replace(self, tries=self.tries + 1, failing_since=since))

    def after_error(self, error: WeighbridgeError, now: float, jitter: float) -> Retry | None:
        """The next retry after an error of a stream or a call; None if there should be none.

        Broken transfers are retried, and so are ResourceExhausted errors with a `retry_after`, not before that time.
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
        """Seconds for which retries go on; ``now`` is by the clock of the failures."""
        return max(self.failing_since + self.seconds - now, 0.0) if self.tries else self.seconds


@dataclass(frozen=True, slots=True)
class Retry:
    """A further attempt.

    Attributes:
        pause: seconds until it.
        backoff: the state after the failure.
    """

    pause: float
    backoff: Backoff
