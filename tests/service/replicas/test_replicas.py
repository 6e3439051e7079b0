"""Do trainer ranks that push one version to several replicas of the service get exactly one version out of it?"""

from __future__ import annotations

import contextlib
import functools
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.heads import stored
from tests.support.identities import Authority, identity, policy_file
from tests.support.raw_clients import (
    Arrays,
    RawClient,
    TinyModel,
    assert_equal,
    cut,
    pulled,
    rows_layout,
    stream_of,
    tiny_config_json,
    tiny_folder,
)
from tests.support.services import RunningService, running_service
from tests.support.waiting import eventually
from weighbridge import Credentials, EngineClient, TrainerClient, Unauthenticated
from weighbridge._core import dtypes
from weighbridge._core.boxes import Box
from weighbridge._core.layouts import Layout, Shard, TensorSpec
from weighbridge._core.resources import VersionState
from weighbridge._formats.safetensors_files import FilesLayout, lay_out_files
from weighbridge.errors import (
    AlreadyExists,
    Conflict,
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    ResourceExhausted,
    Unavailable,
    VersionFailed,
    WeighbridgeError,
)
from weighbridge_service.models import registered_model
from weighbridge_service.models.bridges import bridge_for
from weighbridge_service.models.model_tensors import ModelTensors
from weighbridge_storage.documents.names import ModelName
from weighbridge_storage.head.head import Head
from weighbridge_storage.stores.objects import ObjectStore

MODEL = "acme/spread"
NAME = ModelName.parse(MODEL)
FP32 = dtypes.parse("fp32")
FILE_BYTES = 20_000
"""So small that the tiny model has several files."""


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registered_model, "lay_out_files", functools.partial(lay_out_files, max_shard_bytes=FILE_BYTES))


@pytest.fixture
def sources(tmp_path: Path) -> list[TinyModel]:
    return [tiny_folder(tmp_path / f"hf{seed}", seed=seed) for seed in range(3)]


@contextmanager
def replicas(
    location: str | Path,
    count: int,
    sources: list[TinyModel],
    *,
    credentials: Credentials | None = None,
    **settings: Any,
) -> Iterator[list[RunningService]]:
    """Services over one store, with the model registered."""
    with ExitStack() as stack:
        running = [
            stack.enter_context(running_service(location, **{"advertise": "127.0.0.1:0", **settings}))
            for _ in range(count)
        ]
        with TrainerClient(running[0].address, credentials=credentials) as trainer:
            trainer.register_files(MODEL, sources[0].files)
        yield running


LayoutOf = Callable[[Arrays, int, int], Layout]


def pipeline_layout(arrays: Arrays, rank: int, ranks: int) -> Layout:
    """One of several ranks that have whole tensors, each those of a part of the files."""
    files = files_of(arrays)
    share = np.array_split([file.name for file in files.files], ranks)[rank]
    mine = [p.shard.tensor for p in files.layout.placements if p.buffer in share]
    return Layout.stream(
        (TensorSpec(n, FP32, arrays[n].shape) for n in mine),
        [Shard(n, Box.whole(arrays[n].shape)) for n in mine],
    )


def copies_layout(arrays: Arrays, rank: int, ranks: int) -> Layout:
    """One of several ranks that all hold everything."""
    return Layout.stream(
        (TensorSpec(n, FP32, a.shape) for n, a in arrays.items()),
        [Shard(n, Box.whole(a.shape), main=rank == 0) for n, a in arrays.items()],
    )


def columns_layout(arrays: Arrays, rank: int, ranks: int) -> Layout:
    """One of several ranks that cut each tensor along its last axis; what does not divide is a replica on each."""
    shards = []
    for name, array in arrays.items():
        width = array.shape[-1] // ranks
        if array.shape[-1] % ranks:
            shards.append(Shard(name, Box.whole(array.shape), main=rank == 0))
        else:
            front = array.shape[:-1]
            shards.append(Shard(name, Box((*(0 for _ in front), rank * width), (*front, width))))
    return Layout.stream((TensorSpec(n, FP32, a.shape) for n, a in arrays.items()), shards)


def files_of(arrays: Arrays) -> FilesLayout:
    """The layout of the model's files: tensors in the order of the config, not of the arrays."""
    bridge = bridge_for(tiny_config_json())
    names = ModelTensors(FP32).specs(bridge)
    return registered_model.lay_out_files([TensorSpec(name, FP32, arrays[name].shape) for name in names])


