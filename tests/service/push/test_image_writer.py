"""Does the data plane of a push put every byte where it belongs, once, and say truthfully what is complete?"""

from __future__ import annotations

import itertools
import os
import random
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load

from tests.support.agreements import home_of
from tests.support.images import acquire
from tests.support.raw_clients import Arrays, rows_layout, stream_of
from weighbridge._core import dtypes
from weighbridge._core.layouts import TensorSpec
from weighbridge._formats.safetensors_files import FilesLayout, lay_out_files
from weighbridge._transport import rpc
from weighbridge.errors import (
    DataLoss,
    FailedPrecondition,
    InvalidArgument,
    VersionFailed,
    WeighbridgeError,
)
from weighbridge_service.plan.declarations import Agreement, Home
from weighbridge_service.plan.push_plan import PreparedPush, prepare_push
from weighbridge_service.plan.relations import WeightMap, identity_links
from weighbridge_service.push.filling.image_writer import ImageWriter
from weighbridge_service.push.filling.sample import MOST
from weighbridge_service.push.machine import events as on
from weighbridge_service.push.machine.rank_progress import Received
from weighbridge_storage.memory.image_books import ImageOwner
from weighbridge_storage.memory.image_pool import ImagePool
from weighbridge_storage.memory.images import Image

NAME = "acme/m@1"
HOMES = (Home("one:1", "a"), Home("two:1", "b"))
RANKS = 4
FILE_BYTES = 3_000
"""So small that the tensors lie in several files."""


