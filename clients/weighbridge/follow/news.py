"""Moves of a ref, with checks of the engine between them, so that an agent that waits for a move also detects a restart
of the engine.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from concurrent.futures import Future, wait
from typing import TypeVar

T = TypeVar("T")


def with_looks(source: Iterator[T], seconds: float) -> Iterator[T | None]:
    """Values of an iterator, and None whenever it yields nothing for the given time.

    The next value is requested from it only on demand.

    Args:
        source: may wait forever; each value is fetched in a separate thread, which lasts until the value or the end
            arrives.
        seconds: the time.
    """
    while True:
        coming: Future[list[T]] = Future()
        threading.Thread(target=_take, args=(source, coming), name="news", daemon=True).start()
        while not wait([coming], seconds).done:
            yield None
        if not coming.result():
            return
        yield from coming.result()


def _take(source: Iterator[T], coming: Future[list[T]]) -> None:
    """Fetch the next value, or none at the end."""
    try:
        coming.set_result(list(itertools.islice(source, 1)))
    except BaseException as error:
        coming.set_exception(error)
