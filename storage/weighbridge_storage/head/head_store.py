"""Reader and writer of the heads of models, with their histories.

`HeadStore` reads a head, applies a change, and writes it back with compare-and-swap. If the head has become too long,
it moves a part of it to the tree of its history, whose new nodes are written before the head (`history`).
"""

from __future__ import annotations

import math
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from weighbridge._core.lru import Cache
from weighbridge._core.pauses import DICE, Pauses
from weighbridge._core.references import TRAINING
from weighbridge.errors import (
    Conflict,
    DataLoss,
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    Unavailable,
    WeighbridgeError,
)
from weighbridge_storage.documents import document_digests
from weighbridge_storage.documents.names import ModelName
from weighbridge_storage.head.head import REMEMBERED_WRITES, Head
from weighbridge_storage.head.head_changes import stamp
from weighbridge_storage.head.history import MOST_RECENT, History, NodeMissing, settled
from weighbridge_storage.head.history_nodes import Node, NodeRef
from weighbridge_storage.head.history_store import NodeStore
from weighbridge_storage.stores.objects import IfMatch, ObjectStore, PutMode
from weighbridge_storage.stores.outcomes import outcome, unknown

_CACHED_BYTES = 8 << 20
"""Maximum bytes of text of the cached heads. Parsed heads use about four times as much memory."""
_PAUSES = Pauses(first=0.002, longest=0.25)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Known:
    """A head that was read.

    Attributes:
        head: the head.
        etag: its ETag in the store.
        nbytes: length of its text.
        asked, read: when its last read began and ended, in seconds of the monotonic clock.
    """

    head: Head
    etag: str
    nbytes: int
    asked: float
    read: float


