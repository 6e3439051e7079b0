"""Pools of threads on which the effects of all pushes are carried out, each kind bounded by itself."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

from weighbridge_service.push.machine import effects as do

log = logging.getLogger(__name__)

_PLANS = 2
IMAGES = 8
"""Images that are made at one time: that takes seconds where memory is fresh."""
_DIGESTS = 2
_UPLOADS = 2
"""Files of all versions that are uploaded at one time; the store uploads parts of each side by side."""
_READS = 8
"""Looks at heads, and at what other replicas have said."""
_LEASES = 8
"""Claims and renewals."""
_CONFIRMATIONS = 4
"""Versions that are about to become ready: ranks wait for that."""
_PUBLICATIONS = 8
"""Manifests and what is told to other replicas."""
_CLEANINGS = 4
"""Versions that were given up and are deleted."""
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
        """Do something, some time; never, if the pool was stopped. Raises RuntimeError if there is no thread to be had for it."""
        with self._changed:
            if self._stopped:
                return
            self._waiting.append(work)
            if self._idle >= len(self._waiting) or self._threads == self._most:
                self._changed.notify()
                return
            self._threads += 1
        try:
            threading.Thread(target=self._run, name=self._name, daemon=True).start()
        except RuntimeError:  # the system has none left
            with self._changed:
                self._threads -= 1
                if self._threads:  # another one will come to it
                    return
                self._waiting.remove(work)
            raise

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
    """Carries out effects. Thread-safe.

    Calls of the store have pools by what waits for them: where it hangs, those of one kind must not keep the others from it.
    """

    def __init__(self) -> None:
        self._plans = DaemonPool(_PLANS, "push-plan")
        self._images = DaemonPool(IMAGES, "push-image")
        self._digests = DaemonPool(_DIGESTS, "push-digest")
        self._uploads = DaemonPool(_UPLOADS, "push-upload")
        self._reads = DaemonPool(_READS, "push-read")
        self._leases = DaemonPool(_LEASES, "push-lease")
        self._confirmations = DaemonPool(_CONFIRMATIONS, "push-confirm")
        self._publications = DaemonPool(_PUBLICATIONS, "push-publish")
        self._cleanings = DaemonPool(_CLEANINGS, "push-clean")
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
            case do.Upload() | do.UploadDigests():
                return self._uploads
            case do.Claim() | do.Renew():
                return self._leases
            case do.Confirm():
                return self._confirmations
            case do.WriteManifestAndPublish() | do.HandIn() | do.TellReplicas():
                return self._publications
            case do.GiveUp():
                return self._cleanings
            case do.HandOver():
                return self._handovers
            case _:
                return self._reads

    def stop(self, seconds: float) -> None:
        """Begin nothing more, and wait for what is being done, at most for so long."""
        self._stopping.set()
        pools = (
            self._plans,
            self._images,
            self._digests,
            self._uploads,
            self._reads,
            self._leases,
            self._confirmations,
            self._publications,
            self._cleanings,
            self._handovers,
        )
        for pool in pools:
            pool.stop()
        deadline = time.monotonic() + seconds
        for pool in pools:
            pool.join(max(deadline - time.monotonic(), 0.0))
