"""Pending answers of a push: futures, what gives them, and what is made of one when it is there or has not come in time.

Ranks wait for each other for seconds or minutes. Whoever asks on their behalf decides how to wait: an event loop needs no thread for it.
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
    """An answer that may take a while.

    Attributes:
        future: is done when the push has answered; cannot be cancelled.
        seconds: how long to wait for it.
        finish: gives the result, or raises; to be called once the future is done or the time is over, and told whether it is done.
        leave: nobody waits any more; harmless if it is done.
        in_memory: whether `finish` asks nothing of the store: then an event loop can do it.
    """

    future: Future[Any]
    seconds: float
    finish: Callable[[bool], T]
    leave: Callable[[], None]
    in_memory: bool = False


def settled(value: T) -> Pending[T]:
    """An answer that is there already."""
    found: Future[T] = Future()
    found.set_result(value)
    return Pending(found, 0.0, lambda _: value, lambda: None, in_memory=True)


class WaitingCalls(Generic[S]):
    """Calls that wait for an answer which some state gives. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: dict[Future[Any], Callable[[S], Any]] = {}

    def enter(self, found: Future[T], answer: Callable[[S], T | None]) -> None:
        """A call waits.

        Args:
            found: is given the answer.
            answer: gives it out of a state, or raises; None as long as there is none.
        """
        with self._lock:
            self._calls[found] = answer

    def leave(self, found: Future[Any]) -> None:
        """Nobody waits for an answer any more."""
        with self._lock:
            self._calls.pop(found, None)

    def give(self, state: S) -> None:
        """Answer the calls for which this state has an answer."""
        with self._lock:
            given = [(found, _try(answer, state)) for found, answer in self._calls.items()]
            answered = [(found, outcome) for found, outcome in given if outcome is not None]
            for found, _ in answered:
                del self._calls[found]
        for found, outcome in answered:  # without the lock: whoever waits may go on in this thread
            if isinstance(outcome, WeighbridgeError):
                found.set_exception(outcome)
            else:
                found.set_result(outcome)

    def end(self, error: Callable[[], WeighbridgeError]) -> None:
        """No call gets an answer any more, but an error of its own."""
        with self._lock:
            calls, self._calls = self._calls, {}
        for found in calls:
            found.set_exception(error())


def uncancelled() -> Future[Any]:
    """A future that nobody cancels: whoever waits leaves instead."""
    found: Future[Any] = Future()
    found.set_running_or_notify_cancel()
    return found


def _try(answer: Callable[[S], T | None], state: S) -> T | WeighbridgeError | None:
    """The answer that a state gives, or what it raises; None if there is none yet."""
    try:
        return answer(state)
    except WeighbridgeError as error:
        return error
