"""Threads for calls that touch the store or compute: so many at one time, and each peer in its turn."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from weighbridge.errors import ResourceExhausted, Unavailable
from weighbridge_service.access.peer import Peer
from weighbridge_service.admission.quotas import RETRY_SECONDS
from weighbridge_service.admission.turns import Turns

T = TypeVar("T")
_IDLE_SECONDS = 3.0


class _Work(Future[T]):
    """Some work, and what comes of it."""

    def __init__(self, work: Callable[[], T]) -> None:
        super().__init__()
        self._work: Callable[[], T] | None = work

    def drop(self) -> None:
        """It will not be done; what it holds goes."""
        self._work = None

    def do(self) -> None:
        """Do it, in this thread, unless it has been cancelled."""
        work, self._work = self._work, None
        if work is None or not self.set_running_or_notify_cancel():
            return
        try:
            self.set_result(work())
        except BaseException as error:
            self.set_exception(error)
            del self, work  # the error's traceback leads back here


class Workers:
    """A pool of threads, which come when there is work and go when there is none. Thread-safe.

    Args:
        name: of the threads.
        most: how many there may be.
        line: how many calls may wait for one.
        idle_seconds: how long a thread waits for work before it goes.
    """

    def __init__(self, name: str, most: int, line: int, idle_seconds: float = _IDLE_SECONDS) -> None:
        self._name = name
        self._most = most
        self._line = line
        self._idle_seconds = idle_seconds
        self._changed = threading.Condition()
        self._waiting: Turns[_Work[Any]] = Turns()
        self._threads = self._idle = 0
        self._closed = False

    def submit(self, peer: Peer, work: Callable[[], T]) -> Future[T]:
        """Do some work for a peer; can be cancelled until it is begun.

        Raises:
            ResourceExhausted: too many calls wait, or the system has no thread for this one.
            Unavailable: the pool has been closed.
        """
        found = _Work(work)
        with self._changed:
            if self._closed:
                raise Unavailable("the service is shutting down", fix="try again when it is back")
            if len(self._waiting) >= self._line:
                raise _refusal(f"{len(self._waiting)} calls wait for a thread of this service")
            self._waiting.add(peer, found)
            if self._idle >= len(self._waiting) or self._threads >= self._most:
                self._changed.notify()
            else:
                self._begin(peer, found)
        found.add_done_callback(partial(self._drop, peer))
        return found

    def close(self) -> None:
        """Take no more work, and drop what waits."""
        with self._changed:
            self._closed = True
            dropped = [self._waiting.take() for _ in range(len(self._waiting))]
            self._changed.notify_all()
        for found in dropped:
            found.cancel()

    def _begin(self, peer: Peer, found: _Work[Any]) -> None:
        """One more thread. The lock is held."""
        try:
            threading.Thread(target=self._run, name=self._name, daemon=True).start()
        except RuntimeError as error:  # the system has no more
            if not self._threads:
                self._waiting.discard(peer, found)
                raise _refusal("the system has no thread for this call") from error
        else:
            self._threads += 1

    def _drop(self, peer: Peer, found: Future[Any]) -> None:
        """What was cancelled keeps no place in the line, and no request in memory."""
        if found.cancelled() and isinstance(found, _Work):
            found.drop()
            with self._changed:
                self._waiting.discard(peer, found)

    def _run(self) -> None:
        while (taken := self._take()) is not None:
            taken.do()
            del taken  # its result must not wait for the next work

    def _take(self) -> _Work[Any] | None:
        deadline = time.monotonic() + self._idle_seconds
        with self._changed:
            self._idle += 1
            try:
                while not self._waiting:
                    left = deadline - time.monotonic()
                    if self._closed or left <= 0:
                        self._threads -= 1
                        return None
                    self._changed.wait(left)
                return self._waiting.take()
            finally:
                self._idle -= 1


def _refusal(message: str) -> ResourceExhausted:
    return ResourceExhausted(
        message, fix="try again later; see whether the object store answers", retry_after=RETRY_SECONDS
    )
