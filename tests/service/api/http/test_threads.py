"""Is a handler that waits for the store answered in time, and are there never more threads that wait than there may be?"""

from __future__ import annotations

import asyncio
import threading

import pytest
from anyio import CapacityLimiter

from weighbridge.errors import NotFound, Unavailable
from weighbridge_service.api.http.threads import in_thread


def test_a_call_that_hangs_is_waited_for_so_long_and_keeps_its_thread() -> None:
    async def check() -> None:
        limiter, go_on, ended = CapacityLimiter(1), threading.Event(), threading.Event()

        def hang() -> None:
            go_on.wait(20)
            ended.set()

        with pytest.raises(Unavailable, match=r"within 0\.05 s"):
            await in_thread(hang, limiter, 0.05)
        begun = threading.Event()
        with pytest.raises(Unavailable):
            await in_thread(begun.set, limiter, 0.05)
        leaving = asyncio.create_task(in_thread(begun.set, limiter))
        await asyncio.sleep(0)
        leaving.cancel()
        assert limiter.borrowed_tokens == 1, "whoever gives up leaves the thread to the call"
        go_on.set()
        assert await in_thread(ended.is_set, limiter, 20.0)
        assert not begun.is_set(), "nobody waited for it any more when there was a thread"

    asyncio.run(check())


def test_what_a_call_raises_is_raised() -> None:
    def fail() -> None:
        raise NotFound("there is none")

    async def check() -> None:
        with pytest.raises(NotFound, match="there is none"):
            await in_thread(fail, CapacityLimiter(1), 20.0)

    asyncio.run(check())
