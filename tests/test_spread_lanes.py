"""Is a push over several nodes as good as one on one node: shared memory for what stays on a node, gRPC for the rest?"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.raw_clients import Arrays, TinyModel, assert_equal, rows_layout, tiny_folder
from tests.services import RunningService, running_service
from tests.test_replicas import FILE_BYTES, LayoutOf, columns_layout, copies_layout, files_of, pipeline_layout
from tests.test_resume import CuttingProxy
from weighbridge import EngineClient, TrainerClient, wire
from weighbridge.bulk import Connections
from weighbridge.layouts import Layout
from weighbridge.push_handle import PushReport
from weighbridge.push_sources import ShardSource, StagingPool, TensorSource
from weighbridge.resources import VersionState
from weighbridge.safetensors_files import lay_out_files
from weighbridge_service import models

MODEL = "acme/nodes"
RANKS = 8


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "lay_out_files", functools.partial(lay_out_files, max_shard_bytes=FILE_BYTES))


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
    """All ranks push; the version's number, and what each one's push cost. Tensors are overwritten when `push` has returned."""

    def push(rank: int) -> tuple[int, PushReport]:
        layout = layout_of(arrays, rank, len(clients))
        held = [
            torch.from_numpy(
                arrays[p.shard.tensor][
                    tuple(
                        slice(o, o + e) for o, e in zip(p.shard.box.offset, p.shard.box.extent, strict=True)
                    )
                ].copy()
            )
            for p in layout.placements
        ]

        def open_source(indexes: Sequence[int], stream: Layout) -> ShardSource:
            return TensorSource(StagingPool(), stream, [held[i] for i in indexes])

        handle = clients[rank].push_shards(
            MODEL, layout, wire.HUGGING_FACE, open_source, step=step, rank=rank, world_size=len(clients)
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
            stack.enter_context(TrainerClient(running[node_of(rank)].address, lane="auto"))
            for rank in range(RANKS)
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
                others = client._transport.replicas
                others[each.service.intake.home.address] = Connections(proxy.address, 1)
        number, reports = push_all(clients, source.arrays, rows_layout, 1)
        assert [report.lane for report in reports] == ["mixed", "mixed"]
        assert sum(proxy.cuts for proxy in proxies) >= 2
        for proxy in proxies:
            proxy.close()
        for each in running:
            with EngineClient(each.address) as engine:
                engine.wait_for(MODEL, number, VersionState.DURABLE, timeout=30)
                assert_equal(engine, MODEL, number, source.arrays)
