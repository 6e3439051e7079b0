"""Ledger of a namespace: the stored bytes of each of its models. With it, the models' heads need not be read.

It is derived from the heads: each amount comes from one generation of a model's head, and an amount of a later
generation replaces it. A replica that opens a version writes the amount of its model. So if two replicas open versions
concurrently, one of them sees both amounts. Deletions and failures may be recorded late; until then the total is too
high. Before a replica rejects a request because of the ledger, it counts the heads (`counted`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from weighbridge._core.pauses import DICE, Pauses
from weighbridge.errors import Conflict, DataLoss, DeadlineExceeded, NotFound, Unavailable
from weighbridge_storage.documents import document_digests, entry_json, strict_json
from weighbridge_storage.documents.entries import check_fields
from weighbridge_storage.documents.names import ledger_key
from weighbridge_storage.stores.objects import IfMatch, ObjectStore, PutMode

FORMAT = 1
FEATURES: frozenset[str] = frozenset()
"""The features that a ledger may require in this release: none yet."""
_PAUSES = Pauses(first=0.002, longest=0.25)


@dataclass(frozen=True, slots=True)
class Amount:
    """Amount of one model.

    Attributes:
        generation: generation of the head that it was computed from.
        nbytes: bytes of the weights of its versions (`History.nbytes`).
        extra: fields that this release does not know.
    """

    generation: int
    nbytes: int
    extra: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True)
class Ledger:
    """Amounts of the models of a namespace.

    Attributes:
        amounts: amounts by the second halves of the models' names.
        counted_ms: time at which all heads were last counted, in milliseconds since 1970 UTC; 0 if never.
        extra: fields that this release does not know.
    """

    amounts: Mapping[str, Amount] = field(default_factory=dict)
    counted_ms: int = 0
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Total bytes of all models."""
        return sum(amount.nbytes for amount in self.amounts.values())

    def noted(self, name: str, amount: Amount) -> Ledger:
        """The ledger with the amount of a model's head; the same ledger if it already contains an amount of this or a
        later generation.
        """
        there = self.amounts.get(name)
        if there is not None and there.generation >= amount.generation:
            return self
        return replace(self, amounts={**self.amounts, name: amount})

    def counted(self, before: Ledger, found: Mapping[str, Amount], now_ms: int) -> Ledger:
        """The ledger after all heads of the namespace were read.

        Args:
            before: the ledger before they were read. Amounts recorded since then stay.
            found: amounts of the models.
            now_ms: current time in milliseconds since 1970 UTC.
        """
        meanwhile = {name: each for name, each in self.amounts.items() if before.amounts.get(name) != each}
        after = replace(self, amounts=dict(found), counted_ms=now_ms)
        for name, amount in meanwhile.items():
            after = after.noted(name, amount)
        return after

    def to_json(self) -> bytes:
        """The ledger as the text of its object. The text ends with its digest."""
        return document_digests.encode(
            {
                **self.extra,
                "format": FORMAT,
                "requires": [],
                "counted_ms": self.counted_ms,
                "amounts": entry_json.named_to_json(self.amounts),
            }
        )

    @staticmethod
    def from_json(data: bytes, where: str) -> Ledger:
        """Read the text that `to_json` returned; ``where`` names it in errors.

        Raises:
            DataLoss: it is damaged or malformed.
            FailedPrecondition: it has another format, or requires a feature that is unknown here; the message states
                the fix.
        """
        document = document_digests.decode(data, where, FORMAT)
        document.required(FEATURES)
        with strict_json.malformed_as_data_loss(where):
            return Ledger(
                entry_json.named_from_json(Amount, document.table("amounts"), f"{where}, model"),
                document.integer("counted_ms"),
                document.rest(),
            )


class LedgerStore:
    """The ledgers in a store. Thread-safe.

    Args:
        store: the store that contains them.
        patience_s: seconds for which an update is retried while other writers win or the store fails.
    """

    def __init__(self, store: ObjectStore, *, patience_s: float = 10.0) -> None:
        self._store = store
        self._patience_s = patience_s

    def read(self, namespace: str) -> Ledger:
        """The ledger of a namespace; an empty ledger with ``counted_ms`` 0 if it does not exist or is damaged.

        Raises:
            FailedPrecondition: it was written by a newer release.
            WeighbridgeError: as `ObjectStore.get`.
        """
        return self._read(namespace)[0]

    def update(self, namespace: str, change: Callable[[Ledger], Ledger]) -> Ledger:
        """Change a ledger with compare-and-swap, and return it. Retries if other writers win.

        Args:
            namespace: the namespace.
            change: returns the new ledger. It must be idempotent. If it returns the ledger unchanged, the ledger is not
                written.

        Raises:
            Conflict: other writers won every attempt.
            WeighbridgeError: as `read` and `ObjectStore.put`.
        """
        give_up, attempt = time.monotonic() + self._patience_s, 0
        while True:
            there, mode = self._read(namespace)
            changed = change(there)
            if changed == there:
                return there
            try:
                self._store.put(ledger_key(namespace), changed.to_json(), mode=mode)
                return changed
            except (Conflict, Unavailable, DeadlineExceeded):
                if time.monotonic() > give_up:
                    raise
            time.sleep(_PAUSES.after(attempt, DICE.random()))
            attempt += 1

    def _read(self, namespace: str) -> tuple[Ledger, PutMode]:
        key = ledger_key(namespace)
        try:
            data, etag = self._store.get(key)
        except NotFound:
            return Ledger(), "create"
        try:
            return Ledger.from_json(data, key), IfMatch(etag)
        except DataLoss:  # it can be rebuilt from the heads
            return Ledger(), IfMatch(etag)
