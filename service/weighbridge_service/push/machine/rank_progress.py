"""Progress of the ranks of one push, by its state. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from weighbridge._core.reports.rank_progress import RankProgress
from weighbridge_service.push.machine.state import PushState


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
