"""Threads of HTTP handlers that may wait long for the store: so many at one time, and none of those that all other handlers share."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from typing import ParamSpec, TypeVar

import anyio.to_thread
from anyio import CapacityLimiter

from weighbridge.errors import Unavailable

P = ParamSpec("P")
T = TypeVar("T")


def in_threads(
    limiter: CapacityLimiter, seconds: float | None = None
) -> Callable[[Callable[P, T]], Callable[P, Awaitable[T]]]:
    """A decorator that lets a function run in one of a limited number of threads, as a coroutine of the same signature.

    Args:
        limiter: of the threads.
        seconds: as of `in_thread`.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, Awaitable[T]]:
        @functools.wraps(function)
        async def run(*args: P.args, **kwargs: P.kwargs) -> T:
            return await in_thread(functools.partial(function, *args, **kwargs), limiter, seconds)

        return run

    return decorate


async def in_thread(call: Callable[[], T], limiter: CapacityLimiter, seconds: float | None = None) -> T:
    """What a call gives that runs in a thread. The thread counts until the call is over, also when nobody waits for it any more.

    Args:
        call: cannot be interrupted.
        limiter: of the threads.
        seconds: for which it is waited for, and for a thread; None for as long as it takes.

    Raises:
        Unavailable: it was not over by then.
    """
    begun = False

    def noting() -> T:
        nonlocal begun
        begun = True
        return call()

    task = asyncio.ensure_future(anyio.to_thread.run_sync(noting, limiter=limiter))
    try:
        await asyncio.wait({task}, timeout=seconds)
    finally:
        if not task.done() and begun:
            task.add_done_callback(lambda over: over.cancelled() or over.exception())  # nobody is to be told
        elif not task.done():
            task.cancel()
    if not task.done() or task.cancelled():
        raise Unavailable(
            f"there was no answer within {seconds:g} s: the store does not answer, or the service has too much to do",
            fix="try again; /readyz and the log of the service say more",
        )
    return task.result()
