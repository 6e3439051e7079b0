"""News of models: something of one has changed, and whoever follows it should look again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from weighbridge_storage.documents.names import ModelName

Listener = Callable[[ModelName | None], None]
"""Is told which model has changed, or None for all; in the thread that has changed it, so it must not wait for anything."""


class Changes:
    """Who is told of changes. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._listeners: tuple[Listener, ...] = ()

    def notify(self, name: ModelName | None = None) -> None:
        """Something of a model has changed, or of any."""
        for listener in self._listeners:
            listener(name)

    @contextmanager
    def listening(self, listener: Listener) -> Iterator[None]:
        """Tell the listener of changes while the block runs."""
        with self._lock:
            self._listeners = (*self._listeners, listener)
        try:
            yield
        finally:
            with self._lock:
                self._listeners = tuple(each for each in self._listeners if each is not listener)
