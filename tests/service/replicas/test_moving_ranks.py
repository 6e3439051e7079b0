"""Does a rank that comes to another replica than before, because its own one stops or was away, cost no version?"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.raw_clients import RawClient, TinyModel, assert_equal, tiny_folder
from tests.support.row_pushes import push_rows
from tests.support.services import RunningService, running_service
from tests.support.waiting import eventually
from weighbridge import EngineClient, TrainerClient, Unavailable
from weighbridge._transport.addresses import Addresses
from weighbridge_service.replicas import sessions
from weighbridge_service.replicas.takeovers import KnownReplicas
from weighbridge_storage.documents.names import ModelName
from weighbridge_storage.head.head import Head

MODEL = "acme/moving"
NAME = ModelName.parse(MODEL)
RANKS = 2


class Job:
    """Two replicas, and two ranks, each with the replica of its own node first."""

    def __init__(self, replicas: list[RunningService], source: TinyModel, stack: ExitStack) -> None:
        self.replicas = replicas
        self.source = source
        addresses = [replica.address for replica in replicas]
        self.ranks = [
            stack.enter_context(TrainerClient(",".join(order), run="r")) for order in (addresses, addresses[::-1])
        ]
        self._pool = stack.enter_context(ThreadPoolExecutor(RANKS))

    def addresses(self, rank: int) -> Addresses:
        return self.ranks[rank]._connection.addresses

    def push(self, rank: int, step: int) -> Future[int]:
        """Push a rank's part of a step; the number once the version is durable."""
        return self._pool.submit(self._push, rank, step)

    def push_all(self, step: int) -> int:
        """All ranks push a step; the version's number."""
        (number,) = {push.result(60) for push in [self.push(rank, step) for rank in range(RANKS)]}
        self.check(number)
        return number

    def check(self, number: int) -> None:
        """Compare a version, pulled from the last replica, with what was pushed."""
        with EngineClient(self.replicas[-1].address) as engine:
            assert_equal(engine, MODEL, number, self.source.arrays)

    def _push(self, rank: int, step: int) -> int:
        return push_rows(self.ranks[rank], MODEL, self.source, rank, RANKS, step)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    source = tiny_folder(tmp_path / "hf", seed=1)
    with ExitStack() as stack:
        replicas = [
            stack.enter_context(
                running_service(
                    tmp_path / "store",
                    advertise="127.0.0.1:0",
                    scratch=tmp_path / f"scratch{number}",
                    local_socket=str(tmp_path / f"lane{number}.sock"),
                )
            )
            for number in range(2)
        ]
        homes = {each.service.intake.home for each in replicas}
        for each in replicas:
            here = each.service.intake.home
            eventually(lambda here=here, each=each: {here, *each.service.directory.others()} == homes)
        with TrainerClient(replicas[0].address) as trainer:
            trainer.register_files(MODEL, source.files)
        yield Job(replicas, source, stack)


def is_agreed(replica: RunningService, number: int) -> bool:
    """Whether ranks of a version have learnt from a replica what they push."""
    session = replica.service.registry.get(NAME, number)
    return session is not None and session.state.agreed is not None


def declared(replica: RunningService, number: int) -> bool:
    """Whether a rank has declared a version at a replica."""
    session = replica.service.registry.get(NAME, number)
    return session is not None and bool(session.state.declarations.here)


def opened_after(replica: RunningService, number: int) -> int:
    """The number of the version that ranks begin to push after one, once a replica has told its ranks what to push."""
    eventually(lambda: is_agreed(replica, number + 1))
    return number + 1


def test_a_rank_that_has_moved_is_sent_back_to_the_replica_that_the_others_count_on(job: Job) -> None:
    first = job.push_all(1)
    first_home = job.replicas[0].service.intake
    before = first_home.bytes_in
    staying = job.push(1, 2)
    second = opened_after(job.replicas[1], first)
    job.addresses(0).failed(job.replicas[0].address)  # a call was lost: the rank goes to the other replica
    moved = job.push(0, 2)
    assert {staying.result(60), moved.result(60)} == {second}
    job.check(second)
    assert first_home.bytes_in > before
    assert job.addresses(0).current == job.replicas[0].address
    job.push_all(3)


@pytest.mark.parametrize("moved_first", [False, True])
def test_a_rank_is_sent_back_to_the_only_replica_of_a_version(job: Job, moved_first: bool) -> None:
    job.addresses(1).failed(job.replicas[1].address)
    first = job.push_all(1)
    assert not job.replicas[1].service.intake.bytes_in
    job.addresses(0).failed(job.replicas[0].address)
    if moved_first:  # it waits for the other one when that begins
        moved = job.push(0, 2)
        eventually(lambda: declared(job.replicas[1], first + 1))
        staying = job.push(1, 2)
    else:
        staying = job.push(1, 2)
        head = job.replicas[1].service.catalog.head
        eventually(lambda: (entry := head(NAME).open.get(first + 1)) is not None and entry.claim)
        moved = job.push(0, 2)
    assert {staying.result(60), moved.result(60)} == {first + 1}
    job.check(first + 1)
    assert not job.replicas[1].service.intake.bytes_in
    job.push_all(3)


