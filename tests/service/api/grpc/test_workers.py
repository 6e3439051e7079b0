"""Do threads serve everybody in turn, keep nothing, and go away? And are pending answers left?"""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.support.services import running_service
from tests.support.waiting import eventually
from weighbridge._transport import rpc
from weighbridge.errors import NotFound, ResourceExhausted, Unavailable
from weighbridge.v1 import (
    model_service_pb2,
    model_service_pb2_grpc,
    replica_service_pb2,
    replica_service_pb2_grpc,
)
from weighbridge_service.access.peer import Peer
from weighbridge_service.api.grpc import server
from weighbridge_service.api.grpc.checkpoint_handlers import CheckpointHandlers
from weighbridge_service.api.grpc.workers import Workers
from weighbridge_service.push.pending import Pending, settled

A, B = Peer("a", "1"), Peer("b", "1")
NAME = "tested-worker"


def threads() -> int:
    return sum(thread.name == NAME for thread in threading.enumerate())


@pytest.fixture
def one() -> Iterator[Workers]:
    """A single thread, and three places in the line."""
    made = Workers(NAME, 1, 3)
    yield made
    made.close()
    eventually(lambda: not threads())


class Busy:
    """Work that keeps a thread until it is told to end."""

    def __init__(self, workers: Workers, peer: Peer = A) -> None:
        self._begun, self._end = threading.Event(), threading.Event()
        self.future = workers.submit(peer, self._work)
        assert self._begun.wait(60)

    def _work(self) -> None:
        self._begun.set()
        assert self._end.wait(60)

    def end(self) -> None:
        self._end.set()
        self.future.result(60)


def test_results_and_errors_come_back(one: Workers) -> None:
    assert one.submit(A, lambda: 7).result(60) == 7

    def fail() -> None:
        raise NotFound("nothing")

    with pytest.raises(NotFound, match="nothing"):
        one.submit(A, fail).result(60)
    assert one.submit(A, lambda: 8).result(60) == 8  # the thread has outlived it


def test_there_are_as_many_threads_as_there_is_work_and_no_more() -> None:
    workers = Workers(NAME, 3, 100)
    busy = [Busy(workers) for _ in range(3)]
    late = [workers.submit(A, lambda: None) for _ in range(10)]
    assert threads() == 3
    for each in busy:
        each.end()
    for found in late:
        found.result(60)
    assert workers.submit(A, threading.get_ident).result(60)
    assert threads() == 3
    workers.close()
    eventually(lambda: not threads())


def test_threads_go_when_there_is_no_work_and_come_again() -> None:
    workers = Workers(NAME, 2, 10, idle_seconds=0.05)
    for _ in range(3):
        assert workers.submit(A, lambda: 1).result(60) == 1
        eventually(lambda: not threads())
    workers.close()


def test_each_peer_has_its_turn(one: Workers) -> None:
    done = list[str]()
    busy = Busy(one)
    waiting = [one.submit(A, lambda: done.append("a1")), one.submit(A, lambda: done.append("a2"))]
    waiting.append(one.submit(B, lambda: done.append("b")))
    busy.end()
    for found in waiting:
        found.result(60)
    assert done == ["a1", "b", "a2"]


def test_the_line_is_bounded_and_says_when_to_come_again(one: Workers) -> None:
    busy = Busy(one)
    waiting = [one.submit(A, lambda: None) for _ in range(3)]
    with pytest.raises(ResourceExhausted, match="3 calls wait") as refused:
        one.submit(B, lambda: None)
    assert refused.value.retry_after
    busy.end()
    for found in waiting:
        found.result(60)
    one.submit(B, lambda: None).result(60)


def test_cancelled_work_is_not_done_and_keeps_no_place_in_the_line(one: Workers) -> None:
    busy, done = Busy(one), list[int]()
    waiting = [one.submit(A, lambda: done.append(1)) for _ in range(3)]
    assert all(found.cancel() for found in waiting)
    last = [one.submit(B, lambda: done.append(2)) for _ in range(3)]
    busy.end()
    for found in last:
        found.result(60)
    assert done == [2, 2, 2]


class Large:
    """Something of which must not be kept more than is needed."""


def test_neither_requests_nor_results_are_kept_by_idle_threads_or_cycles(one: Workers) -> None:
    def works(large: Large) -> Large:
        return large

    def fails(large: Large) -> Large:
        raise NotFound("nothing")

    def submitted(work: Any) -> tuple[weakref.ref[Large], Future[Large]]:
        large = Large()
        return weakref.ref(large), one.submit(A, lambda: work(large))

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
        assert kept() is None  # at once, whoever has the future
        busy.end()
    finally:
        gc.enable()


