"""Liveness of another replica: a pure function of the outcomes and times of calls to it."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class SilenceLimits:
    """Timeouts after which a replica is lost.

    Attributes:
        refused_s: seconds during which its address refuses connections. Its process has then ended.
        silent_s: seconds during which it does not respond. Its machine may be down, or the network may be partitioned.
    """

    refused_s: float
    silent_s: float


@dataclass(frozen=True, slots=True)
class Liveness:
    """Liveness of a replica. Times are in seconds of a monotonic clock.

    Attributes:
        heard_s: time of its last response, or of the first call to it.
        refused_s: time since which its address has refused connections; None if it accepts them.
    """

    heard_s: float
    refused_s: float | None = None

    def answered(self, now_s: float) -> Liveness:
        """The liveness after a successful call."""
        return Liveness(now_s)

    def failed(self, now_s: float, *, refused: bool) -> Liveness:
        """The liveness after a failed call. ``refused`` states whether its address refused a connection."""
        if not refused:
            return replace(self, refused_s=None)
        return replace(self, refused_s=now_s if self.refused_s is None else self.refused_s)

    def is_lost(self, now_s: float, limits: SilenceLimits) -> bool:
        """Whether the replica is lost, with everything that it held in memory."""
        refused = self.refused_s is not None and now_s - self.refused_s >= limits.refused_s
        return refused or now_s - self.heard_s >= limits.silent_s
