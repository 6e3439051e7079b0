"""Circuit breaker of a store: opens and closes by the calls that were answered or timed out. Pure.

It opens when a call times out and no other was answered in the second half of that call's timeout, and closes with the next answer. A
call that hangs while others are answered does not open it: the cause is that object or that connection, not the store.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Breaker:
    """State of the breaker at one moment. Times are seconds of the monotonic clock.

    Attributes:
        patience: timeout of a call, in seconds.
        answered: when a call was answered last.
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
        """Seconds without an answer, of an open breaker; 0 of a closed one."""
        return 0.0 if self.silent_since is None else now - self.silent_since

    def ended(self, asked: float, now: float, *, away: bool) -> Breaker:
        """State after a call has ended, whether or not its caller still waits for it.

        Args:
            asked: when it was made.
            now: when it ended.
            away: whether it ended with an error that the store is away. Within the patience even that is an answer: calls that fail as
                fast need no breaker, and their errors say more. A later one comes from a time limit below.
        """
        if away and now >= asked + self.patience:
            return self
        return replace(self, answered=now, silent_since=None)

    def given_up(self, asked: float, now: float) -> Breaker:
        """State after the caller has stopped waiting for a call that was made at ``asked``."""
        if self.is_open or self.answered > now - self.patience / 2:
            return self
        return replace(self, silent_since=max(asked, self.answered))
