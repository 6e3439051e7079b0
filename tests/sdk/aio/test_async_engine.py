"""Does the asyncio client bring what the blocking one brings, end when it is cancelled, and leave its event loop
free?
"""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tests.support.gate import Gate
from tests.support.killable_service import KillableService
from tests.support.new_threads import NewThreads
from tests.support.ports import reserved_port
from tests.support.raw_clients import TinyModel, tiny_folder
from tests.support.services import RunningService, running_service
from tests.support.waiting import eventually
from weighbridge import (
    AsyncEngineClient,
    Boxes,
    EngineClient,
    FullTensors,
    TensorParallel,
    TrainerClient,
    VersionState,
)
from weighbridge._core import striping
from weighbridge._core.slices import LayoutRequest
from weighbridge.aio import AsyncPull
from weighbridge.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    Unavailable,
)

T = TypeVar("T")
MODEL = "tests/asyncio"
WATCHES = 200
HELD_AFTER = 6 << 20
"""Bytes of an answer after which a gate is closed: in the middle of a pull, whose stream has a window of 4 MiB."""


def run(main: Coroutine[Any, Any, T]) -> T:
    """The result of a program, which must end within a minute."""
    return asyncio.run(asyncio.wait_for(main, 60))


async def soon(condition: Callable[[], object]) -> None:
    """Wait until something holds that must come to hold, with the loop free."""
    await asyncio.to_thread(eventually, condition)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """A model of 20 MB: some twenty stripes."""
    return tiny_folder(tmp_path_factory.mktemp("asyncio") / "hf", hidden_size=8192)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, model: TinyModel) -> Iterator[RunningService]:
    folder = tmp_path_factory.mktemp("store")
    with running_service(folder, local_socket=str(folder / "lane.sock"), most_streams=4 * (WATCHES + 8)) as running:
        with TrainerClient(running.address) as trainer:
            trainer.register_model(MODEL, model.folder)
            trainer.push_folder(MODEL, model.folder).wait(timeout=60)
        yield running


