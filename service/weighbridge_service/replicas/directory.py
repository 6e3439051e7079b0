"""Directory of the replicas of the service over one store, for a replica that leaves while the store is unavailable.

Each replica with an address writes an object ``replicas/<boot>`` with that address and an expiry, renews it every
minute, reads and remembers the objects of the others, and deletes its own when it stops. A new replica calls the others
at its start, so that they know it at once. The directory is only a hint: a replica in it may refuse a call, or may no
longer exist.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass

from weighbridge.errors import DataLoss, NotFound, WeighbridgeError
from weighbridge_service.plan.declarations import Home
from weighbridge_service.runtime.clock import unix_ms
from weighbridge_storage.documents import strict_json
from weighbridge_storage.documents.names import REPLICAS, replica_key
from weighbridge_storage.stores.objects import ObjectStore

log = logging.getLogger(__name__)

_RENEW_SECONDS = 60.0
_VALID_MS = 300_000
_KEPT_MS = 86_400_000
"""Milliseconds after which another replica deletes an expired entry."""
_CLOSE_SECONDS = 2.0
"""Seconds for which a stopping process waits until its entry is deleted."""


@dataclass(frozen=True, slots=True)
class ReplicaEntry:
    """Entry of a replica, written by itself.

    Attributes:
        home: the replica.
        until_ms: expiry of the entry, in milliseconds since 1970 UTC.
    """

    home: Home
    until_ms: int

    def to_json(self) -> bytes:
        """Encode the entry as the object in the store."""
        return strict_json.encode(
            {
                "format": 1,
                "address": self.home.address,
                "boot": self.home.boot,
                "until_ms": self.until_ms,
            }
        )

    @staticmethod
    def from_json(data: bytes, where: str) -> ReplicaEntry:
        """Decode an object from `to_json`.

        Raises DataLoss if it is malformed, FailedPrecondition if it has another format.
        """
        fields = strict_json.decode(data, where)
        fields.check_format(1)
        return ReplicaEntry(Home(fields.text("address"), fields.text("boot")), fields.integer("until_ms"))


def others_of(home: Home, entries: Iterable[ReplicaEntry], now_ms: int) -> tuple[Home, ...]:
    """The replicas that a replica may call, one for each address. The replica with the latest expiry comes first.

    Args:
        home: the calling replica, which is excluded.
        entries: entries of replicas.
        now_ms: current time in milliseconds since 1970 UTC.
    """
    newest = sorted(entries, key=lambda entry: (-entry.until_ms, entry.home.boot))
    found: dict[str, Home] = {}
    for entry in newest:
        if entry.until_ms >= now_ms and entry.home.address != home.address:
            found.setdefault(entry.home.address, entry.home)
    return tuple(found.values())


class Directory:
    """This replica's entry, and its knowledge of the others. Thread-safe.

    Args:
        store: store of the entries.
        home: this process.
        greet: calls another replica, which then knows this one.
        clock: returns milliseconds since 1970 UTC.
    """

    def __init__(
        self,
        store: ObjectStore,
        home: Home,
        greet: Callable[[Home], object],
        clock: Callable[[], int] = unix_ms,
    ) -> None:
        self._store = store
        self._home = home
        self._greet = greet
        self._clock = clock
        self._lock = threading.Lock()
        self._known: dict[Home, ReplicaEntry] = {}
        self._left: set[Home] = set()  # until their entries are gone
        self._met: dict[
            Home, ReplicaEntry
        ] = {}  # since the start of the last refresh, which may have read the store before their entries were written
        self._read_at_ms = 0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="directory", daemon=True)

    def start(self) -> None:
        """Start the thread that renews this replica's entry and reads those of the others."""
        self._thread.start()

    def close(self) -> None:
        """Stop the thread, which deletes this replica's entry. Waits at most `_CLOSE_SECONDS` for that."""
        self._closing.set()
        if self._thread.ident is not None:
            self._thread.join(_CLOSE_SECONDS)

    def others(self) -> tuple[Home, ...]:
        """The other replicas, as last read from the store. Stopping replicas come last. Does not read the store."""
        with self._lock:
            known = others_of(self._home, self._known.values(), self._read_at_ms)
            return tuple(sorted(known, key=self._left.__contains__))

    def staying(self) -> frozenset[Home]:
        """The other replicas, except those that have announced that they are stopping."""
        return frozenset(self.others()) - self._left

    def left(self, home: Home) -> bool:
        """Record that another replica has announced that it is stopping. Returns whether this was new."""
        with self._lock:
            known = home in self._left
            self._left.add(home)
            return not known

    def met(self, home: Home) -> None:
        """Record that another replica has called this one."""
        if home.address and home.boot:
            with self._lock:
                self._known[home] = self._met[home] = ReplicaEntry(home, self._clock() + _VALID_MS)

    def refresh(self) -> None:
        """Renew this replica's entry, and read those of the others.

        Raises:
            WeighbridgeError: the store is unavailable. The known replicas are unchanged.
        """
        entry = ReplicaEntry(self._home, self._clock() + _VALID_MS)
        with self._lock:
            self._met = {}
        self._store.put(replica_key(self._home.boot), entry.to_json(), mode="overwrite")
        found = {}
        for key in list(self._store.list(REPLICAS)):
            with suppress(NotFound):  # it was deleted after the listing
                try:
                    there = ReplicaEntry.from_json(self._store.get(key)[0], key)
                except DataLoss as error:
                    log.warning("%s is skipped: %s", key, error.message)
                    continue
                if there.until_ms + _KEPT_MS < entry.until_ms - _VALID_MS:
                    self._store.delete(key)
                found[there.home] = there
        with self._lock:
            self._known, self._read_at_ms = {**self._met, **found}, self._clock()
            self._left &= self._known.keys()

    def _run(self) -> None:
        greeted: set[Home] = set()
        while True:
            try:
                self.refresh()
            except WeighbridgeError as error:
                log.info("other replicas cannot be looked up: %s", error.message)
            except Exception:  # the thread must survive for the next refresh
                log.exception("other replicas cannot be looked up")
            for other in self.others():
                if other not in greeted and not self._closing.is_set():
                    greeted.add(other)
                    with suppress(WeighbridgeError):  # it reads the store within a minute
                        self._greet(other)
            if self._closing.wait(_RENEW_SECONDS):
                break
        with suppress(WeighbridgeError):
            self._store.delete(replica_key(self._home.boot))
