"""Do calls that carry no weights get their answer while streams of weights stand still?

Between client and service stands a proxy that lets nothing more through a connection, in either direction, after it has
carried a few megabytes: what shares a connection with weights stands still with them.
"""

from __future__ import annotations

import selectors
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from tests.support.raw_clients import RawClient, TinyModel, assert_equal, pb, tiny_folder, whole_layout
from tests.support.services import RunningService, running_service
from tests.support.waiting import eventually
from weighbridge import EngineClient, TrainerClient
from weighbridge.errors import ResourceExhausted
from weighbridge.v1 import weight_service_pb2
from weighbridge_service.admission.byte_budget import MESSAGE_ROOM, Direction

MODEL = "tests/control"
WORKERS = 4


class FreezingProxy:
    """Forwards connections to a port. One that has carried so many bytes carries nothing more until all are thawed."""

    def __init__(self, target: int, carries: int) -> None:
        self._target = target
        self._carries = carries
        self._thawed = threading.Event()
        self.frozen = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._forward, args=(client,), daemon=True).start()

    def _forward(self, client: socket.socket) -> None:
        carried = 0
        with (
            client,
            socket.create_connection(("127.0.0.1", self._target)) as server,
            selectors.DefaultSelector() as waiting,
        ):
            waiting.register(client, selectors.EVENT_READ, server)
            waiting.register(server, selectors.EVENT_READ, client)
            while True:
                for key, _ in waiting.select():
                    try:
                        data = key.fileobj.recv(65536)  # type: ignore[union-attr]
                        if not data:
                            return
                        key.data.sendall(data)
                    except OSError:
                        return
                    carried += len(data)
                    if carried > self._carries:
                        self.frozen.set()
                        self._thawed.wait()

    def thaw(self) -> None:
        self._thawed.set()

    def close(self) -> None:
        self.thaw()
        self._listener.close()


@contextmanager
def freezing(service: RunningService) -> Iterator[FreezingProxy]:
    proxy = FreezingProxy(service.grpc.port, carries=4 << 20)
    try:
        yield proxy
    finally:
        proxy.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """A model of 20 MB."""
    return tiny_folder(tmp_path_factory.mktemp("control") / "hf", hidden_size=8192)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, model: TinyModel) -> Iterator[RunningService]:
    with running_service(tmp_path_factory.mktemp("store"), most_streams=WORKERS) as running:
        with TrainerClient(running.address) as trainer:
            trainer.register_model(MODEL, model.folder)
            trainer.push_folder(MODEL, model.folder).wait(timeout=60)
        yield running


def test_calls_are_answered_while_the_client_s_own_pull_stands_still(service: RunningService, model: TinyModel) -> None:
    found: list[BaseException | None] = []
    with freezing(service) as proxy, EngineClient(proxy.address, lane="grpc") as engine:

        def pull() -> None:
            try:
                assert_equal(engine, MODEL, "latest", model.arrays)
                found.append(None)
            except BaseException as error:
                found.append(error)

        pulling = threading.Thread(target=pull, daemon=True)
        pulling.start()
        assert proxy.frozen.wait(60)
        assert engine.version(MODEL, "latest").number == 1
        assert engine.refs(MODEL)["latest"] == 1
        assert engine.pull(MODEL, "latest").version.number == 1
        assert not found
        proxy.thaw()
        pulling.join(60)
    assert found == [None]


def test_calls_are_answered_while_the_client_s_own_push_stands_still(service: RunningService, model: TinyModel) -> None:
    with freezing(service) as proxy, TrainerClient(proxy.address, lane="grpc") as trainer:
        handle = trainer.push_folder(MODEL, model.folder, step=2)
        assert proxy.frozen.wait(60)
        assert trainer.version(MODEL, handle.number).sealed_ranks == 0
        with RawClient(proxy.address) as raw:
            number = raw.open(MODEL, step=3)
            assert number > handle.number
            trainer.abort(MODEL, number)
        assert not handle.done
        proxy.thaw()
        assert handle.wait(timeout=60).number == handle.number


def test_streams_that_stand_still_take_no_thread_from_other_calls(service: RunningService, model: TinyModel) -> None:
    budget = service.service.byte_budget
    most = WORKERS - WORKERS // 4  # a fourth is left to other hosts
    go_on = threading.Event()

    with ExitStack() as stack:
        raw = stack.enter_context(RawClient(service.address))
        number = raw.open(MODEL, step=4)
        raw.declare(MODEL, number, whole_layout(model.arrays))

        def stalled() -> Iterator[pb.PushRequest]:
            yield from raw.messages(MODEL, number, [])
            go_on.wait()

        pushes = [raw.checkpoints.Push.future(stalled()) for _ in range(most)]
        stack.callback(go_on.set)
        eventually(lambda: budget.in_flight.nbytes[Direction.IN] == most * MESSAGE_ROOM)

        with pytest.raises(ResourceExhausted) as caught:
            raw.call(raw.weights.Pull, weight_service_pb2.PullRequest(model=MODEL, version="latest"))
        assert caught.value.retry_after is not None
        engine = stack.enter_context(EngineClient(service.address, lane="grpc"))
        assert engine.version(MODEL, "latest").number >= 1
        assert raw.received(MODEL, number) == []
        go_on.set()
        assert [push.result(60).received_bytes for push in pushes] == [0] * most
        assert_equal(engine, MODEL, "latest", model.arrays)
    eventually(lambda: not any(budget.in_flight.nbytes.values()))
