"""Circuit breaker of a store: from which calls were answered and which were given up, whether another one is worth its time. Pure.

It opens when a call is given up and no other was answered in the second half of the time for which that one was waited for, and closes with the
next answer. A call that hangs while others are answered opens nothing: it is that object or that connection, not the store.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Breaker:
    """What is known of a store's answers at one moment. Times are seconds of the monotonic clock.

    Attributes:
        patience: for how many seconds a call is waited for.
        answered: when a call was answered last.
        silent_since: since when nothing was answered, if the breaker is open; None if it is closed.
    """

    patience: float
    answered: float = -math.inf
    silent_since: float | None = None

    @property
    def is_open(self) -> bool:
        """Whether calls are to fail at once."""
        return self.silent_since is not None

    def silence(self, now: float) -> float:
        """For how many seconds an open breaker has seen no answer; 0 of a closed one."""
        return 0.0 if self.silent_since is None else now - self.silent_since

    def ended(self, asked: float, now: float, *, away: bool) -> Breaker:
        """A call has ended, whether or not anybody still waits for it.

        Args:
            asked: when it was made.
            now: when it ended.
            away: whether it ended with the store being called away or out of reach. Within the patience even that is an answer: calls that
                fail as fast by themselves need no breaker, and say more. Later than that, a time limit below has ended it.
        """
        if away and now >= asked + self.patience:
            return self
        return replace(self, answered=now, silent_since=None)

    def given_up(self, asked: float, now: float) -> Breaker:
        """A call that was made at ``asked`` is waited for no longer."""
        if self.is_open or self.answered > now - self.patience / 2:
            return self
        return replace(self, silent_since=max(asked, self.answered))
