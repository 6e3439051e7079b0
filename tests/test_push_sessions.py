"""What the sessions of pushes hold, and what keeps them going: memory, threads, the object store, other calls."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.raw_clients import RawClient, TinyModel, stream_of, tiny_folder, whole_layout
from tests.services import RunningService, eventually, running_service
from weighbridge import TrainerClient
from weighbridge.errors import Unavailable, WeighbridgeError
from weighbridge_service.push import effect_pools, effect_runner, intake, registry
from weighbridge_service.push import effects as do
from weighbridge_service.push.effect_pools import DaemonPool, EffectPools
from weighbridge_service.push.publisher import Publisher
from weighbridge_storage.head_store import HeadStore
from weighbridge_storage.manifest import TensorEntry
from weighbridge_storage.names import ModelName

MODEL = "acme/tiny"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return tiny_folder(tmp_path_factory.mktemp("tiny") / "hf")


@pytest.fixture
def running(tmp_path: Path, tiny: TinyModel) -> Iterator[RunningService]:
    with running_service(tmp_path / "store") as service:
        with TrainerClient(service.address) as trainer:
            trainer.register_model(MODEL, tiny.folder)
        yield service


@pytest.fixture
def client(running: RunningService) -> Iterator[RawClient]:
    with RawClient(running.address) as client:
        yield client


def finished(running: RunningService) -> None:
    eventually(lambda: not running.service.catalog.unfinished)


# --- what they hold


def test_versions_that_were_published_leave_no_digests_in_memory(
    running: RunningService, client: RawClient, tiny: TinyModel
) -> None:
    def entries_after(pushes: int) -> int:
        for _ in range(pushes):
            number = client.push_whole(MODEL, tiny.arrays)
            finished(running)
        nbytes = len(stream_of(tiny.arrays, whole_layout(tiny.arrays), range(len(tiny.arrays))))
        assert client.received(MODEL, number) == [(0, nbytes)], "whoever asks again is told that all has come"
        return entries()

    def entries() -> int:
        gc.collect()
        return sum(type(each) is TensorEntry for each in gc.get_objects())

    before = entries()
    first = entries_after(2)
    assert entries_after(4) <= first < before + 2 * len(tiny.arrays)


def test_ended_versions_are_remembered_up_to_a_number(
    running: RunningService, client: RawClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "_KEPT_ENDED_IN_ALL", 3)
    for step in range(8):
        number = client.open(MODEL, step=step)
        running.service.intake.abort_version(MODEL, number, "no")
    # the oldest go when another one is opened
    assert sorted(running.service.catalog.snapshots(ModelName.parse(MODEL))) == [6, 7, 8]


def test_an_image_goes_back_if_nothing_can_write_to_it(
    running: RunningService, client: RawClient, tiny: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(effect_runner, "ImageWriter", broken)
    number = client.open(MODEL)
    with pytest.raises(WeighbridgeError, match="no image could be made"):
        client.declare(MODEL, number, whole_layout(tiny.arrays))
    assert running.service.images.usage().memory_in_use == 0


# --- what keeps them going


def test_calls_of_the_store_that_hang_keep_no_others_from_it() -> None:
    pools, hanging = EffectPools(), threading.Event()
    kinds: tuple[do.Effect, ...] = (
        do.LookAtHead(), do.Claim(), do.Confirm(), do.WriteManifestAndPublish(), do.GiveUp(Unavailable(""), False)
    )  # fmt: skip
    try:
        for hang in kinds:
            for _ in range(100):
                pools.submit(hang, hanging.wait)
            others = [kind for kind in kinds if kind is not hang]
            done = threading.Semaphore(0)
            for kind in others:
                pools.submit(kind, lambda done=done: done.release())  # type: ignore[misc]
            assert all(done.acquire(timeout=10) for _ in others), f"others wait for {hang}"
            hanging.set()
            time.sleep(0.05)
            hanging.clear()
    finally:
        hanging.set()
        pools.stop(10.0)


def test_a_pool_recovers_from_a_system_without_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, done = DaemonPool(1, "test"), threading.Event()

    class NoThread(threading.Thread):
        def start(self) -> None:
            raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(effect_pools.threading, "Thread", NoThread)
        with pytest.raises(RuntimeError):
            pool.submit(done.set)
    assert not done.is_set()
    pool.submit(done.set)
    assert done.wait(10)
    pool.stop()


@pytest.mark.parametrize(
    "kind", [do.Digest, do.Confirm, do.Upload, do.UploadDigests, do.WriteManifestAndPublish]
)
def test_an_effect_that_cannot_be_begun_is_tried_again(
    tmp_path: Path, tiny: TinyModel, monkeypatch: pytest.MonkeyPatch, kind: type[do.Effect]
) -> None:
    refused: list[do.Effect] = []
    submit = EffectPools.submit

    def refusing_once(self: EffectPools, effect: do.Effect, carry_out: Any) -> None:
        if isinstance(effect, kind) and not refused:
            refused.append(effect)
            raise RuntimeError("can't start new thread")
        submit(self, effect, carry_out)

    monkeypatch.setattr(EffectPools, "submit", refusing_once)
    with running_service(tmp_path / "store") as running, RawClient(running.address) as client:
        with TrainerClient(running.address) as trainer:
            trainer.register_model(MODEL, tiny.folder)
        number = client.push_whole(MODEL, tiny.arrays)
        finished(running)
        found = running.service.catalog.get_version(MODEL, str(number))
    assert refused
    assert (found.state.value, found.error) == ("durable", "")


def test_calls_that_open_versions_do_not_pile_up_behind_a_store_that_hangs(
    running: RunningService, client: RawClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intake, "_OPENING_SECONDS", 0.2)
    hanging, update = threading.Event(), HeadStore.update

    def slow(self: HeadStore, *args: Any, **more: Any) -> Any:
        hanging.wait(30)
        return update(self, *args, **more)

    monkeypatch.setattr(HeadStore, "update", slow)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(client.open, MODEL, request_id="a")
        time.sleep(0.1)
        begun = time.monotonic()
        with pytest.raises(Unavailable, match="does not answer"):
            client.open(MODEL, request_id="b")
        assert time.monotonic() - begun < 5
        hanging.set()
        assert first.result(30) == 1
    assert client.open(MODEL, request_id="b") == 2


def test_a_service_that_loses_a_visible_version_when_it_ends_says_so(
    running: RunningService,
    client: RawClient,
    tiny: TinyModel,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def away(*_: Any) -> None:
        raise Unavailable("the store is away")

    monkeypatch.setattr(Publisher, "publish", away)
    number = client.push_whole(MODEL, tiny.arrays)
    finished(running)
    assert running.service.catalog.get_version(MODEL, str(number)).state.visible
    assert not running.service.drain()
    assert "is lost: not durable: the store is away" in caplog.text
