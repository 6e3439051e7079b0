"""Does each state of a version mean what docs/design.md says, to everybody who asks?"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.raw_clients import (
    RawClient,
    TinyModel,
    assert_equal,
    cut,
    stream_of,
    tiny_folder,
    whole_layout,
)
from tests.support.services import RunningService, running_service
from tests.support.waiting import answered, eventually
from weighbridge import EngineClient, TrainerClient
from weighbridge._core.checks import CheckStatus
from weighbridge._core.resources import VersionState
from weighbridge.errors import DeadlineExceeded, FailedPrecondition, Unavailable, VersionFailed
from weighbridge_service.health.checks import check_durable
from weighbridge_service.push import publisher
from weighbridge_storage.documents.names import ModelName

MODEL = "acme/states"
NAME = ModelName.parse(MODEL)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return tiny_folder(tmp_path_factory.mktemp("source") / "hf")


@pytest.fixture
def running(tmp_path: Path, source: TinyModel) -> Iterator[RunningService]:
    with running_service(tmp_path / "store", {MODEL: source.files}, drain_seconds=0.5) as service:
        yield service


@pytest.fixture
def raw(running: RunningService) -> Iterator[RawClient]:
    with RawClient(running.address) as client:
        yield client


@pytest.fixture
def trainer(running: RunningService) -> Iterator[TrainerClient]:
    with TrainerClient(running.address) as client:
        yield client


def test_a_version_goes_through_its_states_in_order(
    running: RunningService,
    raw: RawClient,
    trainer: TrainerClient,
    source: TinyModel,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    number = raw.open(MODEL)
    assert trainer.wait_for(MODEL, number, VersionState.OPEN, timeout=60).state is VersionState.OPEN
    with pytest.raises(DeadlineExceeded):
        trainer.wait_for(MODEL, number, VersionState.RECEIVING, timeout=0)
    layout = whole_layout(source.arrays)
    stream = stream_of(source.arrays, layout, raw.declare(MODEL, number, layout))
    raw.push(MODEL, number, cut(stream[:-1]))
    receiving = trainer.wait_for(MODEL, number, VersionState.RECEIVING, timeout=60)
    assert receiving.state is VersionState.RECEIVING
    eventually(lambda: trainer.version(MODEL, number).received_bytes == len(stream) - 1)
    with pytest.raises(FailedPrecondition, match="not complete"):
        trainer.set_ref(MODEL, "prod", number)
    assert not trainer.versions(MODEL)
    assert trainer.refs(MODEL) == {}

    def away(*_: object) -> None:
        raise OSError("the store is away")

    with monkeypatch.context() as patched:
        patched.setattr(publisher, "write_weights", away)
        raw.push(MODEL, number, [(len(stream) - 1, stream[-1:])])
        raw.seal(MODEL, number)
        assert trainer.refs(MODEL) == {"live": number}
        verified = trainer.wait_for(MODEL, number, VersionState.VERIFIED, timeout=60)
        assert verified.state is VersionState.VERIFIED
        assert verified.received_bytes == verified.tensor_bytes == len(stream)
        assert 0 < verified.ready_time_ms <= verified.verified_time_ms
        assert verified.durable_time_ms == 0
        with EngineClient(running.address) as engine:
            assert_equal(engine, MODEL, "live", source.arrays)
    durable = trainer.wait_for(MODEL, number, VersionState.DURABLE, timeout=30)
    assert durable.verified_time_ms == verified.verified_time_ms <= durable.durable_time_ms
    assert trainer.refs(MODEL) == {"live": number, "latest": number}


def test_elements_that_are_not_finite_are_counted(raw: RawClient, trainer: TrainerClient, source: TinyModel) -> None:
    arrays = {name: array.copy() for name, array in source.arrays.items()}
    for count, (name, value) in enumerate(zip(arrays, (np.nan, np.inf, -np.inf), strict=False), start=1):
        arrays[name].reshape(-1)[:count] = value
    number = raw.push_whole(MODEL, arrays)
    found = trainer.wait_for(MODEL, number, VersionState.VERIFIED, timeout=20)
    assert found.nonfinite_elements == sum(int((~np.isfinite(array)).sum()) for array in arrays.values()) == 6
    assert found.to_json()["nonfinite_elements"] == 6


def test_a_version_that_is_damaged_in_memory_fails_before_it_is_durable(
    running: RunningService, raw: RawClient, trainer: TrainerClient, source: TinyModel
) -> None:
    good = raw.push_whole(MODEL, source.arrays)
    trainer.wait_for(MODEL, good, VersionState.DURABLE, timeout=20)
    number = raw.open(MODEL)
    layout = whole_layout(source.arrays)
    stream = stream_of(source.arrays, layout, raw.declare(MODEL, number, layout))
    raw.push(MODEL, number, cut(stream[:5000]))
    session = running.service.registry.get(NAME, number)
    assert session is not None
    image = session._runner.image
    assert image is not None
    for buffer in image.buffers.values():
        buffer[-4:] ^= 1  # of the first tensors, which have come
        header = int.from_bytes(buffer[:8].tobytes(), "little") + 8
        buffer[header : header + 2000] ^= 1
    rest = [(5000 + offset, data) for offset, data in cut(stream[5000:])]
    raw.push(MODEL, number, rest)
    raw.seal(MODEL, number)
    with pytest.raises(VersionFailed, match=r"damaged in memory: bytes \d+ to \d+ of the stream of rank 0"):
        trainer.wait_for(MODEL, number, VersionState.DURABLE, timeout=20)
    eventually(lambda: trainer.refs(MODEL) == {"live": good, "latest": good})
    failed = {v.number: v.state for v in trainer.versions(MODEL, include_invisible=True)}
    assert failed[number] is VersionState.FAILED
    eventually(lambda: number in running.service.catalog.head(NAME).failed)
    again = raw.push_whole(MODEL, source.arrays)
    trainer.wait_for(MODEL, again, VersionState.DURABLE, timeout=20)


def test_who_gives_a_version_up_and_who_takes_it_out_of_history_is_told_apart(
    raw: RawClient, trainer: TrainerClient, source: TinyModel
) -> None:
    aborted = raw.open(MODEL)
    assert trainer.abort(MODEL, aborted, "changed my mind").state is VersionState.ABORTED
    with pytest.raises(VersionFailed, match="changed my mind"):
        trainer.wait_for(MODEL, aborted, VersionState.READY, timeout=60)
    numbers = [raw.push_whole(MODEL, source.arrays) for _ in range(2)]
    for number in numbers:
        trainer.wait_for(MODEL, number, VersionState.DURABLE, timeout=20)
    with pytest.raises(FailedPrecondition, match="visible already"):
        trainer.abort(MODEL, numbers[1])
    assert trainer.delete_version(MODEL, numbers[0]).state is VersionState.RETIRED
    assert trainer.version(MODEL, numbers[0]).state.visible
    states = {v.number: v.state for v in trainer.versions(MODEL, include_invisible=True)}
    assert states == {aborted: VersionState.ABORTED, numbers[1]: VersionState.DURABLE}


@contextmanager
def store_refuses(running: RunningService) -> Iterator[None]:
    """While no file of a version can be written."""
    store = running.service.catalog.store
    put = store.put

    def refuse(key: str, data: Any, **options: Any) -> str:
        if "/versions/" in key:
            raise Unavailable("the store is away")
        return put(key, data, **options)

    store.put = refuse  # type: ignore[method-assign]
    try:
        yield
    finally:
        store.put = put  # type: ignore[method-assign]


def test_a_version_that_the_store_refuses_is_named_by_the_health_check_and_becomes_durable_when_it_is_back(
    running: RunningService, raw: RawClient, trainer: TrainerClient, source: TinyModel
) -> None:
    catalog = running.service.catalog
    with store_refuses(running):
        number = raw.push_whole(MODEL, source.arrays)
        eventually(lambda: catalog.snapshots.not_durable)
        with pytest.raises(DeadlineExceeded, match="the store is away"):
            trainer.wait_for(MODEL, number, VersionState.DURABLE, timeout=1)
        found = check_durable(catalog.snapshots.not_durable)
        assert found.status is CheckStatus.WARN
        assert f"{MODEL}@{number}" in found.what
        assert "the store is away" in found.what
    trainer.wait_for(MODEL, number, VersionState.DURABLE, timeout=60)
    assert check_durable(catalog.snapshots.not_durable).status is CheckStatus.OK


def test_an_operator_may_give_up_a_version_that_the_store_refuses_and_it_stays_live(
    running: RunningService, raw: RawClient, trainer: TrainerClient, source: TinyModel
) -> None:
    with store_refuses(running):
        number = raw.push_whole(MODEL, source.arrays)
        eventually(lambda: running.service.catalog.snapshots.not_durable)
        assert trainer.abort(MODEL, number, "not wanted").state.visible
        assert not running.service.catalog.snapshots.not_durable, "it is not tried again"
        with pytest.raises(VersionFailed, match="not wanted"):
            trainer.wait_for(MODEL, number, VersionState.DURABLE, timeout=20)
    with EngineClient(running.address) as engine:
        assert_equal(engine, MODEL, "live", source.arrays)
    eventually(lambda: number in running.service.catalog.head(NAME).failed)
    again = raw.push_whole(MODEL, source.arrays)
    trainer.wait_for(MODEL, again, VersionState.DURABLE, timeout=20)
    eventually(lambda: trainer.version(MODEL, number).state is VersionState.FAILED)


def test_versions_that_the_store_refuses_leave_their_memory_to_newer_ones(tmp_path: Path, source: TinyModel) -> None:
    room = 5 * sum(array.nbytes for array in source.arrays.values()) // 2
    with (
        running_service(tmp_path / "store", memory_budget=room, spill_budget=0, drain_seconds=0.5) as running,
        TrainerClient(running.address) as trainer,
        RawClient(running.address) as raw,
        EngineClient(running.address) as engine,
    ):
        trainer.register_files(MODEL, source.files)
        with store_refuses(running):
            first = raw.push_whole(MODEL, source.arrays)
            second = raw.push_whole(MODEL, source.arrays)
            eventually(lambda: len(running.service.catalog.snapshots.not_durable) == 2)
            third = raw.push_whole(MODEL, source.arrays)
            with pytest.raises(VersionFailed, match="its memory was needed for a newer version"):
                trainer.wait_for(MODEL, first, VersionState.DURABLE, timeout=20)
            assert [v.number for v in running.service.catalog.snapshots.not_durable if v.number < third] == [second]
            assert_equal(engine, MODEL, "live", source.arrays)
        for number in (second, third):
            trainer.wait_for(MODEL, number, VersionState.DURABLE, timeout=60)


def test_an_abort_that_takes_too_long_says_so(
    running: RunningService, raw: RawClient, source: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = raw.open(MODEL)
    [session] = running.service.registry.of_version(NAME, number)
    monkeypatch.setattr(session, "_take", lambda _event: None)  # nothing that happens is taken note of
    with pytest.raises(DeadlineExceeded, match=r"could not be given up in time: .*waits for rank 0 to declare"):
        answered(running.service.intake.abort_version(MODEL, number, "not wanted", 0.2))
