"""Does a pool of threads serve all callers in turn, keep nothing, and end its threads? And does it hold up no process
and no event loop?
"""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import Future
from contextvars import ContextVar
from typing import Any

import pytest

from tests.support.waiting import eventually
from weighbridge.errors import NotFound, ResourceExhausted, Unavailable
from weighbridge_storage.threads import ThreadPool

NAME = "tested-pool"


def threads() -> int:
    return sum(thread.name == NAME for thread in threading.enumerate())


@pytest.fixture
def one() -> Iterator[ThreadPool]:
    """A single thread, and three places in the line."""
    made = ThreadPool(NAME, 1, most_waiting=3)
    yield made
    made.close()
    eventually(lambda: not threads())


class Busy:
    """Work that keeps a thread until `end`."""

    def __init__(self, pool: ThreadPool) -> None:
        self._begun, self._end = threading.Event(), threading.Event()
        self.future = pool.submit(self._work)
        assert self._begun.wait(60)

    def _work(self) -> None:
        self._begun.set()
        assert self._end.wait(60)

    def end(self) -> None:
        self._end.set()
        self.future.result(60)


def test_results_and_errors_come_back(one: ThreadPool) -> None:
    assert one.submit(lambda: 7).result(60) == 7

    def fail() -> None:
        raise NotFound("nothing")

    with pytest.raises(NotFound, match="nothing"):
        one.submit(fail).result(60)
    assert one.submit(lambda: 8).result(60) == 8  # the thread has outlived it


def test_there_are_as_many_threads_as_there_is_work_and_no_more() -> None:
    pool = ThreadPool(NAME, 3)
    busy = [Busy(pool) for _ in range(3)]
    late = [pool.submit(lambda: None) for _ in range(10)]
    assert threads() == 3
    for each in busy:
        each.end()
    for found in late:
        found.result(60)
    assert pool.submit(threading.get_ident).result(60)
    assert threads() == 3
    pool.close()
    eventually(lambda: not threads())


def test_threads_go_when_there_is_no_work_and_come_again() -> None:
    pool = ThreadPool(NAME, 2, idle_seconds=0.05)
    for _ in range(3):
        assert pool.submit(lambda: 1).result(60) == 1
        eventually(lambda: not threads())
    pool.close()


def test_work_is_done_in_the_order_of_its_coming(one: ThreadPool) -> None:
    done = list[int]()
    busy = Busy(one)
    waiting = [one.submit(lambda i=i: done.append(i)) for i in range(3)]  # type: ignore[misc]
    busy.end()
    for found in waiting:
        found.result(60)
    assert done == [0, 1, 2]


def test_the_line_is_bounded_and_says_when_to_come_again(one: ThreadPool) -> None:
    busy = Busy(one)
    waiting = [one.submit(lambda: None) for _ in range(3)]
    with pytest.raises(ResourceExhausted, match="3 calls wait") as refused:
        one.submit(lambda: None)
    assert refused.value.retry_after
    busy.end()
    for found in waiting:
        found.result(60)
    one.submit(lambda: None).result(60)


def test_work_that_threads_are_about_to_take_does_not_count_as_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool, go_on = ThreadPool(NAME, 2, most_waiting=1), threading.Event()
    run = threading.Thread.run

    def late(thread: threading.Thread) -> None:
        assert go_on.wait(60)
        run(thread)

    monkeypatch.setattr(threading.Thread, "run", late)
    found = [pool.submit(lambda: None) for _ in range(3)]
    with pytest.raises(ResourceExhausted):
        pool.submit(lambda: None)
    go_on.set()
    for each in found:
        each.result(60)
    pool.close(60.0)


def test_cancelled_work_is_not_done_and_keeps_no_place_in_the_line(one: ThreadPool) -> None:
    busy, done = Busy(one), list[int]()
    waiting = [one.submit(lambda: done.append(1)) for _ in range(3)]
    assert all(found.cancel() for found in waiting)
    last = [one.submit(lambda: done.append(2)) for _ in range(3)]
    busy.end()
    for found in last:
        found.result(60)
    assert done == [2, 2, 2]


class Large:
    """Something of which must not be kept more than is needed."""


def test_neither_requests_nor_results_are_kept_by_idle_threads_or_cycles(one: ThreadPool) -> None:
    def works(large: Large) -> Large:
        return large

    def fails(large: Large) -> Large:
        raise NotFound("nothing")

    def submitted(work: Any) -> tuple[weakref.ref[Large], Future[Large]]:
        large = Large()
        return weakref.ref(large), one.submit(lambda: work(large))

    gc.collect()
    gc.disable()
    try:
        kept, found = submitted(works)
        assert found.result(60) is kept()
        del found
        eventually(lambda: kept() is None)

        kept, found = submitted(fails)
        assert isinstance(found.exception(60), NotFound)
        del found
        eventually(lambda: kept() is None)

        busy = Busy(one)
        kept, found = submitted(works)
        found.cancel()
        assert kept() is None  # at once, although the caller still has the future
        busy.end()
    finally:
        gc.enable()


def test_a_closed_pool_refuses_what_waits_and_what_comes(one: ThreadPool) -> None:
    busy = Busy(one)
    waiting = one.submit(lambda: None)
    one.close()
    with pytest.raises(Unavailable, match="shutting down"):
        waiting.result(0)
    with pytest.raises(Unavailable, match="shutting down"):
        one.submit(lambda: None)
    busy.end()


def test_a_system_without_threads_refuses_calls_for_as_long_as_it_has_none(
    one: ThreadPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", start)
        for _ in range(5):
            with pytest.raises(ResourceExhausted, match="no thread"):
                one.submit(lambda: 1)
    assert one.submit(lambda: 1).result(60) == 1


@pytest.mark.parametrize("seconds", [60.0, None])
def test_a_pool_that_is_closed_waits_for_work_that_has_begun_for_as_long_as_it_may(
    one: ThreadPool, seconds: float | None
) -> None:
    busy = Busy(one)
    one.close(0.01)
    assert threads() == 1
    busy.end()
    one.close(seconds)
    assert not threads()


def test_work_goes_on_beside_others_when_the_system_has_no_further_thread(
    one: ThreadPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = ThreadPool(NAME, 2)
    busy = Busy(pool)

    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", start)
        late = pool.submit(lambda: 1)
    busy.end()
    assert late.result(60) == 1
    pool.close()


def test_a_task_has_its_work_done_in_its_context_and_leaves_what_has_begun(one: ThreadPool) -> None:
    said = ContextVar("said", default="nothing")
    begun, go_on, ended = threading.Event(), threading.Event(), threading.Event()

    def hang() -> None:
        begun.set()
        go_on.wait(60)
        ended.set()

    async def check() -> None:
        said.set("something")
        assert await one.run(said.get) == "something"
        hanging = asyncio.create_task(one.run(hang))
        await asyncio.to_thread(begun.wait, 60)
        waiting = asyncio.create_task(one.run(begun.clear))
        await asyncio.sleep(0)
        for task in (waiting, hanging):
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        go_on.set()
        assert await one.run(ended.is_set)
        assert begun.is_set(), "work is not begun once its caller was cancelled"

    asyncio.run(check())


def test_work_that_hangs_keeps_no_process_from_ending() -> None:
    hanging = (
        "from weighbridge_storage.threads import ThreadPool; import threading; ThreadPool('x', "
        "1).submit(threading.Event().wait)"
    )
    assert subprocess.run([sys.executable, "-c", hanging], timeout=60, check=False).returncode == 0