def make_arrays(seed: int) -> Arrays:
    generator = np.random.default_rng(seed)
    shapes = {"a": (8, 16), "b": (4, 12, 5), "c": (16,), "d": (12, 40), "e": (3, 3)}
    return {name: generator.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def files_of(arrays: Arrays) -> FilesLayout:
    specs = [TensorSpec(name, dtypes.parse("fp32"), array.shape) for name, array in arrays.items()]
    return lay_out_files(specs, max_shard_bytes=FILE_BYTES)


def prepared(arrays: Arrays, numbers: Sequence[int]) -> PreparedPush:
    def relate(tensors: Any) -> WeightMap:
        return WeightMap(tensors, tensors, identity_links(tensors.values()), ())

    layouts = [rows_layout(arrays, rank, RANKS) for rank in range(RANKS)]
    return prepare_push(layouts, files_of(arrays), relate, numbers)


class Bench:
    """The writers of all replicas of one push, and what they say."""

    def __init__(self, seed: int = 0, replicas: int = 1) -> None:
        self.arrays = make_arrays(seed)
        self.files = files_of(self.arrays)
        numbers = [rank % replicas for rank in range(RANKS)]
        homes = HOMES[:replicas]
        plan = prepared(self.arrays, numbers)
        claim = f"digest@{homes[0].address}" if replicas == 1 else "digest"
        self.agreed = Agreement(plan, homes, claim)
        self.pool = ImagePool(1 << 20)
        self.events: list[list[on.Event]] = [[] for _ in homes]
        self.images: list[Image] = []
        self.writers: list[ImageWriter] = []
        for which, home in enumerate(homes):
            mine = self.agreed.share_of(home).files
            files = [file for file in self.files.files if file.name in mine]
            image = acquire(self.pool, {file.name: file.nbytes for file in files}, ImageOwner("acme/m", 1))
            for file in files:
                image.buffers[file.name][: len(file.header)] = memoryview(file.header)
            self.images.append(image)
            self.writers.append(ImageWriter(NAME, self.agreed, home, image, self.events[which].extend))
        for writer in self.writers:
            writer.begin()

    # what ranks do

    @property
    def writer(self) -> ImageWriter:
        return self.writers[0]

    def home_of(self, rank: int) -> ImageWriter:
        return self.writers[self.agreed.homes.index(home_of(self.agreed, rank))]

    def stream(self, rank: int) -> bytes:
        layout = rows_layout(self.arrays, rank, RANKS)
        return stream_of(self.arrays, layout, self.agreed.prepared.assigned[rank])

    def push(self, rank: int, pieces: Sequence[tuple[int, int]] = ()) -> None:
        stream = self.stream(rank)
        own = home_of(self.agreed, rank)
        for start, end in pieces or [(0, len(stream))]:
            for home, meant in self.agreed.routes(rank).items():
                writer = self.writers[self.agreed.homes.index(home)]
                for begin, stop in meant.within(start, end):
                    data = memoryview(stream[begin:stop])
                    if home == own:
                        writer.write(rank, begin, data, rpc.checksum(data))
                    else:
                        writer.write_of_other(self.agreed.claim, rank, begin, data, rpc.checksum(data))

    def said(self, kind: type[on.Event], which: int = 0) -> list[Any]:
        return [event for event in self.events[which] if isinstance(event, kind)]

    def filled(self) -> list[str]:
        return [file for each in range(len(self.writers)) for e in self.said(on.FilesFilled, each) for file in e.files]

    def check(self) -> None:
        """Every file is filled once, and safetensors' own loader reads from it what ranks hold."""
        assert sorted(self.filled()) == sorted(file.name for file in self.files.files)
        found: dict[str, np.ndarray] = {}
        for image in self.images:
            for buffer in image.read_only_buffers.values():
                found |= load(buffer.tobytes())
        assert found.keys() == self.arrays.keys()
        for name, array in self.arrays.items():
            assert np.array_equal(found[name], array), name


def random_pieces(dice: random.Random, length: int) -> list[tuple[int, int]]:
    """A stream in pieces of all sizes, in any order, many of them twice or overlapping."""
    cuts = sorted({0, length, *(dice.randrange(length + 1) for _ in range(dice.randrange(12)))})
    pieces = list(itertools.pairwise(cuts))
    for _ in range(dice.randrange(6)):
        start, end = sorted(dice.randrange(length + 1) for _ in range(2))
        pieces.append((start, end))
    dice.shuffle(pieces)
    return pieces


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("seed", range(6))
def test_pieces_of_any_size_in_any_order_make_the_files_that_ranks_hold(seed: int, replicas: int) -> None:
    dice, bench = random.Random(seed), Bench(seed, replicas)
    work = [(rank, each) for rank in range(RANKS) for each in random_pieces(dice, len(bench.stream(rank)))]
    dice.shuffle(work)
    halves = [work[i::3] for i in range(3)]
    threads = [
        threading.Thread(target=lambda part=part: [bench.push(rank, [piece]) for rank, piece in part])
        for part in halves
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    bench.check()
    whole = [event.rank for which in range(replicas) for event in bench.said(on.RankWhole, which)]
    assert sorted(whole) == list(range(RANKS)), "each rank is said to be whole once"
    assert not [event for which in range(replicas) for event in bench.said(on.Broken, which)]
    for rank in range(RANKS):
        assert bench.home_of(rank).missing(rank) == []
        bench.home_of(rank).check_whole(rank)


def test_a_file_is_filled_with_its_last_byte_and_a_rank_whole_with_its() -> None:
    bench = Bench()
    lengths = [len(bench.stream(rank)) for rank in range(RANKS)]
    for rank in range(RANKS):
        bench.push(rank, [(0, lengths[rank] - 1)])
    before = len(bench.filled())
    assert before < len(bench.files.files)
    assert not bench.said(on.RankWhole)
    with pytest.raises(FailedPrecondition, match="have not arrived") as caught:
        bench.writer.check_whole(0)
    assert caught.value.details
    for rank in range(RANKS):
        bench.push(rank, [(lengths[rank] - 1, lengths[rank])])
        assert [event.rank for event in bench.said(on.RankWhole)] == list(range(rank + 1))
    bench.check()


def test_the_first_bytes_are_told_once_and_before_what_follows_from_them() -> None:
    bench = Bench()
    data = memoryview(bench.stream(2)[:8])
    with pytest.raises(DataLoss):
        bench.writer.write(2, 0, data, rpc.checksum(data) ^ 1)
    assert not bench.said(on.FirstByte), "a piece that is refused has not come"
    bench.writer.write(2, 0, data, rpc.checksum(data))
    assert bench.events[0] == [on.FirstByte()]
    for rank in range(RANKS):
        bench.push(rank)
    assert bench.said(on.FirstByte) == [on.FirstByte()]
    bench.check()


@pytest.mark.parametrize("reports", [True, False])
def test_of_a_process_that_writes_to_the_image_the_first_bytes_are_those_that_it_reports(
    reports: bool,
) -> None:
    bench = Bench()
    grant, length = bench.writer.grant(0), len(bench.stream(0))
    if reports:
        bench.writer.report(grant, [])
        assert not bench.events[0], "it has reported nothing"
        bench.writer.report(grant, [(0, length // 2)])
    assert bench.events[0] == [on.FirstByte()] * reports
    bench.writer.end_grant(grant, complete=True)
    assert bench.events[0][0] == on.FirstByte()
    assert bench.said(on.RankWhole) == [on.RankWhole(0)]
    assert len(bench.said(on.FirstByte)) == 1


def test_a_damaged_piece_and_one_outside_of_the_stream_change_nothing() -> None:
    bench = Bench()
    stream = memoryview(bench.stream(0))
    with pytest.raises(DataLoss, match="does not agree"):
        bench.writer.write(0, 0, stream, rpc.checksum(stream) ^ 1)
    with pytest.raises(InvalidArgument, match="outside"):
        bench.writer.write(0, 1, stream, rpc.checksum(stream))
    assert bench.writer.received(0) == ([], len(stream))
    for rank in range(RANKS):
        bench.push(rank)
    bench.check()


def test_a_stream_that_is_closed_takes_no_piece_and_an_ended_version_says_what_of() -> None:
    bench = Bench()
    for rank in range(RANKS):
        bench.push(rank)
    bench.writer.close_stream(0)
    with pytest.raises(FailedPrecondition, match="rank 0 of acme/m@1 is sealed"):
        bench.push(0)
    bench.push(1)  # a repeat, which is left alone
    bench.writer.close(None)
    with pytest.raises(FailedPrecondition, match="acme/m@1 is sealed"):
        bench.push(1)
    bench.writer.close(VersionFailed("changed my mind", details=["x"], fix="push again"))
    with pytest.raises(VersionFailed, match="changed my mind") as caught:
        bench.push(1)
    assert (caught.value.details, caught.value.fix) == (("x",), "push again")
    with pytest.raises(VersionFailed, match="changed my mind"):
        bench.writer.grant(1)


@pytest.mark.parametrize("error", [None, VersionFailed("given up")])
def test_the_image_is_kept_as_long_as_somebody_copies_to_it(
    error: WeighbridgeError | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench()
    transfer, entered, go_on = bench.agreed.prepared.transfer, threading.Event(), threading.Event()
    scatter = transfer.scatter

    def slow(*args: Any, **kwargs: Any) -> Any:
        entered.set()
        assert go_on.wait(20)
        return scatter(*args, **kwargs)

    monkeypatch.setattr(transfer, "scatter", slow)
    late = threading.Thread(target=bench.push, args=(0,))
    late.start()
    assert entered.wait(20)
    assert not bench.said(on.RankWhole), "claimed, and not there yet"
    bench.writer.check_whole(0)
    bench.writer.close(error)
    bench.images[0].release()
    assert bench.pool.usage().memory_in_use
    go_on.set()
    late.join()
    assert not bench.pool.usage().memory_in_use


def test_bytes_that_could_not_be_placed_break_the_version(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()

    def broken(*_args: Any, **_kwargs: Any) -> Any:
        raise MemoryError("no memory")

    monkeypatch.setattr(bench.agreed.prepared.transfer, "scatter", broken)
    with pytest.raises(MemoryError):
        bench.push(0)
    [said] = bench.said(on.Broken)
    assert "could not be placed" in said.error.message
    assert not bench.said(on.RankWhole)


def test_files_are_not_filled_while_a_process_that_did_not_say_that_it_is_done_can_write_to_them() -> None:
    bench = Bench()
    grant = bench.writer.grant(0)
    fd = grant.image.region.reopen(writable=True)
    grant.image.region.doubt(lambda: False)
    for rank in range(1, RANKS):
        bench.push(rank)
    assert not bench.filled(), "memory is granted"
    stream = np.frombuffer(bench.stream(0), np.uint8)
    grant.prepared.transfer.scatter(stream, 0, grant.image.buffers, "0")
    assert bench.writer.end_grant(grant, complete=True) == len(stream)
    assert bench.said(on.MemoryMapped), "its descriptor is still open"
    assert not bench.filled()
    assert [event.rank for event in bench.said(on.RankWhole)] == [1, 2, 3, 0]
    bench.writer.probe()
    assert bench.said(on.MemoryStillMapped)
    os.close(fd)
    bench.writer.probe()
    assert isinstance(bench.events[0][-1], on.MemoryUnmapped)
    bench.check()
    with pytest.raises(FailedPrecondition, match="have arrived"):
        bench.writer.grant(0)


def test_files_are_filled_once_the_process_in_doubt_has_ended() -> None:
    bench = Bench()
    grant = bench.writer.grant(0)
    fd = grant.image.region.reopen(writable=True)
    ended = False
    grant.image.region.doubt(lambda: ended)
    bench.writer.end_grant(grant, complete=False)
    for rank in range(RANKS):
        bench.push(rank)
    assert bench.said(on.MemoryMapped)
    assert not bench.filled()
    ended = True
    bench.writer.probe()
    bench.check()
    os.close(fd)


def test_files_are_filled_at_once_by_who_has_said_that_it_is_done_and_keeps_its_mapping() -> None:
    bench = Bench()
    grant = bench.writer.grant(0)
    fd = grant.image.region.reopen(writable=True)
    for rank in range(1, RANKS):
        bench.push(rank)
    grant.prepared.transfer.scatter(np.frombuffer(bench.stream(0), np.uint8), 0, grant.image.buffers, "0")
    bench.writer.end_grant(grant, complete=True)
    bench.check()
    os.close(fd)


def test_a_grant_that_ends_early_counts_for_nothing_and_none_is_given_once_files_are_filled() -> None:
    bench = Bench()
    grant, length = bench.writer.grant(0), len(bench.stream(0))
    assert bench.writer.received_of_ranks[0] == Received(0, length, copying=True)
    assert bench.writer.end_grant(grant, complete=False) == 0
    assert bench.writer.received_of_ranks[0] == Received(0, length)
    assert bench.writer.received(0)[0] == []
    for rank in range(RANKS):
        bench.push(rank)
    bench.check()
    other = Bench()
    for rank in range(RANKS):
        other.push(rank, [(0, len(other.stream(rank)) - 1)])
    assert other.filled()
    with pytest.raises(FailedPrecondition, match="complete already"):
        other.writer.grant(0)


def test_a_grant_covers_what_belongs_to_the_ranks_own_replica_and_the_rest_is_streamed() -> None:
    bench = Bench(replicas=2)
    for rank in range(RANKS):
        writer, length = bench.home_of(rank), len(bench.stream(rank))
        grant, parts = writer.grant(rank), bench.agreed.prepared.grantable[rank]
        stream = np.frombuffer(bench.stream(rank), np.uint8)
        for start, stop in parts:
            grant.prepared.transfer.scatter(stream[start:stop], start, grant.image.buffers, str(rank))
        assert writer.end_grant(grant, complete=True) == parts.size
        assert 0 < parts.size < length
        assert writer.received(rank) == (list(parts), length)
        home = home_of(bench.agreed, rank)
        assert bench.agreed.routes(rank)[home].size == parts.size, "cut by rows, no part is wanted by both"
        writer.check_whole(rank)
    assert not bench.filled()
    for rank in range(RANKS):
        bench.push(rank, bench.agreed.prepared.grantable[rank].gaps(0, len(bench.stream(rank))))
    bench.check()


def test_replicas_take_only_the_ranges_that_are_routed_to_them() -> None:
    bench = Bench(replicas=2)
    agreed = bench.agreed
    mine, others = (next(iter(agreed.routes(rank)[HOMES[0]])) for rank in (0, 1))
    elsewhere = next(iter(agreed.routes(1)[HOMES[1]]))
    for claim, rank, (start, end), match in (
        ("wrong", 1, others, "do not agree"),
        (agreed.claim, 0, mine, "has declared at this replica"),
        (agreed.claim, 1, elsewhere, "do not belong to files of the replica one:1"),
        (agreed.claim, 1, (0, len(bench.stream(1))), "do not belong"),
    ):
        data = memoryview(bench.stream(rank))[start:end]
        with pytest.raises(FailedPrecondition, match=match):
            bench.writers[0].write_of_other(claim, rank, start, data, rpc.checksum(data))
    start, end = next(iter(agreed.routes(0)[HOMES[1]]))
    data = memoryview(bench.stream(0))[start:end]
    with pytest.raises(FailedPrecondition, match="do not belong"):
        bench.writers[0].write(0, start, data, rpc.checksum(data))
    for rank in range(RANKS):
        bench.push(rank)
    bench.check()
    for writer in bench.writers:
        writer.close(None)
    routed = bench.agreed.prepared.spread
    assert routed is not None
    [(start, end), *_] = list(routed.routes[1][0])
    again = memoryview(bench.stream(1))[start:end]
    bench.writers[0].write_of_other(agreed.claim, 1, start, again, rpc.checksum(again))  # its answer was lost


def test_a_sample_finds_damage_and_names_rank_and_range() -> None:
    for replicas in (1, 2):
        bench = Bench(replicas=replicas)
        for rank in range(RANKS):
            length = len(bench.stream(rank))
            bench.push(rank, [(start, min(start + 50, length)) for start in range(0, length, 50)])
        for writer, image in zip(bench.writers, bench.images, strict=True):
            sample = writer._sample
            assert 0 < len(sample.pieces) <= MOST
            writer.compare_sample(image.read_only_buffers)
        writer, image = bench.writers[0], bench.images[0]
        files = {name: buffer.copy() for name, buffer in image.read_only_buffers.items()}
        transfer = bench.agreed.prepared.transfer
        for piece in writer._sample.pieces:
            found = transfer.collect(piece.start, piece.stop, files, str(piece.rank))
            if found is not None:
                break
        else:
            raise AssertionError("no piece of the sample lies here as a whole")
        [place, *_] = transfer.pieces(piece.start, piece.stop, str(piece.rank))
        files[place.file][place.file_offset] ^= 1
        with pytest.raises(DataLoss, match=f"bytes {piece.start} to {piece.stop} of the stream of rank {piece.rank}"):
            writer.compare_sample(files)


@pytest.mark.parametrize("seed", range(10))
def test_a_range_is_collected_as_it_was_scattered(seed: int) -> None:
    dice, bench = random.Random(seed), Bench(seed)
    for rank in range(RANKS):
        bench.push(rank)
    files = bench.images[0].read_only_buffers
    for _ in range(20):
        rank = dice.randrange(RANKS)
        stream = bench.stream(rank)
        start, end = sorted(dice.randrange(len(stream) + 1) for _ in range(2))
        found = bench.agreed.prepared.transfer.collect(start, end, files, str(rank))
        assert found is not None
        assert found.tobytes() == stream[start:end]
    name = dice.choice(list(files))
    rest = {other: buffer for other, buffer in files.items() if other != name}
    assert any(
        bench.agreed.prepared.transfer.collect(0, len(bench.stream(rank)), rest, str(rank)) is None
        for rank in range(RANKS)
    )


def test_marks_are_revoked_as_soon_as_a_process_that_has_a_grant_may_write_over_what_came_otherwise() -> None:
    """A rank pushes over gRPC while a process of it may still write to the image: which of the two is last is not
    known.
    """
    bench = Bench()
    marks = bench.writer.arrivals()
    bench.push(1)
    grant = bench.writer.grant(0)
    assert not marks.revoked, "nobody else writes what rank 1 or a grant's first process does"
    bench.push(0, [(0, 8)])
    assert marks.revoked
    bench.writer.end_grant(grant, complete=False)


def test_marks_are_revoked_by_a_grant_over_a_piece_that_is_still_being_copied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench()
    marks, transfer = bench.writer.arrivals(), type(bench.agreed.prepared.transfer)
    copying, go_on, scatter = threading.Event(), threading.Event(), transfer.scatter

    def slowly(*args: Any) -> Any:
        copying.set()
        assert go_on.wait(30)
        return scatter(*args)

    monkeypatch.setattr(transfer, "scatter", slowly)
    pushing = threading.Thread(target=bench.push, args=(0, [(0, 8)]))
    pushing.start()
    assert copying.wait(30)
    grant = bench.writer.grant(0)
    go_on.set()
    pushing.join(30)
    assert marks.revoked
    bench.writer.end_grant(grant, complete=False)


@pytest.mark.parametrize("seed", range(4))
def test_a_tensor_is_marked_when_its_last_byte_is_in_place_and_not_before(seed: int) -> None:
    """Pieces of any size in any order, over gRPC and by grants with reports; the reader comes at any time."""
    dice, bench = random.Random(seed), Bench(seed)
    [image], layout = bench.images, bench.files.layout
    granted = {rank: bench.writer.grant(rank) for rank in dice.sample(range(RANKS), 2)}
    work = [(rank, each) for rank in range(RANKS) for each in random_pieces(dice, len(bench.stream(rank)))]
    dice.shuffle(work)
    comes = dice.randrange(len(work))
    for count, (rank, (start, stop)) in enumerate(work):
        if count == comes:
            marks = bench.writer.arrivals()
        if rank in granted:
            stream = np.frombuffer(bench.stream(rank), np.uint8)[start:stop]
            granted[rank].prepared.transfer.scatter(stream, start, image.buffers, str(rank))
            bench.writer.report(granted[rank], [(start, stop)])
        else:
            bench.push(rank, [(start, stop)])
        if count >= comes:
            complete = [
                image.buffers[each.buffer][each.offset : each.offset + each.nbytes].tobytes()
                == bench.arrays[each.shard.tensor].tobytes()
                for each in layout.placements
            ]
            assert marks.region.readable[1 : 1 + len(complete)].astype(bool).tolist() == complete
    assert all(complete)
    assert not marks.revoked
    for grant in granted.values():
        bench.writer.end_grant(grant, complete=True)


def test_a_reader_does_not_hold_up_ranks_however_many_tensors_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A push is accounted for in whole shards: no copy is planned anew for its marks, of which a model of experts has
    100,000.
    """
    bench = Bench()
    marks = bench.writer.arrivals()
    monkeypatch.setattr(type(bench.agreed.prepared.transfer), "_compile", None)
    for rank in range(RANKS):
        bench.writer.report(bench.writer.grant(rank), [(0, len(bench.stream(rank)))])
    assert marks.region.readable[: 1 + len(bench.arrays)].all()
