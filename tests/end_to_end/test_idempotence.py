"""Is it safe to repeat calls, to resume interrupted ones, and to pull while trainers push?"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.killable_service import KillableService
from tests.support.raw_clients import (
    RawClient,
    TinyModel,
    assert_equal,
    cut,
    pb,
    rows_layout,
    stream_of,
    tiny_folder,
    whole_layout,
)
from tests.support.rounds import rounds
from tests.support.services import RunningService, running_service
from tests.support.waiting import eventually
from weighbridge._clients.engine import EngineClient
from weighbridge._core.layouts import Layout
from weighbridge._core.megatron_rank import MegatronRank
from weighbridge._core.resources import Version, VersionState
from weighbridge._core.slices import Boxes, FullTensors, LayoutRequest, TensorParallel
from weighbridge._core.tensor_spaces import TensorSpace
from weighbridge._trainers.trainer import TrainerClient
from weighbridge._transport import rpc, wire
from weighbridge.errors import FailedPrecondition, NotFound, Unavailable, VersionFailed, WeighbridgeError
from weighbridge.v1 import weight_service_pb2

MODEL = "acme/again"
EMBEDDING = "model.embed_tokens.weight"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return tiny_folder(tmp_path_factory.mktemp("source") / "hf")


@pytest.fixture
def running(tmp_path: Path, source: TinyModel) -> Iterator[RunningService]:
    with running_service(tmp_path / "store", {MODEL: source.files}, drain_seconds=0.1) as service:
        yield service


@pytest.fixture
def raw(running: RunningService) -> Iterator[RawClient]:
    with RawClient(running.address) as client:
        yield client


@pytest.fixture
def trainer(running: RunningService) -> Iterator[TrainerClient]:
    with TrainerClient(running.address) as client:
        yield client


@pytest.fixture
def engine(running: RunningService) -> Iterator[EngineClient]:
    with EngineClient(running.address) as client:
        yield client


def at_once(count: int, work: Any) -> list[Any]:
    """The result of ``work(i)``, or its error, on each of ``count`` threads that start together."""
    results: list[Any] = [None] * count
    start = threading.Barrier(count)

    def run(index: int) -> None:
        start.wait()
        try:
            results[index] = work(index)
        except WeighbridgeError as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return results


# -- repeats -------------------------------------------------------------------------------------------------------------


def test_one_request_opens_one_version_however_often_it_comes(running: RunningService, raw: RawClient) -> None:
    clients = [RawClient(running.address) for _ in range(8)]
    numbers = at_once(8, lambda i: clients[i].open(MODEL, request_id="r/1"))
    assert set(numbers) == {numbers[0]}
    assert raw.open(MODEL, request_id="r/1") == numbers[0]
    assert raw.open(MODEL, request_id="r/2") > numbers[0]
    for client in clients:
        client.channel.close()


def test_different_requests_open_different_versions_with_rising_numbers(raw: RawClient) -> None:
    first = [raw.open(MODEL) for _ in range(5)]
    assert first == sorted(set(first))
    assert len(set(at_once(16, lambda i: raw.open(MODEL, request_id=f"q{i}")))) == 16


def test_every_step_of_a_push_may_be_repeated(
    running: RunningService, raw: RawClient, trainer: TrainerClient, engine: EngineClient, source: TinyModel
) -> None:
    arrays = source.arrays
    number = raw.open(MODEL, ranks=2, request_id="r/1")
    layouts = [rows_layout(arrays, rank, 2) for rank in range(2)]
    answers = at_once(8, lambda i: raw.declare(MODEL, number, layouts[i % 2], rank=i % 2))
    assert answers == answers[:2] * 4
    assert [raw.declare(MODEL, number, layouts[rank], rank=rank) for rank in range(2)] == answers[:2]
    pieces = [cut(stream_of(arrays, layouts[rank], answers[rank])) for rank in range(2)]
    at_once(6, lambda i: raw.push(MODEL, number, pieces[i % 2], rank=i % 2))
    for rank in range(2):
        raw.push(MODEL, number, pieces[rank], rank=rank)
    assert raw.open(MODEL, ranks=2, request_id="r/1") == number
    sealed = at_once(12, lambda i: raw.seal(MODEL, number, rank=i % 2))
    assert not [each for each in sealed if isinstance(each, WeighbridgeError)]
    for rank in range(2):
        assert raw.seal(MODEL, number, rank=rank).number == number
    trainer.wait_for(MODEL, number, VersionState.DURABLE, timeout=20)
    assert raw.seal(MODEL, number, rank=0).state == wire.state_to_proto(VersionState.DURABLE)
    # a second publication would have come by then
    eventually(lambda: not running.service.catalog.snapshots.unfinished)
    assert [v.number for v in trainer.versions(MODEL)] == [number]
    assert not trainer.verify(MODEL, number).problems
    assert_equal(engine, MODEL, number, arrays)


def test_a_push_repeated_under_one_request_id_finds_its_version(
    trainer: TrainerClient, engine: EngineClient, source: TinyModel
) -> None:
    first = trainer.push_folder(MODEL, source.folder, request_id="mine").wait()
    with pytest.raises(FailedPrecondition, match="has been pushed already"):
        trainer.push_folder(MODEL, source.folder, request_id="mine")
    assert [v.number for v in trainer.versions(MODEL)] == [first.number]
    assert trainer.push_folder(MODEL, source.folder).wait().number > first.number


def test_aborting_setting_refs_and_registering_may_be_repeated(
    raw: RawClient, trainer: TrainerClient, engine: EngineClient, source: TinyModel
) -> None:
    number = raw.open(MODEL)
    assert {trainer.abort(MODEL, number).state for _ in range(3)} == {VersionState.ABORTED}
    good = raw.push_whole(MODEL, source.arrays)
    trainer.wait_for(MODEL, good, VersionState.DURABLE, timeout=20)
    results = at_once(8, lambda i: trainer.set_ref(MODEL, "prod", good))
    assert {each.number for each in results} == {good}
    models = at_once(8, lambda i: trainer.register_files(MODEL, source.files))
    assert len({str(model.to_json()) for model in models}) == 1
    assert trainer.refs(MODEL) == {"latest": good, "live": good, "prod": good}
    trainer.delete_ref(MODEL, "prod")
    with pytest.raises(NotFound):
        trainer.delete_ref(MODEL, "prod")


def test_a_watcher_gets_the_newest_version_last_and_none_twice(
    running: RunningService, raw: RawClient, trainer: TrainerClient, source: TinyModel
) -> None:
    first = raw.push_whole(MODEL, source.arrays)
    seen: list[list[int]] = [[] for _ in range(4)]
    last: list[int] = []

    def watch(index: int) -> None:
        with TrainerClient(running.address) as client:
            for version in client.watch(MODEL, "live"):
                assert version.state.visible
                seen[index].append(version.number)
                if last and version.number == last[0]:
                    return
                time.sleep(0.03 * index)  # some are slower than the pushes

    threads = [threading.Thread(target=watch, args=(index,), daemon=True) for index in range(4)]
    for thread in threads:
        thread.start()
    eventually(lambda: all(seen))
    for _ in range(8):
        raw.push_whole(MODEL, source.arrays)
    number = raw.open(MODEL)  # known before it can be seen
    last.append(number)
    layout = whole_layout(source.arrays)
    raw.push(MODEL, number, cut(stream_of(source.arrays, layout, raw.declare(MODEL, number, layout))))
    raw.seal(MODEL, number)
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    for numbers in seen:
        assert numbers[0] == first
        assert numbers[-1] == number
        assert numbers == sorted(set(numbers))


# -- restarts ------------------------------------------------------------------------------------------------------------


def test_a_push_that_a_restart_interrupts_says_so_and_the_step_can_be_pushed_again(
    tmp_path: Path, source: TinyModel
) -> None:
    service = KillableService(tmp_path / "store")
    service.start()
    layout = whole_layout(source.arrays)
    try:
        with TrainerClient(service.address) as trainer, RawClient(service.address) as raw:
            trainer.register_files(MODEL, source.files)
            good = trainer.push_folder(MODEL, source.folder).wait().number
            number = raw.open(MODEL, step=5, request_id="r/5")
            stream = stream_of(source.arrays, layout, raw.declare(MODEL, number, layout))
            called_off = threading.Event()

            def half() -> Iterator[Any]:
                yield from raw.messages(MODEL, number, cut(stream[: len(stream) // 2]))
                called_off.wait(60)

            call = raw.checkpoints.Push.future(half())
            eventually(lambda: raw.received(MODEL, number))
            service.kill()
            with (
                pytest.raises(Unavailable, match="cannot be reached"),
                rpc.translated_errors(service.address),
            ):
                call.result(60)
            called_off.set()
            service.start()
        with RawClient(service.address) as raw, EngineClient(service.address) as engine:
            for attempt in (lambda: raw.received(MODEL, number), lambda: raw.seal(MODEL, number)):
                with pytest.raises(
                    VersionFailed, match=r"has lost what it had received|is not being received"
                ) as caught:
                    attempt()
                assert "push the step again" in caught.value.fix
            assert engine.version(MODEL).number == good
            again = raw.push_whole(MODEL, source.arrays, step=5, request_id="r/5")
            assert again >= number  # the same, if it was not claimed yet when the service was killed
            assert_equal(engine, MODEL, again, source.arrays)
            assert_equal(engine, MODEL, good, source.arrays)
    finally:
        service.kill()


def test_the_handle_of_a_push_that_a_restart_interrupts_raises_and_a_new_push_succeeds(
    tmp_path: Path, source: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    from weighbridge._clients import rank_stream

    service = KillableService(tmp_path / "store")
    service.start()
    messages, half_way, go_on = rank_stream._messages, threading.Event(), threading.Event()

    def stalled(*args: Any) -> Iterator[Any]:
        given = messages(*args)
        yield next(given)
        half_way.set()
        go_on.wait(30)
        yield from given

    try:
        with TrainerClient(service.address, retry_seconds=20.0) as trainer:
            trainer.register_files(MODEL, source.files)
            with monkeypatch.context() as patched:
                patched.setattr(rank_stream, "_messages", stalled)
                handle = trainer.push_folder(MODEL, source.folder, step=5)
                assert half_way.wait(60)
                service.kill()
                service.start()
                go_on.set()
                with pytest.raises(
                    VersionFailed, match=r"has lost what it had received|is not being received"
                ) as caught:
                    handle.wait(timeout=30)
                assert "push the step again" in caught.value.fix
            again = trainer.push_folder(MODEL, source.folder, step=5).wait(timeout=30)
            assert again.number > handle.number
            assert again.state is VersionState.DURABLE
            with EngineClient(service.address) as engine:
                assert_equal(engine, MODEL, "latest", source.arrays)
    finally:
        go_on.set()
        service.kill()


def test_a_pull_that_a_restart_interrupts_goes_on_where_it_broke(tmp_path: Path) -> None:
    big = tiny_folder(tmp_path / "hf", hidden_size=16_384)  # some 30 messages: more than fit into the sockets
    service = KillableService(tmp_path / "store")
    service.start()
    try:
        with (
            TrainerClient(service.address) as trainer,
            EngineClient(service.address, retry_seconds=30.0) as engine,
        ):
            trainer.register_files(MODEL, big.files)
            trainer.push_folder(MODEL, big.folder).wait()
            pull = engine.pull(MODEL, "live")
            stream = pull.stream()
            received = [next(stream)]
            service.kill()
            service.start()
            received += stream
            assert b"".join(received) == stream_of(big.arrays, pull.layout, range(len(pull.layout.placements)))
    finally:
        service.kill()


# -- resumption ----------------------------------------------------------------------------------------------------------


def offsets(total: int) -> list[int]:
    """Odd ones above all: most fall into the middle of an element."""
    chance = random.Random(7)
    return [
        0,
        1,
        2,
        3,
        5,
        4097,
        total - 3,
        total - 1,
        total,
        *(chance.randrange(total) | 1 for _ in range(12)),
    ]


@pytest.mark.parametrize(
    "request_",
    [
        FullTensors(),
        FullTensors(("model.norm.weight", EMBEDDING)),
        TensorParallel(2, 1),
        Boxes([(EMBEDDING, (3, 5), (70, 13)), ("model.norm.weight", (1,), (2,)), (EMBEDDING, (0, 31), (128, 1))]),
    ],
    ids=["all", "some", "tensor-parallel", "boxes"],
)
def test_a_pull_resumed_in_the_middle_of_an_element_gives_the_same_bytes(
    raw: RawClient, engine: EngineClient, source: TinyModel, request_: LayoutRequest
) -> None:
    number = raw.push_whole(MODEL, source.arrays)
    layout = engine.pull(MODEL, number, request_).layout
    whole = stream_of(source.arrays, layout, range(len(layout.placements)))
    for offset in offsets(len(whole)):
        responses = raw.call(
            raw.weights.Pull,
            weight_service_pb2.PullRequest(
                model=MODEL, version=str(number), layout=wire.request_to_proto(request_), offset=offset
            ),
        )
        assert responses[0].header.stream_bytes == len(whole)
        assert b"".join(r.data for r in responses) == whole[offset:], f"from byte {offset} on"
        for response in responses:
            assert rpc.checksum(response.data) == response.checksum


def test_a_restore_resumed_in_the_middle_of_an_element_gives_the_same_bytes(
    raw: RawClient, trainer: TrainerClient, source: TinyModel
) -> None:
    number = raw.push_whole(MODEL, source.arrays)
    layout: Layout = trainer.describe_shards(MODEL, MegatronRank(tp=(1, 2)))

    def restored(offset: int) -> bytes:
        request = pb.RestoreRequest(
            model=MODEL,
            version=str(number),
            layout=wire.layout_to_proto(layout, TensorSpace.MEGATRON),
            offset=offset,
        )
        return b"".join(r.data for r in raw.call(raw.checkpoints.Restore, request))

    whole = restored(0)
    assert len(whole) == layout.nbytes
    embedding = source.arrays[EMBEDDING]
    start = next(p for p in layout.placements if p.shard.tensor == "embedding.word_embeddings.weight")
    assert whole[start.offset : start.offset + start.nbytes] == embedding[64:].tobytes()
    for offset in offsets(len(whole)):
        assert restored(offset) == whole[offset:], f"from byte {offset} on"


def test_a_push_cut_in_the_middle_of_elements_and_resumed_gives_the_same_bytes(
    raw: RawClient, engine: EngineClient, source: TinyModel
) -> None:
    layout = whole_layout(source.arrays)
    number = raw.open(MODEL)
    stream = stream_of(source.arrays, layout, raw.declare(MODEL, number, layout))
    ends = sorted({*offsets(len(stream)), len(stream)})
    for start, end in zip([0, *ends], ends, strict=False):
        raw.push(
            MODEL,
            number,
            cut(stream[start:end], 777) and [(start + o, d) for o, d in cut(stream[start:end], 777)],
        )
        assert raw.received(MODEL, number) == ([(0, end)] if end else [])
    raw.seal(MODEL, number)
    assert_equal(engine, MODEL, number, source.arrays)


# -- many engines, many versions -----------------------------------------------------------------------------------------


def test_engines_that_pull_while_versions_come_get_each_exactly_one_of_them(
    tmp_path: Path, running: RunningService, trainer: TrainerClient
) -> None:
    """Each version is filled with its step: a byte of another one would show."""
    hidden = 2048  # several messages
    folders = {
        step: tiny_folder(tmp_path / str(step), constant=float(step), hidden_size=hidden) for step in range(1, 13)
    }
    model = "acme/constants"
    trainer.register_files(model, folders[1].files)
    trainer.push_folder(model, folders[1].folder, step=1).wait()
    done = threading.Event()
    pulls: list[Version] = []
    problems: list[str] = []
    requests: list[LayoutRequest] = [
        FullTensors(),
        TensorParallel(2, 0),
        TensorParallel(2, 1),
        FullTensors((EMBEDDING,)),
    ]

    def work(index: int) -> None:
        with EngineClient(running.address) as engine:
            while not done.is_set():
                ref = "latest" if index % 3 == 0 else "live"
                pull = engine.pull(model, ref, requests[index % len(requests)])
                count = 0
                for name, tensor in pull:
                    count += 1
                    if not bool((tensor == float(pull.version.step)).all()):
                        problems.append(f"{name} of {pull.version} has {np.unique(tensor.numpy())[:5]}")
                    if index == 5:
                        time.sleep(0.005)  # a slow reader: versions come and go in the meantime
                if count != len(pull.layout.placements):
                    problems.append(f"{count} tensors of {pull.version}")
                pulls.append(pull.version)

    def guarded(index: int) -> None:
        try:
            work(index)
        except BaseException as error:
            problems.append(f"an engine got {error!r}")

    threads = [threading.Thread(target=guarded, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    started, seconds = time.monotonic(), rounds("PULL_SECONDS")
    try:
        step = 1
        while (time.monotonic() - started < seconds or len({v.number for v in pulls}) < 5) and not problems:
            step = step % 12 + 1
            handle = trainer.push_folder(model, folders[step].folder, step=step)
            if step % 4 == 0:
                handle.wait(timeout=30)
            else:
                handle.wait("ready", timeout=30)
        number = handle.wait(timeout=30).number
    finally:
        done.set()
        for thread in threads:
            thread.join(60)
    assert not problems, problems[:10]
    assert len({version.number for version in pulls}) >= 5
    assert trainer.refs(model) == {"latest": number, "live": number}
    with EngineClient(running.address) as engine:
        for version in engine.versions(model)[:20]:
            assert_equal(engine, model, version.number, folders[version.step].arrays)
