"""Does the shared-memory lane keep the promises of the gRPC lane, whatever its clients do?

``WEIGHBRIDGE_LANE_RUNS=100`` makes as many random pushes and pulls in the test of memory.
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
import signal
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.lane_client import CLIENT_ID, connected, go_on, lane_process
from tests.support.raw_clients import Arrays, RawClient, TinyModel, rows_layout, stream_of, tiny_folder
from tests.support.raw_clients import cut as pieces_of
from tests.support.rounds import rounds
from tests.support.services import RunningService, lane_service, running_service
from tests.support.waiting import eventually
from weighbridge import Boxes, EngineClient, TensorParallel, TrainerClient
from weighbridge._clients.push_handle import PushHandle
from weighbridge._clients.pushing import Pusher
from weighbridge._core import dtypes
from weighbridge._core.boxes import Box
from weighbridge._core.layouts import Layout, Shard, TensorSpec
from weighbridge._core.resources import VersionState
from weighbridge._core.tensor_spaces import TensorSpace
from weighbridge._formats.push_sources import HeldShards, StagingPool, StreamSource, TensorSource
from weighbridge._lane import protocol
from weighbridge._lane.connection import LaneConnection
from weighbridge._lane.plans import placed_copies
from weighbridge.errors import (
    DataLoss,
    FailedPrecondition,
    InvalidArgument,
    LayoutError,
    NotFound,
    Unavailable,
    VersionFailed,
    WeighbridgeError,
)
from weighbridge.v1 import local_lane_pb2 as pb

MODEL = "acme/local"
HIDDEN_SIZE = 256
IMAGE_BYTES = 630_784
"""Of a version of `tiny_folder` with that size: its one file, in whole pages."""
RUNS = rounds("LANE_RUNS")


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> list[TinyModel]:
    root = tmp_path_factory.mktemp("sources")
    return [tiny_folder(root / str(seed), seed=seed, hidden_size=HIDDEN_SIZE) for seed in range(3)]


@pytest.fixture
def service(tmp_path: Path, sources: list[TinyModel], request: pytest.FixtureRequest) -> Iterator[RunningService]:
    """A service with a model and a lane; with the settings that a test names as its parameter."""
    with lane_service(tmp_path, MODEL, sources[0], **getattr(request, "param", {})) as running:
        yield running


@pytest.fixture
def trainer(service: RunningService) -> Iterator[TrainerClient]:
    with TrainerClient(service.address, lane="local") as client:
        yield client


@pytest.fixture
def engine(service: RunningService) -> Iterator[EngineClient]:
    with EngineClient(service.address, lane="local") as client:
        yield client


def columns_layout(arrays: Arrays, rank: int, ranks: int) -> Layout:
    """One of several ranks that cut each matrix along its last axis; vectors are replicas on each."""
    shards = []
    for name, array in arrays.items():
        width = array.shape[-1] // ranks
        if array.ndim == 1 or array.shape[-1] % ranks:
            shards.append(Shard(name, Box.whole(array.shape), main=rank == 0))
        else:
            shards.append(Shard(name, Box((0, rank * width), (array.shape[0], width))))
    return Layout.stream((TensorSpec(n, dtypes.parse("fp32"), a.shape) for n, a in arrays.items()), shards)


def cut(array: np.ndarray, box: Box) -> np.ndarray:
    return array[tuple(slice(o, o + e) for o, e in zip(box.offset, box.extent, strict=True))]


def apart(tensor: torch.Tensor) -> torch.Tensor:
    """The same elements in memory of its own, none next to another."""
    return torch.stack([torch.full_like(tensor, 9.0), tensor], dim=-1)[..., 1]


def part(tensor: torch.Tensor) -> torch.Tensor:
    """The same elements as a part of a larger tensor, as the halves of a joined matrix are."""
    return torch.stack([torch.full_like(tensor, 9.0), tensor])[1]


def push_ranks(
    clients: Sequence[TrainerClient], source: TinyModel, make: Callable[[Arrays, int, int], Layout], step: int
) -> list[PushHandle]:
    """Push as several ranks at one time; their tensors are overwritten as soon as `push` has returned."""
    handles: list[PushHandle] = []

    def push(rank: int) -> None:
        layout = make(source.arrays, rank, len(clients))
        tensors = [
            (part if number % 2 else apart)(torch.from_numpy(cut(source.arrays[p.shard.tensor], p.shard.box)))
            for number, p in enumerate(layout.placements)
        ]
        handles.append(
            clients[rank].push_shards(
                MODEL,
                layout,
                TensorSpace.HUGGING_FACE,
                TensorSource(StagingPool(), layout, tensors),
                step=step,
                rank=rank,
                world_size=len(clients),
            )
        )
        for tensor in tensors:
            tensor.zero_()

    threads = [threading.Thread(target=push, args=(rank,)) for rank in range(len(clients))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(handles) == len(clients)
    return handles


def assert_served(address: str, number: int, arrays: Arrays) -> None:
    """The version's bytes, as they come over gRPC."""
    with EngineClient(address, lane="grpc") as client:
        found = dict(client.pull(MODEL, number))
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        assert found[name].numpy().tobytes() == array.tobytes(), name


