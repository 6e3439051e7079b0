"""Do clients find the separate port for weights, and does it refuse unauthorized calls?"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from tests.support.new_threads import NewThreads
from tests.support.raw_clients import TinyModel, tiny_folder
from tests.support.services import RunningService, running_service
from tests.support.waiting import eventually
from weighbridge import EngineClient, TrainerClient
from weighbridge._core.operations.verbs import Verb
from weighbridge._transport import bulk, bulk_entry, rpc
from weighbridge._transport.addresses import Addresses
from weighbridge.errors import DataLoss, FailedPrecondition, InvalidArgument, NotFound, Unavailable
from weighbridge.v1 import bulk_service_pb2 as pb
from weighbridge.v1 import bulk_service_pb2_grpc, weight_service_pb2
from weighbridge_service.admission.tickets import VALID_SECONDS, Tickets, ticket_key
from weighbridge_service.api.grpc import asking
from weighbridge_service.api.grpc.requests import RequestLimits
from weighbridge_service.api.grpc.server import CallLimits, GrpcListener, bulk_ports
from weighbridge_storage.stores.local import LocalStore

MODEL = "tests/bulk"
KEY = b"k" * 32


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return tiny_folder(tmp_path_factory.mktemp("bulk") / "hf")


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, model: TinyModel) -> Iterator[RunningService]:
    with running_service(tmp_path_factory.mktemp("store"), bulk_port="0") as running:
        with TrainerClient(running.address, lane="grpc") as trainer:
            trainer.register_files(MODEL, model.files)
            trainer.push_folder(MODEL, model.folder, step=1).wait(timeout=60)
        yield running


def calls(service: RunningService, method: str, code: str) -> float:
    return (
        service.metrics.registry.get_sample_value("weighbridge_grpc_calls_total", {"method": method, "code": code})
        or 0.0
    )


def entry(service: RunningService) -> bulk_entry.BulkEntry:
    with rpc.open_channel(service.address) as channel:
        return bulk_entry.ask(channel, service.address)


def pull_without(service: RunningService, metadata: bulk_entry.Metadata) -> grpc.RpcError:
    """The error of a pull with this metadata at the port for weights."""
    request = weight_service_pb2.PullRequest(model=MODEL, version="latest").SerializeToString()
    with (
        rpc.open_channel(entry(service).address) as channel,
        pytest.raises(grpc.RpcError) as refused,
    ):
        list(channel.unary_stream("/weighbridge.v1.WeightService/Pull")(request, metadata=metadata))
    return refused.value


def test_weights_go_over_their_own_port_and_come_back_the_same(service: RunningService, model: TinyModel) -> None:
    before = calls(service, "Pull", "OK")
    with EngineClient(service.address, lane="grpc") as engine:
        assert engine._connection.streams.way(0).metadata
        found = {name: tensor.numpy() for name, tensor in engine.pull(MODEL, "latest")}
    assert found.keys() == model.arrays.keys()
    assert all(np.array_equal(found[name], array) for name, array in model.arrays.items())
    assert calls(service, "Pull", "OK") == before + 1


def test_a_call_without_a_ticket_is_refused_and_takes_no_thread(service: RunningService) -> None:
    since = NewThreads()
    for ticket in ("", "nonsense", Tickets(KEY).give("127.0.0.1"), "é"):
        metadata = ((bulk_entry.TICKET, ticket),) if ticket.isascii() and ticket else ()
        error = pull_without(service, metadata)
        assert error.code() is grpc.StatusCode.UNAVAILABLE  # type: ignore[attr-defined]
        assert "ticket" in error.details()  # type: ignore[attr-defined]
    assert not [each.name for each in since.alive() if "stream" in each.name]


def test_whoever_takes_it_for_the_service_s_port_is_told_that_one(service: RunningService) -> None:
    with (
        EngineClient(entry(service).address) as engine,
        pytest.raises(FailedPrecondition, match="the service's port for weights") as refused,
    ):
        engine.models()
    assert service.address.rpartition(":")[2] in refused.value.fix


def test_calls_that_would_wait_behind_too_many_are_refused_and_the_port_goes_on(
    tmp_path: Path,
) -> None:
    done = threading.Event()

    def silent() -> Iterator[bytes]:
        done.wait(60)
        yield b""

    with (
        running_service(tmp_path, bulk_port="0", most_streams=1, limits=CallLimits(line=2)) as running,
        rpc.open_channel(entry(running).address) as channel,
    ):
        metadata = entry(running).metadata
        push = channel.stream_stream("/weighbridge.v1.CheckpointService/Push")
        calls = [push(silent(), metadata=metadata, timeout=60) for _ in range(8)]
        eventually(lambda: sum(call.done() for call in calls) == 4)  # two have threads, two wait
        done.set()
        codes = [call.code() for call in calls]
        assert codes.count(grpc.StatusCode.RESOURCE_EXHAUSTED) == 4
        assert codes.count(grpc.StatusCode.INVALID_ARGUMENT) == 4
        with pytest.raises(grpc.RpcError) as refused:
            list(push(iter([b""]), metadata=metadata, timeout=60))
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT  # type: ignore[attr-defined]


def test_control_calls_are_not_answered_at_the_port_for_weights(service: RunningService) -> None:
    found = entry(service)
    with rpc.open_channel(found.address) as channel, pytest.raises(grpc.RpcError) as refused:
        channel.unary_unary("/weighbridge.v1.ModelService/ListModels")(b"", metadata=found.metadata)
    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION


def test_weights_go_over_the_known_port_if_the_other_cannot_be_reached(
    service: RunningService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bulk_entry, "_listens", lambda *_: False)
    with EngineClient(service.address, lane="grpc") as engine:
        assert engine._connection.streams.way(0).metadata == ()
        assert len(dict(engine.pull(MODEL, "latest"))) > 0


def test_a_broken_stream_asks_anew_where_weights_go(tmp_path: Path, model: TinyModel) -> None:
    with running_service(tmp_path, bulk_port="0") as first:
        with TrainerClient(first.address, lane="grpc") as trainer:
            trainer.register_files(MODEL, model.files)
            trainer.push_folder(MODEL, model.folder, step=1).wait(timeout=60)
        connections = bulk.Connections(Addresses([first.address]), 1)
        before = connections.way(0)
        connections.renew()
        assert connections.way(0).channel is before.channel
        connections.close()


def test_a_port_for_weights_that_another_process_has_is_named_with_what_to_do() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(Unavailable, match=f"cannot listen at {address}, its port for weights") as refused:
            GrpcListener("127.0.0.1:0", 16, address.rpartition(":")[2])
    assert "--bulk-port" in refused.value.fix


def test_a_ticket_is_good_for_its_time_and_its_key_alone() -> None:
    now = 10**12
    tickets = Tickets(KEY, lambda: now)
    given = tickets.give("10.0.0.7")
    assert tickets.host_of(given) == "10.0.0.7"
    now += VALID_SECONDS * 1000
    assert tickets.host_of(given) == "10.0.0.7"
    now += 1
    with pytest.raises(Unavailable):
        tickets.host_of(given)
    now -= 1
    with pytest.raises(Unavailable):
        Tickets(b"l" * 32, lambda: now).host_of(given)
    for i in range(len(given)):
        changed = given[:i] + ("A" if given[i] != "A" else "B") + given[i + 1 :]
        with pytest.raises(Unavailable):
            tickets.host_of(changed)


def test_replicas_over_one_store_take_each_others_tickets(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    key = ticket_key(store)
    assert len(key) == 32
    assert ticket_key(store) == key
    store.put("service/ticket-key", b"short", mode="overwrite")
    with pytest.raises(DataLoss, match="5 bytes"):
        ticket_key(store)
    store.close()


def test_the_port_is_the_one_that_was_asked_for() -> None:
    assert bulk_ports("auto", 50051) == (50052, 0)
    assert bulk_ports("auto", 65535) == (0,)
    assert bulk_ports("off", 50051) == ()
    assert bulk_ports("7", 50051) == (7,)
    for wrong in ("", "-1", "65536", "x", "٣"):
        with pytest.raises(InvalidArgument):
            bulk_ports(wrong, 50051)


def test_a_service_without_the_port_takes_weights_at_the_known_one(tmp_path: Path) -> None:
    with running_service(tmp_path) as running, rpc.open_channel(running.address) as channel:
        answer = bulk_service_pb2_grpc.BulkServiceStub(channel).GetTicket(pb.GetTicketRequest())
        assert answer.port == 0
        assert bulk_entry.ask(channel, running.address).address == running.address


# --- callers that mean harm


def ways(service: RunningService) -> tuple[grpc.Channel, bulk_entry.Metadata]:
    """A channel to the port for weights, and what lets calls in there."""
    found = entry(service)
    return rpc.open_channel(found.address), found.metadata


def silent(channel: grpc.Channel, metadata: bulk_entry.Metadata, until: threading.Event) -> Any:
    """A pull that sends its headers and then nothing."""

    def nothing() -> Iterator[bytes]:
        until.wait(60)
        yield from ()

    call = channel.stream_stream("/weighbridge.v1.WeightService/Pull")
    return call(nothing(), metadata=metadata)


def pulled(channel: grpc.Channel, metadata: bulk_entry.Metadata, seconds: float) -> int:
    """Number of bytes that a valid pull receives."""
    request = weight_service_pb2.PullRequest(model=MODEL, version="latest").SerializeToString()
    call = channel.unary_stream("/weighbridge.v1.WeightService/Pull")
    return sum(map(len, call(request, metadata=metadata, timeout=seconds)))


def test_callers_that_say_nothing_lose_their_threads(tmp_path: Path, model: TinyModel) -> None:
    limits, since = CallLimits(requests=RequestLimits(silent_seconds=1.0)), NewThreads()
    with running_service(tmp_path, bulk_port="0", most_streams=2, limits=limits) as service:
        publish(service, model)
        over = threading.Event()
        channel, metadata = ways(service)
        with channel:
            calls = [silent(channel, metadata, over) for _ in range(4)]
            eventually(lambda: len(since.named("grpc-stream")) == 4)
            assert pulled(channel, metadata, 30.0) > 0
            assert all(call.code() is grpc.StatusCode.CANCELLED for call in calls)
            over.set()


def test_a_port_with_no_thread_left_refuses_calls_and_goes_on(tmp_path: Path, model: TinyModel) -> None:
    with running_service(tmp_path, bulk_port="0", most_streams=2, limits=CallLimits(line=3)) as service:
        publish(service, model)
        over = threading.Event()
        channel, metadata = ways(service)
        with channel:
            calls = [silent(channel, metadata, over) for _ in range(20)]
            eventually(lambda: sum(call.done() for call in calls) == 20 - 4 - 3)
            refused = [call for call in calls if call.done()]
            assert {call.code() for call in refused} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
            assert "wait for a thread" in refused[0].details()
            for call in calls:
                call.cancel()
            over.set()
            eventually(lambda: pulls_again(channel, metadata))


def pulls_again(channel: grpc.Channel, metadata: bulk_entry.Metadata) -> bool:
    """Whether a pull is served; a refused one must lack a thread."""
    try:
        return pulled(channel, metadata, 10.0) > 0
    except grpc.RpcError as error:
        if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:  # type: ignore[attr-defined]
            raise
        return False


def publish(service: RunningService, model: TinyModel) -> None:
    with TrainerClient(service.address, lane="grpc") as trainer:
        trainer.register_files(MODEL, model.files)
        trainer.push_folder(MODEL, model.folder, step=1).wait(timeout=60)


def test_the_port_for_weights_asks_whether_a_peer_may(
    service: RunningService, model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[tuple[str, Verb, str, str]]()
    monkeypatch.setattr(asking, "authorize", lambda peer, verb, name, ref: asked.append((peer.host, verb, name, ref)))
    channel, metadata = ways(service)
    with channel:
        assert pulled(channel, metadata, 30.0) > 0
    assert ("127.0.0.1", Verb.PULL, MODEL, "latest") in asked
    asked.clear()
    with TrainerClient(service.address, lane="grpc") as trainer:
        trainer.push_folder(MODEL, model.folder, step=2).wait(timeout=60)
    assert sum(each == ("127.0.0.1", Verb.PUSH, MODEL, "2") for each in asked) >= 3


def test_a_peer_that_may_not_is_refused_at_the_port_for_weights(
    service: RunningService, monkeypatch: pytest.MonkeyPatch
) -> None:
    channel, metadata = ways(service)

    def refuse(*_: object) -> None:
        raise NotFound("there is nothing for you")

    monkeypatch.setattr(asking, "authorize", refuse)
    with channel, pytest.raises(grpc.RpcError) as refused:
        pulled(channel, metadata, 30.0)
    assert refused.value.code() is grpc.StatusCode.NOT_FOUND  # type: ignore[attr-defined]
    assert "nothing for you" in str(refused.value)


def test_a_stream_that_was_ended_leaves_nothing_in_the_log_when_its_client_goes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    large = tiny_folder(tmp_path / "hf", hidden_size=4096)
    with running_service(tmp_path / "store", byte_budget=32 << 20) as service:
        publish(service, large)
        request = weight_service_pb2.PullRequest(model=MODEL, version="latest").SerializeToString()
        channels = [rpc.open_channel(service.address, shared=False) for _ in range(4)]
        calls = [
            channel.unary_stream("/weighbridge.v1.WeightService/Pull")(request)
            for channel in channels
            for _ in range(6)
        ]
        with rpc.open_channel(service.address) as channel:
            assert pulled(channel, (), 60.0) > 8 << 20
        for call in calls:
            call.cancel()
        for each in channels:
            each.close()
        # an ended call counts until its client has disconnected
        eventually(lambda: calls_of(service, "Pull") >= len(calls))
    ours = ("weighbridge_service.api", "grpc")
    assert not [each for each in caplog.records if each.levelname == "ERROR" and each.name.startswith(ours)]


def calls_of(service: RunningService, method: str) -> float:
    """Number of ended calls of a method, with any of these codes."""
    return sum(
        calls(service, method, code) for code in ("OK", "CANCELLED", "UNAVAILABLE", "RESOURCE_EXHAUSTED", "INTERNAL")
    )


def test_weights_go_over_the_known_port_if_another_service_answers_at_the_other(
    tmp_path: Path, service: RunningService, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_service(tmp_path, bulk_port="0") as other:  # over another store, so with another key
        astray = entry(other).address
        really = bulk_entry.ask
        monkeypatch.setattr(bulk_entry, "ask", lambda *to: replace(really(*to), address=astray))
        with EngineClient(service.address, lane="grpc", retry_seconds=30.0) as engine:
            assert len(dict(engine.pull(MODEL, "latest"))) > 0