def push_rank(
    raw: RawClient,
    arrays: Arrays,
    layout_of: LayoutOf,
    rank: int,
    ranks: int,
    request_id: str,
    piece: int = 3000,
) -> int:
    """A rank's push; the version's number."""
    number = raw.open(MODEL, ranks=ranks, request_id=request_id)
    layout = layout_of(arrays, rank, ranks)
    stream = stream_of(arrays, layout, raw.declare(MODEL, number, layout, rank=rank))
    raw.push(MODEL, number, cut(stream, piece), rank=rank)
    raw.seal(MODEL, number, rank=rank)
    return number


def push_all(clients: Sequence[RawClient], arrays: Arrays, layout_of: LayoutOf, ranks: int, request_id: str) -> int:
    """All ranks push, each to the replica that its client is connected to; the version's number."""
    with ThreadPoolExecutor(ranks) as pool:
        pushes = [
            pool.submit(push_rank, clients[rank], arrays, layout_of, rank, ranks, request_id) for rank in range(ranks)
        ]
        (number,) = {push.result(60) for push in pushes}
        return number


def assert_published_once(store: ObjectStore, number: int, *others: int) -> None:
    """The store has these versions, and nothing of any other, open or failed."""
    found = stored(store, NAME)
    assert set(found.versions()) == {number, *others}
    assert not found.head.open
    folders = {key.split("/")[4] for key in store.list(f"{NAME.prefix}versions/")}
    assert folders == {f"{n:012}" for n in (number, *others)}
    assert not list(store.list(f"{NAME.prefix}incoming/"))


def test_layouts_of_a_deleted_model_go_with_a_collection_and_those_of_its_successor_stay(
    tmp_path: Path, sources: list[TinyModel]
) -> None:
    with replicas(tmp_path / "store", 2, sources) as running, ExitStack() as stack:
        clients = [stack.enter_context(RawClient(each.address)) for each in running]
        store = running[0].service.catalog.store

        def layouts() -> set[str]:
            return {key.removeprefix(f"{NAME.prefix}layouts/") for key in store.list(f"{NAME.prefix}layouts/")}

        with EngineClient(running[0].address) as engine, TrainerClient(running[0].address) as trainer:
            number = push_all(clients, sources[0].arrays, rows_layout, 2, "before")
            engine.wait_for(MODEL, number, VersionState.DURABLE)
            before = layouts()
            assert before
            engine.delete_model(MODEL)
            trainer.register_files(MODEL, sources[0].files)
            number = push_all(clients, sources[1].arrays, rows_layout, 2, "after")
            engine.wait_for(MODEL, number, VersionState.DURABLE)
            after = {f"{number}-{digest}" for digest in before}
            assert layouts() == before | after
            running[0].service.collecting.collect(MODEL)
            assert layouts() == after
            assert_equal(engine, MODEL, "latest", sources[1].arrays)


def test_a_version_keeps_its_files_at_a_replica_that_begins_after_others_were_registered(
    tmp_path: Path, sources: list[TinyModel]
) -> None:
    with replicas(tmp_path / "store", 2, sources) as running, ExitStack() as stack:
        clients = [stack.enter_context(RawClient(each.address)) for each in running]
        engines = [stack.enter_context(EngineClient(each.address)) for each in running]
        number = clients[0].open(MODEL, ranks=2, request_id="r")
        with TrainerClient(running[0].address) as trainer:
            trainer.register_files(MODEL, {**sources[0].files, "LICENSE": b"new"})
        assert push_all(clients, sources[1].arrays, rows_layout, 2, "r") == number
        for engine in engines:
            engine.wait_for(MODEL, number, VersionState.DURABLE, timeout=30)
            assert engine.model_files(MODEL, number) == sources[0].files
            assert_equal(engine, MODEL, number, sources[1].arrays)
        after = push_all(clients, sources[2].arrays, rows_layout, 2, "s")
        engines[1].wait_for(MODEL, after, VersionState.DURABLE, timeout=30)
        assert engines[1].model_files(MODEL, after)["LICENSE"] == b"new"


