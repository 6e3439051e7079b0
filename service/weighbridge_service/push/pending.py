"""Pending answers of a push: futures, the calls that wait for them, and the result of each when it is done or times
out.

Ranks wait for each other for seconds or minutes. The handler of a call decides how to wait: on an event loop, a wait
does not need a thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from weighbridge.errors import WeighbridgeError

S = TypeVar("S")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Pending(Generic[T]):
    """Answer that may take a while.

    Attributes:
        future: done when the push has answered; cannot be cancelled.
        seconds: timeout of the wait.
        finish: returns the result, or raises. The handler calls it once the future is done or the timeout has passed;
            the argument is whether the future is done.
        leave: ends the wait; harmless if the future is done.
        in_memory: whether `finish` makes no call of the store, so that an event loop can run it.
    """

    future: Future[Any]
    seconds: float
    finish: Callable[[bool], T]
    leave: Callable[[], None]
    in_memory: bool = False


def settled(value: T) -> Pending[T]:
    """Answer that is available already."""
    found: Future[T] = Future()
    found.set_result(value)
    return Pending(found, 0.0, lambda _: value, lambda: None, in_memory=True)


class WaitingCalls(Generic[S]):
    """Calls that wait until a state has an answer for them. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: dict[Future[Any], Callable[[S], Any]] = {}

    def enter(self, found: Future[T], answer: Callable[[S], T | None]) -> None:
        """Add a waiting call.

        Args:
            found: the future that gets the answer.
            answer: returns the answer that a state has, or raises; None while there is none.
        """
        with self._lock:
            self._calls[found] = answer

    def leave(self, found: Future[Any]) -> None:
        """Remove a waiting call."""
        with self._lock:
            self._calls.pop(found, None)

    def give(self, state: S) -> None:
        """Answer the calls for which this state has an answer."""
        with self._lock:
            given = [(found, _try(answer, state)) for found, answer in self._calls.items()]
            answered = [(found, outcome) for found, outcome in given if outcome is not None]
            for found, _ in answered:
                del self._calls[found]
        for found, outcome in answered:  # without the lock: callbacks of the future run in this thread
            if isinstance(outcome, WeighbridgeError):
                found.set_exception(outcome)
            else:
                found.set_result(outcome)

    def end(self, error: Callable[[], WeighbridgeError]) -> None:
        """Answer all waiting calls with an error, a new one for each."""
        with self._lock:
            calls, self._calls = self._calls, {}
        for found in calls:
            found.set_exception(error())


def uncancelled() -> Future[Any]:
    """Future that cannot be cancelled: a caller leaves instead (`WaitingCalls.leave`)."""
    found: Future[Any] = Future()
    found.set_running_or_notify_cancel()
    return found


def _try(answer: Callable[[S], T | None], state: S) -> T | WeighbridgeError | None:
    """The answer that a state gives, or its error; None if the state does not give an answer yet."""
    try:
        return answer(state)
    except WeighbridgeError as error:
        return error
