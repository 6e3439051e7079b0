"""Progress of the ranks of one push, and the rank that the others waited for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import median_low

from weighbridge._core.json_values import JsonValue
from weighbridge._core.text.counts import percent
from weighbridge._core.text.sizes import readable_part, readable_size

_NOTABLE_MS = 100
"""Minimum delay of the last rank behind the median rank, in milliseconds, for which the rank counts as having held up
the push.
"""
_NOTABLE_SHARE = 0.1
"""The same minimum as a share of the time from the first declaration to the last rank. The larger of both applies."""


class RankStage(StrEnum):
    """Stage of a rank's push."""

    MISSING = "missing"
    """The rank has not called the service."""
    DECLARED = "declared"
    """The rank has declared its layout, but its bytes have not begun to arrive."""
    COPYING = "copying"
    """The rank's process writes to shared memory itself, and reports only when it has written all bytes."""
    SENDING = "sending"
    SEALED = "sealed"
    """All bytes of the rank have arrived, and the rank has sealed its push."""
    ELSEWHERE = "elsewhere"
    """The rank pushes to another replica, which knows its progress."""


@dataclass(frozen=True, slots=True)
class RankProgress(JsonValue):
    """Progress of one rank of a push. Times are Unix times in milliseconds; 0 if the event has not happened yet.

    Attributes:
        rank: number of the rank.
        declared_time_ms: time at which the rank declared its layout.
        sealed_time_ms: time at which all bytes of the rank had arrived and the rank had sealed its push.
        received_bytes: bytes of the rank's stream that have arrived.
        total_bytes: bytes that the rank pushes; 0 before the service has planned the push.
        elsewhere: whether the rank pushes to another replica, which knows its progress.
        copying: whether the rank's process writes to shared memory itself. The service then learns only when the rank
            has finished, and does not know its progress before.
    """

    rank: int
    declared_time_ms: int = 0
    sealed_time_ms: int = 0
    received_bytes: int = 0
    total_bytes: int = 0
    elsewhere: bool = False
    copying: bool = False

    @property
    def stage(self) -> RankStage:
        """Stage of the rank."""
        if self.elsewhere:
            return RankStage.ELSEWHERE
        if self.sealed_time_ms:
            return RankStage.SEALED
        if self.copying:
            return RankStage.COPYING
        if self.received_bytes:
            return RankStage.SENDING
        return RankStage.DECLARED if self.declared_time_ms else RankStage.MISSING

    @property
    def percent(self) -> int:
        """Percentage of the rank's bytes that have arrived; 0 while the rank copies, because the service does not know
        its progress then.
        """
        if self.stage is RankStage.SEALED:
            return 100
        return percent(self.received_bytes, self.total_bytes) if self.stage is RankStage.SENDING else 0

    @property
    def text(self) -> str:
        """Stage and progress of the rank as text."""
        match self.stage:
            case RankStage.ELSEWHERE:
                return "pushes to another replica"
            case RankStage.SEALED:
                return f"sealed, {readable_size(self.total_bytes)}"
            case RankStage.COPYING:
                return f"copies {readable_size(self.total_bytes)} to shared memory itself"
            case RankStage.SENDING:
                return readable_part(self.received_bytes, self.total_bytes)
            case RankStage.DECLARED:
                return "declared, nothing received"
            case RankStage.MISSING:
                return "not heard of"


@dataclass(frozen=True, slots=True)
class HeldUp:
    """The rank that the others waited for.

    Attributes:
        rank: number of the rank.
        behind_ms: delay behind the median rank in milliseconds.
        declaring: whether the rank declared late; otherwise it sealed late.
    """

    rank: int
    behind_ms: int
    declaring: bool


def held_up(ranks: Sequence[RankProgress]) -> HeldUp | None:
    """Return the rank for whose declaration or seal the others waited longest; None if no rank was notably late.
    Declarations count only if they are known for all ranks; so do seals.
    """
    found = [each for each in (_last(ranks, declaring=True), _last(ranks, declaring=False)) if each]
    return max(found, key=lambda each: each.behind_ms, default=None)


def _last(ranks: Sequence[RankProgress], *, declaring: bool) -> HeldUp | None:
    times = {
        each.rank: each.declared_time_ms if declaring else each.sealed_time_ms for each in ranks if not each.elsewhere
    }
    if len(times) < 2 or not all(times.values()):
        return None
    begun = min(each.declared_time_ms for each in ranks if each.declared_time_ms)
    last = max(times, key=lambda rank: times[rank])
    behind = times[last] - median_low(times.values())
    notable = behind >= max(_NOTABLE_MS, _NOTABLE_SHARE * (times[last] - begun))
    return HeldUp(last, behind, declaring) if notable else None