def test_a_replica_counts_on_no_version_that_others_have_received_a_newer_one_after(job: Job) -> None:
    first, second = (replica.address for replica in job.replicas)
    for step, refusing in enumerate((second, first), start=1):
        for rank in range(RANKS):
            if job.addresses(rank).current == refusing:
                job.addresses(rank).failed(refusing)
        number = job.push_all(step)
    job.addresses(0).failed(second)
    moved = job.push(0, 3)  # where both have pushed the first version
    eventually(lambda: declared(job.replicas[0], number + 1))
    staying = job.push(1, 3)
    assert {moved.result(60), staying.result(60)} == {number + 1}
    job.check(number + 1)


def test_ranks_of_a_replica_that_has_stopped_are_not_waited_for_there(job: Job) -> None:
    job.push_all(1)
    assert job.replicas[0].service.intake.drain(20.0)
    job.push_all(2)  # the client of rank 0 is refused, and goes on to the other replica


def test_a_replica_stops_once_a_version_is_done_that_others_have_begun_by_counting_on_it(job: Job) -> None:
    first = job.push_all(1)
    begun = job.push(1, 2)
    second = opened_after(job.replicas[1], first)
    intake = job.replicas[0].service.intake
    drained: list[bool] = []
    draining = threading.Thread(target=lambda: drained.append(intake.drain(30.0)))
    draining.start()
    eventually(lambda: intake.opener.draining)
    late = job.push(0, 2)  # not refused: the version is open
    assert {begun.result(60), late.result(60)} == {second}
    draining.join()
    assert drained == [True]
    job.check(second)


def test_memory_is_lent_by_the_replica_where_a_version_was_opened(job: Job) -> None:
    job.push_all(1)
    left, goes_on = (each.service.intake for each in job.replicas)
    assert left.bytes_in_locally > 0
    before = left.bytes_in, goes_on.bytes_in_locally
    assert left.drain(20.0)  # its socket still answers
    job.push_all(2)
    assert left.bytes_in == before[0]
    assert goes_on.bytes_in_locally > before[1]


def test_a_replica_that_stops_is_waited_for_until_the_store_says_that_no_rank_comes(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = job.push_all(1)
    begun = job.push(1, 2)
    opened_after(job.replicas[1], first)
    service = job.replicas[0].service
    looks: list[ModelName] = []

    def away(name: ModelName) -> Head:
        looks.append(name)
        raise Unavailable("the object store does not answer")

    with ThreadPoolExecutor(1) as pool, monkeypatch.context() as patch:
        patch.setattr(service.catalog, "head", away)
        drained = pool.submit(service.intake.drain, 30.0)
        eventually(lambda: len(looks) > 1 or service.intake.opener.closed)
        patch.undo()
        late = job.push(0, 2)
        assert {begun.result(60), late.result(60)} == {first + 1}
        assert drained.result(60)


def test_a_replica_that_starts_while_another_one_stops_hears_of_it(job: Job, tmp_path: Path) -> None:
    leaving, staying = (each.service for each in job.replicas)
    leaving.intake.drain(0.0)  # still answers
    with running_service(tmp_path / "store", advertise="127.0.0.1:0", scratch=tmp_path / "third") as third:
        directory = third.service.directory
        eventually(lambda: {*directory.others()} == {leaving.intake.home, staying.intake.home})
        eventually(lambda: directory.staying() == {staying.intake.home})


def test_a_replica_stops_once_versions_are_done_that_were_being_opened(job: Job) -> None:
    intake = job.replicas[0].service.intake
    with ThreadPoolExecutor(1) as pool:
        with intake.opener.opening(NAME):
            drained = pool.submit(intake.drain, 30.0)
            eventually(lambda: intake.opener.closed)
            assert not drained.done()
        assert drained.result(30)


def test_a_replica_is_answered_at_once_that_stops_after_a_version_was_aborted(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.push_all(1)
    monkeypatch.setattr(sessions, "_COUNT_SECONDS", 300.0)
    with RawClient(job.replicas[1].address) as raw:
        number = raw.open(MODEL, step=2, ranks=RANKS)
    job.ranks[1].abort(MODEL, number)
    with ThreadPoolExecutor(1) as pool:
        left = pool.submit(job.replicas[1].service.replica_left, job.replicas[0].service.intake.home)
        try:
            left.result(30)
        finally:
            job.replicas[1].service.intake.stop()  # ends what waits


def test_the_time_for_stopping_begins_before_the_others_are_told(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    told_at: list[float] = []

    def leave(self: KnownReplicas) -> frozenset[tuple[str, int]]:
        told_at.append(time.monotonic())
        return frozenset()

    monkeypatch.setattr(KnownReplicas, "leave", leave)
    intake = job.replicas[0].service.intake
    assert intake.drain(20.0)
    assert intake.opener.leaving is not None
    assert intake.opener.leaving.until <= told_at[0] + 20.0
