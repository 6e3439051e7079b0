"""Does one stream report the moves of several refs of several models, and free everything at its end?"""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from pathlib import Path

import grpc
import pytest

from tests.support.catalogs import OTHER, SMOL, CountingStore, catalog_with_models, publish_one
from tests.support.raw_clients import TinyModel, tiny_folder
from tests.support.services import RunningService, running_service
from tests.support.waiting import eventually
from weighbridge import TrainerClient
from weighbridge._clients.client import Client
from weighbridge._transport import rpc
from weighbridge.aio import AsyncEngineClient
from weighbridge.errors import InvalidArgument, NotFound, WeighbridgeError
from weighbridge.v1 import model_service_pb2 as pb
from weighbridge.v1 import model_service_pb2_grpc
from weighbridge_service.admission.quotas import HostQuota
from weighbridge_service.api.grpc import watches as module
from weighbridge_service.api.grpc.event_loop import EventLoop
from weighbridge_service.api.grpc.watches import Watches, merged
from weighbridge_storage.documents.names import ModelName
from weighbridge_storage.threads import ThreadPool

ONE, TWO, LATER = "tests/one", "tests/two", "tests/three"


# --- several sources in one


class Source:
    """A stream that yields the queued items and records whether it was closed."""

    def __init__(self) -> None:
        self.queue = asyncio.Queue[int | Exception | None]()
        self.closed = False

    async def items(self) -> AsyncGenerator[int, None]:
        try:
            while (item := await self.queue.get()) is not None:
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            await asyncio.sleep(0)  # as what has to be awaited at the end
            self.closed = True


@pytest.mark.parametrize("count", [1, 2, 5])
def test_every_source_is_heard_with_its_index(count: int) -> None:
    async def go() -> None:
        before = asyncio.all_tasks()
        sources = [Source() for _ in range(count)]
        found = list[tuple[int, int]]()
        for i, source in enumerate(sources):
            for number in range(3):
                source.queue.put_nowait(10 * i + number)
        async with aclosing(merged([source.items() for source in sources])) as both:
            async for index, item in both:
                found.append((index, item))
                if len(found) == 3 * count:
                    break
        for i in range(count):
            assert [item for index, item in found if index == i] == [10 * i, 10 * i + 1, 10 * i + 2]
        assert all(source.closed for source in sources)
        assert asyncio.all_tasks() == before

    asyncio.run(asyncio.wait_for(go(), 30))


@pytest.mark.parametrize("count", [1, 3])
def test_the_error_of_one_source_ends_all(count: int) -> None:
    async def go() -> None:
        before = asyncio.all_tasks()
        sources = [Source() for _ in range(count)]
        sources[0].queue.put_nowait(1)
        sources[0].queue.put_nowait(NotFound("gone"))
        found = list[tuple[int, int]]()

        async def read() -> None:
            async for each in merged([source.items() for source in sources]):
                found.append(each)

        with pytest.raises(NotFound, match="gone"):
            await read()
        assert found == [(0, 1)]
        assert all(source.closed for source in sources)
        assert asyncio.all_tasks() == before

    asyncio.run(asyncio.wait_for(go(), 30))


@pytest.mark.parametrize("count", [1, 3])
def test_the_end_of_one_source_ends_all(count: int) -> None:
    async def go() -> None:
        sources = [Source() for _ in range(count)]
        sources[-1].queue.put_nowait(7)
        sources[-1].queue.put_nowait(None)
        found = [each async for each in merged([source.items() for source in sources])]
        assert found == [(count - 1, 7)]
        assert all(source.closed for source in sources)

    asyncio.run(asyncio.wait_for(go(), 30))


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("reading", [True, False])
def test_a_reader_that_is_cancelled_leaves_nothing(count: int, reading: bool) -> None:
    async def go() -> None:
        before = asyncio.all_tasks()
        sources = [Source() for _ in range(count)]
        got = asyncio.Event()

        async def read() -> None:
            async with aclosing(merged([source.items() for source in sources])) as both:
                async for _ in both:
                    got.set()
                    if not reading:
                        await asyncio.sleep(60)

        task = asyncio.create_task(read())
        for source in sources:
            for number in range(4):
                source.queue.put_nowait(number)
        await got.wait()
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert all(source.closed for source in sources)
        assert asyncio.all_tasks() == before

    asyncio.run(asyncio.wait_for(go(), 30))


# --- what a look meets with


def test_nobody_waits_for_a_look_that_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = CountingStore(tmp_path)
    catalog = catalog_with_models(store)
    loop, workers = EventLoop("watches"), ThreadPool("watches", 2)
    watches = Watches(catalog, workers)
    found = list[int]()

    async def follow(model: ModelName) -> None:
        async for version in watches.follow(str(model), "latest", 0):
            if version is not None:
                found.append(version.number)

    try:
        publish_one(catalog)
        following = loop.begin(follow(SMOL))
        other = loop.begin(follow(OTHER))
        eventually(lambda: found == [1])

        def broken(*_: object) -> None:
            raise RuntimeError("this was not thought of")

        with monkeypatch.context() as patched:
            patched.setattr(module, "look", broken)
            for each in (following, other):
                with pytest.raises(WeighbridgeError, match="RuntimeError"):
                    each.result(30)
        again = loop.begin(follow(SMOL))
        eventually(lambda: found == [1, 1])
        assert not again.done()
    finally:
        catalog.stopping.set()
        loop.stop()
        workers.close()
        store.close()


# --- end to end


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return tiny_folder(tmp_path_factory.mktemp("watched") / "hf")


@pytest.fixture
def service(tmp_path: Path, model: TinyModel) -> Iterator[RunningService]:
    with running_service(tmp_path) as running:
        with TrainerClient(running.address, lane="grpc") as trainer:
            for name in (ONE, TWO):
                trainer.register_files(name, model.files)
        push(running, model, ONE)
        push(running, model, ONE)
        push(running, model, TWO)
        yield running