@pytest.mark.smoke
@pytest.mark.parametrize("layout_of", [rows_layout, columns_layout, pipeline_layout, copies_layout])
def test_ranks_spread_over_three_replicas_make_one_version(
    location: str, store: ObjectStore, sources: list[TinyModel], layout_of: LayoutOf
) -> None:
    ranks = 8
    with replicas(location, 3, sources) as running, ExitStack() as stack:
        clients = [stack.enter_context(RawClient(running[rank % 3].address)) for rank in range(ranks)]
        engines = [stack.enter_context(EngineClient(each.address)) for each in running]
        numbers: list[int] = []
        for step, source in enumerate(sources):  # from the second on, the layouts are known
            number = push_all(clients, source.arrays, layout_of, ranks, f"r/{step}")
            numbers.append(number)
            for engine in engines:
                assert engine.wait_for(MODEL, number, VersionState.DURABLE, timeout=30).step == 1
                assert_equal(engine, MODEL, number, source.arrays)
                assert engine.refs(MODEL) == {"latest": number, "live": number}
        assert_equal(engines[1], MODEL, numbers[0], sources[0].arrays)
        with TrainerClient(running[2].address) as trainer:
            assert all(not trainer.verify(MODEL, number).problems for number in numbers)
        eventually(lambda: not list(store.list(f"{NAME.prefix}incoming/")))
        assert_published_once(store, *numbers)


def test_replicas_that_ask_for_certificates_and_tokens_make_one_version_of_ranks_at_both(
    tmp_path: Path, sources: list[TinyModel]
) -> None:
    authority = Authority(tmp_path / "ca")
    policy = policy_file(tmp_path, identity("trainer", ["push", "pull"], token="trainers"))
    shown = authority.client("trainer.test", token="trainers")
    settings = {"tls": authority.tls(asks_clients=True), "policy": policy, "bulk_port": "auto"}
    with (
        replicas(tmp_path / "store", 2, sources, credentials=shown, **settings) as running,
        ExitStack() as stack,
    ):
        clients = [stack.enter_context(RawClient(running[rank % 2].address, shown)) for rank in range(4)]
        engines = [stack.enter_context(EngineClient(each.address, credentials=shown)) for each in running]
        number = push_all(clients, sources[1].arrays, columns_layout, 4, "r/1")
        for engine in engines:
            engine.wait_for(MODEL, number, VersionState.DURABLE, timeout=60)
            assert_equal(engine, MODEL, number, sources[1].arrays)
        with pytest.raises(Unauthenticated):
            RawClient(running[0].address, authority.client("stranger.test")).open(MODEL)


@pytest.mark.parametrize("layout_of", [pipeline_layout, copies_layout])
def test_nothing_crosses_between_replicas_where_each_can_fill_files_from_its_own_ranks(
    tmp_path: Path, sources: list[TinyModel], layout_of: LayoutOf
) -> None:
    with replicas(tmp_path / "store", 2, sources) as running, ExitStack() as stack:
        clients = [stack.enter_context(RawClient(each.address)) for each in running]
        push_all(clients, sources[1].arrays, layout_of, 2, "r/1")
        received = [each.service.intake.bytes_in for each in running]
        assert sum(received) == sum(array.nbytes for array in sources[1].arrays.values())
        assert all(received), "and each has its part"


def test_what_belongs_to_another_replicas_files_goes_there_straight_and_once(
    tmp_path: Path, sources: list[TinyModel]
) -> None:
    arrays = sources[1].arrays
    with replicas(tmp_path / "store", 2, sources) as running, ExitStack() as stack:
        clients = [stack.enter_context(RawClient(each.address)) for each in running]
        number = push_all(clients, arrays, rows_layout, 2, "r/1")
        received = sum(each.service.intake.bytes_in for each in running)
        assert received == sum(array.nbytes for array in arrays.values())
        homes = [each.service.intake.home.address for each in running]
        for rank, client in enumerate(clients):
            routes = {
                route.address: sum(each.end - each.start for each in route.ranges)
                for route in client.answers[number, rank].routes
            }
            assert routes.keys() == {"", homes[1 - rank]}, "half of each file is on the other side"
            assert all(routes.values())


def test_each_replica_holds_only_the_files_that_it_writes(tmp_path: Path, sources: list[TinyModel]) -> None:
    with replicas(tmp_path / "store", 2, sources) as running, ExitStack() as stack:
        clients = [stack.enter_context(RawClient(each.address)) for each in running]
        number = push_all(clients, sources[1].arrays, rows_layout, 2, "r/1")
        with TrainerClient(running[0].address) as trainer:
            trainer.wait_for(MODEL, number, VersionState.DURABLE, timeout=30)
        files: list[set[str]] = []
        for each in running:
            catalog = each.service.catalog
            eventually(lambda: (known := catalog.snapshots.get(NAME, number)) and known.image)  # noqa: B023
            known = catalog.snapshots.get(NAME, number)
            assert known is not None
            assert known.image is not None
            files.append(set(known.image.sizes))
        assert files[0]
        assert files[1]
        assert not files[0] & files[1]
        assert files[0] | files[1] == files_of(sources[1].arrays).file_sizes.keys()


