"""Token bucket: how much somebody may have at a rate, and when there is more of it. A value; the clock is an argument."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Bucket:
    """What somebody has left.

    Attributes:
        level: how much that was at the moment; less than nothing if more was taken than there was.
        at: the moment, in seconds.
    """

    level: float
    at: float

    def filled(self, now: float, rate: float, most: float) -> Bucket:
        """The bucket at a later moment.

        Args:
            now: the moment, in seconds.
            rate: what comes in a second.
            most: what it holds.
        """
        return Bucket(min(self.level + (now - self.at) * rate, most), now)

    def without(self, amount: float) -> Bucket:
        """The bucket after something was taken."""
        return Bucket(self.level - amount, self.at)

    def seconds_until(self, level: float, rate: float) -> float:
        """Seconds until it holds so much; 0 if it does."""
        return max((level - self.level) / rate, 0.0)
