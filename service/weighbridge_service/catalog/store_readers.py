"""Versions that this process is reading from the store, and the leases of those that need one.

All readers of a version share one lease. It is written when the oldest reader has been reading for a quarter of the
grace time, and again after every further quarter, as `weighbridge_storage.head.leases` explains; short reads write
nothing.
"""

from __future__ import annotations

import itertools
import logging
import threading
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field

from weighbridge.errors import WeighbridgeError
from weighbridge_service.runtime.clock import unix_ms
from weighbridge_storage.documents.entries import VersionEntry
from weighbridge_storage.documents.names import ModelName
from weighbridge_storage.head.leases import Grace, write_lease
from weighbridge_storage.memory.images import ImageHold
from weighbridge_storage.stores.objects import ObjectStore

log = logging.getLogger(__name__)

DEFAULT_GRACE = Grace(900_000)
_ROUNDS = 4
"""Number of checks for due leases in each quarter of the grace time."""
_LONGEST_ROUND_S = 15.0


@dataclass
class _Use:
    """Readers of one version. All times are in milliseconds since 1970 UTC.

    Attributes:
        since_ms: when each open reader began, by its serial number.
        visited_since_ms: when visitors began, which call again and again and never report their end.
        visited_ms: time of the last visit; None if there was none.
        written_ms: when the lease was last written; None if it was not.
        unheard_ms: until when clients that read from the store directly may be reading.
        kept_ms: until when the last written lease is valid.
        writing: lock that is held while a lease is written.
    """

    since_ms: dict[int, int] = field(default_factory=dict)
    visited_since_ms: int = 0
    visited_ms: int | None = None
    written_ms: int | None = None
    unheard_ms: int = 0
    kept_ms: int = 0
    writing: threading.Lock = field(default_factory=threading.Lock)

    def began_ms(self, now_ms: int, quarter_ms: int) -> int | None:
        """When the oldest active reader began; None if there is no active reader."""
        began = list(self.since_ms.values())
        if self.visited_ms is not None and now_ms - self.visited_ms <= quarter_ms:
            began.append(self.visited_since_ms)
        return min(began, default=None)


class StoreReaders:
    """Readers of one process, and their leases. Thread-safe.

    Every read of a durable version's files (a pull, a restore, an export, a download) begins and ends here. Manifests
    and headers may be read without it.

    Args:
        store: the object store that holds the versions.
        grace: the grace time of all replicas.
        clock: returns the time in milliseconds since 1970 UTC.
    """

    def __init__(self, store: ObjectStore, grace: Grace, clock: Callable[[], int] = unix_ms) -> None:
        self._store = store
        self.grace = grace
        self.clock = clock
        self._id = uuid.uuid4().hex
        self._lock = threading.Lock()
        self._uses: dict[tuple[ModelName, int], _Use] = {}
        self._begun = itertools.count()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def count(self) -> int:
        """Number of open readers, without visitors."""
        with self._lock:
            return sum(len(use.since_ms) for use in self._uses.values())

    def begin(self, model: ModelName, number: int, since_ms: int) -> ImageHold:
        """Begin a read, which ends when the caller releases the hold.

        Args:
            model: name of the model.
            number: number of the version.
            since_ms: when the read counts as begun (`reading_since`).
        """
        place, reader = (model, number), next(self._begun)
        with self._lock:
            self._use(place).since_ms[reader] = since_ms
        self._write_if_due(place)

        def end() -> None:
            with self._lock:
                use = self._uses.get(place)
                if use is not None:
                    del use.since_ms[reader]

        return ImageHold(end)

    def visit(self, model: ModelName, number: int, since_ms: int) -> None:
        """Record a visit of a reader that calls again and again, and does not report its end.

        Visits end when none comes within a quarter of the grace time. Arguments as `begin`; only the first visit uses
        ``since_ms``.
        """
        place = (model, number)
        now_ms = self.clock()
        with self._lock:
            use = self._use(place)
            if use.visited_ms is None or now_ms - use.visited_ms > self.grace.quarter_ms:
                use.visited_since_ms = since_ms
            use.visited_ms = now_ms
        self._write_if_due(place)

    def extend(self, model: ModelName, number: int, ms: int) -> None:
        """Extend the lease for a client that may begin to read from the store directly within ``ms`` milliseconds, and
        makes no more calls.

        The lease is extended to twice that time from now, so that it is written at most once in that time.
        """
        place = (model, number)
        now_ms = self.clock()
        with self._lock:
            use = self._use(place)
            if use.unheard_ms < now_ms + ms:
                use.unheard_ms = now_ms + 2 * ms
        self._write_if_due(place)

    def renew(self) -> None:
        """Write the leases that are due, and forget versions without readers."""
        with self._lock:
            places = list(self._uses)
        for place in places:
            self._write_if_due(place)

    def close(self) -> None:
        """Write no more leases; written ones expire."""
        self._closing.set()
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join()

    def _use(self, place: tuple[ModelName, int]) -> _Use:
        if self._thread is None and not self._closing.is_set():
            self._thread = threading.Thread(target=self._run, name="leases", daemon=True)
            self._thread.start()
        return self._uses.setdefault(place, _Use())

    def _write_if_due(self, place: tuple[ModelName, int]) -> None:
        now_ms, quarter_ms = self.clock(), self.grace.quarter_ms
        with self._lock:
            use = self._uses.get(place)
            if use is None:
                return
            began_ms = use.began_ms(now_ms, quarter_ms)
            unheard = use.unheard_ms > now_ms
            if began_ms is None and not unheard:
                del self._uses[place]
                return
            last_ms = max(now_ms if began_ms is None else began_ms, use.written_ms or 0)
            if now_ms - last_ms < quarter_ms and use.kept_ms >= use.unheard_ms:
                return
            before = use.written_ms, use.kept_ms
            use.written_ms, use.kept_ms = now_ms, max(now_ms + self.grace.ms, use.unheard_ms)
            until_ms = use.kept_ms
        model, number = place
        try:
            with use.writing:  # an older lease must not overwrite a newer one
                with self._lock:
                    until_ms = max(until_ms, use.kept_ms)
                write_lease(self._store, model, number, self._id, until_ms)
        except WeighbridgeError as error:
            with self._lock:
                use.written_ms, use.kept_ms = before
            log.warning("the lease on %s@%d could not be written: %s", model, number, error)

    def _run(self) -> None:
        pause_s = min(self.grace.quarter_ms / 1000 / _ROUNDS, _LONGEST_ROUND_S)
        while not self._closing.wait(pause_s):
            self.renew()


def reading_since(entry: VersionEntry | None, asked_ms: int) -> int:
    """Time in milliseconds since 1970 UTC at which a read of a version counts as begun.

    Args:
        entry: entry of the version; None if it is not durable yet.
        asked_ms: a time before the read of the head that contains the entry.
    """
    return min(asked_ms, entry.retired_ms) if entry is not None and entry.retired else asked_ms
