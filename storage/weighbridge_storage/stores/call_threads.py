"""Threads for calls that may hang, so that they hang there and not in whoever makes them.

The threads are daemons: one that hangs in a system call for ever keeps no process from ending, as those of `concurrent.futures` do. They are
made when they are needed, and end when they have had nothing to do for a while.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar, cast

T = TypeVar("T")

_IDLE_SECONDS = 30.0


class RunningCall(Generic[T]):
    """A call that a thread makes for somebody else."""

    __slots__ = ("_do", "_ended", "_error", "_result", "begun", "dropped")

    def __init__(self, do: Callable[[], T]) -> None:
        self._do = do
        self._ended = threading.Lock()
        self._ended.acquire()
        self._error: BaseException | None = None
        self._result: T | None = None
        self.begun = self.dropped = False

    def make(self) -> None:
        """Make it, in the thread that calls this."""
        try:
            self._result = self._do()
        except BaseException as error:
            self._error = error
        self._ended.release()

    def wait(self, seconds: float) -> bool:
        """Whether it has ended, now or within so many seconds. Only one thread may wait, and not again after it has ended."""
        return self._ended.acquire(timeout=max(seconds, 0.0))

    def result(self) -> T:
        """What it gave, or an exception that it raised; it has ended."""
        if self._error is None:
            return cast(T, self._result)
        try:
            raise self._error
        finally:
            self._error = None  # the error's traceback leads back here


class CallThreads:
    """A bounded number of threads that make calls. Thread-safe.

    Args:
        most: threads at one time.
        name: what the threads' names begin with.
        idle_s: seconds after which a thread ends that has nothing to do.
    """

    def __init__(self, most: int, name: str, *, idle_s: float = _IDLE_SECONDS) -> None:
        self._most = most
        self._name = name
        self._idle_s = idle_s
        self._lock = threading.Lock()
        self._calls: SimpleQueue[RunningCall[Any] | None] = SimpleQueue()
        self._threads = 0
        self._pending = 0  # calls that were submitted and have not ended

    def submit(self, do: Callable[[], T]) -> RunningCall[T]:
        """Have a call made by one of the threads, as soon as one is free."""
        call = RunningCall(do)
        with self._lock:
            self._pending += 1
            missing = self._pending > self._threads and self._threads < self._most
            self._threads += missing
        self._calls.put(call)
        if missing:
            try:
                threading.Thread(target=self._run, name=self._name, daemon=True).start()
            except (
                RuntimeError
            ):  # the process has as many threads as it may have: the call waits for one that is there
                with self._lock:
                    self._threads -= 1
        return call

    def drop(self, call: RunningCall[Any]) -> bool:
        """Whether a call had not begun; then it never will."""
        with self._lock:
            call.dropped = not call.begun
            return call.dropped

    def close(self) -> None:
        """Have the threads end; those that hang do when they hang no more. Waits for nothing."""
        with self._lock:
            threads = self._threads
        for _ in range(threads):
            self._calls.put(None)

    def _run(self) -> None:
        while True:
            try:
                call = self._calls.get(timeout=self._idle_s)
            except Empty:
                with self._lock:
                    if self._pending < self._threads:
                        self._threads -= 1
                        return
                continue  # a call is on its way
            if call is None:
                return
            with self._lock:
                call.begun = not call.dropped
            if call.begun:
                call.make()
            with self._lock:
                self._pending -= 1
