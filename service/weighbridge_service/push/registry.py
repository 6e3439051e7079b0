"""Registry of the pushes of this process, by model, number and request: sessions, and what is remembered of those that have ended.

What a push holds is bounded here: a session that is over becomes an `EndedPush`, and of images that nobody needs but for reading a durable
version once more, only those used last are kept.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from typing import TypeAlias

from weighbridge._core.resources import Version, VersionState
from weighbridge._core.text.durations import readable_duration
from weighbridge._core.text.waits import REMIND_SECONDS
from weighbridge.errors import VersionFailed
from weighbridge_service.catalog.snapshots import Snapshots, VersionSnapshot
from weighbridge_service.push.ended import EndedPush
from weighbridge_service.push.machine import events as on
from weighbridge_service.push.machine.phases import FINAL, Phase
from weighbridge_service.push.session import PushSession
from weighbridge_service.push.timers import Timers
from weighbridge_service.runtime.clock import unix_ms
from weighbridge_storage.documents.names import ModelName

log = logging.getLogger(__name__)

_KEPT_ENDED = 100
"""Ended versions of each model that are remembered, so that whoever pushed them learns what became of them."""

Push: TypeAlias = PushSession | EndedPush


class Registry:
    """The pushes that there are, and their `Surroundings`. Thread-safe.

    Args:
        snapshots: are told what becomes of them.
        news: is set when other replicas are to be told of one.
        approved_since: the reasons for which a version in history that was held is held no more, as its head says that was read last.
        kept_images: images of durable versions that are kept.
        kept_pushes: ended pushes of all models together that are remembered.
    """

    def __init__(
        self,
        snapshots: Snapshots,
        news: threading.Event,
        approved_since: Callable[[ModelName, int], tuple[str, ...]],
        *,
        kept_images: int,
        kept_pushes: int,
    ) -> None:
        self._snapshots = snapshots
        self._kept_images = kept_images
        self._kept_pushes = kept_pushes
        self._news = news
        self._approved_since = approved_since
        self._lock = threading.Lock()
        self._sessions: dict[ModelName, dict[int, PushSession]] = {}
        self._taken: list[PushSession] = []  # of shares of versions that have a session of their own here
        self._ended: dict[ModelName, dict[int, EndedPush]] = {}
        self._ended_in_order: dict[tuple[ModelName, int], None] = {}
        self._by_request: dict[tuple[ModelName, str], int] = {}

    def add(self, session: PushSession) -> None:
        """Enter a session that was just made, and begin it."""
        name = session.model.name
        self._snapshots.show(name, session.snapshot)  # first: from then on, the session shows itself
        with self._lock:
            self._sessions.setdefault(name, {})[session.number] = session
            self._by_request[name, session.request_id] = session.number
        self._settle()
        session.tick()

    def add_taken(self, session: PushSession) -> None:
        """Enter the session of a share that another replica has handed over, of a version that this replica receives itself."""
        with self._lock:
            self._taken.append(session)
        self._settle()
        session.tick()

    def of_version(self, name: ModelName, number: int) -> list[Push]:
        """The push of a version, under way or remembered, and the sessions of shares of it that were taken over beside that."""
        with self._lock:
            own = self._find(name, number)
            taken = [each for each in self._taken if (each.model.name, each.number) == (name, number)]
        return [*([] if own is None else [own]), *taken]

    def get(self, name: ModelName, number: int) -> PushSession | None:
        """The session of a version, if there is one here; of a share that was taken over, only if it is the version's only one."""
        with self._lock:
            return self._sessions.get(name, {}).get(number)

    def find(self, name: ModelName, number: int) -> Push | None:
        """The push of a version, under way or remembered."""
        with self._lock:
            return self._find(name, number)

    def of_request(self, name: ModelName, request_id: str) -> Push | None:
        """The newest push that a request has opened."""
        with self._lock:
            return self._find(name, self._by_request.get((name, request_id), 0))

    def of_model(self, name: ModelName) -> list[Push]:
        """The pushes of a model, in the order of their numbers."""
        with self._lock:
            known: dict[int, Push] = {**self._ended.get(name, {}), **self._sessions.get(name, {})}
            return [known[number] for number in sorted(known)]

    def other_writer(self, name: ModelName, client_id: str) -> Version | None:
        """The newest version of a model that another job has pushed since the job of this client has pushed last; None if there is none.

        A job that was restarted is no other one, for the one before it pushes no more: jobs count as two only once one has pushed, then the other one,
        and now the first one again.
        """
        caller = _process(client_id)
        between: list[Push] = []
        for push in reversed(self.of_model(name)):
            own = _processes(push)
            if caller in own:
                foreign = (each for each in between if own.isdisjoint(_processes(each)))
                return next((each.snapshot.version for each in foreign), None)
            if not push.snapshot.version.state.given_up:
                between.append(push)
        return None

    def sessions_of(self, name: ModelName) -> list[PushSession]:
        """The sessions of a model."""
        with self._lock:
            return list(self._sessions.get(name, {}).values())

    def all(self) -> list[PushSession]:
        """All sessions."""
        with self._lock:
            return [s for known in self._sessions.values() for s in known.values()] + self._taken

    def _find(self, name: ModelName, number: int) -> Push | None:
        session = self._sessions.get(name, {}).get(number)
        return session if session is not None else self._ended.get(name, {}).get(number)

    # --- Surroundings

    def show(self, session: PushSession, snapshot: VersionSnapshot, *, changed: bool) -> None:
        """See `Surroundings`."""
        name = session.model.name
        if self.get(name, session.number) is session:
            self._snapshots.show(name, snapshot, changed=changed)

    def supersede(self, session: PushSession) -> None:
        """See `Surroundings`."""
        sessions = self.sessions_of(session.model.name)
        newest = max((each.number for each in sessions if each.state.released), default=0)
        for each in sessions:
            if each.number < newest and not each.state.superseded:
                each.post(on.Superseded())

    def want_memory(self, session: PushSession) -> None:
        """See `Surroundings`."""
        name = session.model.name
        older = [each for each in self.all() if each.model.name == name and each.number < session.number]
        for each in filter(_is_held, older):
            if reasons := self._approved_since(name, each.number):  # by way of another replica
                each.post(on.Approved(reasons))
        self.supersede(session)  # what was approved may be live now, and those before it are not
        for each in older:
            if _is_held(each) or (each.state.superseded and each.state.may_be_dropped):
                each.post(on.MemoryWanted())

    def approved(self, name: ModelName, number: int, reasons: tuple[str, ...]) -> None:
        """Somebody has approved reasons for which a version is held."""
        for each in self.of_version(name, number):
            if isinstance(each, PushSession):
                each.post(on.Approved(reasons))

    def notify(self, session: PushSession) -> None:
        """See `Surroundings`."""
        self._news.set()

    def forget(self, session: PushSession) -> None:
        """See `Surroundings`."""
        name, number = session.model.name, session.number
        with self._lock:
            there = self._sessions.get(name, {}).get(number)
            if there is session:
                self._remove(session)
                self._forget_request(name, session.request_id, number)
            elif there is not None or not self._forget_ended(((name, number),)):
                return
        self._snapshots.forget(name, number)

    def forget_deleted_model(self, name: ModelName, below: int) -> None:
        """Versions below a number are of a model that was deleted: let go of their images, and forget them."""
        for session in self.sessions_of(name):
            if session.number < below:
                session.post(on.Broken(VersionFailed(f"the model {name} was deleted")))
                session.post(on.Superseded())
        self._settle()
        with self._lock:
            ended = [(name, number) for number in self._ended.get(name, {}) if number < below]
            forgotten = self._forget_ended(ended)
        for _, number in forgotten:
            self._snapshots.forget(name, number)

    # --- what is kept

    def _settle(self) -> None:
        """Remember sessions that are over as ended pushes, up to a number, and let go of images that nobody has read for long."""
        sessions = self.all()
        for session in filter(_is_over, sessions):
            self._end(session)
        with self._lock:
            self._taken = [session for session in self._taken if not _is_over(session)]
            too_many = len(self._ended_in_order) - self._kept_pushes
            oldest = list(self._ended_in_order)[:too_many] if too_many > 0 else []
            forgotten = self._forget_ended(oldest)
        for name, number in forgotten:
            self._snapshots.forget(name, number)
        # those that are held first: of the others each is its model's live version
        idle = sorted(filter(_is_idle, sessions), key=lambda each: (not _is_held(each), each.image_used_at))
        for session in idle[: -self._kept_images]:
            session.post(on.Idle())

    def _end(self, session: PushSession) -> None:
        name, number = session.model.name, session.number
        ended = EndedPush.of(session)
        with self._lock:
            if self._sessions.get(name, {}).get(number) is not session:
                return
            self._remove(session)
            session.forget()
            of_model = self._ended.setdefault(name, {})
            of_model[number] = ended
            self._ended_in_order[name, number] = None
            forgotten = self._forget_ended([(name, each) for each in list(of_model)[:-_KEPT_ENDED]])
        for _, each in forgotten:
            self._snapshots.forget(name, each)

    def _remove(self, session: PushSession) -> None:
        of_model = self._sessions[session.model.name]
        del of_model[session.number]
        if not of_model:
            del self._sessions[session.model.name]

    def _forget_ended(self, which: Iterable[tuple[ModelName, int]]) -> list[tuple[ModelName, int]]:
        """Remember ended pushes no more; gives those that were. The lock is held."""
        forgotten = []
        for name, number in which:
            of_model = self._ended.get(name, {})
            ended = of_model.pop(number, None)
            if ended is not None:
                del self._ended_in_order[name, number]
                if not of_model:
                    del self._ended[name]
                self._forget_request(name, ended.request_id, number)
                forgotten.append((name, number))
        return forgotten

    def _forget_request(self, name: ModelName, request_id: str, number: int) -> None:
        if self._by_request.get((name, request_id)) == number:
            del self._by_request[name, request_id]

    def in_states(self, *states: VersionState) -> list[PushSession]:
        """Sessions in these states."""
        return [session for session in self.all() if session.snapshot.version.state in states]

    def count(self, *states: VersionState) -> int:
        """How many sessions are in these states."""
        return len(self.in_states(*states))