def push(service: RunningService, model: TinyModel, name: str) -> None:
    with TrainerClient(service.address, lane="grpc") as trainer:
        trainer.push_folder(name, model.folder, step=1).wait(timeout=60)


REFS = [(ONE, "prod"), (TWO, "prod"), (TWO, "latest"), (ONE, "none-yet")]
Heard = tuple[str, str, int]


def moves(service: RunningService, model: TinyModel, heard: list[Heard]) -> None:
    """Moves refs, each as soon as the previous move was received."""
    with Client(service.address) as client:
        client.set_ref(ONE, "prod", 1)
        eventually(lambda: heard[-1:] == [("prod", ONE, 1)])
        client.set_ref(TWO, "prod", 1)
        eventually(lambda: heard[-1:] == [("prod", TWO, 1)])
        client.set_ref(ONE, "prod", 2)
        eventually(lambda: heard[-1:] == [("prod", ONE, 2)])
        push(service, model, TWO)
        eventually(lambda: heard[-1:] == [("latest", TWO, 2)])
        client.set_ref(ONE, "none-yet", 1)
        eventually(lambda: heard[-1:] == [("none-yet", ONE, 1)])


ALL = [
    ("latest", TWO, 1),
    ("prod", ONE, 1),
    ("prod", TWO, 1),
    ("prod", ONE, 2),
    ("latest", TWO, 2),
    ("none-yet", ONE, 1),
]


def test_one_stream_brings_the_moves_of_refs_of_several_models(service: RunningService, model: TinyModel) -> None:
    heard = list[Heard]()

    def listen() -> None:
        with Client(service.address) as client:
            for ref, version in client.watch_refs(REFS):
                heard.append((ref, version.model, version.number))
                if len(heard) == len(ALL):
                    return

    listener = threading.Thread(target=listen)
    listener.start()
    eventually(lambda: heard)
    moves(service, model, heard)
    listener.join(30)
    assert not listener.is_alive()
    assert heard == ALL


def test_so_it_does_on_an_event_loop(service: RunningService, model: TinyModel) -> None:
    heard = list[Heard]()

    async def listen() -> None:
        async with (
            AsyncEngineClient(service.address, lane="grpc") as client,
            aclosing(client.watch_refs(REFS)) as found,
        ):
            async for ref, version in found:
                heard.append((ref, version.model, version.number))
                if len(heard) == len(ALL):
                    return

    async def go() -> None:
        listening = asyncio.create_task(listen())
        await asyncio.to_thread(eventually, lambda: heard)
        await asyncio.to_thread(moves, service, model, heard)
        await listening

    asyncio.run(asyncio.wait_for(go(), 60))
    assert heard == ALL


@pytest.mark.parametrize("on_loop", [False, True])
def test_a_model_that_is_registered_later_is_waited_for_beside_others(
    service: RunningService, model: TinyModel, on_loop: bool
) -> None:
    refs = [(ONE, "latest"), (LATER, "latest")]
    heard = list[tuple[str, int]]()

    async def listen_on_loop() -> None:
        async with (
            AsyncEngineClient(service.address, lane="grpc") as client,
            aclosing(client.watch_refs(refs)) as found,
        ):
            async for _, version in found:
                heard.append((version.model, version.number))

    def listen() -> None:
        with Client(service.address) as client:
            for _, version in client.watch_refs(refs):
                heard.append((version.model, version.number))

    def ended() -> None:
        with pytest.raises(NotFound, match=LATER):
            asyncio.run(listen_on_loop()) if on_loop else listen()
        heard.append(("ended", 0))

    listener = threading.Thread(target=ended, daemon=True)
    listener.start()
    eventually(lambda: heard == [(ONE, 2)])
    with TrainerClient(service.address, lane="grpc") as trainer:
        trainer.register_files(LATER, model.files)
        push(service, model, LATER)
        eventually(lambda: heard == [(ONE, 2), (LATER, 1)])
        trainer.delete_model(LATER)
    listener.join(30)
    assert heard[2:] == [("ended", 0)]


def test_a_stream_without_refs_or_with_a_name_of_no_model_is_refused(service: RunningService) -> None:
    for refs in ([], [(ONE, "prod"), ("no-slash", "live")]):
        with Client(service.address) as client, pytest.raises(InvalidArgument):
            list(client.watch_refs(refs))


def watch_quotas() -> list[HostQuota]:
    """Of each service of this process, the places of watches."""
    return [each for each in gc.get_objects() if type(each) is HostQuota and each._what == "watches"]


@pytest.mark.parametrize("how", ["cancelled", "closed", "in time"])
def test_watches_that_end_anyhow_give_their_places_back(service: RunningService, how: str) -> None:
    refs = [pb.WatchedRef(model=name, ref="latest") for name in (ONE, TWO)] * 8
    taken = [(each, each.held) for each in watch_quotas()]
    for i in range(30):
        with rpc.open_channel(service.address, shared=False) as channel:
            stub = model_service_pb2_grpc.ModelServiceStub(channel)
            call = stub.WatchRefs(
                pb.WatchRefsRequest(refs=refs), timeout=0.005 * (i % 10) if how == "in time" else None
            )
            time.sleep(0.002 * (i % 5))
            if how == "cancelled":
                call.cancel()
            elif how == "in time":
                with pytest.raises(grpc.RpcError):
                    list(call)
    eventually(lambda: all(quota.held <= before for quota, before in taken))
    begun = time.monotonic()
    with Client(service.address) as client:
        assert next(client.watch(ONE, "latest")).number == 2
    assert time.monotonic() - begun < 30
