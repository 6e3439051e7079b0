"""Pools of threads on which the effects of all pushes are carried out, each kind bounded by itself."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

from weighbridge_service.push import effects as do

log = logging.getLogger(__name__)

_PLANS = 2
_IMAGES = 8
"""Images that are made at one time: that takes seconds where memory is fresh."""
_DIGESTS = 2
_UPLOADS = 2
"""Files of all versions that are uploaded at one time; the store uploads parts of each side by side."""
_STORE_CALLS = 16
_HANDOVERS = 2
_IDLE_SECONDS = 10.0
"""How long a thread without work waits for some before it ends."""


class DaemonPool:
    """Up to so many threads, made as needed, that keep no process from ending. Thread-safe.

    What `concurrent.futures` makes is joined when the interpreter ends, and a store that hangs would keep it from doing so.

    Args:
        most: threads at one time.
        name: of the threads.
    """

    def __init__(self, most: int, name: str) -> None:
        self._most = most
        self._name = name
        self._changed = threading.Condition()
        self._waiting: deque[Callable[[], None]] = deque()
        self._threads = 0
        self._idle = 0
        self._stopped = False

    def submit(self, work: Callable[[], None]) -> None:
        """Do something, some time; never, if the pool was stopped."""
        with self._changed:
            if self._stopped:
                return
            self._waiting.append(work)
            if self._idle >= len(self._waiting) or self._threads == self._most:
                self._changed.notify()
                return
            self._threads += 1
        threading.Thread(target=self._run, name=self._name, daemon=True).start()

    def _run(self) -> None:
        while (work := self._next()) is not None:
            try:
                work()
            except Exception:
                log.exception("an effect of a push failed")

    def _next(self) -> Callable[[], None] | None:
        with self._changed:
            self._idle += 1
            self._changed.wait_for(lambda: self._waiting or self._stopped, _IDLE_SECONDS)
            self._idle -= 1
            if self._waiting and not self._stopped:
                return self._waiting.popleft()
            self._threads -= 1
            self._changed.notify_all()
            return None

    def stop(self) -> None:
        """Begin nothing more."""
        with self._changed:
            self._stopped = True
            self._waiting.clear()
            self._changed.notify_all()

    def join(self, seconds: float) -> None:
        """Wait for what is being done, at most for so long."""
        with self._changed:
            self._changed.wait_for(lambda: not self._threads, seconds)


class EffectPools:
    """Carries out effects. Thread-safe."""

    def __init__(self) -> None:
        self._plans = DaemonPool(_PLANS, "push-plan")
        self._images = DaemonPool(_IMAGES, "push-image")
        self._digests = DaemonPool(_DIGESTS, "push-digest")
        self._uploads = DaemonPool(_UPLOADS, "push-upload")
        self._store = DaemonPool(_STORE_CALLS, "push-store")
        self._handovers = DaemonPool(_HANDOVERS, "push-handover")  # never behind calls to a store that hangs
        self._stopping = threading.Event()

    @property
    def stopping(self) -> bool:
        """Whether what is not done is to be left as it is."""
        return self._stopping.is_set()

    def submit(self, effect: do.Effect, carry_out: Callable[[], None]) -> None:
        """Carry an effect out, some time; never, if the service goes down."""
        self._pool_of(effect).submit(carry_out)

    def _pool_of(self, effect: do.Effect) -> DaemonPool:
        match effect:
            case do.MakePlan() | do.NameMissing():
                return self._plans
            case do.AcquireImage():
                return self._images
            case do.Digest() | do.CompareSample():
                return self._digests
            case do.Upload():
                return self._uploads
            case do.HandOver():
                return self._handovers
            case _:
                return self._store

    def stop(self, seconds: float) -> None:
        """Begin nothing more, and wait for what is being done, at most for so long."""
        self._stopping.set()
        pools = (self._plans, self._images, self._digests, self._uploads, self._store, self._handovers)
        for pool in pools:
            pool.stop()
        deadline = time.monotonic() + seconds
        for pool in pools:
            pool.join(max(deadline - time.monotonic(), 0.0))
