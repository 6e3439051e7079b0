"""Threads of one asyncio client, for work that would hold up its event loop: copies, checksums, and sockets that block.

Pieces could be received on the loop itself at the same rate, but hold it up two to three times as often (``make bench-asyncio``); a copy
to a GPU, or a slice that is gathered from shared memory, would hold it up for as long as it takes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from weighbridge.errors import Unavailable

T = TypeVar("T")

_MOST_THREADS = 32
"""Steps at one time; what is more waits for one to end, which takes no longer than bytes take to come."""


class Threads:
    """A pool of threads, started as they are needed."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(_MOST_THREADS, thread_name_prefix="weighbridge-aio")

    async def run(self, work: Callable[[], T], stop: Callable[[], None]) -> T:
        """Do work in a thread. If the task is cancelled, the work has ended before this returns.

        Args:
            work: what is to be done.
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
        """Do work in a thread. If the task is cancelled, the work goes on without it, and its result is dropped."""
        _, result = self._submit(work)
        return await asyncio.shield(result)

    def close(self) -> None:
        """Take no more work; the threads go when they are done."""
        self._pool.shutdown(wait=False)

    def _submit(self, work: Callable[[], T]) -> tuple[Future[T], asyncio.Future[T]]:
        try:
            submitted = self._pool.submit(work)
        except RuntimeError as error:  # the pool's word for having been shut down
            raise Unavailable("the client has been closed") from error
        result = asyncio.wrap_future(submitted)
        result.add_done_callback(_look_at)
        return submitted, result


async def _ended(result: asyncio.Future[T]) -> None:
    """Return when work has ended, however often the task is cancelled meanwhile: it will be told that anyway."""
    while not result.done():
        try:
            await asyncio.wait([result])
        except asyncio.CancelledError:
            continue


def _look_at(result: asyncio.Future[T]) -> None:
    """Keep asyncio from reporting an error that nobody waits for any more."""
    if not result.cancelled():
        result.exception()
