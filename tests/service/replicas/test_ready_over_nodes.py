"""Can a version that several replicas hold together be relied on before it is durable: pulled to the bit, or failed by
name?
"""

from __future__ import annotations

import contextlib
import functools
import shutil
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from tests.service.replicas.test_replicas import (
    FILE_BYTES,
    LayoutOf,
    columns_layout,
    copies_layout,
    files_of,
    pipeline_layout,
)
from tests.service.replicas.test_spread_lanes import MODEL, RANKS, node_of, nodes, push_all
from tests.support.killable_service import KillableService
from tests.support.raw_clients import RawClient, TinyModel, assert_equal, pulled, rows_layout, tiny_folder
from tests.support.services import RunningService
from tests.support.waiting import eventually
from weighbridge import EngineClient, TrainerClient
from weighbridge._core.resources import VersionState
from weighbridge._formats.safetensors_files import lay_out_files
from weighbridge.errors import FailedPrecondition, Unavailable, VersionFailed, WeighbridgeError
from weighbridge_service.exports.jobs import Exports
from weighbridge_service.models import registered_model
from weighbridge_storage.documents.names import ModelName, version_prefix

NAME = ModelName.parse(MODEL)


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registered_model, "lay_out_files", functools.partial(lay_out_files, max_shard_bytes=FILE_BYTES))


@pytest.fixture
def sources(tmp_path: Path) -> list[TinyModel]:
    return [tiny_folder(tmp_path / f"hf{seed}", seed=seed) for seed in range(2)]


class HeldStore:
    """A store in a folder in which no file of some versions can be written: a folder stands where it would be."""

    def __init__(self, folder: Path, source: TinyModel, numbers: Sequence[int]) -> None:
        self._folders = [
            folder / version_prefix(NAME, number) / name
            for number in numbers
            for name in files_of(source.arrays).file_sizes
        ]
        for each in self._folders:
            each.mkdir(parents=True)

    def release(self) -> None:
        """Let files be written."""
        for each in self._folders:
            with contextlib.suppress(FileNotFoundError):
                each.rmdir()


@contextmanager
def clients_of(addresses: Sequence[str], lane: str = "auto") -> Iterator[list[TrainerClient]]:
    """A client for each rank, at the service of its node."""
    with ExitStack() as stack:
        yield [
            stack.enter_context(TrainerClient(addresses[node_of(rank)], lane=lane, retry_seconds=5.0))
            for rank in range(RANKS)
        ]


@contextmanager
def store_away(running: RunningService) -> Iterator[None]:
    """While no call to the store gets through."""
    store = running.service.catalog.store
    names = ("put", "get", "list", "delete", "size", "read_range", "map", "open", "stream", "copy")
    before = {name: getattr(store, name) for name in names if hasattr(store, name)}

    def away(*_arguments: Any, **_options: Any) -> Any:
        raise Unavailable("the store is away")

    for name in before:
        setattr(store, name, away)
    try:
        yield
    finally:
        for name in before:
            delattr(store, name)


@pytest.mark.parametrize("layout_of", [pipeline_layout, rows_layout, columns_layout, copies_layout])
def test_a_version_is_pulled_from_its_owners_before_it_is_durable(
    tmp_path: Path, sources: list[TinyModel], layout_of: LayoutOf
) -> None:
    arrays = sources[1].arrays
    store = HeldStore(tmp_path / "store", sources[0], [1])
    with (
        nodes(tmp_path / "store", tmp_path, sources[0]) as running,
        clients_of([each.address for each in running]) as clients,
        ExitStack() as stack,
    ):
        number, _ = push_all(clients, arrays, layout_of, 1)
        engines = [stack.enter_context(EngineClient(each.address)) for each in running]
        for engine in engines:
            assert engine.wait_for(MODEL, number, VersionState.READY, timeout=20).state is VersionState.READY
            assert engine.refs(MODEL) == {"live": number}
        for engine in engines:
            for ref in (number, "live"):
                assert_equal(engine, MODEL, ref, arrays)
        read = [each.service.peer_files.bytes_read for each in running]
        assert all(read)
        sizes = [each.service.catalog.snapshots.get(NAME, number).image.sizes for each in running]  # type: ignore[union-attr]
        assert not sizes[0].keys() & sizes[1].keys()
        assert read == [sum(sizes[1].values()), sum(sizes[0].values())], "each block crosses once"
        assert engines[0].version(MODEL, number).state is VersionState.READY
        store.release()
        for engine in engines:
            engine.wait_for(MODEL, number, VersionState.DURABLE, timeout=60)
            assert_equal(engine, MODEL, number, arrays)