@pytest.fixture(autouse=True)
def striped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams of any length are spread over as many connections as there may be."""
    monkeypatch.setattr(striping, "_LEAST_BYTES", 1)


def nothing_held(service: RunningService, since: NewThreads) -> bool:
    """Whether no stream is open, no message of one in memory, and no thread of a pull at work that has begun since."""
    return not since.named("receive") and not any(service.service.byte_budget.in_flight.nbytes.values())


def assert_same(found: dict[str, torch.Tensor], model: TinyModel) -> None:
    assert found.keys() == model.arrays.keys()
    assert [n for n, array in model.arrays.items() if not np.array_equal(found[n].numpy(), array)] == []


BOXES = Boxes(
    [
        ("model.layers.0.mlp.down_proj.weight", (5, 3), (1000, 40)),
        ("model.layers.0.mlp.down_proj.weight", (0, 0), (8192, 48)),
        ("model.norm.weight", (8000,), (100,)),
    ]
)


@pytest.mark.parametrize("dtype", [None, "bf16"])
@pytest.mark.parametrize(
    "layout",
    [None, FullTensors(("model.norm.weight", "model.embed_tokens.weight")), TensorParallel(2, 1), BOXES],
    ids=["whole", "named", "parallel", "boxes"],
)
@pytest.mark.parametrize(("lane", "connections"), [("grpc", 1), ("grpc", 3), ("auto", 1)])
def test_it_brings_what_the_blocking_client_brings(
    service: RunningService,
    lane: str,
    connections: int,
    layout: LayoutRequest | None,
    dtype: str | None,
) -> None:
    with EngineClient(service.address, lane="grpc") as engine:
        expected = list(engine.pull(MODEL, "latest", layout, dtype=dtype))

    async def main() -> list[list[tuple[str, torch.Tensor]]]:
        async with AsyncEngineClient(service.address, lane=lane, connections=connections) as client:
            pull = client.pull(MODEL, "latest", layout, dtype=dtype)
            iterated = [each async for each in pull]
            plan = await pull.plan()
            assert pull.lane == ("local" if lane == "auto" and dtype is None else "grpc")
            names = [placement.shard.tensor for placement in plan.layout.placements]
            filled = [torch.empty_like(tensor) for _, tensor in iterated]
            await pull.fill(filled.__getitem__)
            passed = [torch.empty_like(tensor) for _, tensor in iterated]
            assert [name async for name, _ in pull.filled(passed.__getitem__)] == names
            slices = await pull.bring()
            brought = [slices.tensor(index).clone() for index in range(len(names))]
            return [
                iterated,
                list(zip(names, filled, strict=True)),
                list(zip(names, passed, strict=True)),
                list(zip(names, brought, strict=True)),
            ]

    for found in run(main()):
        assert [name for name, _ in found] == [name for name, _ in expected]
        assert all(torch.equal(mine, theirs) for (_, mine), (_, theirs) in zip(found, expected, strict=True))


def test_its_control_calls_answer_what_those_of_the_blocking_client_answer(service: RunningService) -> None:
    async def main() -> None:
        with EngineClient(service.address) as engine:
            async with AsyncEngineClient(service.address) as client:
                tagged = await client.set_ref(MODEL, "mine", "latest")
                assert tagged == engine.version(MODEL, "mine")
                assert await client.refs(MODEL) == engine.refs(MODEL)
                assert (await client.refs(MODEL))["mine"] == tagged.number
                assert await client.model(MODEL) == engine.model(MODEL)
                assert await client.models() == engine.models()
                assert await client.version(MODEL) == engine.version(MODEL)
                assert await client.versions(MODEL) == engine.versions(MODEL)
                assert await client.versions(MODEL, limit=1) == engine.versions(MODEL)[:1]
                assert await client.model_files(MODEL) == engine.model_files(MODEL)
                durable = await client.wait_for(MODEL, "latest", VersionState.DURABLE, timeout=60)
                assert durable == engine.version(MODEL)
                await client.delete_ref(MODEL, "mine")
                assert "mine" not in engine.refs(MODEL)

    run(main())


def test_its_errors_are_those_of_the_service(service: RunningService) -> None:
    async def main() -> None:
        async with AsyncEngineClient(service.address) as client:
            with pytest.raises(NotFound):
                await client.version(MODEL, 999)
            with pytest.raises(NotFound):
                await client.version("tests/none")
            with pytest.raises(InvalidArgument):
                await anext(client.watch("no-slash"))
            with pytest.raises(NotFound, match=r"no\.such\.tensor"):
                await client.pull(MODEL, "latest", FullTensors(("no.such.tensor",))).plan()
            with pytest.raises(InvalidArgument):
                [each async for each in client.pull(MODEL, "latest", TensorParallel(2, 2))]
        async with AsyncEngineClient(service.address, lane="local") as client:
            with pytest.raises(FailedPrecondition, match="cast"):
                await client.pull(MODEL, dtype="bf16").bring()
        async with AsyncEngineClient(f"127.0.0.1:{reserved_port()}", retry_seconds=0.2) as client:
            with pytest.raises(Unavailable):
                await client.models()
            with pytest.raises(Unavailable):
                await anext(client.watch(MODEL))

    run(main())


def test_waiting_for_a_state_ends_in_time(service: RunningService, model: TinyModel) -> None:
    with TrainerClient(service.address) as trainer:
        trainer.register_files("tests/waited", model.files)

        async def main() -> None:
            seen = []
            async with AsyncEngineClient(service.address) as client:
                pushing = asyncio.to_thread(trainer.push_folder, "tests/waited", model.folder)
                number = (await pushing).number
                done = await client.wait_for(
                    "tests/waited", number, VersionState.DURABLE, timeout=30, on_progress=seen.append
                )
                assert done.state is VersionState.DURABLE
                assert seen[-1] == done
                waiting = client.wait_for("tests/waited", number + 1, VersionState.READY, timeout=0.1)
                with pytest.raises((DeadlineExceeded, NotFound)):
                    await waiting

        run(main())


def test_a_watch_gives_versions_as_they_are_pushed(service: RunningService, tmp_path: Path) -> None:
    small = tiny_folder(tmp_path / "small")
    with TrainerClient(service.address) as trainer:
        trainer.register_files("tests/watched", small.files)

        async def main() -> list[int]:
            found: list[int] = []

            async def push() -> None:
                for step in range(5):
                    handle = await asyncio.to_thread(trainer.push_folder, "tests/watched", small.folder, step=step)
                    await asyncio.to_thread(handle.wait, "ready", timeout=30)
                    await soon(lambda number=handle.number: number in found)

            async with AsyncEngineClient(service.address) as client:
                pushing = asyncio.create_task(push())
                async with aclosing(client.watch("tests/watched", "live")) as versions:
                    async for version in versions:
                        found.append(version.number)
                        if version.step == 4:
                            break
                await pushing
            return found

        assert run(main()) == [1, 2, 3, 4, 5]


def test_hundreds_of_watches_on_one_loop_hear_of_a_version_and_leave_no_call_behind(
    service: RunningService, tmp_path: Path
) -> None:
    small = tiny_folder(tmp_path / "small")
    with TrainerClient(service.address) as trainer:
        trainer.register_files("tests/many", small.files)

        async def main() -> list[int]:
            async with AsyncEngineClient(service.address) as client:
                since = NewThreads()
                first = asyncio.Barrier(WATCHES + 1)

                async def watch() -> int:
                    async with aclosing(client.watch("tests/many")) as versions:
                        assert (await anext(versions)).number == 1
                        await first.wait()
                        return (await anext(versions)).number

                await asyncio.to_thread(push)
                watches = [asyncio.create_task(watch()) for _ in range(WATCHES)]
                await first.wait()
                of_clients = [each.name for each in since.alive() if not each.name.startswith("grpc_")]
                assert len(of_clients) < 8, of_clients
                await asyncio.to_thread(push)
                return await asyncio.gather(*watches)

        def push() -> None:
            trainer.push_folder("tests/many", small.folder).wait("ready", timeout=30)

        assert run(main()) == [2] * WATCHES


@asynccontextmanager
async def held_pull(
    service: RunningService, connections: int, begin: Callable[[AsyncPull], Awaitable[T]]
) -> AsyncIterator[asyncio.Task[T]]:
    """A pull over gRPC that has come to its middle, and stands still there."""
    since = NewThreads()
    with Gate(service.address) as gate:
        async with AsyncEngineClient(gate.address, lane="grpc", connections=connections) as client:
            pull = client.pull(MODEL)
            await pull.plan()
            gate.hold_after(HELD_AFTER)
            task = asyncio.ensure_future(begin(pull))
            await asyncio.to_thread(gate.wait_closed)
            yield task
            gate.open()
            await soon(lambda: nothing_held(service, since))
            # and the client is as good as new
            assert (await client.version(MODEL)).number == 1


async def collect(pull: AsyncPull) -> list[tuple[str, torch.Tensor]]:
    return [each async for each in pull]


@pytest.mark.parametrize("connections", [1, 3])
@pytest.mark.parametrize("begin", [collect, AsyncPull.bring], ids=["iterated", "brought"])
def test_a_cancelled_pull_ends_at_once_and_the_service_has_everything_back(
    service: RunningService, connections: int, begin: Callable[[AsyncPull], Awaitable[Any]]
) -> None:
    async def main() -> None:
        since = NewThreads()
        async with held_pull(service, connections, begin) as task:
            assert not nothing_held(service, since)
            assert not task.done()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task  # the gate is closed still: it has waited for nothing that would come

    run(main())


def test_a_pull_that_is_not_there_in_time_is_broken_off(service: RunningService) -> None:
    async def main() -> None:
        async with held_pull(service, 2, AsyncPull.bring) as task:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(task, 0.3)

    run(main())


@pytest.mark.parametrize("connections", [1, 3])
def test_whoever_leaves_an_iteration_leaves_no_call_behind(service: RunningService, connections: int) -> None:
    async def main() -> None:
        since = NewThreads()
        async with AsyncEngineClient(service.address, lane="grpc", connections=connections) as client:
            async with aclosing(aiter(client.pull(MODEL))) as tensors:
                async for name, _ in tensors:
                    assert name == "model.embed_tokens.weight"
                    assert not nothing_held(service, since)  # 4 of 20 MB have been taken
                    break
            await soon(lambda: nothing_held(service, since))
            assert (await client.version(MODEL)).number == 1

    run(main())


def test_closing_the_client_ends_what_is_under_way_with_an_error(service: RunningService) -> None:
    async def main() -> None:
        since = NewThreads()
        with Gate(service.address) as gate:
            client = AsyncEngineClient(gate.address, lane="grpc")
            watch = client.watch(MODEL, "live")
            await anext(watch)
            left = aiter(client.pull(MODEL))
            await anext(left)
            pull = client.pull(MODEL)
            await pull.plan()
            gate.hold_after(HELD_AFTER)
            held, waiting = asyncio.create_task(pull.bring()), asyncio.ensure_future(anext(watch))
            await asyncio.to_thread(gate.wait_closed)
            await client.close()
            for each in (held, waiting, anext(left), client.version(MODEL), client.pull(MODEL).bring()):
                with pytest.raises(Unavailable, match="closed"):
                    await each
        await soon(lambda: nothing_held(service, since))

    run(main())


def test_nothing_is_written_once_a_cancelled_pull_has_ended(tmp_path: Path, model: TinyModel) -> None:
    with running_service(tmp_path / "store", local_socket=str(tmp_path / "lane.sock")) as service:
        with TrainerClient(service.address, lane="grpc") as trainer:
            trainer.register_files(MODEL, model.files)
            trainer.push_folder(MODEL, model.folder).wait(timeout=60)
        _cancel_a_pull_that_writes(service)


def _cancel_a_pull_that_writes(service: RunningService) -> None:
    entered, go_on = threading.Event(), threading.Event()

    async def main() -> None:
        async with AsyncEngineClient(service.address, lane="local") as client:
            pull = client.pull(MODEL)
            plan = await pull.plan()
            tensors = [torch.zeros(p.shard.box.extent) for p in plan.layout.placements]

            def tensor_for(index: int) -> torch.Tensor:
                if index == 3:
                    entered.set()
                    assert go_on.wait(30)
                return tensors[index]

            held = service.service.images.usage().memory_in_use
            task = asyncio.create_task(pull.fill(tensor_for))
            await asyncio.to_thread(entered.wait, 30)
            task.cancel()
            task.cancel()
            await asyncio.sleep(0.1)
            assert not task.done()  # a thread may still write
            go_on.set()
            with pytest.raises(asyncio.CancelledError):
                await task
            done = [bool(tensor.any()) for tensor in tensors]
            assert done == [True] * 4 + [False] * (len(tensors) - 4)
            await asyncio.sleep(0.1)
            assert [bool(tensor.any()) for tensor in tensors] == done
            del task
        await soon(lambda: service.lane.clients == 0)
        await soon(lambda: service.service.images.usage().memory_in_use <= held)

    run(main())


def test_memory_that_was_borrowed_goes_back_when_an_iteration_is_left(tmp_path: Path, model: TinyModel) -> None:
    with (
        running_service(tmp_path / "store", local_socket=str(tmp_path / "lane.sock")) as service,
        TrainerClient(service.address, lane="grpc") as trainer,
    ):
        trainer.register_files(MODEL, model.files)
        trainer.push_folder(MODEL, model.folder).wait(timeout=60)
        used = service.service.images.usage().memory_in_use

        async def main() -> None:
            async with AsyncEngineClient(service.address, lane="local") as client:
                async with aclosing(aiter(client.pull(MODEL))) as tensors:
                    _, kept = await anext(tensors)
                # another version takes the place of the one that is held
                for step in (1, 2):
                    handle = await asyncio.to_thread(trainer.push_folder, MODEL, model.folder, step=step)
                    await asyncio.to_thread(handle.wait, timeout=30)
                assert service.service.images.usage().memory_in_use == 2 * used
                del kept, tensors
                await soon(lambda: service.service.images.usage().memory_in_use == used)

        run(main())


def test_the_loop_goes_on_while_a_pull_is_held_up_in_its_thread(service: RunningService) -> None:
    ticked = threading.Event()

    async def tick() -> None:
        await asyncio.sleep(0.01)
        ticked.set()

    async def main() -> None:
        for lane in ("grpc", "local"):
            ticked.clear()
            async with AsyncEngineClient(service.address, lane=lane) as client:
                pull = client.pull(MODEL)
                plan = await pull.plan()

                def tensor_for(index: int, plan: Any = plan) -> torch.Tensor:
                    # on the loop itself this would wait for ever
                    assert ticked.wait(30)
                    return torch.empty(plan.layout.placements[index].shard.box.extent)

                ticking = asyncio.create_task(tick())
                await pull.fill(tensor_for)
                await ticking

    run(main())


@pytest.mark.parametrize("lane", ["grpc", "local"])
def test_the_loop_is_not_held_up_by_pulls(service: RunningService, lane: str) -> None:
    busy: list[float] = []
    """Seconds of a processor that the loop's thread had at work between two ticks; that it may wait is asked above."""

    async def measure() -> None:
        while True:
            started = time.thread_time()
            await asyncio.sleep(0.001)
            busy.append(time.thread_time() - started)

    async def main() -> None:
        async with AsyncEngineClient(service.address, lane=lane) as client:
            [_ async for _ in client.pull(MODEL)]
            measuring = asyncio.create_task(measure())
            for _ in range(5):
                [_ async for _ in client.pull(MODEL)]
            measuring.cancel()
            with suppress(asyncio.CancelledError):
                await measuring

    run(main())
    assert sorted(busy)[len(busy) // 2] < 0.05


@pytest.mark.parametrize("connections", [1, 3])
def test_a_pull_and_a_watch_go_on_where_they_were_when_the_service_was_killed(
    tmp_path: Path, model: TinyModel, connections: int
) -> None:
    service = KillableService(tmp_path / "store", most_streams=64, bulk_port="off")
    service.start()
    try:
        with TrainerClient(service.address, lane="grpc") as trainer:
            trainer.register_files(MODEL, model.files)
            trainer.push_folder(MODEL, model.folder).wait(timeout=60)

        def restart() -> None:
            service.kill()
            service.start()
            with TrainerClient(service.address, lane="grpc") as trainer:
                trainer.push_folder(MODEL, model.folder).wait(timeout=60)

        async def main() -> tuple[dict[str, torch.Tensor], list[int]]:
            with Gate(service.address) as gate:
                async with AsyncEngineClient(gate.address, lane="grpc", connections=connections) as client:
                    versions = client.watch(MODEL, "latest")
                    seen = [(await anext(versions)).number]
                    pull = client.pull(MODEL, "latest")
                    await pull.plan()
                    gate.cut_after(HELD_AFTER)
                    task = asyncio.create_task(collect(pull))
                    await asyncio.to_thread(gate.wait_closed)
                    await asyncio.to_thread(restart)
                    gate.open()
                    found = await task
                    seen.append((await anext(versions)).number)
                    assert len(found) == len(model.arrays)
                    assert (await pull.plan()).version.number == 1
                    return dict(found), seen

        found, seen = run(main())
        assert_same(found, model)
        assert seen == [1, 2]
    finally:
        service.kill()


def test_concurrent_pulls_of_one_client_do_not_disturb_each_other(service: RunningService, model: TinyModel) -> None:
    async def main() -> list[dict[str, torch.Tensor]]:
        async with AsyncEngineClient(service.address, lane="grpc", connections=2) as client:
            return [dict(each) for each in await asyncio.gather(*(collect(client.pull(MODEL)) for _ in range(6)))]

    for found in run(main()):
        assert_same(found, model)


def test_it_is_imported_without_torch() -> None:
    program = "import sys, weighbridge; weighbridge.AsyncEngineClient; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def example(page: Path, having: str) -> str:
    """The block of Python on a page that has a word."""
    blocks: Sequence[str] = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    [found] = [block for block in blocks if having in block]
    return found


def test_the_example_in_the_documentation_follows_a_model(service: RunningService, tmp_path: Path) -> None:
    small = tiny_folder(tmp_path / "small")
    # of the dtype that most models have, and which is not torch's default
    weights = {name: torch.from_numpy(array).bfloat16() for name, array in small.arrays.items()}
    save_file(weights, small.folder / "model.safetensors")
    with TrainerClient(service.address) as trainer:
        trainer.import_folder("acme/smol", small.folder).wait(timeout=30)
    page = Path(__file__).parents[3] / "docs" / "asyncio.md"
    program = example(page, "AsyncEngineClient").replace("127.0.0.1:50051", service.address)
    program = textwrap.dedent(program) + "\n"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"version 1 by local: {len(small.arrays)} tensors"]
