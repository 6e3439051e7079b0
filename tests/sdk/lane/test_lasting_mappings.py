"""Does what a writer keeps mapped from push to push cost no version a bit, and is an image in doubt until its writer
can change it no more?
"""

from __future__ import annotations

import gc
import itertools
import mmap
import os
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.lane_client import CLIENT_ID, connected, go_on, lane_process
from tests.support.raw_clients import RawClient, TinyModel, cut, rows_layout, stream_of, tiny_folder
from tests.support.services import RunningService, lane_service
from tests.support.waiting import eventually
from weighbridge import EngineClient, TrainerClient
from weighbridge._core.byte_copies import ByteCopy
from weighbridge._core.resources import VersionState
from weighbridge._formats.push_sources import MappedSource
from weighbridge._lane import local_lane, protocol
from weighbridge._memory.mappings import MappedMemory, Use
from weighbridge._memory.sampling import PIECE_BYTES, PIECES, sample_of
from weighbridge._memory.strided import WrittenCounts
from weighbridge._transport import rpc
from weighbridge.errors import FailedPrecondition, VersionFailed
from weighbridge.v1 import local_lane_pb2 as pb

MODEL = "acme/tiny"


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> list[TinyModel]:
    return [tiny_folder(tmp_path_factory.mktemp("hf") / str(seed), seed=seed) for seed in range(2)]


@pytest.fixture
def service(tmp_path: Path, sources: list[TinyModel]) -> Iterator[RunningService]:
    with lane_service(tmp_path, MODEL, sources[0]) as running:
        yield running


@pytest.fixture
def trainer(service: RunningService) -> Iterator[TrainerClient]:
    with TrainerClient(service.address, lane="local") as client:
        yield client


