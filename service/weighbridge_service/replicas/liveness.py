"""Liveness of another replica: a pure function of how calls to it went, and when."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class SilenceLimits:
    """When a replica counts as gone.

    Attributes:
        refused_s: seconds for which its machine says that nobody listens at its address: its process has ended.
        silent_s: seconds for which nothing is heard of it: its machine has ended, or the network is cut.
    """

    refused_s: float
    silent_s: float


@dataclass(frozen=True, slots=True)
class Liveness:
    """What is known of a replica.

    Attributes:
        heard_s: when it answered last, or when it was called first; of a monotonic clock, in seconds.
        refused_s: since when its address refuses connections; None if it does not.
    """

    heard_s: float
    refused_s: float | None = None

    def answered(self, now_s: float) -> Liveness:
        """After a call that it answered."""
        return Liveness(now_s)

    def failed(self, now_s: float, *, refused: bool) -> Liveness:
        """After a call that it did not answer; whether a connection was refused."""
        if not refused:
            return replace(self, refused_s=None)
        return replace(self, refused_s=now_s if self.refused_s is None else self.refused_s)

    def is_lost(self, now_s: float, limits: SilenceLimits) -> bool:
        """Whether it counts as gone. What it held in memory is lost then."""
        refused = self.refused_s is not None and now_s - self.refused_s >= limits.refused_s
        return refused or now_s - self.heard_s >= limits.silent_s