class WaitsSaid:
    """Says in the log, every `REMIND_SECONDS`, what those versions wait for that are being received.

    Args:
        registry: which versions there are.
        timers: wake it.
    """

    def __init__(self, registry: Registry, timers: Timers) -> None:
        self._registry = registry
        self._timers = timers
        timers.wake(self, time.monotonic() + REMIND_SECONDS)

    def tick(self) -> None:
        """Say it of each that was opened so long ago."""
        self._timers.wake(self, time.monotonic() + REMIND_SECONDS)
        for session in self._registry.all():
            version = session.snapshot.described
            seconds = (unix_ms() - version.create_time_ms) / 1000
            if version.waits_for and seconds >= REMIND_SECONDS:
                log.info(
                    "%s: for %s, waits for %s",
                    version,
                    readable_duration(seconds, rough=True),
                    "; ".join(version.waits_for),
                )


def _processes(push: Push) -> frozenset[str]:
    """The processes that have opened a version or declared a rank of it, at this replica."""
    return frozenset(map(_process, (*push.clients, push.client_id)))


def _process(client_id: str) -> str:
    """What the ids of all clients in one process begin with."""
    return client_id.partition("/")[0]


def _is_over(session: PushSession) -> bool:
    """Whether nothing is to be done for a version any more, and it holds no memory."""
    return session.state.phase in FINAL and not session.has_image


def _is_idle(session: PushSession) -> bool:
    """Whether the image is there only so that a durable version can be read in memory."""
    return session.state.phase is Phase.PUBLISHED and session.has_image


def _is_held(session: PushSession) -> bool:
    """Whether that version is one which ``live`` passes by."""
    return _is_idle(session) and bool(session.state.holding.reasons)
