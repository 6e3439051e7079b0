"""Push sessions as other replicas see them: their progress, and the files that this replica holds in images."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import wait
from dataclasses import dataclass

from weighbridge.errors import NotFound, VersionFailed
from weighbridge_service.plan.declarations import Agreement, Home
from weighbridge_service.push.machine import events as on
from weighbridge_service.push.machine.answers import check_not_failed
from weighbridge_service.push.machine.phases import BEFORE_SEALED, FINAL, VISIBLE, Phase
from weighbridge_service.push.machine.state import PushState
from weighbridge_service.push.registry import Push, Registry
from weighbridge_service.push.session import PushSession
from weighbridge_service.replicas.progress import Progress, SharedPush, Stage
from weighbridge_storage.documents.names import ModelName
from weighbridge_storage.memory.images import ImageHold
from weighbridge_storage.stores.objects import ByteArray

_COUNT_SECONDS = 1.0
"""Seconds for which `count_on` waits for the sessions."""


@dataclass(frozen=True, slots=True)
class FilesElsewhere:
    """Files of a visible version that is not durable yet. They are in images of other replicas.

    Attributes:
        claim: claim of the agreement between the replicas.
        files: names of the files.
        owner_of: returns the replica that currently owns one of the files.
    """

    claim: str
    files: Collection[str]
    owner_of: Callable[[str], Home]


class SharedSessions:
    """The push sessions of this process that other replicas take part in. Thread-safe.

    Implements `heartbeat.SharedPushes` and `api.grpc.replica_handlers.OwnFiles`.

    Args:
        registry: all sessions.
    """

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    def shared(self) -> Sequence[SharedPush]:
        """See `heartbeat.SharedPushes`."""
        pushes = (_shared(session) for session in self._registry.all())
        return [push for push in pushes if push is not None]

    def progress(self, model: str, number: int, claim: str) -> Sequence[Progress]:
        """See `heartbeat.SharedPushes`."""
        return [_progress(push, agreed) for push, agreed in self._pushes(model, number, claim)]

    def heard(self, sender: Home, progress: Progress) -> None:
        """See `heartbeat.SharedPushes`."""
        for push, _ in self._pushes(*progress.version):
            if isinstance(push, PushSession):
                _hear(push, sender, progress)

    def lost(self, replica: Home, error: VersionFailed) -> None:
        """See `heartbeat.SharedPushes`."""
        for session in self._registry.all():
            agreed = session.state.agreed
            for number, home in enumerate(() if agreed is None else agreed.homes):
                if home == replica:
                    session.post(on.ReplicaLost(number, error))

    def count_on(self, replicas: frozenset[Home]) -> None:
        """Make all sessions without an agreement count only on these other replicas.

        Waits at most `_COUNT_SECONDS` for the sessions.
        """
        counting = [each for each in self._registry.all() if not _counts_on(each.state, replicas)]
        asked = [
            each.asked(lambda state: _counts_on(state, replicas) or None, on.Staying(replicas)) for each in counting
        ]
        wait(asked, _COUNT_SECONDS)
        for session, found in zip(counting, asked, strict=True):
            session.leave(found)

    def own_file(self, model: str, number: int, claim: str, file: str) -> tuple[ByteArray, ImageHold]:
        """See `api.grpc.replica_handlers.OwnFiles`."""
        pushes = [push for push, _ in self._pushes(model, number, claim)]
        for push in pushes:
            check_not_failed(push.state)
        sessions = [push for push in pushes if isinstance(push, PushSession)]
        if not sessions:
            raise NotFound(
                f"this replica does not receive {model}@{number}, or receives it under a different agreement"
            )
        holding = [session for session in sessions if session.holds(file)]
        return (holding or sessions)[0].own_file(file)

    def files_elsewhere(self, name: ModelName, number: int) -> FilesElsewhere | None:
        """Files of a visible version that are in images of other replicas; None if the version is not visible here or
        is not spread.
        """
        session = self._registry.get(name, number)
        agreed = None if session is None else session.state.agreed
        if session is None or agreed is None or agreed.prepared.spread is None or session.state.phase not in VISIBLE:
            return None
        owners = agreed.prepared.spread.owners
        files = [file for file, owner in owners.items() if owner != session.state.share_number]
        return FilesElsewhere(agreed.claim, files, lambda file: _home_of(session.state, owners[file]))

    def is_durable(self, name: ModelName, number: int, claim: str) -> bool:
        """Whether a version that was visible here is now durable. Raises the error that ended it."""
        pushes = self._pushes(str(name), number, claim)
        if not pushes:  # its session ended some time ago
            return True
        state = pushes[0][0].state
        check_not_failed(state)
        return state.phase is Phase.PUBLISHED

    def _pushes(self, model: str, number: int, claim: str) -> list[tuple[Push, Agreement]]:
        """The pushes of a version under this claim. The push of this replica's own part comes first."""
        pushes = self._registry.of_version(ModelName.parse(model), number)
        found = [(push, push.state.agreed) for push in pushes]
        return [(push, agreed) for push, agreed in found if agreed is not None and agreed.claim == claim]


