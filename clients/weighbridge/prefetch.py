"""Taking the next item of an iterator while the one before is still being worked on."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def prefetched(source: Iterable[T], depth: int) -> Iterator[T]:
    """The items of ``source``, made in a thread of their own, up to ``depth`` of them ahead.

    What the source raises is raised here, in its place in the order. When the caller stops early, so does the thread,
    after the item it is at.
    """
    items: deque[T] = deque()
    changed = threading.Condition()
    ended = False
    stopped = False
    failure: BaseException | None = None

    def fill() -> None:
        nonlocal ended, failure
        try:
            for item in source:
                with changed:
                    items.append(item)
                    changed.notify_all()
                    while len(items) >= depth and not stopped:
                        changed.wait()
                    if stopped:
                        return
        except BaseException as error:  # (raised again where the items are taken)
            failure = error
        finally:
            with changed:
                ended = True
                changed.notify_all()

    threading.Thread(target=fill, name="prefetch", daemon=True).start()
    try:
        while True:
            with changed:
                while not items and not ended:
                    changed.wait()
                if not items:
                    break
                item = items.popleft()
                changed.notify_all()
            yield item
        if failure is not None:
            raise failure
    finally:
        with changed:
            stopped = True
            changed.notify_all()
