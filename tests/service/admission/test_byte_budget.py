"""Does the service stay within its limit for weights in flight, and does every host get its share?"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from tests.support.forked import ForkedPython
from tests.support.raw_clients import RawClient, TinyModel, assert_equal, tiny_folder
from tests.support.services import RunningService, running_service
from tests.support.waiting import eventually
from weighbridge import EngineClient, TrainerClient
from weighbridge._transport import rpc
from weighbridge.errors import InvalidArgument, ResourceExhausted, Unavailable
from weighbridge.v1 import weight_service_pb2
from weighbridge_service.access.peer import Peer
from weighbridge_service.admission.byte_budget import (
    LEAST_BYTES,
    MESSAGE_ROOM,
    ByteBudget,
    Direction,
    Reservation,
)

MODEL = "tests/budget"
MIB = 1 << 20


def reserve(budget: ByteBudget, peer: str, direction: Direction = Direction.OUT, seconds: float = 60.0) -> Reservation:
    return Reservation(budget, direction, Peer(peer, peer), lambda: seconds)


class Taker:
    """A stream in a thread of its own that takes room once, and records when it gets it."""

    def __init__(self, budget: ByteBudget, peer: str, order: list[str], direction: Direction = Direction.OUT):
        self.reservation = reserve(budget, peer, direction)
        before = sum(budget.in_flight.waiting.values())
        self.thread = threading.Thread(target=self._take, args=(peer, order), daemon=True)
        self.thread.start()
        eventually(lambda: sum(budget.in_flight.waiting.values()) > before)

    def _take(self, peer: str, order: list[str]) -> None:
        self.reservation.take()
        order.append(peer)

    def leave(self) -> None:
        self.thread.join(60)
        self.reservation.give()


def test_connections_take_turns_however_many_streams_one_of_them_has() -> None:
    budget = ByteBudget(LEAST_BYTES)
    holders = [reserve(budget, f"holder {i}") for i in range(6)]
    for holder in holders:
        holder.take()
    order: list[str] = []
    takers = [Taker(budget, peer, order) for peer in ("greedy", "greedy", "greedy", "greedy", "b", "c")]
    in_turn = [takers[0], takers[4], takers[5], takers[1], takers[2], takers[3]]
    holders[0].give()
    for i, taker in enumerate(in_turn):
        eventually(lambda i=i: len(order) == i + 1)
        taker.leave()
    assert order == ["greedy", "b", "c", "greedy", "greedy", "greedy"]
    for holder in holders[1:]:
        holder.give()
    assert not any(budget.in_flight.nbytes.values())
    assert not any(budget.in_flight.waiting.values())


def test_one_connection_and_one_direction_leave_room_for_the_others() -> None:
    budget = ByteBudget(LEAST_BYTES)
    got: list[str] = []
    held: list[Reservation] = []

    def take_all(peer: str, direction: Direction) -> int:
        before = len(held)
        while True:
            one = reserve(budget, peer, direction, seconds=0.0)
            try:
                one.take()
            except ResourceExhausted:
                return len(held) - before
            held.append(one)

    assert take_all("one", Direction.OUT) * MESSAGE_ROOM == LEAST_BYTES // 4
    for peer in ("two", "three", "four"):
        take_all(peer, Direction.OUT)
    assert len(held) * MESSAGE_ROOM == LEAST_BYTES * 3 // 8
    for peer in ("five", "six", "seven"):
        take_all(peer, Direction.IN)
    assert len(held) * MESSAGE_ROOM == LEAST_BYTES * 3 // 4
    # what other replicas pass on still gets through: they may be waiting for this one
    assert take_all("replica", Direction.REPLICAS) * MESSAGE_ROOM == LEAST_BYTES // 4
    waiting = Taker(budget, "one", got)
    for mine in held[:3]:  # of the same connection: another host can have a fourth
        mine.give()
    eventually(lambda: got == ["one"])
    waiting.leave()
    for one in held:
        one.give()
    assert not any(budget.in_flight.nbytes.values())


def test_a_small_message_does_not_overtake_a_large_one_for_ever() -> None:
    budget = ByteBudget(LEAST_BYTES)
    sizes = [(Direction.OUT, MIB)] * 4 + [(Direction.OUT, MIB // 2)]
    sizes += [(Direction.IN, MIB)] * 6 + [(Direction.REPLICAS, MIB)] * 5
    holders = [reserve(budget, f"holder {i}", direction) for i, (direction, _) in enumerate(sizes)]
    for holder, (_, size) in zip(holders, sizes, strict=True):
        holder.take(size)
    order: list[str] = []
    large = Taker(budget, "large", order)
    with pytest.raises(ResourceExhausted):
        reserve(budget, "small", seconds=0.0).take(MIB // 4)  # half a message is free
    holders[1].give()
    eventually(lambda: order == ["large"])
    large.leave()


def test_whoever_waits_and_goes_away_does_not_stay_in_line() -> None:
    budget = ByteBudget(LEAST_BYTES)
    holders = [reserve(budget, f"holder {i}") for i in range(6)]
    for holder in holders:
        holder.take()
    raised: list[BaseException] = []
    gone = reserve(budget, "gone")

    def wait() -> None:
        try:
            gone.take()
        except Unavailable as error:
            raised.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    eventually(lambda: budget.in_flight.waiting[Direction.OUT] == 1)
    gone.abandon()
    thread.join(60)
    assert len(raised) == 1
    assert budget.in_flight.waiting[Direction.OUT] == 0
    assert budget.in_flight.nbytes[Direction.OUT] == 6 * MESSAGE_ROOM


def test_never_more_than_the_budget_is_held_and_all_are_served() -> None:
    budget = ByteBudget(LEAST_BYTES)
    lock = threading.Lock()
    held, most, served = 0, 0, 0

    def stream(number: int) -> None:
        nonlocal held, most, served
        dice = random.Random(number)
        mine = reserve(budget, f"peer {number % 5}", Direction.IN if number % 3 else Direction.OUT)
        for _ in range(40):
            size = dice.randint(1, MIB)
            mine.take(size)
            with lock:
                held += 2 * size
                most = max(most, held)
            with lock:
                held -= 2 * size
                served += 1
            mine.give()

    with ThreadPoolExecutor(24) as pool:
        list(pool.map(stream, range(24)))
    assert served == 24 * 40
    assert most <= LEAST_BYTES
    assert not any(budget.in_flight.nbytes.values())


def test_a_budget_too_small_to_get_on_with_is_refused() -> None:
    with pytest.raises(InvalidArgument):
        ByteBudget(LEAST_BYTES - 1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """A model of 20 MB."""
    return tiny_folder(tmp_path_factory.mktemp("budget") / "hf", hidden_size=8192)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, model: TinyModel) -> Iterator[RunningService]:
    store = tmp_path_factory.mktemp("store")
    with running_service(store, byte_budget=LEAST_BYTES, budget_wait=0.5) as running:
        with TrainerClient(running.address, lane="grpc") as trainer:
            trainer.register_model(MODEL, model.folder)
            trainer.push_folder(MODEL, model.folder).wait(timeout=60)
        yield running


@contextmanager
def all_room_taken(service: RunningService) -> Iterator[None]:
    """Let other streams hold the whole budget of this direction."""
    with ExitStack() as stack:
        for i in range(6):
            holder = reserve(service.service.byte_budget, f"other {i}")
            stack.callback(holder.give)
            holder.take()
        yield


def refused(service: RunningService) -> float:
    """Number of pulls that were refused with RESOURCE_EXHAUSTED."""
    found = service.metrics.registry.get_sample_value(
        "weighbridge_grpc_calls_total", {"method": "Pull", "code": "RESOURCE_EXHAUSTED"}
    )
    return found or 0.0


def test_a_pull_that_finds_no_room_until_its_deadline_is_told_when_to_try_again(
    service: RunningService,
) -> None:
    def refusal() -> Any:
        request = weight_service_pb2.PullRequest(model=MODEL, version="latest")
        with RawClient(service.address) as raw, pytest.raises(grpc.RpcError) as caught:
            list(raw.weights.Pull(iter([request]), timeout=3.0))
        return caught.value

    with all_room_taken(service):
        refusals = (refusal() for _ in range(5))
        # on a busy machine the deadline may pass before the refusal, which is due a quarter of a second earlier
        told = next(each for each in refusals if each.code() is not grpc.StatusCode.DEADLINE_EXCEEDED)
    assert told.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    status = rpc_status.from_call(told)
    retry = error_details_pb2.RetryInfo()
    assert any(detail.Unpack(retry) for detail in status.details)
    assert retry.retry_delay.ToTimedelta().total_seconds() > 0
    assert service.service.byte_budget.in_flight.nbytes[Direction.OUT] == 0


def test_the_client_waits_for_room_and_gets_the_same_bytes(service: RunningService, model: TinyModel) -> None:
    before = refused(service)
    with EngineClient(service.address, lane="grpc") as engine, ThreadPoolExecutor(1) as pool:
        with all_room_taken(service):
            found = pool.submit(assert_equal, engine, MODEL, "latest", model.arrays)
            eventually(lambda: refused(service) > before)
            assert not found.done()
        found.result(60)


def test_the_client_gives_up_when_there_was_no_room_for_too_long(service: RunningService) -> None:
    with (
        EngineClient(service.address, retry_seconds=0.2, lane="grpc") as engine,
        all_room_taken(service),
        pytest.raises(ResourceExhausted) as caught,
    ):
        list(engine.pull(MODEL, "latest"))
    assert caught.value.retry_after is not None
    assert "--byte-budget" in caught.value.fix


def test_what_is_held_and_who_waits_can_be_seen(service: RunningService) -> None:
    def seen(name: str) -> float | None:
        return service.metrics.registry.get_sample_value(name, {"direction": "out"})

    request = weight_service_pb2.PullRequest(model=MODEL, version="latest")
    with RawClient(service.address) as raw:
        with all_room_taken(service):
            call = raw.weights.Pull(iter([request]), timeout=30.0)
            eventually(lambda: seen("weighbridge_streams_waiting") == 1)
            assert seen("weighbridge_in_flight_bytes") == 6 * MESSAGE_ROOM
        call.cancel()
    eventually(lambda: seen("weighbridge_streams_waiting") == 0 and seen("weighbridge_in_flight_bytes") == 0)


def test_clients_that_do_not_read_hold_one_message_each_and_the_others_go_on(
    service: RunningService, model: TinyModel
) -> None:
    budget = service.service.byte_budget
    request = weight_service_pb2.PullRequest(model=MODEL, version="latest")
    with ExitStack() as stack:
        calls = []
        for _ in range(3):
            raw = stack.enter_context(RawClient(service.address))
            calls.append(raw.weights.Pull(iter([request])))
            next(calls[-1])
        with (
            EngineClient(service.address, lane="grpc") as engine,
            TrainerClient(service.address, lane="grpc") as trainer,
        ):
            assert_equal(engine, MODEL, "latest", model.arrays)
            number = trainer.push_folder(MODEL, model.folder, step=2).wait(timeout=60).number
            assert_equal(engine, MODEL, number, model.arrays)
        assert budget.in_flight.nbytes[Direction.OUT] <= 3 * MESSAGE_ROOM
        for call in calls:
            call.cancel()
    eventually(lambda: not any(budget.in_flight.nbytes.values()))


def test_a_stream_that_was_fast_has_no_more_than_its_window_on_its_way_to_a_receiver_that_stands_still() -> None:
    fast, stop = 200, threading.Event()

    def receive(messages: Iterator[bytes], _: grpc.ServicerContext) -> bytes:
        for number, _message in enumerate(messages, 1):
            if number == fast:
                stop.wait(30)
                break
        return b""

    sent = 0

    def messages() -> Iterator[bytes]:
        nonlocal sent
        while not stop.is_set():
            sent += 1
            yield bytes(MIB)

    handler = grpc.stream_unary_rpc_method_handler(receive)
    server = grpc.server(
        ThreadPoolExecutor(1),
        handlers=[grpc.method_handlers_generic_handler("tests.Window", {"Push": handler})],
        options=rpc.CHANNEL_OPTIONS,
    )
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with grpc.insecure_channel(f"127.0.0.1:{port}", options=rpc.CHANNEL_OPTIONS) as channel:
        call = channel.stream_unary("/tests.Window/Push").future(messages())
        seen = -1
        while sent < fast or sent != seen:
            seen = sent
            assert not stop.wait(0.5)
        stop.set()
        call.cancel()
    server.stop(0).wait(10)
    # one more is with gRPC, one in its encoder, and one was read ahead for the receiver
    assert (sent - fast) * MIB <= rpc.WINDOW_BYTES + 4 * MIB


READER = """
import sys
from weighbridge import EngineClient
stream = EngineClient(sys.argv[1]).pull(sys.argv[2], "live").stream()
while not len(next(stream)):
    pass
print("reading", flush=True)
sys.stdin.read()
"""


def test_a_client_killed_while_it_reads_leaves_nothing_behind_and_disturbs_nobody(
    service: RunningService, model: TinyModel
) -> None:
    with EngineClient(service.address, lane="grpc") as engine:
        other = engine.pull(MODEL, "live").stream()
        received = [bytes(next(other)) for _ in range(3)]
        with ForkedPython("-c", READER, service.address, MODEL) as reader:
            assert reader.stdout.readline() == "reading\n"
            reader.kill()
        received += map(bytes, other)
        whole = b"".join(t.numpy().tobytes() for _, t in engine.pull(MODEL, "live"))
        assert b"".join(received) == whole
        assert_equal(engine, MODEL, "live", model.arrays)
    eventually(lambda: not any(service.service.byte_budget.in_flight.nbytes.values()))
    eventually(lambda: service.service.store_readers.count == 0)
