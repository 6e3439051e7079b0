"""Does a version that several replicas receive together complete or fail cleanly when one of them is killed?

``WEIGHBRIDGE_REPLICA_CRASHES`` says how often one is killed, ``WEIGHBRIDGE_SEED`` repeats a run's random numbers.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.heads import stored
from tests.support.killable_service import KillableService
from tests.support.raw_clients import TinyModel, assert_equal, tiny_folder
from tests.support.rounds import first_seed, rounds
from tests.support.row_pushes import push_rows
from tests.support.waiting import eventually
from weighbridge import EngineClient, TrainerClient
from weighbridge.errors import WeighbridgeError
from weighbridge_storage.documents.entries import VersionEntry
from weighbridge_storage.documents.names import ModelName
from weighbridge_storage.head.head import Head
from weighbridge_storage.opening import open_store

CRASHES = rounds("REPLICA_CRASHES")
SEED = first_seed()
MODEL = "acme/spread"
REPLICAS, RANKS = 3, 6
LONGEST_LIFE = 1.0


@pytest.fixture
def services(location: str) -> Iterator[list[KillableService]]:
    found = []
    for _ in range(REPLICAS):
        service = KillableService(location, file_bytes=20_000, peer_patience=3.0, receive_timeout=10.0)
        service.settings["advertise"] = service.address
        found.append(service)
    yield found
    for service in found:
        service.kill()


def push_rank(trainer: TrainerClient, source: TinyModel, rank: int, step: int) -> int:
    """A rank's push; returns the version's number when all its bytes have arrived."""
    return push_rows(trainer, MODEL, source, rank, RANKS, step)


def push_step(services: list[KillableService], source: TinyModel, step: int) -> set[int] | None:
    """All ranks push one step, each to a replica; the numbers that they got, or None if any of them failed."""
    with ExitStack() as stack, ThreadPoolExecutor(RANKS) as pool:
        trainers = [
            stack.enter_context(TrainerClient(services[rank % REPLICAS].address, run="r", retry_seconds=5.0))
            for rank in range(RANKS)
        ]
        pushes = [pool.submit(push_rank, trainers[rank], source, rank, step) for rank in range(RANKS)]
        numbers: set[int] = set()
        failed = False
        for push in pushes:
            try:
                numbers.add(push.result(120))
            except WeighbridgeError as error:  # anything else is a bug
                print(f"step {step}: {error.message}")
                failed = True
        return None if failed else numbers


def history_of(location: str) -> tuple[Head, dict[int, VersionEntry]]:
    """The head, and the versions that are part of history."""
    store = open_store(location)
    try:
        found = stored(store, ModelName.parse(MODEL))
        return found.head, found.versions()
    finally:
        store.close()


@pytest.mark.timeout(120 + 30 * CRASHES)
def test_a_replica_killed_in_mid_push_costs_at_most_that_version_and_the_step_can_be_pushed_again(
    services: list[KillableService], location: str, tmp_path: Path
) -> None:
    print(f"WEIGHBRIDGE_SEED={SEED}")  # pytest shows it if the test fails
    chance = random.Random(SEED)
    sources = [tiny_folder(tmp_path / str(seed), seed=seed) for seed in range(3)]
    for service in services:
        service.start()
    with TrainerClient(services[0].address) as trainer:
        trainer.register_files(MODEL, sources[0].files)
    checked: set[int] = set()
    pushed: dict[int, TinyModel] = {}
    whole = 0
    for crash in range(CRASHES):
        source = pushed[crash] = chance.choice(sources)
        victim = chance.choice(services)

        def kill_and_start(victim: KillableService = victim, after: float = chance.uniform(0, LONGEST_LIFE)) -> None:
            time.sleep(after)
            victim.kill()
            time.sleep(chance.choice([0.0, 0.5, 4.0]))
            victim.start()

        killer = threading.Thread(target=kill_and_start)
        killer.start()
        numbers = push_step(services, source, crash)
        killer.join()
        whole += numbers is not None
        # the same step, pushed again; a replica that is as slow as `peer_patience` is taken for dead, too
        while numbers is None:
            numbers = push_step(services, source, crash)
        (number,) = numbers
        _, versions = history_of(location)
        assert number in versions
        with TrainerClient(chance.choice(services).address) as trainer:
            for listed in versions.keys() - checked:
                # a push that its ranks took for failed may have been completed by other replicas
                expected = pushed[versions[listed].step]
                assert not trainer.verify(MODEL, listed).problems
                with EngineClient(chance.choice(services).address) as engine:
                    assert_equal(engine, MODEL, listed, expected.arrays)
                checked.add(listed)
        print(f"crash {crash + 1}: {len(checked)} versions, {whole} pushes were not disturbed")
    # a replica that has lost another one gives up what they received together when it has waited for that one
    eventually(lambda: not history_of(location)[0].open)
