"""Sessions of pushes as other replicas see them: how far each is, and the files that this replica has in images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from weighbridge.errors import NotFound, VersionFailed
from weighbridge_service.push import events as on
from weighbridge_service.push.declarations import Home
from weighbridge_service.push.registry import Push, Registry
from weighbridge_service.push.session import PushSession
from weighbridge_service.push.state import BEFORE_SEALED, FINAL, VISIBLE, Phase, PushState, check_not_failed
from weighbridge_service.replicas.progress import Progress, SharedPush, Stage
from weighbridge_storage.images import Lease
from weighbridge_storage.names import ModelName
from weighbridge_storage.objects import ByteArray
from weighbridge_storage.version_writing import Written


@dataclass(frozen=True, slots=True)
class FilesElsewhere:
    """The files of a version that is visible, and not durable yet, which other replicas own.

    Attributes:
        claim: what the replicas have agreed on.
        owners: for each file, the replica that owns it.
    """

    claim: str
    owners: Mapping[str, Home]


class SharedSessions:
    """The sessions of this process that other replicas take part in. Thread-safe.

    Is `heartbeat.SharedPushes` and `handlers.OwnFiles`.

    Args:
        registry: all sessions.
    """

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    def shared(self) -> Sequence[SharedPush]:
        """See `heartbeat.SharedPushes`."""
        pushes = (_shared(session) for session in self._registry.all())
        return [push for push in pushes if push is not None]

    def progress(self, model: str, number: int, claim: str) -> Progress | None:
        """See `heartbeat.SharedPushes`."""
        push = self._push(model, number, claim)
        if push is None:
            return None
        return _progress(push.state, claim, push.handed_in if isinstance(push, PushSession) else None)

    def heard(self, sender: Home, progress: Progress) -> None:
        """See `heartbeat.SharedPushes`."""
        session = self._session(*progress.key)
        replica = None if session is None else _number_of(session.state, sender)
        if session is None or replica is None:
            return
        match progress.stage:
            case Stage.COMPLETE | Stage.WRITTEN:
                handed_in = progress.stage is Stage.WRITTEN
                session.take_progress(replica, progress.written, handed_in=handed_in)
            case Stage.PUBLISHED:
                session.post(on.SaidPublished())
            case Stage.FAILED | Stage.ABORTED:
                if progress.stage is Stage.ABORTED:
                    session.post(on.Aborted(progress.error))
                error = VersionFailed(
                    f"the replica {sender} gave {session.state.name} up: {progress.error}",
                    fix="push the step again",
                )
                session.post(on.ReplicaLost(replica, error))

    def lost(self, replica: Home, error: VersionFailed) -> None:
        """See `heartbeat.SharedPushes`."""
        for session in self._registry.all():
            number = _number_of(session.state, replica)
            if number is not None:
                session.post(on.ReplicaLost(number, error))

    def own_file(self, model: str, number: int, claim: str, file: str) -> tuple[ByteArray, Lease]:
        """See `handlers.OwnFiles`."""
        push = self._push(model, number, claim)
        if push is not None:
            check_not_failed(push.state)
        if not isinstance(push, PushSession):
            raise NotFound(f"{model}@{number} is not received by this replica, or under another agreement")
        return push.own_file(file)

    def files_elsewhere(self, name: ModelName, number: int) -> FilesElsewhere | None:
        """The files that other replicas own of a version that is visible here and not durable; None if there are none."""
        session = self._registry.get(name, number)
        agreed = None if session is None else session.state.agreed
        if (
            session is None
            or agreed is None
            or agreed.prepared.spread is None
            or session.state.phase not in VISIBLE
        ):
            return None
        home = session.state.declarations.home
        owners = {file: agreed.homes[owner] for file, owner in agreed.prepared.spread.owners.items()}
        return FilesElsewhere(agreed.claim, {file: owner for file, owner in owners.items() if owner != home})

    def is_durable(self, name: ModelName, number: int, claim: str) -> bool:
        """Whether a version that was visible here is durable by now. Raises what it has failed of."""
        push = self._push(str(name), number, claim)
        if push is None:  # it has ended a while ago
            return True
        check_not_failed(push.state)
        return push.state.phase is Phase.PUBLISHED

    def _session(self, model: str, number: int, claim: str) -> PushSession | None:
        push = self._push(model, number, claim)
        return push if isinstance(push, PushSession) else None

    def _push(self, model: str, number: int, claim: str) -> Push | None:
        push = self._registry.find(ModelName.parse(model), number)
        agreed = None if push is None else push.state.agreed
        return push if agreed is not None and agreed.claim == claim else None


def _shared(session: PushSession) -> SharedPush | None:
    """A session that others take part in, if it has not ended."""
    state = session.state
    agreed = state.agreed
    if agreed is None or agreed.alone or state.phase in FINAL:
        return None
    peers = tuple(home for home in agreed.homes if home != state.declarations.home)
    return SharedPush(_progress(state, agreed.claim, session.handed_in), peers)


def _progress(state: PushState, claim: str, written: Written | None) -> Progress:
    opened, error = state.opened, ""
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
    return Progress(opened.model, opened.number, claim, stage, written, error)


def _number_of(state: PushState, home: Home) -> int | None:
    """The number of a replica that takes part in a push; None if it does not."""
    agreed = state.agreed
    return agreed.homes.index(home) if agreed is not None and home in agreed.homes else None
