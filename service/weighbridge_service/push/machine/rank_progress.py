"""Progress of one push, computed from its state: of the push, of each of its ranks, and the time at which it times out.
Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from weighbridge._core.reports.rank_progress import RankProgress
from weighbridge_service.push.machine.phases import FINAL
from weighbridge_service.push.machine.state import Moment, PushState


@dataclass(frozen=True, slots=True)
class Received:
    """Received part of a rank's stream.

    Attributes:
        come: bytes that have arrived.
        meant: bytes that belong to this replica.
        copying: as in `RankProgress`.
    """

    come: int
    meant: int
    copying: bool = False


@dataclass(frozen=True, slots=True)
class PushProgress:
    """Progress of a push, as far as one process knows. Times are in milliseconds since 1970 UTC.

    Attributes:
        ranks: progress of each of its ranks.
        heard_ms: time of the last activity of a rank; 0 if the push waits for none.
        given_up_ms: when the push is given up unless a rank is active first; 0 if it waits for none.
        ended_ms: when the push ended, with whatever outcome; 0 if it has not.
    """

    ranks: tuple[RankProgress, ...] = ()
    heard_ms: int = 0
    given_up_ms: int = 0
    ended_ms: int = 0


def progress_of(state: PushState, received: Mapping[int, Received], now: Moment) -> PushProgress:
    """Progress of a push.

    Args:
        state: state of the push.
        received: received part of each rank's stream; empty before there is an image.
        now: the current time.
    """
    share, streams = state.share, {} if state.agreed is None else state.agreed.prepared.streams
    declared = state.declarations.declared

    def of(rank: int) -> RankProgress:
        length = streams[rank].nbytes if rank in streams else 0
        there = received.get(rank, Received(length if rank in state.sealed else 0, length))
        elsewhere = (
            rank not in share.ranks if share is not None else rank in declared.keys() - state.declarations.here.keys()
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
    """Unix time at which the monotonic clock reads ``seconds``, rounded to 1 s, so that repeated conversions give the
    same value.
    """
    return round(now.unix_ms / 1000 + seconds - now.seconds) * 1000