def test_a_request_gets_one_number_whichever_replica_is_asked(tmp_path: Path, sources: list[TinyModel]) -> None:
    with replicas(tmp_path / "store", 3, sources) as running, ExitStack() as stack:
        clients = [stack.enter_context(RawClient(each.address)) for each in running]
        with ThreadPoolExecutor(12) as pool:
            opened = [pool.submit(clients[i % 3].open, MODEL, ranks=3, request_id=f"r/{i % 4}") for i in range(12)]
        numbers = [each.result() for each in opened]
        assert all(numbers[i] == numbers[i + 4] == numbers[i + 8] for i in range(4))
        assert sorted(numbers[:4]) == [1, 2, 3, 4]


def test_a_version_given_up_at_one_replica_ends_at_all(
    location: str, store: ObjectStore, sources: list[TinyModel]
) -> None:
    arrays = sources[1].arrays
    with replicas(location, 3, sources) as running, ExitStack() as stack:
        clients = [stack.enter_context(RawClient(each.address)) for each in running]
        trainer = stack.enter_context(TrainerClient(running[2].address))
        number = clients[0].open(MODEL, ranks=2, request_id="r/1")
        layouts = [rows_layout(arrays, rank, 2) for rank in range(2)]
        with ThreadPoolExecutor(2) as pool:
            declared = [pool.submit(clients[r].declare, MODEL, number, layouts[r], rank=r) for r in range(2)]
            streams = [stream_of(arrays, layouts[r], declared[r].result(30)) for r in range(2)]
        clients[0].push(MODEL, number, cut(streams[0]), rank=0)
        trainer.abort(MODEL, number, "changed my mind")  # this one receives nothing of it
        for rank in range(2):
            with (
                TrainerClient(running[rank].address) as each,
                pytest.raises(VersionFailed, match="changed my mind"),
            ):
                each.wait_for(MODEL, number, VersionState.READY, timeout=20)
        again = push_all(clients[:2], arrays, rows_layout, 2, "r/1")
        assert again > number
        trainer.wait_for(MODEL, again, VersionState.DURABLE, timeout=30)
        assert_equal(stack.enter_context(EngineClient(running[2].address)), MODEL, again, arrays)
        eventually(lambda: len({key.split("/")[4] for key in store.list(f"{NAME.prefix}versions/")}) == 1)
        eventually(lambda: not list(store.list(f"{NAME.prefix}incoming/")))
        assert_published_once(store, again)


def test_a_rank_that_holds_something_else_than_last_time_fails_the_version_and_the_next_push_works(
    tmp_path: Path, sources: list[TinyModel]
) -> None:
    arrays = sources[1].arrays
    with replicas(tmp_path / "store", 2, sources) as running, ExitStack() as stack:
        clients = [stack.enter_context(RawClient(each.address)) for each in running]
        push_all(clients, arrays, rows_layout, 2, "r/1")
        swapped = clients[::-1]  # each rank now pushes to the other replica
        number = 0
        for attempt in range(5):
            with contextlib.suppress(VersionFailed):
                number = push_all(swapped, sources[2].arrays, rows_layout, 2, f"r/2/{attempt}")
                break
        with EngineClient(running[0].address) as engine:
            engine.wait_for(MODEL, number, VersionState.DURABLE, timeout=30)
            assert_equal(engine, MODEL, number, sources[2].arrays)


