"""Pushes that break off, repeat, overlap, or come from the wrong side: is a version only ever the whole of one push?"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests.service.bad_input.bench import EMBEDDING, Bench, assert_never_visible, session_of
from tests.support.raw_clients import RawClient, assert_equal, cut, pb, rows_layout, stream_of, whole_layout
from tests.support.waiting import eventually
from weighbridge._core.layouts import Layout
from weighbridge._core.resources import VersionState
from weighbridge._transport import rpc
from weighbridge.errors import (
    AlreadyExists,
    DataLoss,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    VersionFailed,
    WeighbridgeError,
)
from weighbridge_service.push.machine.phases import Phase


@pytest.fixture
def begun(bench: Bench, raw: RawClient, model: str) -> tuple[int, bytes]:
    """A version that is open and declared, and the stream that it waits for."""
    layout = whole_layout(bench.source.arrays)
    number = raw.open(model)
    return number, stream_of(bench.source.arrays, layout, raw.declare(model, number, layout))


def test_a_push_that_stops_half_way_is_not_seen_and_can_be_resumed(
    bench: Bench, raw: RawClient, model: str, begun: tuple[int, bytes]
) -> None:
    number, stream = begun
    half = len(stream) // 2 + 1
    call_off = threading.Event()

    def stops() -> Iterator[Any]:
        yield from raw.messages(model, number, cut(stream[:half]))
        call_off.wait()

    call = raw.checkpoints.Push.future(stops())
    eventually(lambda: raw.received(model, number) == [(0, half)])
    call.cancel()
    call_off.set()
    assert raw.received(model, number) == [(0, half)]
    assert_never_visible(bench, model, number)
    with pytest.raises(FailedPrecondition) as caught:
        raw.seal(model, number)
    assert "have not arrived" in str(caught.value)
    assert any("model.layers.1" in detail and "box [" in detail for detail in caught.value.details)
    assert not any(detail.startswith(EMBEDDING) for detail in caught.value.details)  # it came first, and whole
    raw.push(model, number, [(half + offset, data) for offset, data in cut(stream[half:])])
    raw.seal(model, number)
    assert_equal(bench.engine, model, number, bench.source.arrays)


def test_a_corrupted_piece_is_refused_and_can_be_sent_again(
    bench: Bench, raw: RawClient, model: str, begun: tuple[int, bytes]
) -> None:
    number, stream = begun
    pieces = cut(stream)
    with pytest.raises(DataLoss, match="checksum"):
        raw.push(model, number, pieces[:3], damage=True)
    assert raw.received(model, number) == [(0, pieces[2][0])]
    with pytest.raises(FailedPrecondition, match="not arrived"):
        raw.seal(model, number)
    raw.push(model, number, pieces[2:])
    raw.seal(model, number)
    assert_equal(bench.engine, model, number, bench.source.arrays)


@pytest.mark.parametrize("offset", [-1, 0, 1, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64 - 4])
@pytest.mark.parametrize("data", [b"", b"evil"])
def test_a_piece_outside_of_the_stream_is_refused(
    bench: Bench, raw: RawClient, model: str, begun: tuple[int, bytes], offset: int, data: bytes
) -> None:
    number, stream = begun
    if offset < 1000:
        offset += len(stream) + (1 if not data else 0)
    if offset + len(data) > len(stream):
        with pytest.raises(InvalidArgument, match="outside of its stream"):
            raw.push(model, number, [(offset, data)])
    assert raw.received(model, number) == []
    raw.push(model, number, cut(stream))
    raw.seal(model, number)
    assert_equal(bench.engine, model, number, bench.source.arrays)


def test_pieces_may_come_repeatedly_overlapping_and_in_any_order(
    bench: Bench, raw: RawClient, model: str, begun: tuple[int, bytes]
) -> None:
    number, stream = begun
    chance = random.Random(5)
    pieces = [*cut(stream, 4_999), *cut(stream, 7_001), *cut(stream, 1), *cut(stream[:100], 1)][
        : 3 * len(stream) // 4_999
    ]
    pieces += cut(stream, 3_333)
    chance.shuffle(pieces)
    parts = [pieces[i::4] for i in range(4)]
    threads = [threading.Thread(target=raw.push, args=(model, number, part)) for part in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    raw.push(model, number, [(0, b""), (len(stream), b"")])
    assert raw.received(model, number) == [(0, len(stream))]
    raw.seal(model, number)
    assert_equal(bench.engine, model, number, bench.source.arrays)


def test_a_sealed_version_takes_nothing_more(bench: Bench, raw: RawClient, model: str) -> None:
    arrays = bench.source.arrays
    number = raw.push_whole(model, arrays)
    layout = whole_layout(arrays)
    evil = b"\xff" * layout.nbytes
    for attempt in (
        lambda: raw.push(model, number, cut(evil)),
        lambda: raw.declare(model, number, layout),
        lambda: raw.call(raw.checkpoints.AbortVersion, pb.AbortVersionRequest(model=model, number=number)),
    ):
        with pytest.raises(FailedPrecondition, match=r"is complete|visible already"):
            attempt()
    assert_equal(bench.engine, model, number, arrays)


def test_a_rank_that_is_sealed_takes_nothing_more_while_others_push(bench: Bench, raw: RawClient, model: str) -> None:
    number, streams = two_ranks(bench, raw, model)
    raw.push(model, number, cut(streams[0]), rank=0)
    raw.seal(model, number, rank=0)
    with pytest.raises(FailedPrecondition, match="sealed"):
        raw.push(model, number, [(0, b"evil")], rank=0)
    raw.push(model, number, cut(streams[1]), rank=1)
    raw.seal(model, number, rank=1)
    assert_equal(bench.engine, model, number, bench.source.arrays)


def two_ranks(bench: Bench, raw: RawClient, model: str) -> tuple[int, list[bytes]]:
    """A version of two ranks, declared, and their streams."""
    arrays = bench.source.arrays
    number = raw.open(model, ranks=2)
    layouts = [rows_layout(arrays, rank, 2) for rank in range(2)]
    answers: dict[int, list[int]] = {}

    def declare(rank: int) -> None:
        answers[rank] = raw.declare(model, number, layouts[rank], rank=rank)

    threads = [threading.Thread(target=declare, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return number, [stream_of(arrays, layouts[rank], answers[rank]) for rank in range(2)]


def test_a_rank_that_does_not_exist_or_has_not_declared_is_refused(bench: Bench, raw: RawClient, model: str) -> None:
    number = raw.open(model, ranks=2)
    layout = whole_layout(bench.source.arrays)
    for rank in (2, 2**31, 2**32 - 1):
        for attempt in (
            lambda rank=rank: raw.declare(model, number, layout, rank=rank),
            lambda rank=rank: raw.push(model, number, [(0, b"x")], rank=rank),
            lambda rank=rank: raw.received(model, number, rank),
            lambda rank=rank: raw.seal(model, number, rank),
        ):
            with pytest.raises(InvalidArgument, match=f"rank {rank}"):
                attempt()
    for attempt in (
        lambda: raw.push(model, number, [(0, b"x")]),
        lambda: raw.received(model, number),
        lambda: raw.seal(model, number),
    ):
        with pytest.raises(FailedPrecondition, match="declared"):
            attempt()
    for unknown in (number + 1, 2**63, 2**64 - 1):
        with pytest.raises(NotFound):
            raw.push(model, unknown, [(0, b"x")])


def test_a_push_without_header_or_without_any_message_is_refused(bench: Bench, raw: RawClient) -> None:
    for messages in ([], [pb.PushRequest(offset=0, data=b"x")]):
        with pytest.raises(InvalidArgument, match="header"), rpc.translated_errors(raw.address):
            raw.checkpoints.Push(iter(messages), timeout=10)


def test_nobody_pushes_as_another_clients_rank(
    bench: Bench, raw: RawClient, model: str, begun: tuple[int, bytes]
) -> None:
    number, stream = begun
    with RawClient(bench.running.address) as other:
        for attempt in (
            lambda: other.push(model, number, [(0, b"evil" * 100)]),
            lambda: other.seal(model, number),
            lambda: other.declare(model, number, whole_layout(bench.source.arrays)),
        ):
            with pytest.raises(AlreadyExists, match="another process"):
                attempt()
    raw.push(model, number, cut(stream))
    raw.seal(model, number)
    assert_equal(bench.engine, model, number, bench.source.arrays)


def test_the_second_of_two_trainers_that_push_one_step_is_told_so(bench: Bench, model: str) -> None:
    with RawClient(bench.running.address) as one, RawClient(bench.running.address) as other:
        layout = whole_layout(bench.source.arrays)
        first = one.open(model, step=7, request_id="r/7")
        one.declare(model, first, layout)
        second = other.open(model, step=7, request_id="r/7")
        assert second == first
        with pytest.raises(AlreadyExists, match="another process") as caught:
            other.declare(model, second, layout)
        assert "its own run name" in caught.value.fix
        with pytest.raises(InvalidArgument, match="ranks"):
            other.open(model, step=7, request_id="r/7", ranks=2)


def test_a_request_id_that_stands_for_another_step_or_run_is_refused(bench: Bench, raw: RawClient, model: str) -> None:
    raw.open(model, step=7, request_id="mine")
    for fields in ({"step": 8}, {"step": 7, "run": "other"}):
        with pytest.raises((InvalidArgument, AlreadyExists)):
            raw.open(model, request_id="mine", **fields)


def test_a_restarted_trainer_that_pushes_a_durable_step_again_gets_a_new_version(bench: Bench, model: str) -> None:
    numbers = []
    for _ in range(2):
        with RawClient(bench.running.address) as started_anew:
            numbers.append(started_anew.push_whole(model, bench.source.arrays, step=3, request_id="r/3"))
        bench.trainer.wait_for(model, numbers[-1], VersionState.DURABLE, timeout=20)
    assert numbers[1] > numbers[0]
    for number in numbers:
        assert_equal(bench.engine, model, number, bench.source.arrays)


def test_layouts_that_changed_since_the_last_push_are_never_mixed_with_those_of_then(bench: Bench, model: str) -> None:
    """Rank 1 declares new shards, of the same size as before, before rank 0 declares its old ones."""
    arrays = bench.source.arrays
    old = [rows_layout(arrays, rank, 2) for rank in range(2)]
    placements = list(old[1].placements)
    names = [p.shard.tensor for p in placements]
    gate, up = (names.index(f"model.layers.0.mlp.{n}_proj.weight") for n in ("gate", "up"))
    placements[gate], placements[up] = placements[up], placements[gate]
    new = Layout.stream(old[1].tensors.values(), [p.shard for p in placements])
    with RawClient(bench.running.address) as raw:

        def push(layouts: list[Layout]) -> int:
            number = raw.open(model, ranks=2)
            errors: list[WeighbridgeError] = []

            def one(rank: int) -> None:
                try:
                    assigned = raw.declare(model, number, layouts[rank], rank=rank)
                    raw.push(model, number, cut(stream_of(arrays, layouts[rank], assigned)), rank=rank)
                    raw.seal(model, number, rank=rank)
                except WeighbridgeError as error:
                    errors.append(error)

            threads = [threading.Thread(target=one, args=(rank,)) for rank in (1, 0)]
            threads[0].start()
            eventually(lambda: errors or session_of(bench, model, number).state.declarations.absent == [0])
            threads[1].start()
            for thread in threads:
                thread.join()
            assert not errors or bench.trainer.version(model, number).state is VersionState.FAILED
            return number

        push(old)
        number = push([old[0], new])
        if bench.trainer.version(model, number).state is not VersionState.FAILED:
            assert_equal(bench.engine, model, number, arrays)
        assert_equal(bench.engine, model, push([old[0], new]), arrays)


def test_a_seal_that_waits_for_a_late_piece_ends_once_and_heeds_an_abort(
    bench: Bench, raw: RawClient, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from weighbridge_service.plan import transfers

    arrays = bench.source.arrays
    for abort in (False, True):
        layout = whole_layout(arrays)
        number = raw.open(model)
        stream = stream_of(arrays, layout, raw.declare(model, number, layout))
        entered, go_on = threading.Event(), threading.Event()
        scatter = transfers.Transfer.scatter

        def slow(
            self: Any,
            *args: Any,
            entered: Any = entered,
            go_on: Any = go_on,
            scatter: Any = scatter,
            **kwargs: Any,
        ) -> Any:
            entered.set()
            go_on.wait(60)
            return scatter(self, *args, **kwargs)

        with monkeypatch.context() as patched:
            patched.setattr(transfers.Transfer, "scatter", slow)
            late = threading.Thread(target=raw.push, args=(model, number, [(0, stream[:5000])]))
            late.start()
            assert entered.wait(60)
        raw.push(model, number, cut(stream))
        results: list[Any] = []

        def seal(number: int = number, results: list[Any] = results) -> None:
            try:
                results.append(raw.seal(model, number).state)
            except WeighbridgeError as error:
                results.append(error)

        session = session_of(bench, model, number)
        threads = [threading.Thread(target=seal) for _ in range(3)]
        for thread in threads:
            thread.start()
        eventually(lambda session=session: len(session._waiting._calls) == 3)  # type: ignore[misc]
        if abort:
            request = pb.AbortVersionRequest(model=model, number=number, reason="changed my mind")
            aborting = threading.Thread(target=raw.call, args=(raw.checkpoints.AbortVersion, request))
            aborting.start()
            threads.append(aborting)
            eventually(lambda session=session: session.state.phase is Phase.ABORTED)  # type: ignore[misc]
        go_on.set()
        for thread in [*threads, late]:
            thread.join()
        if abort:
            assert bench.trainer.version(model, number).state is VersionState.ABORTED
            assert all(isinstance(result, VersionFailed) for result in results), results
            assert_never_visible_number(bench, model, number)
        else:
            bench.trainer.wait_for(model, number, VersionState.DURABLE, timeout=20)
            assert session.wait_finished(60), "a second publication would have come by now"
            assert_equal(bench.engine, model, number, arrays)
            assert not bench.trainer.verify(model, number).problems


def assert_never_visible_number(bench: Bench, model: str, number: int) -> None:
    assert number not in [v.number for v in bench.trainer.versions(model)]
    assert number not in bench.trainer.refs(model).values()
