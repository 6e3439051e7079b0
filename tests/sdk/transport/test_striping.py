"""Do the parts of a stream over several connections make up the stream, and do they end when the reader stops?"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.new_threads import NewThreads
from tests.support.raw_clients import RawClient, TinyModel, cut, stream_of, tiny_folder, whole_layout
from tests.support.services import RunningService, running_service
from tests.support.waiting import eventually
from weighbridge import EngineClient, TrainerClient
from weighbridge._core import striping
from weighbridge._core.striping import STRIPE_BYTES, Striping
from weighbridge._transport import bulk, bulk_entry, rpc
from weighbridge._transport.addresses import Addresses
from weighbridge._transport.pieces import Carried
from weighbridge.errors import InvalidArgument
from weighbridge.v1 import checkpoint_service_pb2 as pb
from weighbridge.v1 import weight_service_pb2

MODEL = "tests/striped"
SIZES = st.integers(0, 9 * STRIPE_BYTES)


@given(st.integers(1, striping.MOST_CALLS), SIZES, SIZES)
def test_the_parts_of_a_stream_are_all_of_it_and_no_byte_twice(count: int, one: int, other: int) -> None:
    begin, end = min(one, other), max(one, other)
    parts = [list(Striping(count, index).messages(begin, end)) for index in range(count)]
    position = begin
    for start, stop in sorted(message for part in parts for message in part):
        assert start == position
        assert 0 < stop - start <= STRIPE_BYTES
        position = stop
    assert position == end
    for index, part in enumerate(parts):
        assert part == sorted(part)
        if count > 1:
            assert all(
                start // STRIPE_BYTES == (stop - 1) // STRIPE_BYTES and start // STRIPE_BYTES % count == index
                for start, stop in part
            )


def test_small_streams_and_small_machines_use_one_connection() -> None:
    assert striping.default_connections(2) == 1
    assert striping.default_connections(64) == 2
    assert striping.calls_for(1 << 20, 8) == 1
    assert striping.calls_for(1 << 30, 8) == 8


@pytest.mark.parametrize("connections", [1, 2, 5])
@pytest.mark.parametrize("spread", [True, False])
def test_a_stream_comes_whole_whether_the_service_spreads_it_or_not(
    monkeypatch: pytest.MonkeyPatch, connections: int, spread: bool
) -> None:
    monkeypatch.setattr(striping, "_LEAST_BYTES", 1)
    stream = np.random.default_rng(1).bytes(7 * STRIPE_BYTES + 12_345)
    asked: list[Striping] = []

    def open_at(_: bulk.Way, part: Striping, offset: int) -> Iterator[Carried[weight_service_pb2.PullResponse]]:
        asked.append(part)
        sent = part if spread else Striping()
        header = pb.StreamHeader(stream_bytes=len(stream), striped_over=sent.count)
        yield Carried(
            weight_service_pb2.PullResponse(header=header, offset=offset, checksum=rpc.checksum(b"")),
            memoryview(b""),
        )
        for start, stop in sent.messages(offset, len(stream)):
            data = memoryview(stream)[start:stop]
            yield Carried(weight_service_pb2.PullResponse(offset=start, checksum=rpc.checksum(data)), data)

    class Cancellable:
        def __init__(self, pieces: Iterator[Carried[weight_service_pb2.PullResponse]]) -> None:
            self.pieces = pieces

        def __iter__(self) -> Iterator[Carried[weight_service_pb2.PullResponse]]:
            return self.pieces

        def cancel(self) -> None:
            pass

    # no server listens there, so no part is sent
    monkeypatch.setattr(bulk_entry, "ask", lambda *_: bulk_entry.BulkEntry("127.0.0.1:1", "127.0.0.1:1", (), math.inf))
    pieces = bulk.StreamReceiver(
        lambda way, part, offset: Cancellable(open_at(way, part, offset)),
        bulk.Connections(Addresses(["127.0.0.1:1"]), connections),
        nbytes=len(stream),
        on_header=lambda _: None,
        retry_seconds=1.0,
    )
    assert b"".join(map(bytes, pieces)) == stream
    assert {part.index for part in asked} == set(range(connections if spread else 1))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """A model of 20 MB: some twenty stripes."""
    return tiny_folder(tmp_path_factory.mktemp("striped") / "hf", hidden_size=8192)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, model: TinyModel) -> Iterator[RunningService]:
    with running_service(tmp_path_factory.mktemp("store")) as running:
        with TrainerClient(running.address, lane="grpc") as trainer:
            trainer.register_model(MODEL, model.folder)
            trainer.push_folder(MODEL, model.folder).wait(timeout=60)
        yield running


def test_whoever_stops_in_the_middle_leaves_no_thread_no_call_and_no_bytes_behind(
    service: RunningService, model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(striping, "_LEAST_BYTES", 1)
    since = NewThreads()
    with EngineClient(service.address, connections=3, lane="grpc") as engine:
        stream = engine.pull(MODEL, "latest").stream()
        while not len(next(stream)):
            pass
        assert since.named("receive")
        stream.close()
        eventually(lambda: not since.named("receive"))
        eventually(lambda: not any(service.service.byte_budget.in_flight.nbytes.values()))
        assert {name: t.numpy().tobytes() for name, t in engine.pull(MODEL, "latest")} == {
            name: array.tobytes() for name, array in model.arrays.items()
        }


@pytest.mark.parametrize(("count", "index"), [(0, 0), (2, 2), (3, 2**32 - 1), (17, 0), (2**32 - 1, 1)])
def test_parts_that_there_cannot_be_are_refused(service: RunningService, count: int, index: int) -> None:
    part = pb.Striping(count=count, index=index)
    with RawClient(service.address) as raw:
        with pytest.raises(InvalidArgument):
            raw.call(
                raw.weights.Pull,
                weight_service_pb2.PullRequest(model=MODEL, version="latest", striping=part),
            )
        with pytest.raises(InvalidArgument):
            raw.call(raw.checkpoints.Restore, pb.RestoreRequest(model=MODEL, version="latest", striping=part))


def test_a_message_of_more_than_a_mebibyte_is_refused_and_one_of_a_mebibyte_is_taken(
    service: RunningService, model: TinyModel
) -> None:
    layout = whole_layout(model.arrays)
    with RawClient(service.address) as raw:
        number = raw.open(MODEL)
        stream = stream_of(model.arrays, layout, raw.declare(MODEL, number, layout))
        with pytest.raises(InvalidArgument, match="1048577"):
            raw.push(MODEL, number, cut(stream, STRIPE_BYTES + 1))
        raw.push(MODEL, number, cut(stream, STRIPE_BYTES))
        raw.seal(MODEL, number)


@pytest.mark.parametrize("connections", [0, -1, 17])
def test_a_client_cannot_have_no_connection_or_too_many(connections: int) -> None:
    with pytest.raises(InvalidArgument):
        EngineClient("127.0.0.1:1", connections=connections)
