"""Does a service that is killed at any moment leave the store readable and every durable version intact?

``WEIGHBRIDGE_CRASHES`` sets the number of kills, ``WEIGHBRIDGE_SEED`` repeats a run's random numbers.
"""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.killable_service import KillableService
from tests.support.raw_clients import (
    RawClient,
    TinyModel,
    assert_equal,
    cut,
    rows_layout,
    stream_of,
    tiny_folder,
)
from tests.support.rounds import first_seed, rounds
from weighbridge._clients.engine import EngineClient
from weighbridge._core.resources import REF_LATEST, VersionState
from weighbridge._trainers.trainer import TrainerClient
from weighbridge.errors import WeighbridgeError

CRASHES = rounds("CRASHES")
SEED = first_seed()
MODEL = "acme/crash"
LONGEST_LIFE = 0.5


class Record:
    """The results that clients received, over all lives of the service. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.source_of: dict[int, TinyModel] = {}
        self.durable: set[int] = set()
        self.latest = 0
        self.tagged: int | None = None
        self.problems: list[str] = []

    def opened(self, number: int, source: TinyModel) -> None:
        with self._lock:
            if number in self.source_of:
                self.problems.append(f"number {number} was given twice")
            self.source_of[number] = source

    def saw_durable(self, number: int) -> None:
        with self._lock:
            self.durable.add(number)

    def saw_latest(self, number: int) -> None:
        with self._lock:
            self.durable.add(number)
            self.latest = max(self.latest, number)

    def went_wrong(self, what: str) -> None:
        with self._lock:
            self.problems.append(what)


class Driver:
    """Pushes from several threads until told to stop, or until the service is gone.

    Args:
        address: of the service.
        sources: models to push.
        record: receives the results.
        chance: random numbers.
    """

    def __init__(self, address: str, sources: list[TinyModel], record: Record, chance: random.Random) -> None:
        self._address = address
        self._sources = sources
        self._record = record
        self._stop = threading.Event()
        work = [self._push_folders, self._push_folders, self._push_ranks, self._look]
        self._threads = [
            threading.Thread(target=self._run, args=(each, random.Random(chance.random()))) for each in work
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive(), "a client hangs on a service that is gone"

    def _run(self, work: object, chance: random.Random) -> None:
        try:
            work(chance)  # type: ignore[operator]
        except WeighbridgeError:
            pass  # the service is gone; any other exception is a bug
        except BaseException as error:
            self._record.went_wrong(f"a client got {error!r}")

    def _push_folders(self, chance: random.Random) -> None:
        with TrainerClient(self._address, retry_seconds=0.1) as trainer:
            step = 0
            while not self._stop.is_set():
                step += 1
                source = chance.choice(self._sources)
                handle = trainer.push_folder(MODEL, source.folder, step=step)
                self._record.opened(handle.number, source)
                if chance.random() < 0.5:
                    self._record.saw_durable(handle.wait(timeout=30).number)
                else:
                    handle.report(30)  # the next push begins while this version is being published

    def _push_ranks(self, chance: random.Random) -> None:
        """Two ranks with rows of each tensor, on one thread each, in pieces."""
        with RawClient(self._address) as raw, TrainerClient(self._address, retry_seconds=0.1) as trainer:
            while not self._stop.is_set():
                source = chance.choice(self._sources)
                number = raw.open(MODEL, ranks=2)
                self._record.opened(number, source)
                other = threading.Thread(
                    target=self._run, args=(lambda _, a=(raw, number, source): one_rank(*a, 1), chance)
                )
                other.start()
                try:
                    one_rank(raw, number, source, 0)
                finally:
                    other.join()
                self._record.saw_durable(trainer.wait_for(MODEL, number, VersionState.DURABLE, timeout=30).number)

    def _look(self, _: random.Random) -> None:
        with TrainerClient(self._address, retry_seconds=0.1) as client:
            while not self._stop.is_set():
                latest = client.refs(MODEL).get(REF_LATEST)
                if latest is not None:
                    self._record.saw_latest(latest)
                for version in client.versions(MODEL):
                    if version.state is VersionState.DURABLE:
                        self._record.saw_durable(version.number)
                time.sleep(0.005)


def one_rank(raw: RawClient, number: int, source: TinyModel, rank: int) -> None:
    layout = rows_layout(source.arrays, rank, 2)
    stream = stream_of(source.arrays, layout, raw.declare(MODEL, number, layout, rank=rank))
    raw.push(MODEL, number, cut(stream, max(3000, len(stream) // 50)), rank=rank)
    raw.seal(MODEL, number, rank=rank)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> list[TinyModel]:
    root = tmp_path_factory.mktemp("sources")
    return [tiny_folder(root / str(seed), seed=seed) for seed in range(6)]


@pytest.fixture(params=["off", "lane.sock"])
def service(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[KillableService]:
    """With a socket, clients share its memory when they find it, and go over gRPC when they do not."""
    where = request.param if request.param == "off" else str(tmp_path / request.param)
    killable = KillableService(tmp_path / "store", local_socket=where)
    yield killable
    killable.kill()


def check(service: KillableService, record: Record, checked: set[int], again: bool = False) -> None:
    """Check that each version in the store is whole, and that every version ever seen durable is there."""
    assert not record.problems, record.problems
    with TrainerClient(service.address) as trainer, EngineClient(service.address) as engine:
        listed = {version.number: version for version in trainer.versions(MODEL)}
        assert all(version.state is VersionState.DURABLE for version in listed.values())
        missing = record.durable - listed.keys()
        assert not missing, f"versions that were durable are gone: {sorted(missing)}"
        refs = trainer.refs(MODEL)
        if listed:
            assert refs[REF_LATEST] == max(listed) >= record.latest
            record.saw_latest(refs[REF_LATEST])
        else:
            assert refs == {}
        for number in sorted(listed.keys() if again else listed.keys() - checked):
            assert number in record.source_of, f"version {number} was never pushed"
            assert trainer.verify(MODEL, number).problems == ()
            assert_equal(engine, MODEL, number, record.source_of[number].arrays)
            checked.add(number)
        for number in record.source_of.keys() - listed.keys():
            with pytest.raises(WeighbridgeError):
                engine.pull(MODEL, number)


def leave_rubbish(store: Path, chance: random.Random) -> None:
    """Leave objects in the store, as an interrupted attempt at the next version or one far ahead might."""
    model = store / "models" / MODEL
    head = json.loads((model / "head.json").read_bytes())
    number = head["next_version"] + chance.choice([0, 0, 1, 2])
    folder = model / "versions" / f"{number:012d}"
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("model.safetensors", "config.json", "weighbridge.json", "model-00001-of-00002.safetensors"):
        if chance.random() < 0.7:
            (folder / name).unlink(missing_ok=True)
            (folder / name).write_bytes(chance.randbytes(chance.choice([0, 100, 50_000])))


@pytest.mark.smoke
@pytest.mark.timeout(60 + 10 * CRASHES)
def test_a_killed_service_loses_nothing_that_was_durable_and_shows_nothing_that_is_not(
    service: KillableService, sources: list[TinyModel]
) -> None:
    print(f"WEIGHBRIDGE_SEED={SEED}")  # pytest shows it if the test fails
    chance = random.Random(SEED)
    record, checked = Record(), set[int]()
    service.start()
    with TrainerClient(service.address) as trainer:
        trainer.register_files(MODEL, sources[0].files)
    for crash in range(CRASHES):
        driver = Driver(service.address, sources, record, chance)
        time.sleep(chance.uniform(0.0, LONGEST_LIFE))
        service.kill()
        driver.stop()
        if chance.random() < 0.5:
            leave_rubbish(service.store, chance)
        if chance.random() < 0.2:  # once more, while it starts
            service.start(wait=False)
            time.sleep(chance.uniform(0.0, 0.5))
            service.kill()
        service.start()
        check(service, record, checked)
        print(f"crash {crash + 1}: {len(checked)} of {len(record.source_of)} versions are durable")
    with TrainerClient(service.address) as trainer:
        for source in sources[:3]:
            handle = trainer.push_folder(MODEL, source.folder)
            record.opened(handle.number, source)
            record.saw_latest(handle.wait(timeout=30).number)
    check(service, record, checked, again=True)
    assert len(checked) >= 3
