"""Registry of the sessions of this process, by model, number and request."""

from __future__ import annotations

import threading

from weighbridge.resources import VersionState
from weighbridge_service.catalog import Catalog, VersionSnapshot
from weighbridge_service.push import events as on
from weighbridge_service.push.session import PushSession
from weighbridge_storage.names import ModelName

_KEPT_ENDED = 100
"""Ended versions of each model that are remembered, so that whoever pushed them learns what became of them."""
_KEPT_ENDED_IN_ALL = 1000
"""The same of all models together."""


class Registry:
    """The sessions that there are, and their `Surroundings`. Thread-safe.

    Args:
        catalog: is shown what becomes of them.
        news: is set when other replicas are to be told of one.
    """

    def __init__(self, catalog: Catalog, news: threading.Event) -> None:
        self._catalog = catalog
        self._news = news
        self._lock = threading.Lock()
        self._sessions: dict[ModelName, dict[int, PushSession]] = {}
        self._taken: list[PushSession] = []  # of shares of versions that have a session of their own here
        self._by_request: dict[tuple[ModelName, str], int] = {}
        self._in_order: dict[PushSession, None] = {}

    def add(self, session: PushSession) -> None:
        """Enter a session that was just made, and begin it."""
        name = session.model.name
        self._catalog.show(name, session.snapshot)  # first: from then on, the session shows itself
        with self._lock:
            self._sessions.setdefault(name, {})[session.number] = session
            self._by_request[name, session.request_id] = session.number
            self._in_order[session] = None
        self._forget_old(name)
        session.tick()

    def add_taken(self, session: PushSession) -> None:
        """Enter the session of a share that another replica has handed over, of a version that this replica receives itself."""
        with self._lock:
            self._taken = [each for each in self._taken if not _is_over(each)] + [session]
        session.tick()

    def of_version(self, name: ModelName, number: int) -> list[PushSession]:
        """The session of a version, and those of shares of it that were taken over beside that."""
        with self._lock:
            own = self._sessions.get(name, {}).get(number)
            taken = [each for each in self._taken if (each.model.name, each.number) == (name, number)]
        return ([] if own is None else [own]) + taken

    def get(self, name: ModelName, number: int) -> PushSession | None:
        """The session of a version, if there is one here; of a share that was taken over, only if it is the version's only one."""
        with self._lock:
            return self._sessions.get(name, {}).get(number)

    def of_request(self, name: ModelName, request_id: str) -> PushSession | None:
        """The newest session that a request has opened."""
        with self._lock:
            number = self._by_request.get((name, request_id), 0)
            return self._sessions.get(name, {}).get(number)

    def of_model(self, name: ModelName) -> list[PushSession]:
        """The sessions of a model, in the order of their numbers."""
        with self._lock:
            known = self._sessions.get(name, {})
            return [known[number] for number in sorted(known)]

    def all(self) -> list[PushSession]:
        """All sessions."""
        with self._lock:
            return [s for known in self._sessions.values() for s in known.values()] + self._taken

    # --- Surroundings

    def show(self, session: PushSession, snapshot: VersionSnapshot, *, changed: bool) -> None:
        """See `Surroundings`."""
        name = session.model.name
        if self.get(name, session.number) is session:
            self._catalog.show(name, snapshot, changed=changed)

    def supersede(self, session: PushSession) -> None:
        """See `Surroundings`."""
        sessions = self.of_model(session.model.name)
        visible = [each.number for each in sessions if each.snapshot.version.state.visible]
        newest = max(visible, default=0)
        for each in sessions:
            if each.number < newest and not each.state.superseded:
                each.post(on.Superseded())

    def want_memory(self, session: PushSession) -> None:
        """See `Surroundings`."""
        for each in self.all():
            older = each.model.name == session.model.name and each.number < session.number
            if older and each.state.superseded and each.state.may_be_dropped:
                each.post(on.MemoryWanted())

    def notify(self, session: PushSession) -> None:
        """See `Surroundings`."""
        self._news.set()

    def forget(self, session: PushSession) -> None:
        """See `Surroundings`."""
        name = session.model.name
        with self._lock:
            known = self._sessions.get(name, {})
            if known.get(session.number) is not session:
                return
            del known[session.number], self._in_order[session]
            if not known:
                del self._sessions[name]
            if self._by_request.get((name, session.request_id)) == session.number:
                del self._by_request[name, session.request_id]
        self._catalog.forget(name, session.number)

    def _forget_old(self, name: ModelName) -> None:
        for session in [each for each in self.of_model(name) if _is_over(each)][:-_KEPT_ENDED]:
            self.forget(session)
        with self._lock:
            too_many = len(self._in_order) - _KEPT_ENDED_IN_ALL
            oldest = list(self._in_order) if too_many > 0 else []
        for session in list(filter(_is_over, oldest))[: max(too_many, 0)]:
            self.forget(session)

    def count(self, *states: VersionState) -> int:
        """Sessions in these states."""
        return sum(session.snapshot.version.state in states for session in self.all())


def _is_over(session: PushSession) -> bool:
    """Whether nothing is to be done for a version any more, and it holds no memory."""
    return not session.state.unfinished and not session.has_image
