"""News of a ref, with looks at the engine between them: an agent that waits for news sees in time that the engine was started again."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from concurrent.futures import Future, wait
from typing import TypeVar

T = TypeVar("T")


def with_looks(source: Iterator[T], seconds: float) -> Iterator[T | None]:
    """Values of an iterator, and None whenever it gives nothing for so long. It is not asked for the next value before that is wanted here.

    Args:
        source: may wait for ever; each value is taken in a thread of its own, which lasts until the value comes, or the end.
        seconds: how long.
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
    """Take the next value, or none at the end."""
    try:
        coming.set_result(list(itertools.islice(source, 1)))
    except BaseException as error:
        coming.set_exception(error)
