"""Circuit breaker of a store. It opens when calls time out and closes when calls are answered. All functions are pure.

The breaker opens when a call times out and no other call was answered in the second half of that call's timeout. It
closes with the next answer. A call that hangs while others are answered does not open it, because the cause is then
that object or that connection instead of the store.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Breaker:
    """State of the breaker at one moment. Times are seconds of the monotonic clock.

    Attributes:
        patience: timeout of a call, in seconds.
        answered: time at which a call was last answered.
        silent_since: start of the silence, if the breaker is open; None if it is closed.
    """

    patience: float
    answered: float = -math.inf
    silent_since: float | None = None

    @property
    def is_open(self) -> bool:
        """Whether calls fail at once."""
        return self.silent_since is not None

    def silence(self, now: float) -> float:
        """Seconds without an answer if the breaker is open; 0 if it is closed."""
        return 0.0 if self.silent_since is None else now - self.silent_since

    def ended(self, asked: float, now: float, *, away: bool) -> Breaker:
        """State after a call has ended, whether or not its caller still waits for it.

        Args:
            asked: time at which it was made.
            now: time at which it ended.
            away: whether it ended with an error that the store is unreachable. Within the patience, even such an error
                counts as an answer: calls that fail this fast do not need a breaker, and their own errors are more
                specific. A later error results from a time limit of a lower layer.
        """
        if away and now >= asked + self.patience:
            return self
        return replace(self, answered=now, silent_since=None)

    def given_up(self, asked: float, now: float) -> Breaker:
        """State after the caller has stopped waiting for a call that was made at ``asked``."""
        if self.is_open or self.answered > now - self.patience / 2:
            return self
        return replace(self, silent_since=max(asked, self.answered))
