"""Threads for calls that touch the store or compute: so many at one time, and each peer in its turn."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from weighbridge.errors import ResourceExhausted
from weighbridge_service.admission.peer import Peer
from weighbridge_service.admission.turns import Turns

log = logging.getLogger(__name__)

T = TypeVar("T")
_IDLE_SECONDS = 10.0
_RETRY_SECONDS = 1.0


class Workers:
    """A pool of threads, which come when there is work and go when there is none. Thread-safe.

    Args:
        name: of the threads.
        most: how many there may be.
        line: how many calls may wait for one.
    """

    def __init__(self, name: str, most: int, line: int) -> None:
        self._name = name
        self._most = most
        self._line = line
        self._changed = threading.Condition()
        self._waiting: Turns[tuple[Future[Any], Callable[[], Any]]] = Turns()
        self._threads = self._idle = 0
        self._closed = False

    def check_room(self) -> None:
        """Raise ResourceExhausted if too many calls wait."""
        if self._closed or len(self._waiting) >= self._line:
            error = ResourceExhausted(
                f"{len(self._waiting)} calls wait for a thread of this service",
                fix="try again later; see whether the object store answers",
            )
            error.retry_after = _RETRY_SECONDS
            raise error

    def submit(self, peer: Peer, work: Callable[[], T], *, admitted: bool = False) -> Future[T]:
        """Do some work for a peer; can be cancelled until it is begun.

        Args:
            peer: for whom.
            work: is called in a thread.
            admitted: whether `check_room` was asked before: then the work is taken however many wait by now.

        Raises:
            ResourceExhausted: too many calls wait.
        """
        found: Future[T] = Future()
        with self._changed:
            if not admitted or self._closed:
                self.check_room()
            self._waiting.add(peer, (found, work))
            if self._idle >= len(self._waiting) or self._threads >= self._most:
                self._changed.notify()
                return found
            self._threads += 1
        threading.Thread(target=self._run, name=self._name, daemon=True).start()
        return found

    def close(self) -> None:
        """Take no more work, and drop what waits."""
        with self._changed:
            self._closed = True
            while self._waiting:
                self._waiting.take()[0].cancel()
            self._changed.notify_all()

    def _run(self) -> None:
        while (taken := self._take()) is not None:
            found, work = taken
            if not found.set_running_or_notify_cancel():
                continue
            try:
                result = work()
            except BaseException as error:
                found.set_exception(error)
            else:
                found.set_result(result)
            del taken, found, work  # what they hold must not wait for the next work

    def _take(self) -> tuple[Future[Any], Callable[[], Any]] | None:
        deadline = time.monotonic() + _IDLE_SECONDS
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
