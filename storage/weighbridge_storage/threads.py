"""Pool of threads. Threads start when work arrives, and end after some idle time.

The threads are daemons: `concurrent.futures` joins its threads when the interpreter exits, so work that hangs, for
example in a store call, would prevent the process from exiting.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import copy_context
from functools import partial
from typing import Any, Generic, TypeVar

from weighbridge.errors import ResourceExhausted, Unavailable

T = TypeVar("T")
_IDLE_SECONDS = 3.0
_RETRY_SECONDS = 1.0
_CLOSED = Unavailable("the service is shutting down", fix="try again when it is back")


class Line(Generic[T]):
    """A FIFO queue. A subclass may use another order. Not thread-safe."""

    def __init__(self) -> None:
        self._items: deque[T] = deque()

    def __len__(self) -> int:
        return len(self._items)

    def add(self, key: Any, item: T) -> None:
        """Add an item; ``key`` names its client."""
        self._items.append(item)

    def take(self) -> T:
        """Remove and return the next item. Raises IndexError if the queue is empty."""
        return self._items.popleft()

    def discard(self, key: Any, item: T) -> bool:
        """Remove an item. Returns whether it was in the queue."""
        if item not in self._items:
            return False
        self._items.remove(item)
        return True


class PoolWork(Future[T]):
    """Work of a pool, and its result. Cancelling releases the work's references at once."""

    def __init__(self, work: Callable[[], T], drop: Callable[[PoolWork[T]], object]) -> None:
        super().__init__()
        self._work: Callable[[], T] | None = work
        self._drop = drop

    def cancel(self) -> bool:
        """See `Future.cancel`."""
        cancelled = super().cancel()
        if cancelled:
            self._work = None
            self._drop(self)
        return cancelled

    def do(self) -> None:
        """Run the work in this thread, unless it was cancelled."""
        work, self._work = self._work, None
        if work is None or not self.set_running_or_notify_cancel():
            return
        try:
            self.set_result(work())
        except BaseException as error:
            self.set_exception(error)
            del self, work  # the error's traceback leads back here


class ThreadPool:
    """A bounded number of daemon threads. Thread-safe.

    Args:
        name: name of the threads.
        most: maximum number of concurrent threads.
        line: queue of waiting work; by default a FIFO queue.
        most_waiting: maximum number of calls that may wait for a thread.
        idle_seconds: seconds that a thread waits for work before it ends.
    """

    def __init__(
        self,
        name: str,
        most: int,
        *,
        line: Line[PoolWork[Any]] | None = None,
        most_waiting: float = math.inf,
        idle_seconds: float = _IDLE_SECONDS,
    ) -> None:
        self._name = name
        self._most = most
        self._waiting: Line[PoolWork[Any]] = Line() if line is None else line
        self._most_waiting = most_waiting
        self._idle_seconds = idle_seconds
        self._changed = threading.Condition()
        self._threads = self._idle = 0
        self._closed = False

    def submit(self, work: Callable[[], T], key: Any = None) -> Future[T]:
        """Queue work. It can be cancelled until it begins.

        Args:
            work: called in one of the threads.
            key: client of the work, if the queue distinguishes clients.

        Raises:
            ResourceExhausted: too much work is waiting, or the system cannot start a thread for it.
            Unavailable: the pool has been closed.
        """
        found = PoolWork(work, partial(self._drop, key))
        with self._changed:
            if self._closed:
                raise _CLOSED.anew()
            waiting = len(self._waiting)
            if waiting - self._idle >= self._most_waiting:
                raise _exhausted(f"{waiting} calls wait for a thread of this service")
            self._waiting.add(key, found)
            if self._idle > waiting or self._threads >= self._most:
                self._changed.notify()
                return found
            try:
                threading.Thread(target=self._run, name=self._name, daemon=True).start()
            except RuntimeError as error:  # the system cannot start another thread
                if not self._threads:
                    self._waiting.discard(key, found)
                    raise _exhausted("the system has no thread for this call") from error
            else:
                self._threads += 1
                self._idle += 1  # until it takes some work
        return found

    async def run(self, work: Callable[[], T], key: Any = None) -> T:
        """Run work in a thread, in the context of this task. If the task is cancelled, work that has begun continues
        and its result is dropped.

        Args and errors are those of `submit`.
        """
        return await asyncio.wrap_future(self.submit(partial(copy_context().run, work), key))

    def close(self, seconds: float | None = 0.0) -> None:
        """Reject new and waiting work, then wait up to ``seconds`` for running work. None waits until it ends."""
        with self._changed:
            self._closed = True
            refused = [self._waiting.take() for _ in range(len(self._waiting))]
            self._changed.notify_all()
        for found in refused:
            if found.set_running_or_notify_cancel():
                found.set_exception(_CLOSED.anew())
        with self._changed:
            self._changed.wait_for(lambda: not self._threads, seconds)

    def _drop(self, key: Any, found: PoolWork[Any]) -> None:
        with self._changed:
            self._waiting.discard(key, found)

    def _run(self) -> None:
        more = 0
        while (taken := self._take(more)) is not None:
            taken.do()
            del taken  # its result must not be kept until the next work arrives
            more = 1

    def _take(self, more: int) -> PoolWork[Any] | None:
        """The next work; None to end the thread. ``more`` is the number of threads that this call makes idle."""
        with self._changed:
            self._idle += more
            self._changed.wait_for(lambda: self._waiting or self._closed, self._idle_seconds)
            self._idle -= 1
            if self._waiting:
                return self._waiting.take()
            self._threads -= 1
            self._changed.notify_all()
            return None


def _exhausted(message: str) -> ResourceExhausted:
    return ResourceExhausted(
        message, fix="try again later; see whether the object store answers", retry_after=_RETRY_SECONDS
    )
