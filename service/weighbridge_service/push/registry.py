"""Registry of the pushes of this process, by model, number and request.

It contains sessions, and records of sessions that have ended.

The registry limits the memory of pushes. It turns a session that has ended into an `EndedPush`. Some images only serve
reads of durable versions; the registry keeps the ones that were read last.
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
"""Number of ended versions of each model that are remembered, so that the ranks that pushed them learn their
outcome.
"""

Push: TypeAlias = PushSession | EndedPush


class Registry:
    """Registry of pushes, and their `Surroundings`. Thread-safe.

    Args:
        snapshots: gets the snapshots of all versions.
        news: set when a push has progress to report to other replicas.
        approved_since: returns the approved reasons for holding a version in history, from the head as it was read
            last.
        kept_images: number of images of durable versions that are kept.
        kept_pushes: number of ended pushes of all models together that are remembered.
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
        self._taken: list[PushSession] = []  # shares taken over of versions that have their own session here
        self._ended: dict[ModelName, dict[int, EndedPush]] = {}
        self._ended_in_order: dict[tuple[ModelName, int], None] = {}
        self._by_request: dict[tuple[ModelName, str], int] = {}

    def add(self, session: PushSession) -> None:
        """Enter a new session, and start it."""
        name = session.model.name
        self._snapshots.show(name, session.snapshot)  # first: once entered, the session shows its own changes
        with self._lock:
            self._sessions.setdefault(name, {})[session.number] = session
            self._by_request[name, session.request_id] = session.number
        self._settle()
        session.tick()

    def add_taken(self, session: PushSession) -> None:
        """Enter the session of a share that another replica has handed over, if this replica has a session of that
        version already.
        """
        with self._lock:
            self._taken.append(session)
        self._settle()
        session.tick()

    def of_version(self, name: ModelName, number: int) -> list[Push]:
        """Push of a version, under way or remembered, and the sessions of its shares that were taken over in
        addition.
        """
        with self._lock:
            own = self._find(name, number)
            taken = [each for each in self._taken if (each.model.name, each.number) == (name, number)]
        return [*([] if own is None else [own]), *taken]

    def get(self, name: ModelName, number: int) -> PushSession | None:
        """Session of a version; None if this process has no session.

        If there are several, it is the one that does not belong to a taken-over share.
        """
        with self._lock:
            return self._sessions.get(name, {}).get(number)

    def find(self, name: ModelName, number: int) -> Push | None:
        """Push of a version, under way or remembered; None if there is none."""
        with self._lock:
            return self._find(name, number)

    def of_request(self, name: ModelName, request_id: str) -> Push | None:
        """Newest push that a request has opened; None if there is none."""
        with self._lock:
            return self._find(name, self._by_request.get((name, request_id), 0))

    def of_model(self, name: ModelName) -> list[Push]:
        """Pushes of a model, in the order of their numbers."""
        with self._lock:
            known: dict[int, Push] = {**self._ended.get(name, {}), **self._sessions.get(name, {})}
            return [known[number] for number in sorted(known)]

    def other_writer(self, name: ModelName, client_id: str) -> Version | None:
        """Newest version of a model that another job has pushed since the last push of this client's job; None if there
        is none.

        A restarted job has new processes, and its old processes do not push any more. So two jobs count as different
        only when one has pushed, then the other, and then the first one again.
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
        """Sessions of a model."""
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
            if reasons := self._approved_since(name, each.number):  # approved at another replica
                each.post(on.Approved(reasons))
        self.supersede(session)  # an approved version may be live now, which supersedes older ones
        for each in older:
            if _is_held(each) or (each.state.superseded and each.state.may_be_dropped):
                each.post(on.MemoryWanted())

    def approved(self, name: ModelName, number: int, reasons: tuple[str, ...]) -> None:
        """Post to the sessions of a version that a caller has approved reasons for which it is held."""
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
        """Release the images of versions below a number, which belong to a deleted model, and forget the versions."""
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

    # --- limits on what is kept

    def _settle(self) -> None:
        """Turn sessions that have ended into ended pushes, forget the oldest of those, and release the least recently
        read images.
        """
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
        # held versions go first: every other one is the live version of its model
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
        """Forget ended pushes. Returns those that were remembered. The caller holds the lock."""
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
        """Number of sessions in these states."""
        return len(self.in_states(*states))


class WaitsSaid:
    """Logs, every `REMIND_SECONDS`, what the versions that are being received wait for.

    Args:
        registry: the versions.
        timers: wake the reminder.
    """

    def __init__(self, registry: Registry, timers: Timers) -> None:
        self._registry = registry
        self._timers = timers
        timers.wake(self, time.monotonic() + REMIND_SECONDS)

    def tick(self) -> None:
        """Log what each version waits for that was opened at least `REMIND_SECONDS` ago."""
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
    """Common prefix of the ids of all clients in one process."""
    return client_id.partition("/")[0]


def _is_over(session: PushSession) -> bool:
    """Whether a push has ended and holds no memory."""
    return session.state.phase in FINAL and not session.has_image


def _is_idle(session: PushSession) -> bool:
    """Whether the image only serves reads of a durable version from memory."""
    return session.state.phase is Phase.PUBLISHED and session.has_image


def _is_held(session: PushSession) -> bool:
    """Whether the image is idle and its version is held, so that ``live`` skips it."""
    return _is_idle(session) and bool(session.state.holding.reasons)
