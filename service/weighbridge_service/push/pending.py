"""Pending answer of a push: a future, and what is made of it when it is there or has not come in time.

Ranks wait for each other for seconds or minutes. Whoever asks on their behalf decides how to wait: an event loop needs no thread for it.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

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

    def result(self) -> T:
        """Wait in this thread. Raises what the push answers, or `finish` does."""
        try:
            self.future.exception(self.seconds)
        except TimeoutError:
            self.leave()
            return self.finish(False)
        return self.finish(True)


def settled(value: T) -> Pending[T]:
    """An answer that is there already."""
    found: Future[T] = Future()
    found.set_result(value)
    return Pending(found, 0.0, lambda _: value, lambda: None, in_memory=True)
