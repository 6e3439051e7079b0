"""Does each kind of call have its own threads, shared fairly among peers, and are pending answers dropped?"""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.support.services import running_service
from weighbridge._transport import rpc
from weighbridge.errors import NotFound
from weighbridge.v1 import (
    model_service_pb2,
    model_service_pb2_grpc,
    replica_service_pb2,
    replica_service_pb2_grpc,
    weight_service_pb2,
    weight_service_pb2_grpc,
)
from weighbridge_service.access.peer import Peer
from weighbridge_service.admission.turns import Turns
from weighbridge_service.api.grpc import server
from weighbridge_service.api.grpc.checkpoint_handlers import CheckpointHandlers
from weighbridge_service.push.pending import Pending
from weighbridge_storage.threads import ThreadPool

A, B = Peer("a", "1"), Peer("b", "1")


@pytest.fixture
def one() -> Iterator[ThreadPool]:
    """A single thread, and peers that wait for it in turn."""
    made = ThreadPool("tested-turns", 1, line=Turns())
    yield made
    made.close(60.0)


def test_each_peer_has_its_turn(one: ThreadPool) -> None:
    done, begun, go_on = list[str](), threading.Event(), threading.Event()

    def stay() -> None:
        begun.set()
        assert go_on.wait(60)

    waiting = [one.submit(stay, A)]
    assert begun.wait(60)
    waiting += [one.submit(lambda: done.append("a1"), A), one.submit(lambda: done.append("a2"), A)]
    waiting.append(one.submit(lambda: done.append("b"), B))
    go_on.set()
    for found in waiting:
        found.result(60)
    assert done == ["a1", "b", "a2"]


def test_what_a_peer_has_cancelled_keeps_no_turn(one: ThreadPool) -> None:
    done, begun, go_on = list[str](), threading.Event(), threading.Event()

    def stay() -> None:
        begun.set()
        assert go_on.wait(60)

    waiting = [one.submit(stay, A)]
    assert begun.wait(60)
    assert one.submit(lambda: done.append("a"), A).cancel()
    waiting.append(one.submit(lambda: done.append("b"), B))
    go_on.set()
    for found in waiting:
        found.result(60)
    assert done == ["b"]


# --- pending answers


class Asked:
    """The part of `Methods` that handlers use, over its own threads."""

    def __init__(self, threads: ThreadPool) -> None:
        self._threads = threads

    def begin(self, call: object, work: Any) -> Future[Any]:
        return self._threads.submit(work, A)

    async def run(self, call: object, work: Any) -> Any:
        return await asyncio.wrap_future(self.begin(call, work))


async def answered(threads: ThreadPool, ask: Any) -> Any:
    handlers = CheckpointHandlers.__new__(CheckpointHandlers)
    handlers._methods = Asked(threads)  # type: ignore[assignment]
    return await handlers._answered(None, ask)  # type: ignore[arg-type]


@pytest.mark.parametrize("asking", [True, False])
def test_a_caller_that_goes_leaves_what_it_has_asked(one: ThreadPool, asking: bool) -> None:
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


def test_errors_of_pending_answers_are_logged_by_nobody(one: ThreadPool, caplog: pytest.LogCaptureFixture) -> None:
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


@pytest.mark.parametrize("full", ["long", "plan"])
def test_calls_are_answered_while_all_threads_of_another_kind_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full: str
) -> None:
    begun, go_on = threading.Semaphore(0), threading.Event()
    with running_service(tmp_path) as service, rpc.open_channel(service.address) as channel:

        def stay(*_: object, **__: object) -> None:
            begun.release()
            assert go_on.wait(60)
            raise NotFound("nothing")

        monkeypatch.setattr(service.service.catalog, "verify", stay)
        monkeypatch.setattr(service.service.serving, "pull", stay)
        models = model_service_pb2_grpc.ModelServiceStub(channel)
        calls: list[Any] = []
        try:
            if full == "long":
                request = model_service_pb2.VerifyVersionRequest(model="a/b", version="1")
                calls = [models.VerifyVersion.future(request) for _ in range(server._LONG_THREADS)]
            else:
                pulls = weight_service_pb2_grpc.WeightServiceStub(channel)
                asked = weight_service_pb2.PullRequest(model="a/b", version="1")
                calls = [pulls.Pull(iter([asked])) for _ in range(server._PLANNING_THREADS)]
            for _ in calls:
                assert begun.acquire(timeout=60)
            assert not models.ListModels(model_service_pb2.ListModelsRequest(), timeout=60).models
        finally:
            go_on.set()
        codes = [call.code() for call in calls]
        assert set(codes) == {grpc.StatusCode.NOT_FOUND}