@pytest.fixture
def mapped(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Keys of the memory that clients of this process map for writing, each time that they do."""
    found: list[str] = []

    class Noted(MappedMemory):
        def __init__(self, descriptor: int, key: str, nbytes: int, use: Use) -> None:
            super().__init__(descriptor, key, nbytes, use)
            if use is Use.WRITE:
                found.append(key)

    monkeypatch.setattr(local_lane, "MappedMemory", Noted)
    return found


def _assert_served(address: str, number: int, source: TinyModel) -> None:
    with EngineClient(address, lane="grpc") as client:
        pulled = {name: tensor.numpy() for name, tensor in client.pull(MODEL, number)}
    assert pulled.keys() == source.arrays.keys()
    assert all(np.array_equal(pulled[name], array) for name, array in source.arrays.items())


def test_a_trainer_maps_each_image_once_however_often_it_pushes(
    service: RunningService, trainer: TrainerClient, sources: list[TinyModel], mapped: list[str]
) -> None:
    for step in range(5):
        handle = trainer.push_folder(MODEL, sources[step % 2].folder)
        assert handle.report(20).lane == "local"
        handle.wait(timeout=20)
        _assert_served(service.address, handle.number, sources[step % 2])
    assert len(mapped) == len(set(mapped)) == 2


def test_what_is_mapped_goes_when_the_service_gives_its_memory_up(
    service: RunningService, trainer: TrainerClient, sources: list[TinyModel], mapped: list[str]
) -> None:
    lane = trainer._connection.lane
    for step in range(3):
        trainer.push_folder(MODEL, sources[step % 2].folder).wait(timeout=20)
    eventually(lambda: service.service.images.usage().memory_free > 0)
    assert service.service.images.trim() > 0
    assert len(lane._writable) == 1
    for step in range(2):
        trainer.push_folder(MODEL, sources[step % 2].folder).wait(timeout=20)
    assert len(mapped) == len(set(mapped)) == 3
    trainer.close()
    assert not lane._writable


def test_a_client_that_is_closed_keeps_no_memory_mapped(service: RunningService, sources: list[TinyModel]) -> None:
    def images() -> int:
        return Path("/proc/self/maps").read_text().count("weighbridge-image")

    with TrainerClient(service.address, lane="local") as trainer:
        for source in sources:
            trainer.push_folder(MODEL, source.folder).wait(timeout=20)
        with_client = images()
    eventually(lambda: images() == with_client - 2)


def test_a_child_of_a_trainer_has_nothing_of_what_it_writes_to_and_undoes_nothing_else(
    service: RunningService, trainer: TrainerClient, sources: list[TinyModel]
) -> None:
    for source in sources:
        trainer.push_folder(MODEL, source.folder).wait(timeout=20)
    kept = list(trainer._connection.lane._writable.values())
    places = [(memory.address, memory.nbytes) for memory in kept]
    child = os.fork()
    if child == 0:
        code = 1
        try:
            mapped = [
                [int(end, 16) for end in line.split()[0].split("-")]
                for line in Path("/proc/self/maps").read_text().splitlines()
            ]
            there = any(start < at + nbytes and at < end for at, nbytes in places for start, end in mapped)
            others = [mmap.mmap(-1, nbytes) for _, nbytes in places * 8]  # some of them where it was
            for each in others:
                each[0] = 7
            trainer._connection.lane._lost(trainer._connection.lane._connection)  # type: ignore[arg-type]
            kept.clear()
            gc.collect()
            code = int(there or any(each[0] != 7 for each in others))
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    handle = trainer.push_folder(MODEL, sources[1].folder)
    handle.wait(timeout=20)
    _assert_served(service.address, handle.number, sources[1])


_ENDS_PROPERLY = """
import mmap, os, sys
from weighbridge._memory.mappings import MappedMemory, Use
descriptor, nbytes = os.memfd_create("image"), 8 << 20
os.ftruncate(descriptor, nbytes)
memory = MappedMemory(descriptor, "", nbytes, Use.WRITE)
memory.bytes[:] = 1
if (child := os.fork()) == 0:
    others = [mmap.mmap(-1, nbytes) for _ in range(8)]  # some of them lie where it was
    for each in others:
        each[:4] = b"here"
    sys.kept = others  # and are there to the end
    sys.exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert memory.bytes.all()
"""


def test_a_child_of_a_trainer_ends_as_any_other() -> None:
    assert subprocess.run([sys.executable, "-c", _ENDS_PROPERLY], timeout=60).returncode == 0


def test_an_image_whose_writer_has_left_in_the_middle_is_nobodys_until_that_process_has_ended(
    service: RunningService, trainer: TrainerClient, sources: list[TinyModel]
) -> None:
    layout = rows_layout(sources[0].arrays, 0, 1)
    usage, held = service.service.images.usage, trainer.warm(MODEL).image_bytes
    with RawClient(service.address) as raw:
        raw.client_id = CLIENT_ID
        number = raw.open(MODEL)
        raw.declare(MODEL, number, layout)
        with lane_process(service.address, "leave", MODEL, str(number)) as writer:
            assert go_on(writer) == "left"
            eventually(lambda: service.lane.clients == 0)
            trainer.abort(MODEL, number)
            numbers = []
            for step in range(4):
                handle = trainer.push_folder(MODEL, sources[step % 2].folder)
                handle.wait(timeout=20)
                numbers.append(handle.number)
                if step == 2:
                    assert go_on(writer) == "wrote"
                _assert_served(service.address, handle.number, sources[step % 2])
            assert usage().memory_in_use >= 2 * held, "what it may write to, and the live version"
    eventually(lambda: usage().memory_in_use == held)
    assert usage().made == 3
    for step, each in enumerate(numbers):
        assert trainer.verify(MODEL, each).problems == ()
        _assert_served(service.address, each, sources[step % 2])


def test_a_version_whose_writer_has_left_in_the_middle_is_pushed_by_another_one_once_it_has_ended(
    service: RunningService, trainer: TrainerClient, sources: list[TinyModel]
) -> None:
    layout = rows_layout(sources[0].arrays, 0, 1)
    with RawClient(service.address) as raw:
        raw.client_id = CLIENT_ID
        number = raw.open(MODEL)
        assigned = raw.declare(MODEL, number, layout)
        with lane_process(service.address, "leave", MODEL, str(number)) as writer:
            assert go_on(writer) == "left"
            eventually(lambda: service.lane.clients == 0)
            raw.push(MODEL, number, cut(stream_of(sources[0].arrays, layout, assigned)))
            assert trainer.version(MODEL, number).state is VersionState.RECEIVING
            writer.kill()
            writer.wait()
            raw.seal(MODEL, number)
    assert trainer.wait_for(MODEL, number, VersionState.DURABLE, timeout=20)
    _assert_served(service.address, number, sources[0])


@pytest.mark.parametrize("right", [True, False])
def test_a_version_is_compared_with_what_its_writer_had_before_it_wrote(
    service: RunningService, trainer: TrainerClient, sources: list[TinyModel], right: bool
) -> None:
    layout = rows_layout(sources[0].arrays, 0, 1)
    with RawClient(service.address) as raw:
        number = raw.open(MODEL)
        assigned = raw.declare(MODEL, number, layout)
        stream = stream_of(sources[0].arrays, layout, assigned)
        lane = connected(service.address, raw.client_id)
        begin = pb.LaneRequest(begin_write=pb.BeginWrite(model=MODEL, number=number, rank=0))
        answer, [descriptor] = lane.ask(begin)
        memory = MappedMemory(descriptor, "", answer.write.memory.bytes, Use.WRITE)
        os.close(descriptor)
        offsets = {file.name: file.offset for file in answer.write.files}
        for shard, placement in zip(answer.write.plan.shards, layout.placements, strict=True):
            for copy in shard.copies:
                at = offsets[answer.write.plan.files[copy.file]] + copy.file_offset
                nbytes = placement.nbytes
                assert (copy.shard_offset, sum(copy.extent)) == (0, nbytes), "whole tensors lie in one run"
                memory.bytes[at : at + nbytes] = np.frombuffer(stream, np.uint8)[placement.offset :][:nbytes]
        piece = pb.SampledPiece(start=10, end=5000, checksum=rpc.checksum(stream[10:5000]) + (not right))
        end = pb.EndWrite(loan=answer.write.loan, complete=True, kept=True, sample=[piece])
        lane.ask(pb.LaneRequest(end_write=end))
        raw.seal(MODEL, number)
        if right:
            assert trainer.wait_for(MODEL, number, VersionState.DURABLE, timeout=20)
        else:
            with pytest.raises(VersionFailed, match="bytes 10 to 5000 of the stream of rank 0"):
                trainer.wait_for(MODEL, number, VersionState.DURABLE, timeout=20)
        memory.close()
        lane.close()


def test_what_goes_wrong_between_a_trainers_tensors_and_the_image_is_found(
    service: RunningService, trainer: TrainerClient, sources: list[TinyModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    write = MappedSource.write

    def damaged(
        self: MappedSource,
        copies: Sequence[Sequence[ByteCopy[int]]],
        memories: Sequence[MappedMemory],
        on_written: Any,
    ) -> WrittenCounts:
        counts = write(self, copies, memories, on_written)
        at = random.choice([copy for of_shard in copies for copy in of_shard])
        memories[at.file].bytes[at.file_offset + random.randrange(at.extent[-1])] ^= 1
        return counts

    monkeypatch.setattr(MappedSource, "write", damaged)
    handle = trainer.push_folder(MODEL, sources[0].folder)
    with pytest.raises(VersionFailed, match="was damaged in memory"):
        handle.wait(timeout=20)


def test_samples_that_nobody_should_send_are_left_out(
    service: RunningService, trainer: TrainerClient, sources: list[TinyModel]
) -> None:
    layout = rows_layout(sources[0].arrays, 0, 1)
    with RawClient(service.address) as raw:
        number = raw.open(MODEL)
        raw.declare(MODEL, number, layout)
        lane = connected(service.address, raw.client_id)
        begin = pb.LaneRequest(begin_write=pb.BeginWrite(model=MODEL, number=number, rank=0))
        answer, descriptors = lane.ask(begin)
        protocol.close_all(descriptors)
        huge = (1 << 64) - 1
        ranges = [(0, 0), (5, 3), (0, huge), (huge, huge), (layout.nbytes - 1, layout.nbytes + 1)] * 40
        sample = [pb.SampledPiece(start=start, end=end, checksum=1) for start, end in ranges]
        end = pb.EndWrite(loan=answer.write.loan, complete=True, kept=True, sample=sample)
        lane.ask(pb.LaneRequest(end_write=end))
        raw.seal(MODEL, number)
        assert trainer.wait_for(MODEL, number, VersionState.DURABLE, timeout=20)
        with pytest.raises(FailedPrecondition):
            lane.ask(begin)
        lane.close()


@pytest.mark.parametrize("nbytes", [0, 1, PIECE_BYTES - 1, PIECE_BYTES, 3 * PIECE_BYTES + 7, 100 * PIECE_BYTES])
@pytest.mark.parametrize("left_out", [(), ((0, 1),), ((5, 900), (70_000, 80_000)), ((0, 50_000), (50_000, 60_000))])
def test_a_sample_is_spread_over_all_that_is_written_and_nothing_else(
    nbytes: int, left_out: tuple[tuple[int, int], ...]
) -> None:
    gone = [(min(start, nbytes), min(end, nbytes)) for start, end in left_out]
    outside = {i for start, end in gone for i in range(start, end)}
    seen: set[int] = set()
    for seed in range(20):
        ranges = sample_of(nbytes, gone, random.Random(seed))
        assert len(ranges) <= PIECES
        assert sorted(ranges) == ranges
        for start, end in ranges:
            assert 0 <= start < end <= min(nbytes, start + PIECE_BYTES)
            seen.update(range(start, end))
        assert all(one[1] <= other[0] for one, other in itertools.pairwise(ranges))
    assert not seen & outside
    if nbytes <= PIECES * PIECE_BYTES and not outside:
        assert len(seen) == nbytes, "all of what is small"
    elif nbytes > PIECE_BYTES:
        assert max(seen) - min(seen) > 0.9 * (nbytes - 80_000)
