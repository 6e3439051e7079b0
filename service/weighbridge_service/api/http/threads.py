"""Thread pools for HTTP handlers that may wait long for the store, so that they do not occupy the threads that all
other handlers share.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from typing import ParamSpec, TypeVar

from weighbridge.errors import Unavailable
from weighbridge_storage.threads import ThreadPool

P = ParamSpec("P")
T = TypeVar("T")


def in_threads(
    threads: ThreadPool, seconds: float | None = None
) -> Callable[[Callable[P, T]], Callable[P, Awaitable[T]]]:
    """A decorator that runs a function in a thread pool, as a coroutine with the same signature.

    The coroutine raises Unavailable if the function has not ended within ``seconds``, including the wait for a thread.
    A function that has started continues, and occupies its thread until it ends.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, Awaitable[T]]:
        @functools.wraps(function)
        async def run(*args: P.args, **kwargs: P.kwargs) -> T:
            try:
                async with asyncio.timeout(seconds) as limit:
                    return await threads.run(functools.partial(function, *args, **kwargs))
            except TimeoutError:
                if not limit.expired():
                    raise
            raise Unavailable(
                f"no response within {seconds:g} s: the store does not answer, or the service is overloaded",
                fix="try again; see /readyz and the log of the service",
            )

        return run

    return decorate
