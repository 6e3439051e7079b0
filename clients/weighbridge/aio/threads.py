"""Threads of an asyncio client for work that would block its event loop: copies, checksums, and blocking sockets.

The loop itself could receive pieces at the same rate, but would be blocked two to three times as often
(``make bench-asyncio``). A copy to a GPU, or a slice that is gathered from shared memory, would block it for its whole
duration.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from weighbridge.errors import Unavailable

T = TypeVar("T")

_MOST_THREADS = 32
"""Maximum number of concurrent steps.

Other steps wait until one ends, which takes no longer than the arrival of its bytes.
"""


class Threads:
    """A pool of threads that are started when they are needed."""

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
            del submitted, result  # an error in them would keep references to the objects that the work used
            raise

    async def run_or_leave(self, work: Callable[[], T]) -> T:
        """Run work in a thread.

        If the task is cancelled, the work continues without it, and its result is discarded.
        """
        _, result = self._submit(work)
        return await asyncio.shield(result)

    def close(self) -> None:
        """Refuse further work. The threads end when they have finished their current work."""
        self._pool.shutdown(wait=False)

    def _submit(self, work: Callable[[], T]) -> tuple[Future[T], asyncio.Future[T]]:
        try:
            submitted = self._pool.submit(work)
        except RuntimeError as error:  # the pool was shut down
            raise Unavailable("the client has been closed") from error
        result = asyncio.wrap_future(submitted)
        result.add_done_callback(_look_at)
        return submitted, result


async def _ended(result: asyncio.Future[T]) -> None:
    """Wait until work has ended, even if the task is cancelled again.

    The caller raises CancelledError after that in any case.
    """
    while not result.done():
        try:
            await asyncio.wait([result])
        except asyncio.CancelledError:
            continue


def _look_at(result: asyncio.Future[T]) -> None:
    """Retrieve an error, so that asyncio does not report it when no task is waiting for it any longer."""
    if not result.cancelled():
        result.exception()
