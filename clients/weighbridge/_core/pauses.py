"""Lengths of pauses between attempts. They double up to a limit and are random, so that clients that failed at the same
time do not retry at the same time.

`Pauses` does not have state: the caller passes a random number from `DICE`. (Retry libraries sleep themselves, which is
of no use to an event loop or a state machine.)
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass

_MOST_DOUBLINGS = 64

DICE = random.Random()
"""The package's own random number generator. Python's generator belongs to the program: training seeds it, stores its
state, and expects the same numbers after a restore. Ranks that give it the same seed would also have the same pauses.
"""

os.register_at_fork(after_in_child=DICE.seed)


@dataclass(frozen=True, slots=True)
class Pauses:
    """Parameters of a sequence of pauses, in seconds.

    Attributes:
        first: maximum length of the first pause.
        longest: maximum length of all pauses.
        steady: share of each pause that is not random, from 0 to 1.
    """

    first: float
    longest: float
    steady: float = 0.0

    def after(self, tries: int, random: float) -> float:
        """Return the pause after an attempt.

        Args:
            tries: number of attempts before this one; 0 for the first pause.
            random: random number from 0 to 1.
        """
        whole = min(self.first * 2.0 ** min(tries, _MOST_DOUBLINGS), self.longest)
        return whole * (self.steady + (1.0 - self.steady) * random)