@pytest.mark.smoke
@pytest.mark.parametrize("make", [rows_layout, columns_layout])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_shards_that_ranks_write_themselves_end_where_those_by_grpc_do(
    service: RunningService,
    sources: list[TinyModel],
    ranks: int,
    make: Callable[[Arrays, int, int], Layout],
) -> None:
    clients = [TrainerClient(service.address, lane="local") for _ in range(ranks)]
    try:
        for step, source in enumerate(sources):
            handles = push_ranks(clients, source, make, step)
            for handle in handles:
                assert handle.report(20).lane == "local"
            number = handles[0].wait(timeout=20).number
            assert_served(service.address, number, source.arrays)
            assert clients[0].verify(MODEL, number).problems == ()
    finally:
        for client in clients:
            client.close()
    pushed = len(sources) * sum(array.nbytes for array in sources[0].arrays.values())
    for lane, nbytes in (("local", pushed), ("grpc", 0)):
        found = service.metrics.registry.get_sample_value("weighbridge_received_bytes_total", {"lane": lane})
        assert found == nbytes


@pytest.mark.smoke
def test_ranks_by_both_lanes_make_one_version(service: RunningService, sources: list[TinyModel]) -> None:
    lanes = ["local", "grpc", "local", "grpc"]
    clients = [TrainerClient(service.address, lane=lane) for lane in lanes]
    handles = push_ranks(clients, sources[1], columns_layout, step=3)
    assert sorted(handle.report(20).lane for handle in handles) == sorted(lanes)
    number = handles[0].wait(timeout=20).number
    assert_served(service.address, number, sources[1].arrays)
    for client in clients:
        client.close()


@pytest.mark.parametrize(
    "request_of",
    [
        None,
        TensorParallel(2, 1),
        TensorParallel(4, 0, vocab_multiple=96),
        TensorParallel(2, 0, layers=(1, 2)),
    ],
)
def test_slices_read_where_they_lie_are_those_that_come_by_grpc(
    service: RunningService,
    trainer: TrainerClient,
    engine: EngineClient,
    sources: list[TinyModel],
    request_of: TensorParallel | None,
) -> None:
    trainer.push_folder(MODEL, sources[2].folder).wait(timeout=20)
    pull = engine.pull(MODEL, "live", request_of)
    ours = list(pull)
    assert pull.lane == "local"
    into = [torch.full(tensor.shape, 7.0) for _, tensor in ours]
    filled = list(pull.filled(into.__getitem__))
    strided = [torch.full((2, *tensor.shape), 7.0).movedim(0, -1)[..., 1] for _, tensor in ours]
    list(pull.filled(strided.__getitem__))
    parts = [torch.full((3, *tensor.shape), 7.0) for _, tensor in ours]
    list(pull.filled([each[1] for each in parts].__getitem__))
    assert all((each[0] == 7.0).all() and (each[2] == 7.0).all() for each in parts)
    with EngineClient(service.address, lane="grpc") as client:
        theirs = list(client.pull(MODEL, "live", request_of))
    assert [name for name, _ in ours] == [name for name, _ in theirs] == [name for name, _ in filled]
    for (name, tensor), (_, other), third, fourth, fifth in zip(ours, theirs, into, strided, parts, strict=True):
        for found in (tensor, third, fourth, fifth[1]):
            assert torch.equal(found, other), name