def test_two_processes_that_both_have_all_ranks_do_not_write_one_version(
    tmp_path: Path, sources: list[TinyModel]
) -> None:
    """A trainer was started twice, on two nodes."""
    with replicas(tmp_path / "store", 2, sources) as running, ExitStack() as stack:
        clients = [stack.enter_context(RawClient(each.address)) for each in running]
        outcomes: list[Any] = [None, None]

        def push(which: int, request_id: str) -> None:
            try:
                outcomes[which] = push_rank(clients[which], sources[which].arrays, rows_layout, 0, 1, request_id)
            except WeighbridgeError as error:
                outcomes[which] = error

        for turn in range(4):
            threads = [threading.Thread(target=push, args=(which, f"r/{turn}")) for which in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
            durable = 0
            with TrainerClient(running[0].address) as trainer, EngineClient(running[0].address) as engine:
                for number in {outcome for outcome in outcomes if isinstance(outcome, int)}:
                    with contextlib.suppress(VersionFailed):
                        trainer.wait_for(MODEL, number, VersionState.DURABLE, timeout=20)
                        found = pulled(engine, MODEL, number)
                        assert any(
                            all(found[n] == a.tobytes() for n, a in source.arrays.items()) for source in sources[:2]
                        ), f"version {number} is a mixture"
                        assert not trainer.verify(MODEL, number).problems
                        durable += 1
            assert durable, f"neither of them got through: {outcomes}"


def test_a_file_is_uploaded_as_soon_as_its_bytes_are_there(
    location: str, store: ObjectStore, sources: list[TinyModel]
) -> None:
    arrays = sources[1].arrays
    with replicas(location, 1, sources) as running, RawClient(running[0].address) as raw:
        number = raw.open(MODEL)
        layout = pipeline_layout(arrays, 0, 1)
        stream = stream_of(arrays, layout, raw.declare(MODEL, number, layout))
        first = files_of(arrays).files[0]
        enough = first.nbytes - len(first.header)
        raw.push(MODEL, number, cut(stream[: enough - 1]))
        folder = f"{NAME.prefix}versions/{number:012}/"
        assert not list(store.list(folder))
        raw.push(MODEL, number, [(enough - 1, stream[enough - 1 : enough + 10])])
        digests = f"{folder}{first.name}.blake3"
        eventually(lambda: set(store.list(folder)) == {folder + first.name, digests})
        content = store.get(folder + first.name)[0]
        assert content[: len(first.header)] == first.header
        assert content[len(first.header) :] == stream[:enough]
        assert not stored(store, NAME).versions()
        raw.push(MODEL, number, cut(stream))
        raw.seal(MODEL, number)
        with TrainerClient(running[0].address) as trainer:
            trainer.wait_for(MODEL, number, VersionState.DURABLE, timeout=20)
            assert not trainer.verify(MODEL, number).problems


def test_files_that_are_as_in_the_version_before_are_copied_by_the_store(
    tmp_path: Path, sources: list[TinyModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    arrays = sources[1].arrays
    changed = dict(arrays)
    name = "model.norm.weight"
    changed[name] = arrays[name] + 1
    with replicas(tmp_path / "store", 1, sources) as running, RawClient(running[0].address) as raw:
        store = running[0].service.catalog.store
        with TrainerClient(running[0].address) as trainer, EngineClient(running[0].address) as engine:
            first = raw.push_whole(MODEL, arrays)
            trainer.wait_for(MODEL, first, VersionState.DURABLE, timeout=20)
            written: list[str] = []
            put = store.put
            monkeypatch.setattr(store, "put", lambda key, *a, **k: (written.append(key), put(key, *a, **k))[1])
            second = raw.push_whole(MODEL, changed)
            trainer.wait_for(MODEL, second, VersionState.DURABLE, timeout=20)
            monkeypatch.undo()
            manifest = json.loads(store.get(f"{NAME.prefix}versions/{second:012}/weighbridge.json")[0])
            uploaded = {key.rpartition("/")[2] for key in written if key.endswith(".safetensors")}
            assert uploaded == {manifest["parts"]["weights"]["tensors"][name]["file"]}
            assert manifest["lineage"] == {"parent": first}
            assert not trainer.verify(MODEL, second).problems
            assert_equal(engine, MODEL, second, changed)


def alone(location: str | Path, count: int, sources: list[TinyModel]) -> Any:
    """Services that know nothing of each other over one store, with the model registered."""
    return replicas(location, count, sources, advertise="")


def declared(raw: RawClient, arrays: Arrays, request_id: str) -> tuple[int, bytes]:
    """A version that one rank pushes whole: its number, and the rank's stream."""
    number = raw.open(MODEL, request_id=request_id)
    layout = rows_layout(arrays, 0, 1)
    return number, stream_of(arrays, layout, raw.declare(MODEL, number, layout))


def test_a_version_that_was_given_up_elsewhere_does_not_become_visible_where_it_is_received(
    location: str, sources: list[TinyModel]
) -> None:
    with alone(location, 2, sources) as running, RawClient(running[0].address) as raw:
        number, stream = declared(raw, sources[1].arrays, "r/1")
        raw.push(MODEL, number, cut(stream[:-10]))
        with TrainerClient(running[1].address) as other:
            eventually(lambda: head_of(running[1]).open[number].claim)
            other.abort(MODEL, number, "changed my mind")
            with contextlib.suppress(WeighbridgeError):
                raw.push(MODEL, number, [(len(stream) - 10, stream[-10:])])
            with pytest.raises(VersionFailed, match="changed my mind"):
                raw.seal(MODEL, number)
            assert other.refs(MODEL) == {}
        with EngineClient(running[0].address) as engine:
            assert engine.refs(MODEL) == {}
            with pytest.raises(VersionFailed):
                engine.pull(MODEL, number)


def head_of(running: RunningService) -> Head:
    return running.service.catalog.head(NAME)


def test_who_asks_the_wrong_replica_does_not_end_a_version(tmp_path: Path, sources: list[TinyModel]) -> None:
    arrays = sources[1].arrays
    with (
        alone(tmp_path / "store", 2, sources) as running,
        RawClient(running[0].address) as raw,
        RawClient(running[1].address) as stray,
    ):
        number, stream = declared(raw, arrays, "r/1")
        raw.push(MODEL, number, cut(stream[: len(stream) // 2]))
        eventually(lambda: head_of(running[0]).open[number].claim)
        for ask in (
            lambda: stray.received(MODEL, number),
            lambda: stray.seal(MODEL, number),
            lambda: stray.declare(MODEL, number, rows_layout(arrays, 0, 1)),
            lambda: stray.open(MODEL, request_id="r/1"),
        ):
            with pytest.raises(AlreadyExists, match=running[0].service.intake.home.address):
                ask()
        raw.push(MODEL, number, cut(stream))
        raw.seal(MODEL, number)
        with EngineClient(running[1].address) as engine:
            engine.wait_for(MODEL, number, VersionState.DURABLE, timeout=20)
            assert_equal(engine, MODEL, number, arrays)


def test_a_replica_that_only_opened_a_version_does_not_end_it(tmp_path: Path, sources: list[TinyModel]) -> None:
    """A connection moved on to another replica between the opening and the rest."""
    arrays = sources[1].arrays
    with (
        replicas(tmp_path / "store", 2, sources, advertise="", receive_timeout=5.0) as running,
        RawClient(running[0].address) as first,
        RawClient(running[1].address) as raw,
    ):
        number = first.open(MODEL, request_id="r/1")
        layout = rows_layout(arrays, 0, 1)
        stream = stream_of(arrays, layout, raw.declare(MODEL, number, layout))
        catalog = running[0].service.catalog
        assert catalog.snapshots.get(NAME, number) is not None
        for piece in cut(stream, len(stream) // 8):
            raw.push(MODEL, number, [piece])
            time.sleep(0.6)
        # it leaves the version to the other one
        eventually(lambda: catalog.snapshots.get(NAME, number) is None)
        raw.seal(MODEL, number)
        with EngineClient(running[0].address) as engine:
            engine.wait_for(MODEL, number, VersionState.DURABLE, timeout=20)
            assert_equal(engine, MODEL, number, arrays)


def all_have_heard_of(running: Sequence[RunningService], number: int, rank: int) -> bool:
    """Whether each of these replicas knows what the ranks up to this one have declared."""
    sessions = [each.service.registry.get(NAME, number) for each in running]
    return all(
        session is not None and min(session.state.declarations.absent, default=rank + 1) > rank for session in sessions
    )


def test_a_replica_that_writes_no_file_still_tells_the_others_what_its_ranks_declare(
    tmp_path: Path, sources: list[TinyModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies of a model of one file: one replica writes it, the other one's rank declares last and has nothing to
    push.
    """
    monkeypatch.setattr(registered_model, "lay_out_files", lay_out_files)
    arrays = sources[1].arrays
    with replicas(tmp_path / "store", 2, sources, receive_timeout=15.0) as running, ExitStack() as stack:
        clients = [stack.enter_context(RawClient(running[rank > 0].address)) for rank in range(3)]
        number = clients[0].open(MODEL, ranks=3, request_id="r/1")
        with ThreadPoolExecutor(3) as pool:
            ranks = []
            for rank in range(3):
                ranks.append(pool.submit(push_rank, clients[rank], arrays, copies_layout, rank, 3, "r/1"))
                if rank < 2:  # the last rank comes once the replicas know the others
                    eventually(lambda: all_have_heard_of(running[: rank + 1], number, rank))  # noqa: B023
            assert {each.result(30) for each in ranks} == {number}
        with EngineClient(running[1].address) as engine:
            engine.wait_for(MODEL, number, VersionState.DURABLE, timeout=20)
            assert_equal(engine, MODEL, number, arrays)


FAILURES = [Unavailable("away"), DeadlineExceeded("unknown"), ResourceExhausted("full"), Conflict("strange")]


@pytest.mark.parametrize("failure", FAILURES, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("landed", [False, True])
def test_a_store_that_fails_now_and_then_does_not_keep_replicas_from_agreeing(
    tmp_path: Path,
    sources: list[TinyModel],
    monkeypatch: pytest.MonkeyPatch,
    failure: WeighbridgeError,
    landed: bool,
) -> None:
    """Each kind of store call for messages between replicas fails the first time, whether it was carried out or not."""
    with replicas(tmp_path / "store", 2, sources) as running, ExitStack() as stack:
        failed: set[tuple[int, str, str]] = set()

        def spoil(which: int, name: str) -> None:
            store = running[which].service.catalog.store
            call = getattr(store, name)

            def spoilt(key: str, *arguments: Any, **options: Any) -> Any:
                kind = next((k for k in ("/declared-", "/written-", "/layouts/", "/incoming/") if k in key), None)
                if kind is None or (which, name, kind) in failed:
                    return call(key, *arguments, **options)
                failed.add((which, name, kind))
                if landed:
                    call(key, *arguments, **options)
                raise failure

            monkeypatch.setattr(store, name, spoilt)

        for which in range(2):
            for name in ("put", "get", "list", "delete"):
                spoil(which, name)
        clients = [stack.enter_context(RawClient(running[rank % 2].address)) for rank in range(4)]
        for step, source in enumerate(sources[:2]):
            number = push_all(clients, source.arrays, rows_layout, 4, f"r/{step}")
            for each in running:
                with EngineClient(each.address) as engine:
                    engine.wait_for(MODEL, number, VersionState.DURABLE, timeout=40)
                    assert_equal(engine, MODEL, number, source.arrays)
        assert {name for _, name, _ in failed} >= {"put", "get", "list"}


@pytest.mark.parametrize("location", ["local"], indirect=True)
def test_a_step_that_is_pushed_again_right_after_it_failed_gets_a_new_number(
    location: str, sources: list[TinyModel]
) -> None:
    arrays = sources[1].arrays
    with (
        replicas(location, 1, sources) as running,
        RawClient(running[0].address) as raw,
        TrainerClient(running[0].address) as trainer,
    ):
        numbers = []
        for _ in range(10):
            number, _ = declared(raw, arrays, "r/1")
            numbers.append(number)
            trainer.abort(MODEL, number)
        assert numbers == sorted(set(numbers))
        last = raw.push_whole(MODEL, arrays, request_id="r/1")
        assert last > numbers[-1]
        trainer.wait_for(MODEL, last, VersionState.DURABLE, timeout=20)


def test_a_deleted_version_gives_its_room_back_although_it_was_read(tmp_path: Path, sources: list[TinyModel]) -> None:
    with (
        replicas(tmp_path / "store", 1, sources, grace_seconds=1.0, collect_every=0.0) as running,
        RawClient(running[0].address) as raw,
        TrainerClient(running[0].address) as trainer,
    ):
        for source in sources:
            number = raw.push_whole(MODEL, source.arrays)
            trainer.wait_for(MODEL, number, VersionState.DURABLE, timeout=20)
        with EngineClient(running[0].address) as engine:
            assert_equal(engine, MODEL, 1, sources[0].arrays)
        trainer.delete_version(MODEL, 1)
        eventually(lambda: [found.number for found in trainer.collect(MODEL).deleted] == [1])
        folder = str(tmp_path / "store" / NAME.prefix / f"versions/{1:012}")
        assert folder not in Path("/proc/self/maps").read_text()


def push_straight(raw: RawClient, number: int, claim: str, rank: int, offset: int, data: bytes) -> None:
    """Push a part of a stream as a rank of another replica would."""
    raw.push_to(raw.address, claim, MODEL, number, [(offset, data)], rank=rank)


def test_a_stranger_who_pushes_under_a_claim_neither_ends_a_version_nor_gets_bytes_into_it(
    tmp_path: Path, sources: list[TinyModel]
) -> None:
    arrays = sources[1].arrays
    with replicas(tmp_path / "store", 2, sources) as running, ExitStack() as stack:
        clients = [stack.enter_context(RawClient(each.address)) for each in running]
        number = clients[0].open(MODEL, ranks=2, request_id="r/1")
        layouts = [rows_layout(arrays, rank, 2) for rank in range(2)]
        with ThreadPoolExecutor(2) as pool:
            answers = [pool.submit(clients[r].declare, MODEL, number, layouts[r], rank=r) for r in range(2)]
            streams = [stream_of(arrays, layouts[r], answers[r].result(30)) for r in range(2)]
        eventually(lambda: head_of(running[0]).open[number].claim)
        claim = head_of(running[0]).open[number].claim
        rubbish = b"\x7f" * 4096
        for which, said, rank, offset in (
            (0, "wrong", 0, 0),
            (0, "wrong", 1, 2**64 - 1),
            (0, claim, 0, 0),  # a rank that pushes to this replica itself
            (1, claim, 1, 0),
            (0, claim, 1, 2**63),
            (0, claim, 1, len(streams[1]) - 100),
        ):
            with pytest.raises((FailedPrecondition, InvalidArgument)):
                push_straight(clients[which], number, said, rank, offset, rubbish)
        with pytest.raises(InvalidArgument):
            push_straight(clients[0], number, claim, 2, 0, rubbish)
        with ThreadPoolExecutor(2) as pool:
            for done in [
                pool.submit(clients[rank].push, MODEL, number, cut(streams[rank]), rank=rank) for rank in range(2)
            ]:
                done.result(30)
            for done in [pool.submit(clients[rank].seal, MODEL, number, rank=rank) for rank in range(2)]:
                done.result(30)
        with EngineClient(running[0].address) as engine:
            engine.wait_for(MODEL, number, VersionState.DURABLE, timeout=20)
            assert_equal(engine, MODEL, number, arrays)


def test_a_stranger_who_pushes_under_a_claim_to_a_service_that_is_alone_is_refused(
    tmp_path: Path, sources: list[TinyModel]
) -> None:
    arrays = sources[1].arrays
    with alone(tmp_path / "store", 1, sources) as running, RawClient(running[0].address) as raw:
        number, stream = declared(raw, arrays, "r/1")
        eventually(lambda: head_of(running[0]).open[number].claim)
        for claim in ("wrong", head_of(running[0]).open[number].claim):
            with pytest.raises(FailedPrecondition):
                push_straight(raw, number, claim, 0, 0, b"\x7f" * 16)
        raw.push(MODEL, number, cut(stream))
        raw.seal(MODEL, number)
        with EngineClient(running[0].address) as engine:
            assert_equal(engine, MODEL, number, arrays)


@pytest.mark.parametrize(
    "content",
    [b"\xff\x00garbage", b'{"address":"a:1","boot":"b","ranks":[[-1,"c","d"]]}', b"{}", b"[" * 100_000],
)
def test_what_no_replica_has_declared_fails_the_version_at_once_and_says_where_it_lies(
    tmp_path: Path, sources: list[TinyModel], content: bytes
) -> None:
    with replicas(tmp_path / "store", 2, sources) as running, RawClient(running[0].address) as raw:
        number = raw.open(MODEL, ranks=2)
        key = f"{NAME.prefix}incoming/{number:012}/declared-000-000000"
        running[0].service.catalog.store.put(key, content, mode="create")
        with pytest.raises(VersionFailed, match="declared-000-000000"):
            raw.declare(MODEL, number, rows_layout(sources[1].arrays, 0, 2))


@pytest.mark.parametrize("name", ["written-zz", "written-000009", "written-", "written-1"])
def test_what_no_replica_has_handed_in_is_passed_over(tmp_path: Path, sources: list[TinyModel], name: str) -> None:
    with replicas(tmp_path / "store", 2, sources) as running, ExitStack() as stack:
        clients = [stack.enter_context(RawClient(each.address)) for each in running]
        running[0].service.catalog.store.put(f"{NAME.prefix}incoming/{1:012}/{name}", b'{"claim":"x"}', mode="create")
        number = push_all(clients, sources[1].arrays, rows_layout, 2, "r/1")
        with EngineClient(running[0].address) as engine:
            engine.wait_for(MODEL, number, VersionState.DURABLE, timeout=20)
            assert_equal(engine, MODEL, number, sources[1].arrays)
