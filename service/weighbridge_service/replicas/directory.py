"""Directory of the replicas of the service over one store, for a replica that leaves while the store is away.

Each replica that is reached by others writes an object ``replicas/<boot>``, with its address and the time until which that counts,
renews it every minute, reads those of the others, remembers them, and removes its own when it ends. What one has seen it tells by a
call at its start, so the others need not look. Nothing is decided by the directory: who is in it is asked, and may refuse or be gone.
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
"""How long an entry that does not count any more is left alone."""
_CLOSE_SECONDS = 2.0
"""How long the end of the process waits for its entry to be removed."""


@dataclass(frozen=True, slots=True)
class ReplicaEntry:
    """What a replica says of itself.

    Attributes:
        home: the replica.
        until_ms: until when that counts, in milliseconds since 1970 UTC.
    """

    home: Home
    until_ms: int

    def to_json(self) -> bytes:
        """The object in the store."""
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
        """What `to_json` gave. Raises DataLoss if it is malformed, FailedPrecondition if it has another format."""
        fields = strict_json.decode(data, where)
        fields.check_format(1)
        return ReplicaEntry(Home(fields.text("address"), fields.text("boot")), fields.integer("until_ms"))


def others_of(home: Home, entries: Iterable[ReplicaEntry], now_ms: int) -> tuple[Home, ...]:
    """The replicas that another one may ask, the one that was heard of last first; one for each address.

    Args:
        home: the replica that asks.
        entries: what replicas have said of themselves.
        now_ms: milliseconds since 1970 UTC.
    """
    newest = sorted(entries, key=lambda entry: (-entry.until_ms, entry.home.boot))
    found: dict[str, Home] = {}
    for entry in newest:
        if entry.until_ms >= now_ms and entry.home.address != home.address:
            found.setdefault(entry.home.address, entry.home)
    return tuple(found.values())


class Directory:
    """This replica's entry, and what it knows of the others. Thread-safe.

    Args:
        store: where the entries lie.
        home: this process.
        greet: calls another replica, which learns of this one by that.
        clock: gives milliseconds since 1970 UTC.
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
        ] = {}  # since the last look began: it may have been too early to see their entries
        self._read_at_ms = 0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="directory", daemon=True)

    def start(self) -> None:
        """Enter this replica, and keep up with the others from now on."""
        self._thread.start()

    def close(self) -> None:
        """Take this replica's entry away, if the store takes that within seconds."""
        self._closing.set()
        if self._thread.ident is not None:
            self._thread.join(_CLOSE_SECONDS)

    def others(self) -> tuple[Home, ...]:
        """The other replicas, as of the last time that the store could be read, those that stop last. Asks nothing of the store."""
        with self._lock:
            known = others_of(self._home, self._known.values(), self._read_at_ms)
            return tuple(sorted(known, key=self._left.__contains__))

    def staying(self) -> frozenset[Home]:
        """The other replicas but for those that have said that they stop."""
        return frozenset(self.others()) - self._left

    def left(self, home: Home) -> bool:
        """Note that another replica has said that it stops. Returns whether that is news."""
        with self._lock:
            known = home in self._left
            self._left.add(home)
            return not known

    def met(self, home: Home) -> None:
        """Another replica has called this one."""
        if home.address and home.boot:
            with self._lock:
                self._known[home] = self._met[home] = ReplicaEntry(home, self._clock() + _VALID_MS)

    def refresh(self) -> None:
        """Renew this replica's entry, and read those of the others.

        Raises:
            WeighbridgeError: the store cannot be used; what was known before still is.
        """
        entry = ReplicaEntry(self._home, self._clock() + _VALID_MS)
        with self._lock:
            self._met = {}
        self._store.put(replica_key(self._home.boot), entry.to_json(), mode="overwrite")
        found = {}
        for key in list(self._store.list(REPLICAS)):
            with suppress(NotFound):  # it has left just now
                try:
                    there = ReplicaEntry.from_json(self._store.get(key)[0], key)
                except DataLoss as error:
                    log.warning("%s is passed over: %s", key, error.message)
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
            except Exception:  # the next time must come
                log.exception("other replicas cannot be looked up")
            for other in self.others():
                if other not in greeted and not self._closing.is_set():
                    greeted.add(other)
                    with suppress(WeighbridgeError):  # it looks itself within a minute
                        self._greet(other)
            if self._closing.wait(_RENEW_SECONDS):
                break
        with suppress(WeighbridgeError):
            self._store.delete(replica_key(self._home.boot))
