"""Does an engine that stages a version while it arrives serve the final bytes, whatever happens to the pushing ranks?

``WEIGHBRIDGE_EARLY_ROUNDS=50`` makes 50 pushes whose ranks die and write other bytes.
"""

from __future__ import annotations

import gc
import logging
import mmap
import os
import random
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from tests.engines.test_engine_model import Alone
from tests.sdk.follow.test_mistakes import Recording
from tests.support.example_engine import Llama
from tests.support.lane_client import connected
from tests.support.raw_clients import RawClient, cut, rows_layout, stream_of
from tests.support.reference import tiny_config, tiny_model
from tests.support.rounds import rounds
from tests.support.services import RunningService, running_service
from tests.support.waiting import eventually
from weighbridge import EngineClient, TrainerClient, VersionState
from weighbridge import _lazy as lazy
from weighbridge._clients.engine import read_arriving
from weighbridge._core import dtypes
from weighbridge._core.layouts import Layout
from weighbridge._core.resources import RECEIVING
from weighbridge._core.tensor_spaces import TensorSpace
from weighbridge._formats.push_sources import StagingPool, TensorSource
from weighbridge._lane.connection import LaneConnection
from weighbridge._memory.cuda_copies import CopyQueue
from weighbridge.errors import FailedPrecondition, InvalidArgument, NotFound, ResourceExhausted
from weighbridge.follow.agent import Followed, Follower
from weighbridge.follow.engines import Prepared, Serving, wait_prepared
from weighbridge.follow.status import Status
from weighbridge.integrations.engine_rank.agreement import RanksFailed
from weighbridge.integrations.engine_rank.rank import EngineRank
from weighbridge.integrations.engine_rank.source import ModelSource
from weighbridge.v1 import local_lane_pb2 as pb
from weighbridge.v1 import weight_service_pb2 as pb_weights

MODEL = "tests/early"
CONFIG = tiny_config("llama", tied=False, head_dim=8)
ROUNDS = rounds("EARLY_ROUNDS")
Arrays = Mapping[str, np.ndarray]


@pytest.fixture(scope="module")
def arrays(tmp_path_factory: pytest.TempPathFactory) -> Arrays:
    folder = tmp_path_factory.mktemp("model")
    tiny_model(CONFIG, 1).save_pretrained(folder)
    return load_file(folder / "model.safetensors")


@pytest.fixture
def service(tmp_path: Path, arrays: Arrays) -> Iterator[RunningService]:
    folder = tmp_path / "hf"
    tiny_model(CONFIG, 1).save_pretrained(folder)
    with running_service(tmp_path / "store", local_socket=str(tmp_path / "lane.sock")) as running:
        with TrainerClient(running.address) as trainer:
            trainer.register_model(MODEL, folder)
            trainer.push_folder(MODEL, folder).wait(timeout=60)
        yield running


@pytest.fixture
def model() -> Llama:
    return Llama(CONFIG, 0, 1)


