"""Is a handler that waits for the store answered in time, and are there never more threads that wait than there may
be?
"""

from __future__ import annotations

import asyncio
import threading

import pytest

from weighbridge.errors import NotFound, Unavailable
from weighbridge_service.api.http.threads import in_threads
from weighbridge_storage.threads import ThreadPool


class SetClockLoop(asyncio.SelectorEventLoop):
    """An event loop whose time passes when a test says so, and not because a machine has much else to do."""

    now = 0.0

    def time(self) -> float:
        return self.now


def test_a_call_that_hangs_is_waited_for_so_long_and_keeps_its_thread() -> None:
    async def check(loop: SetClockLoop) -> None:
        pool, go_on = ThreadPool("tested-http", 1), threading.Event()
        hanging, ended, begun = threading.Event(), threading.Event(), threading.Event()

        def hang() -> None:
            hanging.set()
            go_on.wait(60)
            ended.set()

        waiting = asyncio.create_task(in_threads(pool, 0.05)(hang)())  # type: ignore[arg-type]
        assert await asyncio.to_thread(hanging.wait, 60)
        loop.now += 0.04
        await asyncio.sleep(0)
        assert not waiting.done()
        loop.now += 0.02
        with pytest.raises(Unavailable, match=r"within 0\.05 s"):
            await waiting
        waiting = asyncio.create_task(in_threads(pool, 0.05)(begun.set)())  # type: ignore[arg-type]
        await asyncio.sleep(0)
        loop.now += 0.06
        with pytest.raises(Unavailable):
            await waiting
        go_on.set()
        assert await in_threads(pool, 20.0)(ended.is_set)(), "a caller that gives up leaves the thread to the call"
        assert not begun.is_set(), "its caller had left before there was a thread"

    with asyncio.Runner(loop_factory=SetClockLoop) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, SetClockLoop)
        runner.run(check(loop))


@pytest.mark.parametrize("error", [NotFound("there is none"), TimeoutError("of the system")])
def test_what_a_call_raises_is_raised(error: Exception) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(type(error), match=str(error)):
        asyncio.run(in_threads(ThreadPool("tested-http", 1), 20.0)(fail)())  # type: ignore[arg-type]
