"""Progress of the ranks of one push: how far each is, and which of them the others waited for. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median_low

from weighbridge_service.push.machine.state import PushState

_NOTABLE_MS = 100
"""By how much the last rank must be behind the middle one for it to count as held up by it."""
_NOTABLE_SHARE = 0.1
"""And for how much of the time that the push took."""


@dataclass(frozen=True, slots=True)
class RankProgress:
    """How far a rank is.

    Attributes:
        rank: which one.
        declared_ms: when it has declared its layout, in milliseconds since 1970 UTC; 0 if it has not.
        sealed_ms: when all of its bytes were here, and it had said so, likewise.
        received: bytes of its stream that have come.
        total: bytes that it pushes; 0 before there is a plan.
        elsewhere: whether it pushes to another replica, which knows more.
    """

    rank: int
    declared_ms: int = 0
    sealed_ms: int = 0
    received: int = 0
    total: int = 0
    elsewhere: bool = False


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


def ranks_of(state: PushState, received: Mapping[int, tuple[int, int]]) -> tuple[RankProgress, ...]:
    """How far each rank of a push is.

    Args:
        state: of the push.
        received: of each rank's stream the bytes that have come, and those that are to come here; of none before there is an image.
    """
    share, streams = state.share, {} if state.agreed is None else state.agreed.prepared.streams
    declared = state.declarations.declared

    def of(rank: int) -> RankProgress:
        length = streams[rank].nbytes if rank in streams else 0
        come, meant = received.get(rank, (length if rank in state.sealed else 0, length))
        elsewhere = (
            rank not in share.ranks
            if share is not None
            else rank in declared.keys() - state.declarations.here.keys()
        )
        return RankProgress(
            rank,
            state.declared_ms.get(rank, 0),
            state.sealed_ms.get(rank, 0),
            come,
            length if elsewhere else meant,
            elsewhere,
        )

    return tuple(map(of, range(state.declarations.ranks)))


def held_up(ranks: Sequence[RankProgress]) -> HeldUp | None:
    """Which rank the others waited for longest, of those whose times are all known; None if none was notably late."""
    found = [each for each in (_last(ranks, declaring=True), _last(ranks, declaring=False)) if each]
    return max(found, key=lambda each: each.behind_ms, default=None)


def _last(ranks: Sequence[RankProgress], *, declaring: bool) -> HeldUp | None:
    times = {
        each.rank: each.declared_ms if declaring else each.sealed_ms for each in ranks if not each.elsewhere
    }
    if len(times) < 2 or not all(times.values()):
        return None
    begun = min(each.declared_ms for each in ranks if each.declared_ms)
    last = max(times, key=lambda rank: times[rank])
    behind = times[last] - median_low(times.values())
    notable = behind >= max(_NOTABLE_MS, _NOTABLE_SHARE * (times[last] - begun))
    return HeldUp(last, behind, declaring) if notable else None
