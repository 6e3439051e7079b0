"""Threads of one asyncio client, for work that would block its event loop: copies, checksums, and blocking sockets.

Pieces could be received on the loop itself at the same rate, but would block it two to three times as often (``make bench-asyncio``); a copy
to a GPU, or a slice that is gathered from shared memory, would block it for its whole duration.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from weighbridge.errors import Unavailable

T = TypeVar("T")

_MOST_THREADS = 32
"""Most concurrent steps; further ones wait for one to end, which takes no longer than the arrival of its bytes."""


class Threads:
    """A pool of threads, started as they are needed."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(_MOST_THREADS, thread_name_prefix="weighbridge-aio")

    async def run(self, work: Callable[[], T], stop: Callable[[], None]) -> T:
        """Run work in a thread. If the task is cancelled, this returns only after the work has ended.

        Args:
            work: the work.
            stop: makes the work end soon; called on the event loop if the task is cancelled.

        Raises:
            Unavailable: the client has been closed.
        """
        submitted, result = self._submit(work)
        try:
            return await asyncio.shield(result)
        except asyncio.CancelledError:
            if not submitted.cancel():
                stop()
                await _ended(result)
            del submitted, result  # an error in them would keep what the work has used
            raise

    async def run_or_leave(self, work: Callable[[], T]) -> T:
        """Run work in a thread. If the task is cancelled, the work goes on without it, and its result is dropped."""
        _, result = self._submit(work)
        return await asyncio.shield(result)

    def close(self) -> None:
        """Refuse further work; the threads end with their present work."""
        self._pool.shutdown(wait=False)

    def _submit(self, work: Callable[[], T]) -> tuple[Future[T], asyncio.Future[T]]:
        try:
            submitted = self._pool.submit(work)
        except RuntimeError as error:  # raised by a pool that was shut down
            raise Unavailable("the client has been closed") from error
        result = asyncio.wrap_future(submitted)
        result.add_done_callback(_look_at)
        return submitted, result


async def _ended(result: asyncio.Future[T]) -> None:
    """Wait until work has ended, even if the task is cancelled again: the caller raises CancelledError after that anyway."""
    while not result.done():
        try:
            await asyncio.wait([result])
        except asyncio.CancelledError:
            continue


def _look_at(result: asyncio.Future[T]) -> None:
    """Retrieve an error, so that asyncio does not report it when no task waits for it any more."""
    if not result.cancelled():
        result.exception()
