"""Progress of the ranks of one push: how far each is, and which of them the others waited for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import median_low

from weighbridge._core.json_values import JsonValue
from weighbridge._core.text.counts import percent
from weighbridge._core.text.sizes import readable_part, readable_size

_NOTABLE_MS = 100
"""By how much the last rank must be behind the middle one for it to count as held up by it."""
_NOTABLE_SHARE = 0.1
"""And for how much of the time that the push took."""


class RankStage(StrEnum):
    """Where a rank stands."""

    MISSING = "missing"
    """Nothing was heard of it."""
    DECLARED = "declared"
    """It has said what it holds, and nothing of that has come."""
    COPYING = "copying"
    """Its process writes to shared memory itself, and says when all is there."""
    SENDING = "sending"
    SEALED = "sealed"
    """All of its bytes are there, and it has said so."""
    ELSEWHERE = "elsewhere"
    """It pushes to another replica, which knows more."""


@dataclass(frozen=True, slots=True)
class RankProgress(JsonValue):
    """How far a rank is.

    Attributes:
        rank: which one.
        declared_time_ms: when it has declared its layout, in milliseconds since 1970 UTC; 0 if it has not.
        sealed_time_ms: when all of its bytes were there, and it had said so, likewise.
        received_bytes: of its stream, that have come.
        total_bytes: that it pushes; 0 before there is a plan.
        elsewhere: whether it pushes to another replica, which knows more.
        copying: whether its process writes to shared memory itself: the service is told when all is there, and not how far that is.
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
        """Where it stands."""
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
        """Of its bytes, how many have come; 0 of one that is copying, as that is not known."""
        if self.stage is RankStage.SEALED:
            return 100
        return percent(self.received_bytes, self.total_bytes) if self.stage is RankStage.SENDING else 0

    @property
    def text(self) -> str:
        """Where it stands, for people."""
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
        rank: which one.
        behind_ms: by how much it was behind the rank in the middle.
        declaring: whether it was late to declare; otherwise it was late with its bytes.
    """

    rank: int
    behind_ms: int
    declaring: bool


def held_up(ranks: Sequence[RankProgress]) -> HeldUp | None:
    """Which rank the others waited for longest, of those whose times are all known; None if none was notably late."""
    found = [each for each in (_last(ranks, declaring=True), _last(ranks, declaring=False)) if each]
    return max(found, key=lambda each: each.behind_ms, default=None)


def _last(ranks: Sequence[RankProgress], *, declaring: bool) -> HeldUp | None:
    times = {
        each.rank: each.declared_time_ms if declaring else each.sealed_time_ms
        for each in ranks
        if not each.elsewhere
    }
    if len(times) < 2 or not all(times.values()):
        return None
    begun = min(each.declared_time_ms for each in ranks if each.declared_time_ms)
    last = max(times, key=lambda rank: times[rank])
    behind = times[last] - median_low(times.values())
    notable = behind >= max(_NOTABLE_MS, _NOTABLE_SHARE * (times[last] - begun))
    return HeldUp(last, behind, declaring) if notable else None