class HeadStore:
    """The heads of all models in a store.

    Args:
        store: the store that contains them. Its conditional writes must be atomic.
        patience_s: seconds for which an update is retried while other writers win or the store fails.
        most_recent: maximum number of entries and removals in a head that this object writes.
    """

    def __init__(self, store: ObjectStore, *, patience_s: float = 30.0, most_recent: int = MOST_RECENT) -> None:
        self._store = store
        self._patience_s = patience_s
        self._most_recent = most_recent
        self._nodes = NodeStore(store)
        self._changed = -math.inf
        self._remembering = threading.Lock()
        self._known: Cache[_Known] = Cache(_CACHED_BYTES, lambda known: known.nbytes)

    def read(self, model: ModelName) -> tuple[Head, str] | None:
        """A model's head and its etag; None if the model does not exist or is deleted. Raises as `read_any`."""
        found = self.read_any(model)
        return None if found is None or found[0].deleted else found

    def read_any(self, model: ModelName) -> tuple[Head, str] | None:
        """As `read`, but also returns the head of a deleted model.

        Raises:
            DataLoss: the head is damaged; the message says how to rebuild it.
            FailedPrecondition: it has another format, or requires a feature that is unknown here; the message states
                the fix.
            WeighbridgeError: as `ObjectStore.get`.
        """
        asked = time.monotonic()
        try:
            data, etag = self._store.get(model.head_key)
        except NotFound:
            self._known.drop(model)
            return None
        known = self._known.get(model)
        # it is read far more often than it changes
        there = known is not None and known.etag == etag
        head = known.head if known is not None and there else Head.from_json(data, model.head_key)
        self._remember(model, _Known(head, etag, len(data), asked, time.monotonic()))
        return head, etag

    def _remember(self, model: ModelName, found: _Known) -> None:
        """Keep the newer of two heads: if two reads overlap, the read that ends last may have returned the older
        head.
        """
        with self._remembering:
            known = self._known.get(model)
            after = known is None or found.asked >= known.read
            if known is None or after or found.head.generation >= known.head.generation:
                self._known.put(model, found)

    def last_read(self, model: ModelName) -> Head | None:
        """The head that was read last; None if none was read or it was evicted.

        Does not make a request to the store.
        """
        known = self._known.get(model)
        return None if known is None else known.head

    def read_lately(self, model: ModelName, seconds: float) -> Head | None:
        """The head, if it was read within the last ``seconds`` and this replica has not written a head since.

        Does not access the store.
        """
        known = self._known.get(model)
        since = max(time.monotonic() - seconds, self._changed)
        return None if known is None or known.asked < since else known.head

    def history(self, model: ModelName) -> History | None:
        """The history of a model; None if the model does not exist. Raises as `read`."""
        found = self.read(model)
        return None if found is None else self.history_of(model, found[0])

    def history_of_any(self, model: ModelName) -> History | None:
        """As `history`, but also returns the history of a deleted model."""
        found = self.read_any(model)
        return None if found is None else self.history_of(model, found[0])

    def history_of(self, model: ModelName, head: Head) -> History:
        """The history of a head. If nodes of this head have been deleted, the history uses a newer head."""
        return History(head, partial(self.load_node, model), partial(self._newer, model))

    def load_node(self, model: ModelName, ref: NodeRef) -> Node:
        """A node of a model's history. Raises as `NodeStore.load`."""
        return self._nodes.load(model, ref)

    def update(
        self,
        model: ModelName,
        change: Callable[[Head], tuple[Head, T]],
        *,
        create: bool = False,
        deleted: bool = False,
    ) -> T:
        """As `edit`, for a change that needs only the head itself."""
        return self.edit(model, lambda history: change(history.head), create=create, deleted=deleted)

    def edit(
        self,
        model: ModelName,
        change: Callable[[History], tuple[Head, T]],
        *,
        create: bool = False,
        deleted: bool = False,
    ) -> T:
        """Change a model's head exactly once, also if other writers change it at the same time.

        If the response to a write is lost or wrong, the write counts as done if its id is in the head afterwards. A
        change is never applied twice.

        Args:
            model: the model.
            change: returns the new head and a result. It may be called several times, so it must not have side effects.
                Its errors end the update, except Unavailable and DeadlineExceeded from reads of the history, after
                which it is called again. If it returns the head unchanged, the head is not written.
            create: whether to start from ``Head()`` if the model does not exist, or from the head of a deleted model.
            deleted: whether to change the head of a deleted model too.

        Returns:
            The result of the call of ``change`` that was written.

        Raises:
            NotFound: the model does not exist, and ``create`` is not set.
            Conflict: other writers were faster throughout `patience_s`; nothing was changed.
            DataLoss: a node of the history is missing.
            DeadlineExceeded: the store failed, and it is unknown whether the change was made.
            Unavailable: the store cannot be read, or does not accept nodes; nothing was changed.
            WeighbridgeError: as `ObjectStore.put`.
        """
        deadline = time.monotonic() + self._patience_s
        results: dict[str, T] = {}
        found = self.read_any(model)
        attempt = 0
        doubtful = unsure = False
        while True:
            if not create and (found is None or (found[0].deleted and not deleted)):
                raise NotFound(f"there is no model {model}", fix="register it first")
            base = Head() if found is None else found[0]
            mode: PutMode = "create" if found is None else IfMatch(found[1])
            failure: WeighbridgeError
            try:
                changed, result = change(History(base, partial(self.load_node, model)))
                if changed == base:
                    return result
                write_id = uuid.uuid4().hex
                text = self.settle(model, stamp(changed, base, write_id)).to_json()
            except NodeMissing as error:
                failure = _missing(error)  # unless there is a newer head, which leads elsewhere
            except (Unavailable, DeadlineExceeded) as error:
                failure = error
            else:
                results[write_id] = result
                try:
                    try:
                        self._store.put(model.head_key, text, mode=mode)
                    finally:
                        self._changed = time.monotonic()
                    return result
                except (Conflict, Unavailable, DeadlineExceeded) as error:
                    failure = error
                    # A store that raises Conflict has verified it: our write is not in the head, no matter how often
                    # others change it.
                    doubtful = doubtful or not isinstance(error, Conflict)
                    unsure = unsure or isinstance(error, DeadlineExceeded)
            # Read the head at once, while it still records this write if the write was carried out, and again after a
            # pause, to get the newest head. A write that timed out may be carried out between the two reads, so look
            # for all writes each time.
            seen = base.generation
            for pause_s in (0.0, _pause_s(attempt)):
                time.sleep(pause_s)
                found = self._read_back(model, deadline)
                now = Head() if found is None else found[0]
                landed = results.keys() & set(now.writes)
                # Once the generation has advanced, writes for an earlier generation can no longer be carried out.
                moved = seen == base.generation and now.generation > seen
                forgotten = now.generation > seen + REMEMBERED_WRITES
                match outcome(landed=bool(landed), doubtful=doubtful, moved=moved, forgotten=forgotten):
                    case "written":
                        return results[landed.pop()]
                    case "unknown" if moved:
                        raise _unknown(model, "it was changed too often in the meantime")
                    case "conflict":
                        doubtful = unsure = False
                seen = now.generation
            stuck = seen == base.generation
            if time.monotonic() > deadline or (stuck and isinstance(failure, DataLoss)):
                if stuck:
                    raise (_unknown(model, failure.message) if unsure else failure) from failure
                raise Conflict(
                    f"other writers kept changing {model} for {self._patience_s:g} s", fix="try again"
                ) from failure
            attempt += 1

    def _read_back(self, model: ModelName, deadline: float) -> tuple[Head, str] | None:
        """As `read_any`, but retry until ``deadline`` while the store fails."""
        attempt = 0
        while True:
            try:
                return self.read_any(model)
            except (Unavailable, DeadlineExceeded) as error:
                if time.monotonic() > deadline:
                    raise _unknown(model, error.message) from error
            time.sleep(_pause_s(attempt))
            attempt += 1

    def settle(self, model: ModelName, head: Head) -> Head:
        """A head with the same history that is not too long. On return, the nodes that it needs are in the store.

        Args:
            model: the model.
            head: the head to be written next, with its generation.

        Raises:
            NodeMissing: a node of the history is missing.
            WeighbridgeError: as `NodeStore.load` and `NodeStore.write`.
        """
        after, nodes = settled(head, partial(self.load_node, model), self._most_recent)
        self._nodes.write(model, nodes)
        return after

    def models(self, after: str = "") -> Iterator[ModelName]:
        """Models after ``after``, by namespace and name. Does not read heads.

        The result may include a name whose head was never written or is lost.

        Raises:
            WeighbridgeError: as `ObjectStore.folders`.
        """
        namespace_before, _, name_before = after.partition("/")
        for namespace in sorted(self._store.folders("models/")):
            if namespace < namespace_before:
                continue
            for model in self._names(namespace, ""):
                if (namespace, model.name) > (namespace_before, name_before):
                    yield model

    def everything(self) -> Iterator[ModelName]:
        """All models, then all parts of models, that have or had a head. Raises as `models`."""
        yield from self.models()
        for namespace in sorted(self._store.folders(f"{TRAINING}/")):
            yield from self._names(namespace, TRAINING)

    def everything_of(self, namespace: str) -> list[ModelName]:
        """As `everything`, for one namespace."""
        return [*self._names(namespace, ""), *self._names(namespace, TRAINING)]

    def _names(self, namespace: str, part: str) -> list[ModelName]:
        folders = sorted(self._store.folders(f"{part or 'models'}/{namespace}/"))
        found = (_name_or_none(namespace, name, part) for name in folders)
        return [name for name in found if name is not None]

    def examined(self) -> Iterator[tuple[ModelName, DataLoss | FailedPrecondition | None]]:
        """Each model or part of a model, with the error if its head cannot be read (damaged, or of another release);
        None if it can.

        Raises:
            WeighbridgeError: as `ObjectStore.folders` and `ObjectStore.get`.
        """
        for model in self.everything():
            try:
                self.read(model)
            except (DataLoss, FailedPrecondition) as error:
                yield model, error
            else:
                yield model, None

    def _newer(self, model: ModelName, head: Head) -> Head:
        """A newer head, after a node was found missing. Raises DataLoss if no newer head exists."""
        found = self.read_any(model)
        if found is None or found[0].generation == head.generation:
            raise _missing(f"the history of {model}")
        return found[0]


def _pause_s(attempt: int) -> float:
    """Random pause in seconds.

    It grows with the number of failed attempts, so that writers do not stay synchronised.
    """
    return _PAUSES.after(attempt, DICE.random())


def _missing(what: object) -> DataLoss:
    return DataLoss(f"{what} is missing from the store, or a part of it", fix=document_digests.REPAIR)


def _unknown(model: ModelName, why: str) -> DeadlineExceeded:
    return unknown(f"changing {model}", why)


def _name_or_none(namespace: str, name: str, part: str) -> ModelName | None:
    try:
        return ModelName(namespace, name, part)
    except InvalidArgument:
        return None
