"""Call: what a handler may know of who called, and for how long it can wait."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

from weighbridge_service.admission.peer import Peer

T = TypeVar("T")

_MARGIN = 0.25
"""Seconds by which a wait ends before the caller's deadline, so that the answer says what was missing."""


class Context(Protocol):
    """What is the same in gRPC's contexts of threads and of event loops."""

    def time_remaining(self) -> float | None:
        """Seconds until the deadline; None without one."""

    def peer(self) -> str:
        """Who has called."""


class Call:
    """One call. Thread-safe.

    Args:
        context: gRPC's.
        cancel: ends the call, from any thread; what its handler is at breaks off.

    Attributes:
        peer: who has called.
        cancel: as given.
    """

    def __init__(self, context: Context, cancel: Callable[[], object] = lambda: None) -> None:
        self.cancel = cancel
        self.peer = Peer.of_grpc(context.peer())
        self._context = context
        self._lock = threading.Lock()
        self._ended = False
        self._callbacks: list[Callable[[], object]] = []
        self._awaited: Future[Any] | None = None

    def patience(self, without: float) -> float:
        """How many seconds the call may wait now: almost until its deadline, and at most ``without``."""
        left = self._context.time_remaining()
        return without if left is None or left > without else max(left - _MARGIN, 0.0)

    def is_active(self) -> bool:
        """Whether the caller still waits for an answer."""
        return not self._ended

    def wait(self, future: Future[T]) -> T:
        """Wait in the handler's thread, until the call ends at most. Raises CancelledError if it does."""
        self._awaited = future
        try:
            if self._ended:
                future.cancel()
            return future.result()
        finally:
            self._awaited = None
            del future  # its error's traceback leads back here

    def add_callback(self, callback: Callable[[], object]) -> None:
        """Call this, from any thread, when the call has ended; at once if it has."""
        with self._lock:
            if not self._ended:
                self._callbacks.append(callback)
                return
        callback()

    def end(self) -> None:
        """The caller has its answer, or has gone."""
        with self._lock:
            self._ended = True
            callbacks, self._callbacks = self._callbacks, []
        awaited = self._awaited
        if awaited is not None:
            awaited.cancel()
        for callback in callbacks:
            callback()
