"""Notifications of changed models, on which followers of a model read it again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from weighbridge_storage.documents.names import ModelName

Listener = Callable[[ModelName | None], None]
"""Called with the name of the model that has changed, or None for all.

It runs in the thread that made the change, so it must not block.
"""


class Changes:
    """Listeners to changes of models. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._listeners: tuple[Listener, ...] = ()

    def notify(self, name: ModelName | None = None) -> None:
        """Notify all listeners that a model has changed; None for any model."""
        for listener in self._listeners:
            listener(name)

    @contextmanager
    def listening(self, listener: Listener) -> Iterator[None]:
        """Notify the listener of changes while the block runs."""
        with self._lock:
            self._listeners = (*self._listeners, listener)
        try:
            yield
        finally:
            with self._lock:
                self._listeners = tuple(each for each in self._listeners if each is not listener)
