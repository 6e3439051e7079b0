"""How do writers of a model's head take turns?

`HeadStore` reads the head, applies a change, and writes it back only if nobody else has meanwhile.
"""

from __future__ import annotations

import random
import threading
import time
import uuid
from collections.abc import Callable
from typing import TypeVar

from weighbridge.errors import (
    Conflict,
    DeadlineExceeded,
    InvalidArgument,
    NotFound,
    Unavailable,
)
from weighbridge_storage.head import REMEMBERED_WRITES, Head
from weighbridge_storage.head_changes import stamp
from weighbridge_storage.names import ModelName
from weighbridge_storage.objects import IfMatch, ObjectStore, PutMode

_KEPT_HEADS = 1024
_FIRST_PAUSE_S = 0.002
_LONGEST_PAUSE_S = 0.25

T = TypeVar("T")


class HeadStore:
    """The heads of all models in a store.

    Args:
        store: where they lie. It must keep its promises about conditional writes.
        patience_s: for how long an update goes on trying against other writers and a failing store, in seconds.
    """

    def __init__(self, store: ObjectStore, *, patience_s: float = 30.0) -> None:
        self._store = store
        self._patience_s = patience_s
        self._lock = threading.Lock()
        self._known: dict[ModelName, tuple[Head, str]] = {}

    def read(self, model: ModelName) -> tuple[Head, str] | None:
        """A model's head and its etag; None if there is no such model.

        Raises:
            DataLoss: the head is malformed.
            WeighbridgeError: as `ObjectStore.get`.
        """
        try:
            data, etag = self._store.get(model.head_key)
        except NotFound:
            return None
        with self._lock:
            known = self._known.get(model)
        if known is None or known[1] != etag:
            # heads grow with history, and are read far more often than they change
            known = Head.from_json(data, model.head_key), etag
            with self._lock:
                self._known.pop(model, None)
                self._known[model] = known
                while len(self._known) > _KEPT_HEADS:
                    del self._known[next(iter(self._known))]
        return known

    def update(
        self, model: ModelName, change: Callable[[Head], tuple[Head, T]], *, create: bool = False
    ) -> T:
        """Change a model's head exactly once, whoever else changes it at the same time.

        A write whose response is lost or misleading counts as done if its id stands in the head afterwards; no
        change is ever applied twice.

        Args:
            model: which model.
            change: gives the new head and a result. May be called several times, so it must have no effects of its
                own. What it raises ends the update. A head that it returns unchanged is not written.
            create: start from ``Head()`` if there is no such model.

        Returns:
            The result of the call of ``change`` that was written.

        Raises:
            NotFound: there is no such model, and ``create`` is not set.
            Conflict: other writers were faster for all of `patience_s`; nothing was changed.
            DeadlineExceeded: the store failed, and whether the change was made could not be found out.
            Unavailable: the store cannot be read; nothing was changed.
            WeighbridgeError: as `ObjectStore.put`.
        """
        give_up = time.monotonic() + self._patience_s
        results: dict[str, T] = {}
        found = self.read(model)
        attempt = 0
        doubtful = False
        while True:
            if found is None and not create:
                raise NotFound(f"there is no model {model}", fix="register it first")
            base = Head() if found is None else found[0]
            mode: PutMode = "create" if found is None else IfMatch(found[1])
            changed, result = change(base)
            if changed == base:
                return result
            write_id = uuid.uuid4().hex
            results[write_id] = result
            try:
                self._store.put(model.head_key, stamp(changed, base, write_id).to_json(), mode=mode)
                return result
            except (Conflict, Unavailable, DeadlineExceeded) as error:
                failure = error
                # A store that says Conflict has made sure of it: however often others change the head, ours is not in it.
                doubtful = doubtful or not isinstance(error, Conflict)
            # Look at once, while the head remembers this write if it landed, and again after a pause, for a head as
            # fresh as can be. A write that timed out may land between the two, so look for all of them each time.
            seen = base.generation
            for pause_s in (0.0, _pause_s(attempt)):
                time.sleep(pause_s)
                found = self._read_back(model, give_up)
                now = Head() if found is None else found[0]
                for landed in results.keys() & set(now.writes):
                    return results[landed]
                # Once the generation has moved on, no write that was made for an earlier one can land any more.
                if seen == base.generation and now.generation > seen:
                    if doubtful and now.generation > seen + REMEMBERED_WRITES:
                        raise _unknown_outcome(model, "it was changed too often meanwhile")
                    doubtful = False
                seen = now.generation
            if time.monotonic() > give_up:
                if seen == base.generation:
                    raise _unknown_outcome(model, failure.message) from failure
                raise Conflict(
                    f"other writers of {model} were faster for {self._patience_s:g} s", fix="try again"
                ) from failure
            attempt += 1

    def _read_back(self, model: ModelName, give_up: float) -> tuple[Head, str] | None:
        """As `read`, but tries until the time ``give_up`` while the store fails."""
        attempt = 0
        while True:
            try:
                return self.read(model)
            except (Unavailable, DeadlineExceeded) as error:
                if time.monotonic() > give_up:
                    raise _unknown_outcome(model, error.message) from error
            time.sleep(_pause_s(attempt))
            attempt += 1

    def list_models(self) -> list[ModelName]:
        """All models, by name.

        Raises:
            WeighbridgeError: as `ObjectStore.folders`.
        """
        return sorted(
            model
            for namespace in self._store.folders("models/")
            for name in self._store.folders(f"models/{namespace}/")
            if (model := _model_or_none(namespace, name)) is not None and self._has_head(model)
        )

    def _has_head(self, model: ModelName) -> bool:
        try:
            self._store.size(model.head_key)
        except NotFound:
            return False
        return True


def _pause_s(attempt: int) -> float:
    """A random pause, the longer the more attempts have failed, so that writers fall out of step."""
    return random.uniform(0, min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** min(attempt, 16)))


def _unknown_outcome(model: ModelName, why: str) -> DeadlineExceeded:
    return DeadlineExceeded(
        f"whether {model} was changed could not be found out: {why}",
        fix="read the model's state, then decide",
    )


def _model_or_none(namespace: str, name: str) -> ModelName | None:
    try:
        return ModelName(namespace, name)
    except InvalidArgument:
        return None
