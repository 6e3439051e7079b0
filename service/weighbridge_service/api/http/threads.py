"""Threads of HTTP handlers that may wait long for the store: so many at one time, and none of those that all other handlers share."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import ParamSpec, TypeVar

import anyio.to_thread
from anyio import CapacityLimiter

P = ParamSpec("P")
T = TypeVar("T")


def in_threads(limiter: CapacityLimiter) -> Callable[[Callable[P, T]], Callable[P, Awaitable[T]]]:
    """A decorator that lets a function run in one of a limited number of threads, as a coroutine of the same signature."""

    def decorate(function: Callable[P, T]) -> Callable[P, Awaitable[T]]:
        @functools.wraps(function)
        async def run(*args: P.args, **kwargs: P.kwargs) -> T:
            call = functools.partial(function, *args, **kwargs)
            return await anyio.to_thread.run_sync(call, limiter=limiter)

        return run

    return decorate