def _counts_on(state: PushState, replicas: frozenset[Home]) -> bool:
    """Whether a push has ended or counts on these replicas only."""
    return state.phase in FINAL or state.declarations.counting_on(replicas) is state.declarations


def _hear(session: PushSession, sender: Home, progress: Progress) -> None:
    """Post the progress of another replica to a session.

    The progress is that of its own part or of a part that it has taken over.
    """
    replica = progress.share
    session.post(on.ShareMoved(replica, sender, progress.handovers))
    agreed = session.state.agreed
    if agreed is None or replica >= len(agreed.homes) or agreed.homes[replica] != sender:
        return  # the sender does not take part, or another replica now has the part
    match progress.stage:
        case Stage.COMPLETE | Stage.WRITTEN:
            handed_in = progress.stage is Stage.WRITTEN
            session.take_progress(replica, progress.written, handed_in=handed_in, nonfinite=progress.nonfinite)
        case Stage.PUBLISHED:
            session.post(on.SaidPublished())
        case Stage.FAILED | Stage.ABORTED:
            if progress.stage is Stage.ABORTED:
                session.post(on.Aborted(progress.error))
            error = VersionFailed(
                f"the replica {sender} gave up {session.state.name}: {progress.error}",
                fix="push the step again",
            )
            session.post(on.ReplicaLost(replica, error))


def _home_of(state: PushState, number: int) -> Home:
    """The replica that currently has a share."""
    agreed = state.agreed
    if agreed is None:
        raise AssertionError(f"{state.name} is not agreed on")
    return agreed.homes[number]


def _shared(session: PushSession) -> SharedPush | None:
    """The shared push of a session; None if no other replica takes part or it has ended."""
    state = session.state
    agreed = state.agreed
    if agreed is None or agreed.alone or state.phase in FINAL:
        return None
    peers = tuple(home for home in agreed.homes if home != state.declarations.home)
    return SharedPush(_progress(session, agreed), peers)


def _progress(push: Push, agreed: Agreement) -> Progress:
    state, share, error = push.state, push.share_number or 0, ""
    opened, written = state.opened, push.handed_in
    match state.phase:
        case Phase.PUBLISHED:
            stage = Stage.PUBLISHED
        case Phase.FAILED | Phase.ABORTED:
            stage = Stage.FAILED if state.phase is Phase.FAILED else Stage.ABORTED
            error = "" if state.error is None else state.error.message
        case phase if phase in BEFORE_SEALED:
            stage = Stage.RECEIVING
        case _:
            stage = Stage.COMPLETE if written is None else Stage.WRITTEN
    handovers = agreed.handovers.get(share, 0)
    name, nonfinite = (opened.model, opened.number, agreed.claim), state.holding.here
    return Progress(*name, stage, share, handovers, written, error, nonfinite)
