"""Progress of one push: how far it and each of its ranks are, when it is given up, and which rank the others waited for. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median_low

from weighbridge_service.push.machine.phases import FINAL
from weighbridge_service.push.machine.state import Moment, PushState

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
        copying: whether its process writes to shared memory itself: it is told here when all is there, and not how far that is.
    """

    rank: int
    declared_ms: int = 0
    sealed_ms: int = 0
    received: int = 0
    total: int = 0
    elsewhere: bool = False
    copying: bool = False

    @property
    def absent(self) -> bool:
        """Whether nothing was heard of it."""
        return not (self.declared_ms or self.elsewhere)


@dataclass(frozen=True, slots=True)
class Received:
    """What has come of a rank's stream.

    Attributes:
        come: bytes that have.
        meant: bytes that are to come to this replica.
        copying: as in `RankProgress`.
    """

    come: int
    meant: int
    copying: bool = False


@dataclass(frozen=True, slots=True)
class PushProgress:
    """How far a push is, as far as one process knows. Times are in milliseconds since 1970 UTC.

    Attributes:
        ranks: how far each of its ranks is.
        heard_ms: when one of them was last heard of; 0 if it waits for none of them.
        given_up_ms: when it is given up unless one is heard of before; likewise.
        ended_ms: when it ended, however it did; 0 if it has not.
    """

    ranks: tuple[RankProgress, ...] = ()
    heard_ms: int = 0
    given_up_ms: int = 0
    ended_ms: int = 0


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


def progress_of(state: PushState, received: Mapping[int, Received], now: Moment) -> PushProgress:
    """How far a push is.

    Args:
        state: of the push.
        received: what has come of each rank's stream; of none before there is an image.
        now: the time.
    """
    share, streams = state.share, {} if state.agreed is None else state.agreed.prepared.streams
    declared = state.declarations.declared

    def of(rank: int) -> RankProgress:
        length = streams[rank].nbytes if rank in streams else 0
        there = received.get(rank, Received(length if rank in state.sealed else 0, length))
        elsewhere = (
            rank not in share.ranks
            if share is not None
            else rank in declared.keys() - state.declarations.here.keys()
        )
        return RankProgress(
            rank,
            state.declared_ms.get(rank, 0),
            state.sealed_ms.get(rank, 0),
            there.come,
            length if elsewhere else there.meant,
            elsewhere,
            there.copying and state.phase not in FINAL,
        )

    until = state.given_up_at
    return PushProgress(
        tuple(map(of, range(state.declarations.ranks))),
        0 if until is None else _unix_ms(state.heard_at, now),
        0 if until is None else _unix_ms(until, now),
        state.ended_ms,
    )


def _unix_ms(seconds: float, now: Moment) -> int:
    """When the monotonic clock says ``seconds``, to the second: two readings of two clocks give the same."""
    return round(now.unix_ms / 1000 + seconds - now.seconds) * 1000


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
