"""Lengths of pauses between tries: doubling, bounded, and random, so that many who failed at one moment do not come back at one.

`Pauses` is pure: the caller brings the random number, of `DICE`. (Retry libraries sleep themselves, which neither an event loop nor a state machine can use.)
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass

_MOST_DOUBLINGS = 64

DICE = random.Random()
"""Random numbers of this package's own. Python's generator belongs to the program: training seeds it, stores its state, and expects the same numbers after a
restore; and ranks that seed it alike would pause alike."""

os.register_at_fork(after_in_child=DICE.seed)


@dataclass(frozen=True, slots=True)
class Pauses:
    """Pauses of one kind, in seconds.

    Attributes:
        first: the first one, at its longest.
        longest: of all.
        steady: share of each that is not random, from 0 to 1.
    """

    first: float
    longest: float
    steady: float = 0.0

    def after(self, tries: int, random: float) -> float:
        """The pause after so many tries before the last one.

        Args:
            tries: 0 for the first pause.
            random: from 0 to 1.
        """
        whole = min(self.first * 2.0 ** min(tries, _MOST_DOUBLINGS), self.longest)
        return whole * (self.steady + (1.0 - self.steady) * random)