def test_a_closed_pool_drops_what_waits_and_takes_nothing(one: Workers) -> None:
    busy = Busy(one)
    waiting = one.submit(B, lambda: None)
    one.close()
    assert waiting.cancelled()
    with pytest.raises(Unavailable, match="shutting down"):
        one.submit(A, lambda: None)
    busy.end()


def test_a_system_without_threads_refuses_calls_for_as_long_as_it_has_none(
    one: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", start)
        for _ in range(5):
            with pytest.raises(ResourceExhausted, match="no thread"):
                one.submit(A, lambda: 1)
    assert one.submit(A, lambda: 1).result(60) == 1


# --- pending answers


def test_a_pending_answer_says_whether_it_has_come_in_time() -> None:
    future, left = Future[int](), list[int]()
    pending = Pending(future, 0.01, lambda done: f"in time: {done}", lambda: left.append(1))
    assert pending.result() == "in time: False"
    assert left == [1]
    future.set_result(1)
    assert pending.result() == "in time: True"
    assert left == [1]
    assert settled("there").result() == "there"


def test_a_pending_error_is_that_of_finish() -> None:
    future = Future[int]()
    future.set_exception(NotFound("nothing"))
    with pytest.raises(NotFound):
        Pending(future, 1.0, lambda _: future.result(), lambda: None).result()


class Asked:
    """What handlers know of `Methods`, with threads of its own."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers

    def begin(self, call: object, work: Any) -> Future[Any]:
        return self._workers.submit(A, work)

    async def run(self, call: object, work: Any) -> Any:
        return await asyncio.wrap_future(self.begin(call, work))


async def answered(workers: Workers, ask: Any) -> Any:
    handlers = CheckpointHandlers.__new__(CheckpointHandlers)
    handlers._methods = Asked(workers)  # type: ignore[assignment]
    return await handlers._answered(None, ask)  # type: ignore[arg-type]


@pytest.mark.parametrize("asking", [True, False])
def test_a_caller_that_goes_leaves_what_it_has_asked(one: Workers, asking: bool) -> None:
    begun, go_on, left = threading.Event(), threading.Event(), threading.Event()
    if not asking:
        go_on.set()

    def ask() -> Pending[int]:
        begun.set()
        assert go_on.wait(60)
        future = Future[int]()
        future.set_running_or_notify_cancel()
        return Pending(future, 60.0, lambda _: 1, left.set)

    async def go() -> None:
        task = asyncio.create_task(answered(one, ask))
        await asyncio.to_thread(begun.wait, 60)
        await asyncio.sleep(0.0 if asking else 0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(go())
    go_on.set()
    assert left.wait(60)


def test_errors_of_pending_answers_are_logged_by_nobody(
    one: Workers, caplog: pytest.LogCaptureFixture
) -> None:
    def ask() -> Pending[int]:
        future = Future[int]()
        future.set_running_or_notify_cancel()
        future.set_exception(NotFound("an error of one pending answer"))
        return Pending(future, 60.0, lambda _: future.result(), lambda: None)

    async def go() -> None:
        with pytest.raises(NotFound):
            await answered(one, ask)

    asyncio.run(go())
    gc.collect()
    texts = map(logging.Formatter().format, caplog.records)
    assert not [each for each in texts if "an error of one pending answer" in each]


def test_replicas_are_answered_while_clients_have_all_other_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Semaphore(0), threading.Event()
    with running_service(tmp_path) as service, rpc.open_channel(service.address) as channel:

        def stay(*_: object, **__: object) -> None:
            begun.release()
            assert go_on.wait(60)
            raise NotFound("nothing")

        monkeypatch.setattr(service.service.catalog, "verify", stay)
        monkeypatch.setattr(service.service.catalog, "get_model", stay)
        models = model_service_pb2_grpc.ModelServiceStub(channel)
        replicas = replica_service_pb2_grpc.ReplicaServiceStub(channel)
        try:
            calls: list[Any] = [
                models.VerifyVersion.future(model_service_pb2.VerifyVersionRequest(model="a/b", version="1"))
                for _ in range(server._LONG_THREADS)
            ]
            calls += [
                models.GetModel.future(model_service_pb2.GetModelRequest(model="a/b"))
                for _ in range(server._QUICK_THREADS)
            ]
            for _ in calls:
                assert begun.acquire(timeout=60)
            sender = replica_service_pb2.Replica(address="127.0.0.1:1", boot="b")
            replicas.Exchange(replica_service_pb2.ExchangeRequest(sender=sender), timeout=60)
            with pytest.raises(grpc.RpcError) as refused:
                replicas.TakeOver(iter([replica_service_pb2.TakeOverRequest(model="a/b")]), timeout=60)
            assert refused.value.code() is not grpc.StatusCode.DEADLINE_EXCEEDED  # type: ignore[attr-defined]
        finally:
            go_on.set()
        for call in calls:
            assert call.exception(60).code() is grpc.StatusCode.NOT_FOUND
