"""Bytes that namespaces hold, and the check for capacity for a new version.

A version counts from when it is opened, before its first byte arrives, until it is aborted or its objects are deleted.
So a retired version still counts during its grace time. All replicas share one ledger in the store
(`weighbridge_storage.head.ledger`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from weighbridge._core.lru import Cache
from weighbridge._core.text.sizes import readable_size
from weighbridge.errors import DataLoss, FailedPrecondition, ResourceExhausted, WeighbridgeError
from weighbridge_service.runtime.clock import unix_ms
from weighbridge_storage.documents.names import ModelName
from weighbridge_storage.head.head_store import HeadStore
from weighbridge_storage.head.history import History
from weighbridge_storage.head.ledger import Amount, Ledger, LedgerStore
from weighbridge_storage.stores.objects import ObjectStore

log = logging.getLogger(__name__)

_COUNTED_SECONDS = 3600.0
"""Maximum age of a count of all heads.

Services without the limit change heads, but not the ledger, so counts become stale.
"""
_KNOWN_NODES = 100_000
_READS_AT_ONCE = 16
_REST = 10.0
_LEAST_COUNT_SECONDS = 0.1
"""Minimum duration of a count for computing its rest."""


class StoredBytes:
    """Bytes that namespaces hold. Thread-safe.

    Args:
        store: store of the ledgers.
        heads: heads of all models.
        limits: returns the current limits in bytes, by namespace.
        rest: after a count, refused calls start no new one for this many times the count's duration, since callers may
            retry at once.

    Attributes:
        limits: as given.
    """

    def __init__(
        self,
        store: ObjectStore,
        heads: HeadStore,
        limits: Callable[[], Mapping[str, int]],
        *,
        rest: float = _REST,
    ) -> None:
        self._ledgers = LedgerStore(store)
        self._heads = heads
        self.limits = limits
        self._rest = rest
        self._below: Cache[int] = Cache(_KNOWN_NODES)
        self._lock = threading.Lock()
        self._rests: dict[str, float] = {}
        self._seen: dict[str, int] = {}

    def seen(self) -> dict[str, int]:
        """Bytes by namespace, as this process has last read them. Does not read the store."""
        return dict(self._seen)  # a copy: another thread may add a namespace while the caller iterates

    def is_limited(self, name: ModelName) -> bool:
        """Whether the namespace of a model has a limit."""
        return name.namespace in self.limits()

    def check_room(self, name: ModelName, nbytes: int) -> None:
        """Raise ResourceExhausted if the namespace has no capacity for a new version of `nbytes` bytes."""
        limit = self.limits().get(name.namespace)
        if limit is None:
            return
        held = self.held(name.namespace)
        if held + nbytes > limit and time.monotonic() >= self._rests.get(name.namespace, 0.0):
            held = self._count(name.namespace)
        if held + nbytes > limit:
            raise _full(name, held, nbytes, limit)

    def take_room(self, name: ModelName, nbytes: int) -> None:
        """Record a version of `nbytes` bytes that was opened.

        Raises ResourceExhausted if concurrent calls have taken the capacity.
        """
        limit = self.limits().get(name.namespace)
        if limit is None:
            return
        held = self._note(name)
        if held > limit:
            held = self._count(name.namespace)
        if held > limit:
            raise _full(name, held - nbytes, nbytes, limit)

    def note(self, name: ModelName) -> None:
        """Record that a version was aborted, or the model collected or deleted, so that its capacity is free.

        Errors are only logged.
        """
        if self.is_limited(name):
            try:
                self._note(name)
            except WeighbridgeError as error:
                log.warning("the stored bytes of namespace %s could not be recorded: %s", name.namespace, error)

    def held(self, namespace: str) -> int:
        """Bytes that a namespace holds. May be slightly too high just after a deletion or an abort."""
        ledger = self._ledgers.read(namespace)
        if ledger.counted_ms + _COUNTED_SECONDS * 1000 < unix_ms():
            return self._count(namespace)
        return self._saw(namespace, ledger)

    def models(self, namespace: str) -> list[str]:
        """Full names of the models in a namespace's ledger."""
        return [f"{namespace}/{name}" for name in self._ledgers.read(namespace).amounts]

    def _note(self, name: ModelName) -> int:
        """Write the bytes that a model holds into the ledger, and return the bytes of the namespace."""
        history = self._heads.history_of_any(name)
        amount = Amount(0, 0) if history is None else self._amount(history)
        noted = self._ledgers.update(name.namespace, lambda ledger: ledger.noted(name.second, amount))
        return self._saw(name.namespace, noted)

    def _amount(self, history: History) -> Amount:
        return Amount(history.head.generation, history.nbytes(self._below))

    def _count(self, namespace: str) -> int:
        """Read all heads of a namespace, write their bytes into its ledger, and return the bytes of the namespace."""
        with self._lock:  # one count at a time
            begun = time.monotonic()
            before = self._ledgers.read(namespace)
            names = self._heads.everything_of(namespace)
            with ThreadPoolExecutor(_READS_AT_ONCE, thread_name_prefix="count") as pool:
                found = pool.map(partial(self._amount_of, before), names)
                amounts = {name.second: amount for name, amount in zip(names, found, strict=True) if amount}
            now_ms = unix_ms()
            after = self._ledgers.update(namespace, lambda ledger: ledger.counted(before, amounts, now_ms))
            took = time.monotonic() - begun
            self._rests[namespace] = begun + took + max(took, _LEAST_COUNT_SECONDS) * self._rest
            return self._saw(namespace, after)

    def _amount_of(self, before: Ledger, name: ModelName) -> Amount | None:
        """Bytes that a model holds; None if there is no model of this name.

        A model that cannot be read keeps its previous amount.
        """
        try:
            history = self._heads.history_of_any(name)
            return None if history is None else self._amount(history)
        except (DataLoss, FailedPrecondition) as error:
            log.error("the stored bytes of %s cannot be counted: %s", name, error)
            return before.amounts.get(name.second)

    def _saw(self, namespace: str, ledger: Ledger) -> int:
        self._seen[namespace] = held = ledger.nbytes
        return held


def _full(name: ModelName, held: int, nbytes: int, limit: int) -> ResourceExhausted:
    return ResourceExhausted(
        f"namespace {name.namespace} holds {readable_size(held)} of {readable_size(limit)}, and a version of {name} "
        f"takes {readable_size(nbytes)} more",
        fix="delete versions that are not needed, or let a retention do so (`weighbridge "
        "retention`): their room is free once they are "
        "collected; or let the service's policy give the namespace more `stored`",
    )