def test_restores_and_exports_read_a_ready_version_at_each_replica(tmp_path: Path, sources: list[TinyModel]) -> None:
    arrays = sources[1].arrays
    store = HeldStore(tmp_path / "store", sources[0], [1])
    with (
        nodes(tmp_path / "store", tmp_path, sources[0]) as running,
        clients_of([each.address for each in running]) as clients,
    ):
        number, _ = push_all(clients, arrays, rows_layout, 1)
        restored = []
        for each in running:
            with TrainerClient(each.address) as trainer:
                trainer.wait_for(MODEL, number, VersionState.READY, timeout=20)
                layout = trainer.describe_shards(MODEL)
                tensors = [torch.zeros(p.shard.box.extent) for p in layout.placements]
                for _ in trainer.restore_layout(MODEL, layout, tensors.__getitem__, version=number):
                    pass
                restored.append(torch.cat([tensor.flatten() for tensor in tensors]))
            exports = Exports(each.service)
            try:
                job = exports.start(MODEL, str(number))
                eventually(lambda: exports.get(job.id).state.ended)  # noqa: B023
                folder = Path(exports.get(job.id).folder)
            finally:
                exports.close()
            found = {}
            for path in folder.glob("*.safetensors"):
                with safe_open(path, "np") as file:
                    found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            assert {name: array.tobytes() for name, array in found.items()} == {
                name: array.tobytes() for name, array in arrays.items()
            }
            shutil.rmtree(folder)
        assert restored[0].equal(restored[1])
        assert restored[0].count_nonzero() > 0.9 * restored[0].numel()
        with TrainerClient(running[0].address) as trainer:
            assert trainer.version(MODEL, number).state is VersionState.READY
        store.release()


def test_a_version_becomes_ready_and_is_pulled_while_the_store_is_away(
    tmp_path: Path, sources: list[TinyModel]
) -> None:
    """From the declarations on nothing of a push needs the store until it is made durable."""
    with (
        nodes(tmp_path / "store", tmp_path, sources[0]) as running,
        clients_of([each.address for each in running]) as clients,
    ):
        first, _ = push_all(clients, sources[0].arrays, rows_layout, 1)  # layouts are known from now on
        clients[0].wait_for(MODEL, first, VersionState.DURABLE, timeout=30)
        store = HeldStore(tmp_path / "store", sources[0], [first + 1])
        number, _ = push_all(clients, sources[1].arrays, rows_layout, 2)
        for each in running:
            with EngineClient(each.address) as engine:
                engine.wait_for(MODEL, number, VersionState.READY, timeout=20)
        with store_away(running[0]), store_away(running[1]):
            for each in running:
                with EngineClient(each.address) as engine:
                    assert_equal(engine, MODEL, number, sources[1].arrays)
                    assert_equal(engine, MODEL, "live", sources[1].arrays)
        store.release()
        clients[0].wait_for(MODEL, number, VersionState.DURABLE, timeout=60)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[list[KillableService]]:
    """Two services as processes over one store, each with a socket for the ranks of its node."""
    services = []
    for number in range(2):
        service = KillableService(
            tmp_path / "store",
            file_bytes=FILE_BYTES,
            local_socket=str(tmp_path / f"lane{number}.sock"),
            scratch=tmp_path / f"scratch{number}",
        )
        service.settings["advertise"] = service.address
        services.append(service)
        service.start()
    yield services
    for service in services:
        service.kill()


@pytest.mark.parametrize("victim", [0, 1])
def test_an_owner_that_is_killed_before_the_version_is_durable_fails_it_by_name_and_the_step_is_pushed_again(
    tmp_path: Path, pair: list[KillableService], sources: list[TinyModel], victim: int
) -> None:
    arrays = sources[1].arrays
    dying, other = pair[victim], pair[1 - victim]
    with TrainerClient(other.address) as trainer:
        trainer.register_files(MODEL, sources[0].files)
    store = HeldStore(tmp_path / "store", sources[0], [1])
    with clients_of([each.address for each in pair]) as clients:
        number, reports = push_all(clients, arrays, pipeline_layout, 1)
        assert all(report.local_bytes == report.stream_bytes for report in reports)
    errors: list[WeighbridgeError] = []
    with EngineClient(other.address, retry_seconds=2.0) as engine:
        engine.wait_for(MODEL, number, VersionState.READY, timeout=20)
        assert_equal(engine, MODEL, number, arrays)

        def wait() -> None:
            try:
                engine.wait_for(MODEL, number, VersionState.DURABLE, timeout=20)
            except WeighbridgeError as error:
                errors.append(error)

        waiting = threading.Thread(target=wait)
        waiting.start()
        dying.kill()
        waiting.join(60)
        (error,) = errors
        assert isinstance(error, VersionFailed)
        assert dying.address in error.message
        with pytest.raises((VersionFailed, FailedPrecondition), match=dying.address):
            pulled(engine, MODEL, number)
        assert engine.refs(MODEL) == {}
    store.release()
    dying.start()
    with clients_of([each.address for each in pair]) as clients:
        again, _ = push_all(clients, arrays, pipeline_layout, 1)
        assert again > number
        for client in (clients[0], clients[-1]):
            client.wait_for(MODEL, again, VersionState.DURABLE, timeout=60)
    for each in pair:
        with EngineClient(each.address) as engine:
            assert_equal(engine, MODEL, again, arrays)


def test_an_owner_that_is_killed_while_bytes_arrive_fails_the_version_by_name_and_nobody_waits_for_it(
    pair: list[KillableService], sources: list[TinyModel]
) -> None:
    dying, other = pair
    with TrainerClient(other.address) as trainer:
        trainer.register_files(MODEL, sources[0].files)

        def declare(rank: int) -> int:
            with RawClient(pair[rank].address) as raw:
                number = raw.open(MODEL, ranks=2, request_id="r/1")
                raw.declare(MODEL, number, rows_layout(sources[1].arrays, rank, 2), rank=rank)
                return number

        with ThreadPoolExecutor(2) as pool:
            (number,) = set(pool.map(declare, range(2)))
        dying.kill()
        with pytest.raises(VersionFailed, match=dying.address):  # and not that it was not ready in time
            trainer.wait_for(MODEL, number, VersionState.READY, timeout=20)
