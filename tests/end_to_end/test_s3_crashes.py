"""Does a service on S3 keep its promises when it, or the store under it, is killed at any moment?

Trainers push, tag and read all the time, and the service collects expired versions. ``WEIGHBRIDGE_S3_CRASHES`` says how
often one of the two is killed, ``WEIGHBRIDGE_SEED`` repeats a run's random numbers.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.end_to_end.test_crash import Driver, Record
from tests.support.heads import in_memory, stored
from tests.support.killable_service import KillableService
from tests.support.raw_clients import TinyModel, assert_equal, tiny_folder
from tests.support.rounds import first_seed, rounds
from tests.support.s3_server import S3Server, SeaweedFS
from weighbridge._clients.engine import EngineClient
from weighbridge._core.resources import Retention, VersionState
from weighbridge._trainers.trainer import TrainerClient
from weighbridge.errors import Unavailable, WeighbridgeError
from weighbridge_storage.documents.names import ModelName
from weighbridge_storage.head.history import History
from weighbridge_storage.opening import open_store

CRASHES = rounds("S3_CRASHES")
SEED = first_seed()
MODEL = "acme/crash"
NAME = ModelName.parse(MODEL)
KEPT = 3
GRACE = 1.0
LONGEST_LIFE = 3.0
START_SECONDS = 60.0
HIDDEN_SIZE = 8192
"""Makes models of 20 MB, which are uploaded in two parts."""


class World:
    """A service over a store, both of which can be killed."""

    def __init__(self, folder: Path) -> None:
        data = folder / "seaweed"
        data.mkdir()
        self.seaweed = SeaweedFS(data)
        server: S3Server = self.seaweed.start()
        self.location = server.location()
        self.service = KillableService(
            self.location,
            scratch=folder / "scratch",
            receive_timeout=5.0,
            open_lease=5.0,
            collect_every=0.5,
            grace_seconds=GRACE,
        )
        self.service.start()

    def kill(self, victim: str, pause: float) -> None:
        """Kill one or both, and start it again."""
        if victim != "service":
            self.seaweed.kill()
        if victim != "store":
            self.service.kill()
        time.sleep(pause)
        if victim != "service":
            self.seaweed.start()
        if victim != "store":
            self.service.start()

    def history(self) -> History:
        """The history in the store; retries, because a store answers 500 after its start until it has found its
        volumes.

        The whole history is read before this returns.
        """
        store = open_store(self.location)
        deadline = time.monotonic() + START_SECONDS
        try:
            while True:
                try:
                    found = stored(store, NAME)
                    return in_memory(found.head, *found.versions().values(), *found.retired().values())
                except Unavailable:
                    if time.monotonic() > deadline:
                        raise
        finally:
            store.close()


@pytest.fixture
def world(aws_environment: None, tmp_path: Path) -> Iterator[World]:
    found = World(tmp_path)
    yield found
    found.service.kill()
    found.seaweed.kill()


def check(world: World, record: Record, checked: set[int]) -> None:
    """Check that each listed version is whole, and that only versions beyond the last `KEPT` are gone."""
    assert not record.problems, record.problems
    with TrainerClient(world.service.address) as trainer, EngineClient(world.service.address) as engine:
        history = world.history()
        head, versions = history.head, history.versions()
        for number in record.durable - versions.keys():
            newer = sum(other > number for other in versions)
            assert newer >= KEPT, f"version {number} was durable, is among the last {KEPT}, and is gone"
        tagged = set(head.ref_numbers.values())
        assert record.tagged is None or record.tagged in tagged, "a tagged version is gone"
        if versions:
            assert head.latest == max(versions) >= record.latest
        for number in sorted(versions.keys() - checked):
            assert number in record.source_of, f"version {number} was never pushed"
            try:
                assert trainer.verify(MODEL, number).problems == ()
                assert_equal(engine, MODEL, number, record.source_of[number].arrays)
            except WeighbridgeError:
                assert world.history().durable(number) is None, "a listed version cannot be read"
            checked.add(number)


@pytest.mark.timeout(120 + 30 * CRASHES)
def test_a_killed_service_or_store_loses_no_durable_version_tears_none_and_leaks_nothing(
    world: World, tmp_path: Path
) -> None:
    print(f"WEIGHBRIDGE_SEED={SEED}")  # pytest shows it if the test fails
    chance = random.Random(SEED)
    sources = [tiny_folder(tmp_path / str(seed), seed=seed, hidden_size=HIDDEN_SIZE) for seed in range(4)]
    record, checked = Record(), set[int]()
    with TrainerClient(world.service.address) as trainer:
        trainer.register_files(MODEL, sources[0].files)
        trainer.set_retention(MODEL, Retention(keep_last=KEPT))
    for crash in range(CRASHES):
        driver = Driver(world.service.address, sources, record, chance)
        time.sleep(chance.uniform(0.0, LONGEST_LIFE))
        victim = chance.choice(["service", "store", "both"])
        world.kill(victim, chance.choice([0.0, 0.3, 1.5]))
        driver.stop()
        check(world, record, checked)
        tag(world, record, chance)
        print(f"crash {crash + 1} ({victim}): {len(checked)} of {len(record.source_of)} versions seen durable")
    leave_nothing_behind(world, record, sources)


def tag(world: World, record: Record, chance: random.Random) -> None:
    """Let a tag name one of the versions that are there."""
    with TrainerClient(world.service.address) as trainer:
        number = chance.choice(list(world.history().versions()) or [0])
        try:
            record.tagged = trainer.set_ref(MODEL, "kept", number).number if number else None
        except WeighbridgeError:  # it was collected just now
            record.tagged = world.history().head.ref_numbers.get("kept")


def leave_nothing_behind(world: World, record: Record, sources: list[TinyModel]) -> None:
    """Check that a push still works, and that a last collection leaves only the objects that the head lists."""
    with TrainerClient(world.service.address) as trainer:
        for source in sources[:2]:
            handle = trainer.push_folder(MODEL, source.folder)
            record.opened(handle.number, source)
            assert handle.wait(timeout=60).state is VersionState.DURABLE
        deadline = time.monotonic() + 180  # open versions of dead services end by themselves, after two minutes
        while True:
            trainer.collect(MODEL)
            history = world.history()
            left = history.head.open, history.retired()
            store = open_store(world.location)
            try:
                folders = {int(key.split("/")[4]) for key in store.list(f"{NAME.prefix}versions/")}
                rest = [key for key in store.list(NAME.prefix) if key.split("/")[3] in ("incoming", "leases")]
                if left == ({}, {}) and folders == set(history.versions()) and not rest:
                    assert store.discard_unfinished("", older_than_s=0.0) == 0, "an upload was left"
                    break
            finally:
                store.close()
            assert time.monotonic() < deadline, (left, folders, rest)
            time.sleep(1.0)
    check(world, record, set())
