"""Do services keep their promises while the way to their store is bad?

Two replicas of the service over one store, which they reach through a proxy that spoils requests. Trainers push to
either and to both, tags are set, versions are collected. Then the way is good again, and what is in the store is read
without them.

``WEIGHBRIDGE_SERVICE_FAULTS=500`` makes as many random runs; ``WEIGHBRIDGE_SEED`` chooses the first one's seed.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from urllib.parse import quote

import pytest
import xxhash

from tests.support.fault_proxy import FAULTS, FaultProxy, fault_proxy
from tests.support.heads import stored
from tests.support.raw_clients import RawClient, TinyModel, cut, rows_layout, stream_of, tiny_folder
from tests.support.rounds import first_seed, rounds
from tests.support.s3_server import BUCKET, S3Server
from tests.support.services import RunningService, running_service
from weighbridge import TrainerClient
from weighbridge._core.resources import REF_LATEST, Retention, VersionState
from weighbridge.errors import WeighbridgeError
from weighbridge_storage import opening
from weighbridge_storage.documents.names import ModelName
from weighbridge_storage.opening import open_store
from weighbridge_storage.stores.objects import ObjectStore
from weighbridge_storage.stores.s3.settings import SMALLEST_PART, S3Settings
from weighbridge_storage.versions.reading import read_manifest
from weighbridge_storage.versions.verifying import verify_version

RUNS = rounds("SERVICE_FAULTS")
FIRST_SEED = first_seed()
KEPT = 2
HIDDEN_SIZE = 2400
"""Makes models of 6 MB, which are uploaded in two parts of the least size."""


@dataclass(frozen=True)
class Place:
    """Two services that reach their store through a proxy, and the store itself."""

    services: list[RunningService]
    proxy: FaultProxy
    honest: ObjectStore


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> list[TinyModel]:
    root = tmp_path_factory.mktemp("sources")
    return [tiny_folder(root / str(seed), seed=seed, hidden_size=HIDDEN_SIZE) for seed in range(3)]


@pytest.fixture(scope="module")
def place(seaweed: S3Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    parse = opening.parse_location

    def with_small_parts(location: str) -> S3Settings:
        return replace(parse(location), part_bytes=SMALLEST_PART, attempts=4, read_timeout_s=10.0)

    honest_location = seaweed.location()
    prefix = honest_location.split("?", maxsplit=1)[0].removeprefix(f"s3://{BUCKET}/")
    with contextlib.ExitStack() as stack:
        stack.enter_context(pytest.MonkeyPatch.context()).setattr(opening, "parse_location", with_small_parts)
        proxy = stack.enter_context(fault_proxy(seaweed.endpoint))
        location = f"s3://{BUCKET}/{prefix}?endpoint={quote(proxy.endpoint)}&region=us-east-1"
        services = [
            stack.enter_context(
                running_service(
                    location,
                    scratch=tmp_path_factory.mktemp("scratch"),
                    advertise="127.0.0.1:0",
                    receive_timeout=8.0,
                    open_lease=4.0,
                    collect_every=0.0,
                    grace_seconds=1.0,
                )
            )
            for _ in range(2)
        ]
        honest = open_store(honest_location)
        stack.callback(honest.close)
        yield Place(services, proxy, honest)


@dataclass
class Record:
    """The results that clients received. Thread-safe."""

    source_of: dict[int, TinyModel] = field(default_factory=dict)
    durable: set[int] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def opened(self, number: int, source: TinyModel) -> None:
        with self._lock:
            there = self.source_of.setdefault(number, source)
            if there is not source:
                self.problems.append(f"number {number} was given twice")

    def saw_durable(self, number: int) -> None:
        with self._lock:
            self.durable.add(number)


def push_folders(place: Place, which: int, model: str, source: TinyModel, record: Record) -> None:
    with TrainerClient(place.services[which].address, run=f"r{which}", retry_seconds=5.0) as trainer:
        for step in range(2):
            with contextlib.suppress(WeighbridgeError):
                handle = trainer.push_folder(model, source.folder, step=step)
                record.opened(handle.number, source)
                record.saw_durable(handle.wait(timeout=30).number)


def push_to_both(place: Place, model: str, source: TinyModel, record: Record) -> None:
    """Two ranks, each of which pushes to another replica."""

    def rank_push(rank: int) -> None:
        with RawClient(place.services[rank].address) as raw, contextlib.suppress(WeighbridgeError):
            number = raw.open(model, ranks=2, request_id="both")
            record.opened(number, source)
            layout = rows_layout(source.arrays, rank, 2)
            stream = stream_of(source.arrays, layout, raw.declare(model, number, layout, rank=rank))
            raw.push(model, number, cut(stream, 500_000), rank=rank)
            raw.seal(model, number, rank=rank)
            with TrainerClient(place.services[rank].address) as trainer:
                record.saw_durable(trainer.wait_for(model, number, VersionState.DURABLE, timeout=30).number)

    other = threading.Thread(target=rank_push, args=(1,))
    other.start()
    rank_push(0)
    other.join()


def tag_and_collect(place: Place, model: str, dice: random.Random) -> None:
    with TrainerClient(place.services[1].address, retry_seconds=2.0) as trainer:
        for _ in range(3):
            time.sleep(dice.uniform(0.0, 0.7))
            with contextlib.suppress(WeighbridgeError):
                trainer.set_ref(model, "prod", REF_LATEST)
            with contextlib.suppress(WeighbridgeError):
                trainer.collect(model)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("seed", range(FIRST_SEED, FIRST_SEED + RUNS))
def test_no_version_is_torn_lost_or_leaked_on_a_bad_way_to_the_store(
    place: Place, sources: list[TinyModel], seed: int
) -> None:
    dice = random.Random(seed)
    model = f"faults/m{seed}"
    record = Record()
    with TrainerClient(place.services[0].address) as trainer:
        trainer.register_files(model, sources[0].files)
        trainer.set_retention(model, Retention(keep_last=KEPT))
    place.proxy.dice.seed(seed)
    place.proxy.rate = dice.choice([0.02, 0.1, 0.25])
    place.proxy.script.append(dice.choice(FAULTS))  # a run without a fault would prove nothing
    spoilt_before = place.proxy.done.total() - place.proxy.done["none"]
    work: list[Callable[[], None]] = [
        lambda: push_folders(place, 0, model, sources[0], record),
        lambda: push_folders(place, 1, model, sources[1], record),
        lambda: push_to_both(place, model, sources[2], record),
        lambda: tag_and_collect(place, model, random.Random(seed)),
    ]

    def guarded(each: Callable[[], None]) -> None:
        try:
            each()
        except BaseException as error:  # a client gets nothing but errors of Weighbridge
            record.problems.append(repr(error))

    threads = [threading.Thread(target=guarded, args=(each,)) for each in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    place.proxy.rate = 0.0
    place.proxy.wait_until_quiet()
    assert place.proxy.done.total() - place.proxy.done["none"] > spoilt_before
    assert not record.problems
    check(place, ModelName.parse(model), record)
    settle(place, model)
    check(place, ModelName.parse(model), record)


def check(place: Place, name: ModelName, record: Record) -> None:
    """Check that each listed version is whole and as pushed, and that a durable one is there unless `KEPT` newer ones
    exist.
    """
    history = stored(place.honest, name)
    versions = history.versions()
    for number in record.durable - versions.keys():
        assert sum(other > number for other in versions) >= KEPT, f"version {number} is lost"
    assert history.head.latest == max(versions, default=0)
    for number in versions:
        try:
            assert verify_version(place.honest, name, number).problems == ()
            tensors = read_manifest(place.honest, name, number).tensors
        except WeighbridgeError:
            assert stored(place.honest, name).durable(number) is None, f"version {number} cannot be read"
            continue
        pushed = {n: xxhash.xxh3_128_hexdigest(a.tobytes()) for n, a in record.source_of[number].arrays.items()}
        assert {n: t.xxh3_128 for n, t in tensors.items()} == pushed


def settle(place: Place, model: str) -> None:
    """Check that a last collection leaves only the objects that the head lists."""
    name = ModelName.parse(model)
    deadline = time.monotonic() + 60
    while True:
        with TrainerClient(place.services[0].address) as trainer:
            trainer.collect(model)
        history = stored(place.honest, name)
        left = history.head.open, history.retired()
        folders = {int(key.split("/")[4]) for key in place.honest.list(f"{name.prefix}versions/")}
        rest = [key for key in place.honest.list(name.prefix) if key.split("/")[3] in ("incoming", "leases")]
        if left == ({}, {}) and folders == set(history.versions()) and not rest:
            break
        assert time.monotonic() < deadline, (left, folders, rest)
        time.sleep(0.5)
    assert place.honest.discard_unfinished(name.prefix, older_than_s=0.0) == 0, "an upload was left"
