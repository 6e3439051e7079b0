"""Known models: registrations that a process remembers, so that it need not read them again."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable

from weighbridge_service.models.registered_model import KEPT_SHARDS, RegisteredModel
from weighbridge_storage.documents.names import ModelName

_MOST_BYTES = 1 << 30
"""Bytes that all models may take together; models in use are remembered in any case."""


class KnownModels:
    """Cache of the models that were used last. Thread-safe.

    Args:
        most: number of models that are remembered.
        in_use: returns whether work is under way for a model.
        shards: number of shards of declared layouts that each model remembers.
    """

    def __init__(self, most: int, in_use: Callable[[ModelName], bool], shards: int = KEPT_SHARDS) -> None:
        self._most = most
        self._shards = shards
        self._in_use = in_use
        self._lock = threading.Lock()
        self._known: OrderedDict[ModelName, RegisteredModel] = OrderedDict()

    @property
    def names(self) -> list[ModelName]:
        """Names of the known models, the least recently used first."""
        with self._lock:
            return list(self._known)

    def get(self, name: ModelName) -> RegisteredModel | None:
        """A model; None if it is not known."""
        with self._lock:
            model = self._known.get(name)
            if model is not None:
                self._known.move_to_end(name)
            return model

    def keep(self, model: RegisteredModel, unless: Callable[[RegisteredModel], bool]) -> RegisteredModel:
        """Remember a model, unless ``unless`` accepts the one that is known by its name.

        Returns the model that is known afterwards.
        """
        with self._lock:
            there = self._known.get(model.name)
            if there is not None and unless(there):
                return there
            model.remember(self._shards)
            self._known[model.name] = model
            self._known.move_to_end(model.name)
            count, nbytes = len(self._known), sum(each.nbytes for each in self._known.values())
            for name in list(self._known)[:-1]:
                if count <= self._most and nbytes <= _MOST_BYTES:
                    break
                if not self._in_use(name):
                    count, nbytes = count - 1, nbytes - self._known.pop(name).nbytes
            return model

    def forget(self, name: ModelName) -> None:
        """Forget a model."""
        with self._lock:
            self._known.pop(name, None)