def test_bytes_that_are_no_whole_elements_of_the_tensor_given_are_copied_all_the_same(
    trainer: TrainerClient, engine: EngineClient, sources: list[TinyModel]
) -> None:
    trainer.push_folder(MODEL, sources[0].folder).wait(timeout=20)
    name = "model.layers.0.self_attn.q_proj.weight"
    pull = engine.pull(MODEL, "live", Boxes([(name, (1, 3), (5, 7))]))
    wide = torch.zeros(5 * 7 * 4 // 2, dtype=torch.int16)
    list(pull.filled([wide].__getitem__))
    assert wide.numpy().tobytes() == sources[0].arrays[name][1:6, 3:10].tobytes()
    with pytest.raises(InvalidArgument, match=f"{name}.*140 bytes"):
        list(pull.filled([wide[:-1]].__getitem__))


@pytest.mark.parametrize("lane", ["local", "grpc"])
def test_a_tensor_of_another_float_is_refused_although_it_has_as_many_bytes(
    service: RunningService, trainer: TrainerClient, sources: list[TinyModel], lane: str
) -> None:
    trainer.push_folder(MODEL, sources[0].folder).wait(timeout=20)
    name = "model.norm.weight"
    with EngineClient(service.address, lane=lane) as client:
        pull = client.pull(MODEL, "live", Boxes([(name, (0,), (8,))]))
        for wrong in (torch.zeros(16, dtype=torch.bfloat16), torch.zeros(4, dtype=torch.float64)):
            with pytest.raises(LayoutError, match=f"{name}: a tensor of {wrong.dtype} .* a slice of torch.float32"):
                list(pull.filled([wrong].__getitem__))
            assert not wrong.any()


def test_whole_tensors_are_views_and_who_writes_to_one_changes_nobody_elses(
    service: RunningService, trainer: TrainerClient, engine: EngineClient, sources: list[TinyModel]
) -> None:
    trainer.push_folder(MODEL, sources[0].folder).wait(timeout=20)
    first, second = dict(engine.pull(MODEL, "live")), dict(engine.pull(MODEL, "live"))
    storages = {tensor.untyped_storage().data_ptr() for tensor in first.values()}
    # one mapping for all of them: none is a copy
    assert max(t.data_ptr() for t in first.values()) - min(storages) < IMAGE_BYTES
    for tensor in first.values():
        tensor.fill_(3.0)
    for name, array in sources[0].arrays.items():
        assert second[name].numpy().tobytes() == array.tobytes()
    assert_served(service.address, 1, sources[0].arrays)


def test_a_durable_version_without_an_image_is_read_from_the_files_of_the_store(
    service: RunningService, trainer: TrainerClient, engine: EngineClient, sources: list[TinyModel]
) -> None:
    for source in sources:
        trainer.push_folder(MODEL, source.folder).wait(timeout=20)
    pull = engine.pull(MODEL, 1)
    found = dict(pull)
    assert pull.lane == "local"
    trainer.delete_version(MODEL, 1)
    trainer.collect(MODEL)
    for name, array in sources[0].arrays.items():
        assert found[name].numpy().tobytes() == array.tobytes()


def test_tensors_outlive_the_client_that_they_came_by(
    service: RunningService, trainer: TrainerClient, sources: list[TinyModel]
) -> None:
    trainer.push_folder(MODEL, sources[0].folder).wait(timeout=20)
    with EngineClient(service.address, lane="local") as client:
        kept = dict(client.pull(MODEL, "live"))
    for source in (*sources[1:], *sources[1:]):
        trainer.push_folder(MODEL, source.folder).wait(timeout=20)
    for name, array in sources[0].arrays.items():
        assert kept[name].numpy().tobytes() == array.tobytes()
    trainer.close()
    eventually(lambda: service.service.images.usage().memory_in_use == 2 * IMAGE_BYTES)
    kept.clear()
    eventually(lambda: service.service.images.usage().memory_in_use == IMAGE_BYTES)


def test_memory_of_a_reader_that_has_left_without_a_word_is_not_used_before_it_lets_go(
    service: RunningService, trainer: TrainerClient, sources: list[TinyModel]
) -> None:
    trainer.push_folder(MODEL, sources[0].folder).wait(timeout=20)
    with lane_process(service.address, "hold", MODEL, "1") as reader:
        go_on(reader)  # it ends its connection, and keeps reading
        for source in (*sources[1:], *sources[1:]):
            trainer.push_folder(MODEL, source.folder).wait(timeout=20)
        assert go_on(reader) == "same"
    eventually(lambda: service.service.images.usage().memory_in_use <= 2 * IMAGE_BYTES)


def test_a_trainer_that_keeps_memory_mapped_does_not_keep_others_from_pushing_by_grpc(
    service: RunningService, trainer: TrainerClient, sources: list[TinyModel]
) -> None:
    for source in sources:
        trainer.push_folder(MODEL, source.folder).wait(timeout=20)
    with TrainerClient(service.address, lane="grpc", run="other") as other:
        handle = other.push_folder(MODEL, sources[0].folder)
        handle.wait(timeout=20)
        assert_served(service.address, handle.number, sources[0].arrays)


def test_a_process_that_is_forked_from_a_trainer_takes_no_part_in_its_pushes(
    service: RunningService, trainer: TrainerClient, sources: list[TinyModel]
) -> None:
    for source in sources:
        trainer.push_folder(MODEL, source.folder).wait(timeout=20)
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    try:
        assert trainer.push_folder(MODEL, sources[1].folder).wait(timeout=20).state is VersionState.DURABLE
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_plans_of_two_models_are_never_taken_for_each_other(
    service: RunningService, trainer: TrainerClient, sources: list[TinyModel]
) -> None:
    trainer.register_files("acme/twin", sources[0].files)
    plans = set()
    for model in (MODEL, "acme/twin"):
        handle = trainer.push_folder(model, sources[1].folder)
        handle.wait(timeout=20)
        plans.add(trainer._connection.lane._plans.known((model, 0))[0])
    assert len(plans) == 2


def test_nobody_may_write_to_a_version_of_which_all_bytes_have_come(
    service: RunningService, sources: list[TinyModel]
) -> None:
    layout = rows_layout(sources[0].arrays, 0, 1)
    with RawClient(service.address) as raw:
        number = raw.open(MODEL)
        assigned = raw.declare(MODEL, number, layout)
        raw.push(MODEL, number, pieces_of(stream_of(sources[0].arrays, layout, assigned)))
        connection = connected(service.address, raw.client_id)
        with pytest.raises(FailedPrecondition, match="have arrived"):
            connection.ask(pb.LaneRequest(begin_write=pb.BeginWrite(model=MODEL, number=number, rank=0)))
        connection.close()
        raw.seal(MODEL, number)
    assert_served(service.address, number, sources[0].arrays)


@pytest.mark.parametrize("lane", ["local", "grpc"])
def test_a_push_does_not_keep_the_shards_that_it_has_copied(
    service: RunningService, sources: list[TinyModel], lane: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = rows_layout(sources[0].arrays, 0, 1)
    shards = TensorSource(
        StagingPool(), layout, [torch.from_numpy(sources[0].arrays[each.shard.tensor]) for each in layout.placements]
    )
    freed = weakref.ref(shards)
    delivering, go_on_delivering = threading.Event(), threading.Event()
    deliver = Pusher._deliver

    def slowly(*arguments: Any) -> Any:
        delivering.set()
        assert go_on_delivering.wait(60)
        return deliver(*arguments)

    monkeypatch.setattr(Pusher, "_deliver", slowly)
    with TrainerClient(service.address, lane=lane) as trainer:
        handle = trainer.push_shards(MODEL, layout, TensorSpace.HUGGING_FACE, shards, step=9, rank=0, world_size=1)
        assert delivering.wait(60)
        del shards
        gc.collect()
        assert freed() is None
        go_on_delivering.set()
        assert_served(service.address, handle.wait(timeout=60).number, sources[0].arrays)


def test_shards_that_are_a_function_are_refused_before_a_version_is_opened(trainer: TrainerClient) -> None:
    before = len(list(trainer.versions(MODEL, include_invisible=True)))
    with pytest.raises(InvalidArgument, match="not HeldShards"):
        trainer.push_shards(MODEL, Layout({}, ()), TensorSpace.HUGGING_FACE, print, step=9, rank=0, world_size=1)  # type: ignore[arg-type]
    assert len(list(trainer.versions(MODEL, include_invisible=True))) == before


def test_a_source_that_fails_gives_its_loan_back_and_says_why(
    service: RunningService, trainer: TrainerClient, sources: list[TinyModel]
) -> None:
    class Broken(StreamSource, HeldShards):
        def select(self, indexes: Sequence[int], stream: Layout) -> Broken:
            return Broken(stream)

        def read(self, start: int, stop: int) -> bytes:
            raise DataLoss("the folder is damaged")

    layout = rows_layout(sources[0].arrays, 0, 1)
    with pytest.raises(DataLoss, match="the folder is damaged"):
        trainer.push_shards(
            MODEL, layout, TensorSpace.HUGGING_FACE, Broken(layout), step=1, rank=0, world_size=1
        )  # fmt: skip
    eventually(lambda: service.service.images.usage().memory_in_use == 0)


def test_an_image_is_not_used_again_while_a_tensor_of_it_is_there(
    service: RunningService, trainer: TrainerClient, engine: EngineClient, sources: list[TinyModel]
) -> None:
    trainer.push_folder(MODEL, sources[0].folder).wait(timeout=20)
    name = "model.norm.weight"
    kept = dict(engine.pull(MODEL, "live"))[name]
    for _ in range(3):
        for source in sources[1:]:
            trainer.push_folder(MODEL, source.folder).wait(timeout=20)
    assert kept.numpy().tobytes() == sources[0].arrays[name].tobytes()
    held = service.service.images.usage().memory_in_use
    assert held >= 2 * IMAGE_BYTES
    del kept
    gc.collect()
    # what is left is `live`, and the memory that the next version was promised
    eventually(lambda: service.service.images.usage().memory_in_use <= 2 * IMAGE_BYTES)


def test_a_reader_that_is_killed_releases_the_memory_that_it_was_granted(
    service: RunningService, trainer: TrainerClient, sources: list[TinyModel]
) -> None:
    trainer.push_folder(MODEL, sources[0].folder).wait(timeout=20)
    with lane_process(service.address, "read", MODEL, "1") as reader:
        for source in (*sources[1:], *sources):
            trainer.push_folder(MODEL, source.folder).wait(timeout=20)
        assert go_on(reader) == "same"
        trainer.close()  # the memory of its next version goes back
        eventually(lambda: service.service.images.usage().memory_in_use == 2 * IMAGE_BYTES)
    eventually(lambda: service.service.images.usage().memory_in_use == IMAGE_BYTES)


def test_a_writer_that_is_killed_leaves_nothing_and_its_step_can_be_pushed_again(
    service: RunningService, sources: list[TinyModel]
) -> None:
    layout = rows_layout(sources[0].arrays, 0, 1)
    raw = RawClient(service.address)
    raw.client_id = CLIENT_ID
    number = raw.open(MODEL, ranks=1, request_id="run/5")
    raw.declare(MODEL, number, layout)
    with lane_process(service.address, "write", MODEL, str(number)):
        # besides what is made ahead
        eventually(lambda: service.service.images.usage().memory_in_use == IMAGE_BYTES)
    with TrainerClient(service.address, lane="local") as trainer:
        eventually(lambda: service.lane.clients == 0)
        trainer.abort(MODEL, number)
        eventually(lambda: service.service.images.usage().memory_in_use == 0)
        handle = trainer.push_folder(MODEL, sources[0].folder, step=5, run="run", request_id="run/5")
        assert handle.wait(timeout=20).number > number
        assert_served(service.address, handle.number, sources[0].arrays)
    with pytest.raises(WeighbridgeError), EngineClient(service.address) as engine:
        engine.pull(MODEL, number)


@pytest.mark.parametrize("service", [{"unmap_wait": 0.3}], indirect=True, ids=[""])
def test_who_keeps_memory_open_for_writing_makes_his_version_fail_and_no_other(
    service: RunningService, trainer: TrainerClient, sources: list[TinyModel]
) -> None:
    trainer.push_folder(MODEL, sources[1].folder).wait(timeout=20)
    layout = rows_layout(sources[0].arrays, 0, 1)
    raw = RawClient(service.address)
    raw.client_id = CLIENT_ID
    number = raw.open(MODEL, ranks=1, request_id="run/6")
    raw.declare(MODEL, number, layout)
    with lane_process(service.address, "write", MODEL, str(number)) as writer:
        assert go_on(writer) == "ended"
        with pytest.raises(VersionFailed, match="can still write to its memory"):
            raw.seal(MODEL, number)
        with pytest.raises(VersionFailed, match="can still write to its memory"):
            trainer.wait_for(MODEL, number, VersionState.READY)
        # until then, no version gets the memory that can still be written to
        for step in range(4):
            handle = trainer.push_folder(MODEL, sources[step % 2].folder)
            handle.wait(timeout=20)
            if step == 1:
                assert go_on(writer) == "wrote"
            assert_served(service.address, handle.number, sources[step % 2].arrays)
            assert trainer.verify(MODEL, handle.number).problems == ()
        held = service.service.images.usage().memory_in_use
    eventually(lambda: service.service.images.usage().memory_in_use < held)
    assert number not in {version.number for version in trainer.versions(MODEL)}


def test_a_rank_that_says_too_early_that_it_is_done_cannot_be_sealed(
    service: RunningService, sources: list[TinyModel]
) -> None:
    layout = rows_layout(sources[0].arrays, 0, 1)
    raw = RawClient(service.address)
    number = raw.open(MODEL, ranks=1, request_id="run/7")
    raw.declare(MODEL, number, layout)
    connection = connected(service.address, raw.client_id)
    answer, descriptors = connection.ask(pb.LaneRequest(begin_write=pb.BeginWrite(model=MODEL, number=number, rank=0)))
    protocol.close_all(descriptors)
    connection.ask(pb.LaneRequest(end_write=pb.EndWrite(loan=answer.write.loan, complete=False)))
    with pytest.raises(FailedPrecondition, match="have not arrived"):
        raw.seal(MODEL, number, 0)
    with pytest.raises(InvalidArgument, match="no grant"):
        connection.ask(pb.LaneRequest(end_write=pb.EndWrite(loan=answer.write.loan, complete=True)))
    connection.close()


def test_memory_that_a_model_was_promised_goes_to_another_that_needs_it(
    tmp_path: Path, sources: list[TinyModel]
) -> None:
    socket_path = str(tmp_path / "lane.sock")
    with running_service(tmp_path / "store", local_socket=socket_path, memory_budget=3 * IMAGE_BYTES) as service:
        clients = [TrainerClient(service.address, lane="local") for _ in range(2)]
        for _ in range(3):
            for number, client in enumerate(clients):
                model = f"acme/m{number}"
                client.register_files(model, sources[0].files)
                handle = client.push_folder(model, sources[number].folder)
                assert handle.report(20).lane == "local"
                handle.wait(timeout=20)
        for client in clients:
            client.close()
        usage = service.service.images.usage()
        assert usage.disk_in_use == usage.disk_free == 0
        assert usage.memory_in_use + usage.memory_free <= 3 * IMAGE_BYTES


def test_an_image_that_does_not_fit_into_memory_is_read_as_a_file_and_written_by_grpc(
    tmp_path: Path, sources: list[TinyModel]
) -> None:
    with running_service(tmp_path / "store", local_socket=str(tmp_path / "s"), memory_budget=0) as service:
        with (
            TrainerClient(service.address, lane="auto") as trainer,
            EngineClient(service.address, lane="local") as engine,
        ):
            trainer.register_files(MODEL, sources[0].files)
            for source in sources:
                handle = trainer.push_folder(MODEL, source.folder)
                assert "a file on disk" in handle.report(20).lane_reason
                handle.wait("ready", timeout=20)
                found = dict(engine.pull(MODEL, "live"))
                for name, array in source.arrays.items():
                    assert found[name].numpy().tobytes() == array.tobytes()
                del found
        assert service.service.images.usage().memory_in_use == 0


def test_a_lease_that_is_held_for_ever_keeps_nobody_from_pushing_and_pulling(
    tmp_path: Path, sources: list[TinyModel]
) -> None:
    with (
        running_service(tmp_path / "store", local_socket=str(tmp_path / "s"), memory_budget=2 * IMAGE_BYTES) as service,
        TrainerClient(service.address, lane="auto") as trainer,
        EngineClient(service.address, lane="local") as engine,
    ):
        trainer.register_files(MODEL, sources[0].files)
        held = []
        for step in range(5):
            source = sources[step % 3]
            handle = trainer.push_folder(MODEL, source.folder)
            handle.wait(timeout=20)
            held.append((dict(engine.pull(MODEL, handle.number)), source))
            assert_served(service.address, handle.number, source.arrays)
        for tensors, source in held:
            for name, array in source.arrays.items():
                assert tensors[name].numpy().tobytes() == array.tobytes()


@pytest.mark.parametrize(
    ("settings", "variable", "reason"),
    [
        ({"local_socket": "off"}, None, "local-socket off"),
        ({}, "/nowhere/lane.sock", "No such file"),
    ],
)
def test_without_a_socket_bytes_go_by_grpc_and_the_reason_is_said(
    tmp_path: Path,
    sources: list[TinyModel],
    settings: dict[str, str],
    variable: str | None,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if variable:
        monkeypatch.setenv("WEIGHBRIDGE_LOCAL_SOCKET", variable)
    with running_service(tmp_path / "store", **{"local_socket": str(tmp_path / "s"), **settings}) as service:
        with (
            TrainerClient(service.address, lane="auto") as trainer,
            EngineClient(service.address, lane="auto") as engine,
        ):
            trainer.register_files(MODEL, sources[0].files)
            report = trainer.push_folder(MODEL, sources[0].folder).report(20)
            assert (report.lane, reason in report.lane_reason) == ("grpc", True), report
            pull = engine.pull(MODEL, "live")
            assert dict(pull).keys() == sources[0].arrays.keys()
            assert (pull.lane, reason in pull.lane_reason) == ("grpc", True)
        with (
            TrainerClient(service.address, lane="local") as trainer,
            pytest.raises(FailedPrecondition, match=reason),
        ):
            trainer.push_folder(MODEL, sources[0].folder)
        with TrainerClient(service.address, lane="grpc") as trainer:
            report = trainer.push_folder(MODEL, sources[0].folder).report(20)
            assert (report.lane, report.lane_reason) == ("grpc", "")


def test_an_unknown_lane_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="no lane 'fast'"):
        TrainerClient("127.0.0.1:1", lane="fast")


def test_the_socket_of_another_service_is_not_used(
    tmp_path: Path, service: RunningService, sources: list[TinyModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_service(tmp_path / "other", local_socket=str(tmp_path / "other.sock")) as other:
        monkeypatch.setenv("WEIGHBRIDGE_LOCAL_SOCKET", other.lane.path)
        with TrainerClient(service.address, lane="auto") as trainer:
            report = trainer.push_folder(MODEL, sources[0].folder).report(20)
            assert report.lane == "grpc"
            assert "belongs to another service" in report.lane_reason


def test_a_client_finds_the_socket_of_a_service_that_was_restarted(tmp_path: Path, sources: list[TinyModel]) -> None:
    from tests.support.killable_service import KillableService

    killable = KillableService(tmp_path / "store", local_socket=str(tmp_path / "lane.sock"))
    killable.start()
    try:
        with (
            TrainerClient(killable.address, lane="local") as trainer,
            EngineClient(killable.address, lane="local") as engine,
        ):
            trainer.register_files(MODEL, sources[0].files)
            trainer.push_folder(MODEL, sources[0].folder).wait(timeout=30)
            before = dict(engine.pull(MODEL, "latest"))
            killable.kill()
            killable.start()
            handle = trainer.push_folder(MODEL, sources[1].folder)
            assert handle.report(30).lane == "local"
            handle.wait(timeout=30)
            after = dict(engine.pull(MODEL, "latest"))
            for name, tensor in before.items():  # what was granted before stays what it was
                assert tensor.numpy().tobytes() == sources[0].arrays[name].tobytes()
                assert after[name].numpy().tobytes() == sources[1].arrays[name].tobytes()
    finally:
        killable.kill()


def test_only_the_process_that_declared_a_rank_may_write_for_it(
    service: RunningService, sources: list[TinyModel]
) -> None:
    raw = RawClient(service.address)
    number = raw.open(MODEL, ranks=1, request_id="run/8")
    raw.declare(MODEL, number, rows_layout(sources[0].arrays, 0, 1))
    begin = pb.BeginWrite(model=MODEL, number=number, rank=0)
    stranger = connected(service.address, "stranger")
    with pytest.raises(WeighbridgeError, match="another"):
        stranger.ask(pb.LaneRequest(begin_write=begin))
    for wrong in (
        pb.BeginWrite(model="acme/none", number=1),
        pb.BeginWrite(model=MODEL, number=999),
        pb.BeginWrite(model=MODEL, number=number, rank=7),
        pb.BeginWrite(model="../..", number=1),
    ):
        with pytest.raises(WeighbridgeError):
            stranger.ask(pb.LaneRequest(begin_write=wrong))
    with pytest.raises(NotFound):
        stranger.ask(pb.LaneRequest(begin_read=pb.BeginRead(model=MODEL, version="no-such-ref")))
    with pytest.raises(InvalidArgument, match="does not know"):
        stranger.ask(pb.LaneRequest())
    assert not stranger.ended
    stranger.close()


@pytest.mark.parametrize(
    "garbage",
    [b"\xff" * 64, b"\x05\x00\x00\x00abcde", b"\x00\x00\x00\x40" + b"x" * 100, b"\x10\x00", b""],
)
def test_garbage_on_the_socket_ends_that_connection_and_no_other(
    service: RunningService, trainer: TrainerClient, sources: list[TinyModel], garbage: bytes
) -> None:
    trainer.push_folder(MODEL, sources[0].folder).wait(timeout=20)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as hostile:
        hostile.settimeout(20)
        hostile.connect(service.lane.path)
        fd = os.memfd_create("theirs")
        socket.send_fds(hostile, [garbage or b"\x00"], [fd] * 100)
        os.close(fd)
        hostile.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionResetError):
            assert hostile.recv(1) == b""
    eventually(lambda: service.lane.clients == 1)
    assert trainer.push_folder(MODEL, sources[1].folder).report(20).lane == "local"


def test_descriptors_of_an_answer_that_is_no_message_are_closed(tmp_path: Path) -> None:
    path = tmp_path / "lane.sock"
    reading, writing = os.pipe()

    def serve(listening: socket.socket) -> None:
        with listening.accept()[0] as client:
            received = protocol.receive(client)
            assert received is not None
            hello = pb.LaneResponse(id=pb.LaneRequest.FromString(received[0]).id)
            hello.hello.service_id = "one"
            protocol.send(client, hello)
            socket.send_fds(client, [struct.pack("<I", 1)], [writing])
            os.close(writing)
            client.sendall(b"\xff")
            client.recv(1)

    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen()
        serving = threading.Thread(target=serve, args=(listening,))
        serving.start()
        connection = LaneConnection(str(path), True, "one", CLIENT_ID, "", lambda _: None, lambda _: None)
        serving.join(20)
        eventually(lambda: connection.ended)
    with os.fdopen(reading, "rb") as pipe:
        assert pipe.read() == b""  # which waits while any process has the other end


def test_a_plan_that_leads_beyond_the_memory_is_refused() -> None:
    spec = TensorSpec("w", dtypes.parse("fp32"), (4, 4))
    stream = Layout.stream([spec], [Shard("w", Box.whole((4, 4)))])

    def copy(**changed: object) -> pb.StridedCopy:
        good: dict[str, object] = {
            "extent": [4, 16], "shard_offset": 0, "shard_strides": [16, 1],
            "file": 0, "file_offset": 100, "file_strides": [32, 1],
        }  # fmt: skip
        return pb.StridedCopy(**{**good, **changed})  # type: ignore[arg-type]

    def place(copies: list[pb.StridedCopy], nbytes: int = 212, shards: int = 1) -> None:
        plan = pb.LanePlan(files=["a"], shards=[pb.ShardCopies(copies=copies)] * shards)
        placed_copies(plan, stream, {"a": (0, 0)}, [nbytes])

    place([copy()])
    for wrong in (
        copy(extent=[5, 16]),
        copy(extent=[0, 16]),
        copy(extent=[]),
        copy(shard_offset=1),
        copy(shard_strides=[17, 1]),
        copy(shard_strides=[16]),
        copy(file=1),
        copy(file_offset=101),
        copy(file_strides=[33, 1]),
        copy(file_strides=[1 << 63, 1]),
        copy(extent=[1, 16], shard_strides=[1 << 63, 1]),
        copy(shard_strides=[16, 0]),
        copy(file_strides=[32, 2], extent=[2, 16]),
        copy(extent=[1 << 40, 16], shard_strides=[0, 1], file_strides=[0, 1]),  # within its bounds, and without end
        copy(extent=[1] * 15 + [16], shard_strides=[1] * 16, file_strides=[1] * 16),
    ):
        with pytest.raises(DataLoss):
            place([wrong])
    with pytest.raises(DataLoss):
        place([copy()], nbytes=211)
    with pytest.raises(DataLoss):
        place([copy()], shards=2)


def test_a_service_that_stops_ends_all_loans_and_tensors_stay_what_they_were(
    tmp_path: Path, sources: list[TinyModel]
) -> None:
    with running_service(tmp_path / "store", local_socket=str(tmp_path / "s")) as service:
        trainer = TrainerClient(service.address, lane="local", retry_seconds=0)
        engine = EngineClient(service.address, lane="local", retry_seconds=0)
        trainer.register_files(MODEL, sources[0].files)
        trainer.push_folder(MODEL, sources[0].folder).wait(timeout=20)
        tensors = dict(engine.pull(MODEL, "live"))
    assert not (tmp_path / "s").exists()
    for name, array in sources[0].arrays.items():
        assert tensors[name].numpy().tobytes() == array.tobytes()
    with pytest.raises(Unavailable):
        trainer.push_folder(MODEL, sources[0].folder)
    trainer.close()
    engine.close()


def test_memory_stays_at_two_images_under_pushes_and_pulls_at_random(
    service: RunningService, trainer: TrainerClient, engine: EngineClient, sources: list[TinyModel]
) -> None:
    dice = random.Random(5)
    for step in range(RUNS):
        source = dice.choice(sources)
        handle = trainer.push_folder(MODEL, source.folder, step=step)
        handle.wait(dice.choice(["ready", "durable"]), timeout=20)
        for _ in range(dice.randrange(3)):
            wanted = dice.choice([None, TensorParallel(2, 1)])
            for name, tensor in engine.pull(MODEL, handle.number, wanted):
                if wanted is None:
                    assert tensor.numpy().tobytes() == source.arrays[name].tobytes()
            del tensor
        handle.wait(timeout=20)
        eventually(lambda: service.service.images.usage().memory_in_use <= 2 * IMAGE_BYTES)
    usage = service.service.images.usage()
    assert usage.memory_in_use + usage.memory_free <= 2 * IMAGE_BYTES
    assert usage.disk_in_use == usage.disk_free == 0
