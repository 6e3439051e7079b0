"""Record of an ended push: a small value that tells the ranks that pushed the version its outcome.

A session holds its model, its plan and the data plane. None of these is needed once the push has ended and its image is
released. Without this record, a process that receives versions of many models would keep all of them for every push.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

from weighbridge._core.layouts import Layout
from weighbridge._core.reports.rank_progress import RankProgress
from weighbridge_service.catalog.snapshots import VersionSnapshot
from weighbridge_service.plan.declarations import Declarations
from weighbridge_service.plan.planning import Plan
from weighbridge_service.plan.push_plan import PreparedPush
from weighbridge_service.plan.transfers import Transfer
from weighbridge_service.push.machine.answers import answer_abort, check_not_failed, sealed
from weighbridge_service.push.machine.rank_progress import PushProgress
from weighbridge_service.push.machine.state import PushState
from weighbridge_service.push.session import PushSession
from weighbridge_storage.versions.writing import Written

_EMPTY = Layout.stream((), ())
_NO_PLAN = PreparedPush({}, {}, Transfer(Plan(_EMPTY, _EMPTY, (), ()), scatter=True), {}, {})


@dataclass(frozen=True, slots=True)
class EndedPush:
    """A push that has ended and no longer holds memory.

    Attributes:
        state: the final state, without the plan and the declarations of ranks.
        snapshot: the version as readers last saw it.
        client_id: the process that opened the version.
        request_id: the request that opened it.
        clients: processes that have declared a rank here.
        share_number: number of this process's share of the version; None if no plan was made.
        lengths: length of each rank's stream, in bytes; empty if no plan was made.
        declared_ms, sealed_ms: when each rank declared here and when it was sealed, in milliseconds since 1970 UTC; 0
            if it never did.
        received, meant: bytes of each rank's stream that arrived at this replica, and that belong to it.
        elsewhere: ranks that have pushed to other replicas.
    """

    state: PushState
    snapshot: VersionSnapshot
    client_id: str
    request_id: str
    clients: frozenset[str]
    share_number: int | None
    lengths: Sequence[int]
    declared_ms: Sequence[int] = ()
    sealed_ms: Sequence[int] = ()
    received: Sequence[int] = ()
    meant: Sequence[int] = ()
    elsewhere: frozenset[int] = frozenset()

    @staticmethod
    def of(session: PushSession) -> EndedPush:
        """Record of a session that has ended."""
        state = session.state
        agreed = state.agreed
        streams = {} if agreed is None else agreed.prepared.streams
        ranks = session.progress.ranks
        return EndedPush(
            _without_plan(state),
            session.snapshot,
            session.client_id,
            session.request_id,
            session.clients,
            state.share_number,
            array("Q", [streams[rank].nbytes for rank in range(len(streams))]),
            array("Q", [each.declared_time_ms for each in ranks]),
            array("Q", [each.sealed_time_ms for each in ranks]),
            array("Q", [each.received_bytes for each in ranks]),
            array("Q", [each.total_bytes for each in ranks]),
            frozenset(each.rank for each in ranks if each.elsewhere),
        )

    @property
    def handed_in(self) -> Written | None:
        """None. See `PushSession.handed_in`.

        The other replicas have already read the files' names, or read the version's manifest.
        """
        return None

    def takes_part(self, client_id: str) -> bool:
        """See `PushSession.takes_part`."""
        return client_id in self.clients

    def refuse(self) -> NoReturn:
        """Raise the reason why the version cannot receive more: the error that ended it, or FailedPrecondition."""
        check_not_failed(self.state)
        raise sealed(self.state)

    def push_state(self, rank: int) -> tuple[list[tuple[int, int]], int, bool]:
        """See `PushSession.push_state`: all bytes have arrived."""
        check_not_failed(self.state)
        self.state.declarations.check_rank(rank)
        length = self.lengths[rank]
        return [(0, length)] if length else [], length, True

    def seal(self, rank: int) -> None:
        """Accept a repeated request to seal a rank. Raises the error that ended the version."""
        check_not_failed(self.state)
        self.state.declarations.check_rank(rank)

    @property
    def progress(self) -> PushProgress:
        """See `PushSession.progress`."""
        columns = zip(self.declared_ms, self.sealed_ms, self.received, self.meant, strict=True)
        ranks = (RankProgress(rank, *figures, elsewhere=rank in self.elsewhere) for rank, figures in enumerate(columns))
        return PushProgress(tuple(ranks), ended_ms=self.state.ended_ms)

    def abort(self) -> None:
        """Do nothing if the version was given up. Raises FailedPrecondition if it is visible."""
        answer_abort(self.state)


def _without_plan(state: PushState) -> PushState:
    """The final state, reduced to what the pure functions about an ended push read."""
    there, agreed = state.declarations, state.agreed
    light = None if agreed is None else replace(agreed, prepared=_NO_PLAN)
    return PushState(
        state.opened,
        state.limits,
        Declarations(there.name, there.ranks, there.created_ms, there.home, agreed=light),
        heard_at=state.heard_at,
        renew_at=state.renew_at,
        phase=state.phase,
        holding=state.holding,
        received_bytes=state.received_bytes,
        ready_ms=state.ready_ms,
        verified_ms=state.verified_ms,
        durable_ms=state.durable_ms,
        ended_ms=state.ended_ms,
        error=None if state.error is None else state.error.anew(),
        superseded=state.superseded,
        handed_to=state.handed_to,
    )