@pytest.fixture
def rank(
    service: RunningService, model: Llama, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[EngineRank]:
    """An engine with version 1, and a place for the next one."""
    monkeypatch.setenv("WEIGHBRIDGE_CACHE", str(tmp_path))
    engine = Alone(model)
    engine.place = lazy.StagingPlace(torch.zeros(4 << 20, dtype=torch.uint8))
    rank = EngineRank(engine)
    rank.load(ModelSource(MODEL, service.address, lane="local"), 1)
    yield rank
    rank.close()


@pytest.fixture
def raw(service: RunningService) -> Iterator[RawClient]:
    with RawClient(service.address) as client:
        yield client


def others(arrays: Arrays, seed: int) -> dict[str, np.ndarray]:
    """Other values for all tensors."""
    generator = np.random.default_rng(seed)
    return {name: generator.standard_normal(a.shape, dtype=np.float32) for name, a in arrays.items()}


def begin(raw: RawClient, arrays: Arrays, step: int, ranks: int = 1, model: str = MODEL) -> tuple[int, list[bytes]]:
    """Open a version and declare all ranks; its number, and the streams."""
    number, layouts = (
        raw.open(model, step=step, ranks=ranks),
        [rows_layout(arrays, r, ranks) for r in range(ranks)],
    )
    threads = [
        threading.Thread(target=raw.declare, args=(model, number, layout), kwargs={"rank": r})
        for r, layout in enumerate(layouts)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    streams = [stream_of(arrays, layout, raw.answers[number, r].assigned) for r, layout in enumerate(layouts)]
    return number, streams


def expected(arrays: Arrays) -> dict[str, torch.Tensor]:
    """The parameters of a version with these tensors, by the model's own loader."""
    fresh = Llama(CONFIG, 0, 1)
    fresh.load_weights((name, torch.from_numpy(array)) for name, array in arrays.items())
    return {name: parameter.detach().clone() for name, parameter in fresh.named_parameters()}


def check(model: Llama, arrays: Arrays) -> None:
    for name, tensor in expected(arrays).items():
        assert torch.equal(model.get_parameter(name), tensor), name


def staged(rank: EngineRank, arrays: Arrays) -> set[str]:
    """Names of the staged parameters that equal those of these tensors."""
    recorded, place = rank._recorded, rank.engine.place
    assert recorded is not None
    assert place is not None
    there = place.tensors(recorded.recording.whole)
    return {name for name, tensor in expected(arrays).items() if torch.equal(there[name], tensor)}


@contextmanager
def counted(caplog: pytest.LogCaptureFixture) -> Iterator[list[int]]:
    """The number of parameters staged early, and of those that were valid; filled in at the end of the block."""
    found: list[int] = []
    caplog.clear()
    with caplog.at_level(logging.INFO, "weighbridge.integrations.engine_rank.preparation"):
        yield found
    found += next(r.args[2:] for r in caplog.records if "staged while it arrived" in r.msg)  # type: ignore[misc]


def test_parameters_are_staged_while_the_rest_still_comes(
    rank: EngineRank,
    model: Llama,
    raw: RawClient,
    service: RunningService,
    arrays: Arrays,
    caplog: pytest.LogCaptureFixture,
) -> None:
    new = others(arrays, 2)
    number, [stream] = begin(raw, new, 2)
    pieces, granted = cut(stream), service.service.serving.bytes_out_locally
    rank.prepare_early(number)
    raw.push(MODEL, number, pieces[: len(pieces) // 2])
    eventually(lambda: len(staged(rank, new)) > 3)
    before = staged(rank, new)
    assert rank.status().preparing == f"{MODEL}@{number}"
    assert before < expected(new).keys()
    check(model, arrays)
    with counted(caplog) as found:
        raw.push(MODEL, number, pieces[len(pieces) // 2 :])
        raw.seal(MODEL, number)
        rank.apply(number)
    check(model, new)
    assert found[0] == found[1] >= len(before)
    assert service.service.serving.bytes_out_locally - granted == len(stream), "it was granted once"


class Quantising(Alone):
    """Computes with fp8 of one of its parameters, which it makes of what is staged."""

    def __init__(self, model: Llama) -> None:
        super().__init__(model)
        rows, columns = model.get_parameter(QUANTISED).shape
        self.live = {
            "weight": torch.empty(rows, columns, dtype=torch.float8_e4m3fn).t(),
            "weight_scale": torch.empty(1),
        }
        self.processed: list[int] = []

    def process_staged(self, update: lazy.Update, recording: lazy.Recording) -> int:
        self.processed.append(update.version.number)
        assert update.replace([QUANTISED], quantised(update.staged[QUANTISED]))
        return 1

    def fill(self, update: lazy.Update, recording: lazy.Recording, rest: Any) -> None:
        assert update.replaced == {QUANTISED}
        update.fill({name: p for name, p in self.targets().items() if name != QUANTISED})
        update.fill_made(self.live)


QUANTISED = "lm_head"


def quantised(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    scale = weight.abs().max().reshape(1) / 448
    return {"weight": (weight / scale).to(torch.float8_e4m3fn).t(), "weight_scale": scale}


def test_what_is_staged_is_processed_when_it_is_known_to_be_the_version_s_and_again_when_it_is_brought_again(
    rank: EngineRank, raw: RawClient, model: Llama, arrays: Arrays, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, known = rank.engine.place, rank._recorded
    rank.engine = engine = Quantising(model)
    engine.place = place
    agreed = lazy.EarlyStaging.agreed

    def disagree(early: lazy.EarlyStaging) -> frozenset[str]:
        assert place is not None
        assert known is not None
        assert not engine.processed
        place.tensors(known.recording.whole)[QUANTISED].zero_()
        return agreed(early) - {QUANTISED}

    monkeypatch.setattr(lazy.EarlyStaging, "agreed", disagree)
    new = others(arrays, 2)
    number, [stream] = begin(raw, new, 2)
    rank.prepare_early(number)
    raw.push(MODEL, number, cut(stream))
    eventually(lambda: QUANTISED in staged(rank, new))
    raw.seal(MODEL, number)
    for turn, now in ((number, new), (1, arrays), (number, new)):
        rank.apply(turn)
        for name, tensor in quantised(expected(now)[QUANTISED]).items():
            assert torch.equal(engine.live[name].float(), tensor.float()), (turn, name)
        for name, tensor in expected(now).items():
            assert name == QUANTISED or torch.equal(model.get_parameter(name), tensor), (turn, name)
    assert engine.processed == [number, 1, number]


def test_a_version_whose_processing_ends_with_any_error_is_applied_from_where_it_was_staged(
    rank: EngineRank, model: Llama, arrays: Arrays, monkeypatch: pytest.MonkeyPatch, raw: RawClient
) -> None:
    def fails(update: lazy.Update, recording: lazy.Recording) -> int:
        assert update.staged
        raise AttributeError("made up")

    monkeypatch.setattr(rank.engine, "process_staged", fails)
    new = others(arrays, 2)
    number, [stream] = begin(raw, new, 2)
    raw.push(MODEL, number, cut(stream))
    raw.seal(MODEL, number)
    rank.apply(number)
    assert rank.status().served == f"{MODEL}@{number}"
    for name, tensor in expected(new).items():
        assert torch.equal(model.get_parameter(name), tensor), name


def test_a_step_of_an_engine_that_began_early_has_waited_less_than_nothing(
    rank: EngineRank, service: RunningService, raw: RawClient, arrays: Arrays
) -> None:
    number, [stream] = begin(raw, others(arrays, 2), 2)
    rank.prepare_early(number)
    begun_s = time.monotonic()
    raw.push(MODEL, number, cut(stream))
    early_s = time.monotonic() - begun_s
    raw.seal(MODEL, number)
    with EngineClient(service.address) as client:
        done = next(Follower(client, MODEL, Beside(rank), "live").run())
    passed_s = time.monotonic() - begun_s
    assert (done.version, done.error) == (number, "")
    assert done.parts["wait"] < 0
    assert done.parts["stage"] > early_s, "it ends when the version is ready"
    assert sum(done.parts.values()) < passed_s - early_s + 0.01, "parts are counted from when the agent has heard"


def grant(connection: LaneConnection, number: int, of: int) -> tuple[pb.WriteLoan, mmap.mmap]:
    """A grant of the image to a rank, and its memory."""
    answer, [descriptor] = connection.ask(
        pb.LaneRequest(begin_write=pb.BeginWrite(model=MODEL, number=number, rank=of))
    )
    memory = mmap.mmap(descriptor, answer.write.memory.bytes)
    os.close(descriptor)
    return answer.write, memory


def write(loan: pb.WriteLoan, memory: mmap.mmap, layout_shards: Sequence[int], stream: bytes) -> list[tuple[int, int]]:
    """Write some shards of a rank where they belong; their ranges in the stream."""
    places = {file.name: file.offset for file in loan.files}
    ranges = []
    start = 0
    for index, shard in enumerate(loan.plan.shards):
        nbytes = sum(int(np.prod(copy.extent)) for copy in shard.copies)
        if index in layout_shards:
            for copy in shard.copies:
                data = np.frombuffer(stream, np.uint8)
                source = np.ndarray(
                    tuple(copy.extent), np.uint8, data, start + copy.shard_offset, tuple(copy.shard_strides)
                )
                at = places[loan.plan.files[copy.file]] + copy.file_offset
                np.ndarray(tuple(copy.extent), np.uint8, memory, at, tuple(copy.file_strides))[...] = source
            ranges.append((start, start + nbytes))
        start += nbytes
    return ranges


def report(connection: LaneConnection, loan: pb.WriteLoan, ranges: Sequence[tuple[int, int]]) -> None:
    said = pb.ReportWritten(loan=loan.loan, ranges=[{"start": start, "end": end} for start, end in ranges])
    connection.ask(pb.LaneRequest(report_written=said))


def test_no_early_byte_survives_of_a_rank_that_dies_and_writes_other_bytes(
    rank: EngineRank,
    model: Llama,
    raw: RawClient,
    service: RunningService,
    arrays: Arrays,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Random: which rank dies, after how many shards, reported or not, and over which lane the other bytes come."""
    chance = random.Random(7)
    for step in range(2, 2 + ROUNDS):
        first, new = others(arrays, 1000 + step), others(arrays, step)
        number, streams = begin(raw, first, step, ranks=2)
        other_streams = [stream_of(new, rows_layout(new, r, 2), raw.answers[number, r].assigned) for r in range(2)]
        rank.prepare_early(number)
        dying = chance.randrange(2)
        raw.push(MODEL, number, cut(streams[1 - dying]), rank=1 - dying)
        connection = connected(service.address, raw.client_id)
        loan, memory = grant(connection, number, dying)
        shards = len(loan.plan.shards)
        written = chance.sample(range(shards), chance.randint(1, shards))
        ranges = write(loan, memory, written, streams[dying])
        report(connection, loan, ranges)
        mixed = dict(new)
        layout = rows_layout(new, 1 - dying, 2)
        for index in raw.answers[number, 1 - dying].assigned:
            shard = layout.placements[index].shard
            box = tuple(slice(o, o + e) for o, e in zip(shard.box.offset, shard.box.extent, strict=True))
            mixed[shard.tensor] = mixed[shard.tensor].copy()
            mixed[shard.tensor][box] = first[shard.tensor][box]
        if len(written) > shards // 2:
            eventually(partial(staged, rank, first))
        memory.close()
        connection.close()
        with counted(caplog) as found:
            raw.push(MODEL, number, cut(other_streams[dying]), rank=dying)
            sealing = threading.Thread(target=raw.seal, args=(MODEL, number, 1 - dying))
            sealing.start()
            raw.seal(MODEL, number, dying)
            sealing.join(30)
            rank.apply(number)
        assert found[1] == 0
        check(model, mixed)


def test_a_version_that_is_given_up_leaves_its_memory_to_the_reader_until_that_is_done(
    rank: EngineRank, model: Llama, raw: RawClient, service: RunningService, arrays: Arrays
) -> None:
    new = others(arrays, 2)
    number, [stream] = begin(raw, new, 2)
    raw.push(MODEL, number, cut(stream)[:10])
    rank.prepare_early(number)
    eventually(lambda: staged(rank, new))
    with TrainerClient(service.address) as trainer:
        trainer.abort(MODEL, number)
    eventually(lambda: rank.status().error)
    check(model, arrays)
    newer = others(arrays, 3)
    number = raw.push_whole(MODEL, newer, step=3)
    rank.apply(number)
    check(model, newer)


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Engines run no garbage collection while they compute, and some never do."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def readers(service: RunningService, number: int) -> int:
    """Number of readers of a version's image, without the service itself."""
    return sum(each.readers for each in service.service.images.holdings() if each.owner.number == number)


@pytest.mark.parametrize("how", ["given up", "not wanted"])
def test_memory_of_a_version_goes_back_when_its_early_reader_has_ended(
    how: str, rank: EngineRank, raw: RawClient, service: RunningService, arrays: Arrays
) -> None:
    new = others(arrays, 2)
    number, [stream] = begin(raw, new, 2)
    raw.push(MODEL, number, cut(stream)[:10])
    with without_garbage_collection(), TrainerClient(service.address) as trainer:
        rank.prepare_early(number)
        eventually(lambda: staged(rank, new))
        if how == "not wanted":
            rank.discard()
        trainer.abort(MODEL, number)
        if how == "given up":
            eventually(lambda: rank.status().error)
        eventually(lambda: not readers(service, number))


def test_memory_of_a_version_goes_back_when_all_of_it_lies_in_the_place(
    rank: EngineRank, model: Llama, raw: RawClient, service: RunningService, arrays: Arrays
) -> None:
    new = others(arrays, 2)
    number, [stream] = begin(raw, new, 2)
    with without_garbage_collection():
        rank.prepare_early(number)
        raw.push(MODEL, number, cut(stream))
        raw.seal(MODEL, number)
        eventually(lambda: rank.status().prepared)
        eventually(lambda: not readers(service, number))
    rank.apply(number)
    check(model, new)


def test_an_engine_does_not_wait_for_ranks_when_it_is_asked_for_a_version_that_is_not_ready(
    rank: EngineRank, model: Llama, raw: RawClient, arrays: Arrays
) -> None:
    """It would stand still while it waits."""
    new = others(arrays, 2)
    number, [stream] = begin(raw, new, 2)
    raw.push(MODEL, number, cut(stream)[:10])
    rank.prepare_early(number)
    eventually(lambda: staged(rank, new))
    failed: list[str] = []

    def apply() -> None:
        with pytest.raises(RanksFailed) as caught:
            rank.apply(number)
        failed.append(str(caught.value))

    applying = threading.Thread(target=apply, daemon=True)
    applying.start()
    applying.join(20)
    assert "is not complete yet" in failed[0]
    check(model, arrays)


@pytest.mark.parametrize("error", [None, RuntimeError("no memory"), ResourceExhausted("no memory")])
def test_early_copies_have_ended_before_anything_else_is_copied_to_their_place(
    error: Exception | None,
    rank: EngineRank,
    model: Llama,
    raw: RawClient,
    service: RunningService,
    arrays: Arrays,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Such as after bytes of a version may have been rewritten, or after a copy could not be started."""
    new, happened = others(arrays, 2), list[str]()
    close, stage = CopyQueue.close, lazy.Update.stage
    monkeypatch.setattr(CopyQueue, "close", lambda self: (happened.append("ended"), close(self))[1])
    monkeypatch.setattr(lazy.Update, "stage", lambda *args: (happened.append("staged"), stage(*args))[1])
    if error is not None:
        monkeypatch.setattr(lazy.EarlyStaging, "_take", Mock(side_effect=error))
    number, [stream] = begin(raw, new, 2)
    raw.push(MODEL, number, cut(stream)[:10])
    rank.prepare_early(number)
    if error is None:
        eventually(lambda: staged(rank, new))
        connection = connected(service.address, raw.client_id)
        _, memory = grant(connection, number, 0)
        memory.close()
        connection.close()
    eventually(lambda: happened == ["ended"])
    raw.push(MODEL, number, cut(stream))
    raw.seal(MODEL, number)
    rank.apply(number)
    assert happened[:2] == ["ended", "staged"]
    check(model, new)


def test_a_version_that_never_gets_ready_gives_way_to_another_one(
    rank: EngineRank, model: Llama, raw: RawClient, arrays: Arrays
) -> None:
    number, [stream] = begin(raw, others(arrays, 2), 2)
    raw.push(MODEL, number, cut(stream)[:10])
    rank.prepare_early(number)
    rank.prepare_early(number)
    another, _ = begin(raw, others(arrays, 4), 2)
    rank.prepare_early(another)
    newer = others(arrays, 3)
    newest = raw.push_whole(MODEL, newer, step=3, run="another")
    rank.prepare(newest)
    with pytest.raises(FailedPrecondition, match="is here, or is being fetched"):
        rank.prepare_early(number)
    rank.apply(newest)
    check(model, newer)


def test_what_is_ready_or_has_other_tensors_is_not_read_early(rank: EngineRank, raw: RawClient, arrays: Arrays) -> None:
    assert rank._recorded is not None
    recording, client = rank._recorded.recording, rank.client()
    read = partial(read_arriving, client, MODEL)
    with pytest.raises(FailedPrecondition, match=r"is not open|is ready|sealed|complete"):
        read(1, recording.request, recording.layout)
    number, _ = begin(raw, others(arrays, 2), 2)
    other = Layout.stream(
        (replace(spec, dtype=dtypes.parse("bf16")) for spec in recording.specs.values()),
        [placement.shard for placement in recording.layout.placements],
    )
    with pytest.raises(FailedPrecondition, match="has different tensors than the previous one"):
        read(number, recording.request, other)
    assert not read(number, recording.request, recording.layout).arrivals.count


@pytest.mark.parametrize(
    "layout",
    [
        pb_weights.LayoutRequest(tensor_parallel=pb_weights.TensorParallel(size=2, rank=5)),
        pb_weights.LayoutRequest(full=pb_weights.FullTensors(names=["of no model"])),
    ],
    ids=["no rank", "no tensor"],
)
def test_a_refused_early_read_keeps_no_memory(
    layout: pb_weights.LayoutRequest, raw: RawClient, service: RunningService, arrays: Arrays
) -> None:
    number, _ = begin(raw, others(arrays, 2), 2)
    before = readers(service, number)
    read = pb.BeginRead(model=MODEL, version=str(number), layout=layout, arriving=True)
    connection = connected(service.address, raw.client_id)
    with pytest.raises((InvalidArgument, NotFound)):
        connection.ask(pb.LaneRequest(begin_read=read))
    assert readers(service, number) == before
    connection.close()


def test_an_early_read_says_of_which_tensors_the_whole_version_is(
    rank: EngineRank,
    raw: RawClient,
    arrays: Arrays,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """With more tensors than the engine takes, the version would count as one that was not read early."""
    number, [stream] = begin(raw, others(arrays, 2), 2)
    recorded = rank._recorded
    assert recorded is not None
    recording = recorded.recording
    loan = read_arriving(rank.client(), MODEL, number, recording.request, recording.layout)
    assert loan.arrivals is not None
    assert loan.arrivals.tensors_digest == recorded.tensors_digest
    del loan
    rank._recorded = replace(recorded, specs=recorded.specs[1:])
    rank.prepare_early(number)
    raw.push(MODEL, number, cut(stream))
    raw.seal(MODEL, number)
    with pytest.raises(RanksFailed, match="is not known"):
        rank.apply(number)


class Halting(TensorSource):
    """Writes all but its last shard, and waits."""

    go_on = threading.Event()

    def write(self, copies: Any, memories: Any, on_written: Any = None) -> Any:
        first = [*copies[:-1], ()]
        super().write(first, memories, on_written)
        assert self.go_on.wait(30)
        return super().write([*([()] * (len(copies) - 1)), copies[-1]], memories, on_written)


def test_what_a_rank_has_written_is_staged_while_it_writes_the_rest(
    rank: EngineRank,
    model: Llama,
    service: RunningService,
    arrays: Arrays,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("weighbridge._lane.loans._REPORTED_BYTES", 1)
    new = {name: torch.from_numpy(array) for name, array in others(arrays, 2).items()}
    layout = rows_layout({name: tensor.numpy() for name, tensor in new.items()}, 0, 1)
    shards = Halting(StagingPool(), layout, [new[placement.shard.tensor] for placement in layout.placements])

    def push() -> None:
        with TrainerClient(service.address, lane="local") as trainer:
            trainer.push_shards(MODEL, layout, TensorSpace.HUGGING_FACE, shards, step=2, rank=0, world_size=1).wait(
                timeout=60
            )

    pushing = threading.Thread(target=push)
    pushing.start()
    number = next(v.number for _, v in rank.client().watch_refs([(MODEL, RECEIVING)]))
    rank.prepare_early(number)
    plain = {name: tensor.numpy() for name, tensor in new.items()}
    eventually(lambda: len(staged(rank, plain)) >= len(expected(plain)) - 2)
    with counted(caplog) as found:
        Halting.go_on.set()
        pushing.join(30)
        rank.apply(number)
    check(model, plain)
    assert found[0] == found[1] > 0


class Beside(Recording):
    """Agent's driver of a rank in this process."""

    def __init__(self, rank: EngineRank) -> None:
        super().__init__(Serving(1))
        self._rank = rank

    def prepare(self, version: int) -> Prepared:
        self._rank.prepare(version)
        return wait_prepared(self._ranks(), self._ranks, MODEL, version, 60)

    def apply(self, version: int, label: str) -> None:
        self._rank.apply(version)
        self._serving = Serving(version)

    def _ranks(self) -> dict[str, Status]:
        return {"rank 0": self._rank.status()}


class Engine(Recording):
    """Notes when it is asked to prepare early."""

    def prepare_early(self, version: int) -> None:
        self.asked.append(f"early {version}")


def test_an_agent_whose_engine_cannot_prepare_early_takes_versions_when_they_are_ready(
    raw: RawClient, service: RunningService, arrays: Arrays
) -> None:
    engine = Recording(Serving(None))
    with EngineClient(service.address) as client:
        steps = Follower(client, MODEL, engine, "live").run()
        assert next(steps).version == 1
        news: list[Followed] = []
        following = threading.Thread(target=lambda: news.append(next(steps)), daemon=True)
        following.start()
        number, [stream] = begin(raw, others(arrays, 2), 2)
        raw.push(MODEL, number, cut(stream))
        raw.seal(MODEL, number)
        following.join(30)
    assert [each.version for each in news] == [number]


@pytest.mark.parametrize("ref", ["live", "latest"])
def test_an_agent_lets_its_engine_stage_what_will_be_live_as_it_arrives(
    ref: str, raw: RawClient, service: RunningService, arrays: Arrays
) -> None:
    engine = Engine(Serving(None))
    with EngineClient(service.address) as client:
        steps = Follower(client, MODEL, engine, ref).run()
        assert next(steps).version == 1
        news: list[Followed] = []
        following = threading.Thread(target=lambda: news.append(next(steps)))
        following.start()
        number, [stream] = begin(raw, others(arrays, 2), 2)
        if ref == "live":
            eventually(lambda: f"early {number}" in engine.asked)
        raw.push(MODEL, number, cut(stream))
        raw.seal(MODEL, number)
        following.join(30)
    assert news[0].version == number
    after = engine.asked[engine.asked.index(f"apply {MODEL}@1") + 1 :]
    assert after[: 1 + (ref == "live")] == [*([f"early {number}"] if ref == "live" else []), "connect"]


def test_what_is_being_received_can_be_watched(
    rank: EngineRank, raw: RawClient, arrays: Arrays, service: RunningService
) -> None:
    client = rank.client()
    seen: list[tuple[str, int, VersionState]] = []

    def watch() -> None:
        for ref, version in client.watch_refs([(MODEL, "live"), (MODEL, RECEIVING)]):
            seen.append((ref, version.number, version.state))
            if ref == RECEIVING:
                return

    watching = threading.Thread(target=watch)
    watching.start()
    eventually(lambda: seen)
    number, _ = begin(raw, others(arrays, 2), 2)
    watching.join(30)
    assert seen[-1] == (RECEIVING, number, VersionState.RECEIVING)
