"""News of a ref, with looks at the engine between them: an agent that waits for news sees in time that the engine was started again."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import TypeVar

T = TypeVar("T")


def with_looks(source: Iterator[T], seconds: float) -> Iterator[T | None]:
    """Values of an iterator, and None whenever it gives nothing for so long. It is not asked for the next value before that is wanted here.

    Args:
        source: may wait for ever; runs in a thread of its own, which lasts until it gives something after the end of this iterator, or ends.
        seconds: how long.
    """
    wanted = threading.Semaphore(0)
    given: queue.SimpleQueue[tuple[bool, T | None, BaseException | None]] = queue.SimpleQueue()
    ended = threading.Event()
    thread = threading.Thread(target=_give, args=(source, wanted, given, ended), name="news", daemon=True)
    thread.start()
    try:
        while True:
            wanted.release()
            while True:
                try:
                    more, value, error = given.get(timeout=seconds)
                    break
                except queue.Empty:
                    yield None
            if error is not None:
                raise error
            if not more:
                return
            yield value
    finally:
        ended.set()
        wanted.release()


def _give(
    source: Iterator[T],
    wanted: threading.Semaphore,
    given: queue.SimpleQueue[tuple[bool, T | None, BaseException | None]],
    ended: threading.Event,
) -> None:
    while wanted.acquire() and not ended.is_set():
        try:
            given.put((True, next(source), None))
        except StopIteration:
            given.put((False, None, None))
            return
        except BaseException as error:
            given.put((False, None, error))
            return
