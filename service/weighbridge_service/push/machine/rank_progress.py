"""Progress of one push, by its state: how far it and each of its ranks are, and when it is given up. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from weighbridge._core.reports.rank_progress import RankProgress
from weighbridge_service.push.machine.phases import FINAL
from weighbridge_service.push.machine.state import Moment, PushState


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
