"""Is a push over several nodes as good as one on one node: shared memory for what stays on a node, gRPC for the
rest?
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.sdk.clients.test_resume import CuttingProxy
from tests.service.replicas.test_replicas import (
    FILE_BYTES,
    LayoutOf,
    columns_layout,
    copies_layout,
    files_of,
    pipeline_layout,
)
from tests.support.raw_clients import Arrays, TinyModel, assert_equal, rows_layout, tiny_folder
from tests.support.services import RunningService, running_service
from weighbridge import EngineClient, TrainerClient
from weighbridge._clients.push_handle import PushHandle, PushReport
from weighbridge._core.layouts import Layout
from weighbridge._core.resources import VersionState
from weighbridge._core.tensor_spaces import TensorSpace
from weighbridge._formats.push_sources import StagingPool, TensorSource
from weighbridge._formats.safetensors_files import lay_out_files
from weighbridge._memory.strided import WrittenCounts
from weighbridge._transport.addresses import Addresses
from weighbridge._transport.bulk import Connections
from weighbridge.errors import VersionFailed
from weighbridge_service.models import registered_model

MODEL = "acme/nodes"
RANKS = 8


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registered_model, "lay_out_files", functools.partial(lay_out_files, max_shard_bytes=FILE_BYTES))


@pytest.fixture
def sources(tmp_path: Path) -> list[TinyModel]:
    return [tiny_folder(tmp_path / f"hf{seed}", seed=seed) for seed in range(3)]


@contextmanager
def nodes(
    location: str | Path, folder: Path, source: TinyModel, count: int = 2, **settings: Any
) -> Iterator[list[RunningService]]:
    """Services that stand for one on each node, with a socket for its ranks, over one store."""
    with ExitStack() as stack:
        running = [
            stack.enter_context(
                running_service(
                    location,
                    **{
                        "advertise": "127.0.0.1:0",
                        "local_socket": str(folder / f"lane{number}.sock"),
                        "scratch": folder / f"scratch{number}",
                        **settings,
                    },
                )
            )
            for number in range(count)
        ]
        with TrainerClient(running[0].address) as trainer:
            trainer.register_files(MODEL, source.files)
        yield running


def push_all(
    clients: Sequence[TrainerClient], arrays: Arrays, layout_of: LayoutOf, step: int
) -> tuple[int, list[PushReport]]:
    """All ranks push; the version's number, and what each one's push cost.

    Tensors are overwritten when `push` has returned.
    """

    def push(rank: int) -> tuple[int, PushReport]:
        layout = layout_of(arrays, rank, len(clients))
        held = [
            torch.from_numpy(
                arrays[p.shard.tensor][
                    tuple(slice(o, o + e) for o, e in zip(p.shard.box.offset, p.shard.box.extent, strict=True))
                ].copy()
            )
            for p in layout.placements
        ]
        handle = clients[rank].push_shards(
            MODEL,
            layout,
            TensorSpace.HUGGING_FACE,
            TensorSource(StagingPool(), layout, held),
            step=step,
            rank=rank,
            world_size=len(clients),
        )
        for tensor in held:
            tensor.zero_()
        return handle.number, handle.report(60)

    with ThreadPoolExecutor(len(clients)) as pool:
        found = list(pool.map(push, range(len(clients))))
    (number,) = {number for number, _ in found}
    return number, [report for _, report in found]


def node_of(rank: int) -> int:
    """Neighbouring ranks are on one node, as launchers place them."""
    return rank * 2 // RANKS


@pytest.mark.parametrize("layout_of", [pipeline_layout, rows_layout, columns_layout, copies_layout])
def test_ranks_write_what_their_own_replica_owns_and_stream_the_rest(
    location: str, tmp_path: Path, sources: list[TinyModel], layout_of: LayoutOf
) -> None:
    with nodes(location, tmp_path, sources[0]) as running, ExitStack() as stack:
        clients = [
            stack.enter_context(TrainerClient(running[node_of(rank)].address, lane="auto")) for rank in range(RANKS)
        ]
        engines = [stack.enter_context(EngineClient(each.address, lane="grpc")) for each in running]
        before = [0, 0]
        for step, source in enumerate(sources):
            number, reports = push_all(clients, source.arrays, layout_of, step)
            for engine in engines:
                engine.wait_for(MODEL, number, VersionState.DURABLE, timeout=30)
                assert_equal(engine, MODEL, number, source.arrays)
            by_lane = [
                sum(report.local_bytes for rank, report in enumerate(reports) if node_of(rank) == node)
                for node in range(2)
            ]
            counted = [each.service.intake.bytes_in_locally for each in running]
            assert [after - b for after, b in zip(counted, before, strict=True)] == by_lane
            before = counted
            for report in reports:
                streamed = report.stream_bytes - report.local_bytes
                lanes = {
                    (False, False): "grpc",
                    (True, False): "local",
                    (True, True): "mixed",
                    (False, True): "grpc",
                }
                assert report.lane == lanes[report.local_bytes > 0, streamed > 0]
            pushed = sum(report.stream_bytes for report in reports)
            assert pushed == sum(array.nbytes for array in source.arrays.values())
            if layout_of in (pipeline_layout, copies_layout):
                assert sum(by_lane) == pushed, "each node's ranks hold what it owns"
            else:
                assert 0.4 * pushed < sum(by_lane) < 0.9 * pushed
    assert files_of(sources[0].arrays).files[1:], "there are several files to be owned"


class WatchedSource(TensorSource):
    """Shards of which those that belong to shared memory are copied when something has happened, or never."""

    def __init__(self, layout: Layout, tensors: Sequence[torch.Tensor], before: Callable[[], None]) -> None:
        super().__init__(StagingPool(), layout, tensors)
        self._before = before

    def write(self, *arguments: Any) -> WrittenCounts:
        self._before()
        return super().write(*arguments)


def push_watched(client: TrainerClient, arrays: Arrays, rank: int, before: Callable[[], None]) -> PushHandle:
    """One of two ranks that cut tensors by rows pushes."""
    layout = rows_layout(arrays, rank, 2)
    shards = [placement.shard for placement in layout.placements]
    boxes = [tuple(slice(o, o + e) for o, e in zip(s.box.offset, s.box.extent, strict=True)) for s in shards]
    tensors = [torch.from_numpy(arrays[s.tensor][b].copy()) for s, b in zip(shards, boxes, strict=True)]
    source = WatchedSource(layout, tensors, before)
    return client.push_shards(MODEL, layout, TensorSpace.HUGGING_FACE, source, step=1, rank=rank, world_size=2)


def test_a_rank_that_cannot_copy_the_rest_fails_the_version_and_gives_its_memory_back(
    tmp_path: Path, sources: list[TinyModel]
) -> None:
    arrays = sources[0].arrays

    def fail() -> None:
        raise RuntimeError("out of memory")

    with nodes(tmp_path / "store", tmp_path, sources[0]) as running, ExitStack() as stack:
        clients = [stack.enter_context(TrainerClient(each.address, lane="local")) for each in running]
        with ThreadPoolExecutor(2) as pool:
            other = pool.submit(push_watched, clients[1], arrays, 1, lambda: None)
            with pytest.raises(RuntimeError, match="out of memory"):
                push_watched(clients[0], arrays, 0, fail)
            with pytest.raises(VersionFailed, match=r"rank 0 gave up.*out of memory"):
                other.result(60).wait(VersionState.READY, timeout=30)
        number, _ = push_all(clients, arrays, rows_layout, 2)
        with EngineClient(running[1].address) as engine:
            engine.wait_for(MODEL, number, VersionState.DURABLE, timeout=30)
            assert_equal(engine, MODEL, number, arrays)


def test_a_stream_that_breaks_beside_a_grant_is_resumed_with_what_was_to_be_streamed(tmp_path: Path) -> None:
    source = tiny_folder(tmp_path / "hf", seed=7, hidden_size=4096)
    with nodes(tmp_path / "store", tmp_path, source) as running, ExitStack() as stack:
        proxies = [
            CuttingProxy(each.grpc.port, cuts=3, between=(1 << 17, 1 << 19), seed=seed)
            for seed, each in enumerate(running)
        ]
        clients = [stack.enter_context(TrainerClient(proxy.address, lane="auto")) for proxy in proxies]
        for client in clients:  # what goes to the other replica goes through its proxy, too
            for proxy, each in zip(proxies, running, strict=True):
                others = client._connection._streams_to
                others[each.service.intake.home.address] = Connections(Addresses([proxy.address]), 1)
        number, reports = push_all(clients, source.arrays, rows_layout, 1)
        assert [report.lane for report in reports] == ["mixed", "mixed"]
        assert sum(proxy.cuts for proxy in proxies) >= 2
        for proxy in proxies:
            proxy.close()
        for each in running:
            with EngineClient(each.address) as engine:
                engine.wait_for(MODEL, number, VersionState.DURABLE, timeout=30)
                assert_equal(engine, MODEL, number, source.arrays)
