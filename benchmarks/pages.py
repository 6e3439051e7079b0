"""``python -m benchmarks.pages``: how soon pages are there, and what open ones cost.

A service over a folder with 100 models of 1,000 versions each answers for the list of models, a model and one of its
versions: the slowest of some requests for each, next to `/livez` of the same service. Then pages are opened as browsers
do, by their streams of events, and the processor time of the service is compared with and without them: while nothing
happens, and while versions are pushed to the model that they show.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2 as httpx

from benchmarks import processes, report
from tests.support.heads import entry, opened
from tests.support.raw_clients import RawClient, TinyModel, cut, stream_of, tiny_folder, whole_layout
from weighbridge import TrainerClient
from weighbridge_storage.documents.names import ModelName
from weighbridge_storage.head.head import Head
from weighbridge_storage.head.head_changes import publish
from weighbridge_storage.head.head_store import HeadStore
from weighbridge_storage.head.history import History
from weighbridge_storage.head.open_versions import claim_version
from weighbridge_storage.opening import open_store

ANSWER_GOAL = 0.2
"""Seconds in which the service has to answer a page."""
OPEN_GOAL = 0.1
"""Share of a core that all open pages may cost."""
_MODEL = "acme/model-000"
_PUSH_PIECE = 2_000
_MEGABYTE = 1 << 20


@dataclass(frozen=True)
class Shape:
    """Size of the store, and settings of the measurement.

    Attributes:
        models, versions: number of models, and of versions of each.
        pages: pages open at once.
        requests: requests for each page.
        seconds: seconds for which processor time is measured.
    """

    models: int
    versions: int
    pages: int
    requests: int
    seconds: float


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print and compare with the goals."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=int, default=100)
    parser.add_argument("--versions", type=int, default=1000)
    parser.add_argument("--pages", type=int, default=200)
    parser.add_argument("--requests", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    shape = Shape(args.models, args.versions, args.pages, args.requests, args.seconds)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model = tiny_folder(folder / "hf")
        _fill(folder, model, shape)
        with processes.service(folder, _MEGABYTE) as running:
            answers = _answers(running.http, shape)
            costs = _costs(running, model, shape)
    print(f"{shape.models} models of {shape.versions} versions; {shape.pages} pages open")
    rows = [[path, f"{first * 1000:.0f}", f"{slowest * 1000:.0f}"] for path, (first, slowest) in answers.items()]
    print(report.table(["page", "first, ms", "slowest after that, ms"], rows))
    print(
        report.table(
            ["of a core", "without pages", "with them"],
            [[name, *(f"{each:.3f}" for each in two)] for name, two in costs.items()],
        )
    )
    slowest = max(max(two) for two in answers.values())
    dearest = max(after - before for before, after in costs.values())
    for what, value, goal in (
        ("pages answer in", slowest, ANSWER_GOAL),
        ("open pages cost", dearest, OPEN_GOAL),
    ):
        print(f"{what} {value:.3f}; the goal of {goal:g} is {'met' if value <= goal else 'missed'}")
    if args.json is not None:
        report.write_json(args.json, answers=answers, costs=costs, shape=vars(shape))
    if slowest > ANSWER_GOAL or dearest > OPEN_GOAL:
        raise SystemExit(1)


def _fill(folder: Path, model: TinyModel, shape: Shape) -> None:
    """A store with models and their histories: one is written, the others are its copies."""
    with processes.service(folder, _MEGABYTE) as running, TrainerClient(running.grpc) as trainer:
        trainer.register_files(_MODEL, model.files)
        trainer.push_folder(_MODEL, model.folder, step=1).wait(timeout=60)
    store = open_store(folder / "store")
    heads, name = HeadStore(store), ModelName.parse(_MODEL)
    for _ in range(shape.versions - 1):
        heads.edit(name, lambda history: (_published(history), None))
    store.close()
    first = (folder / "store" / name.head_key).parent
    for number in range(1, shape.models):
        shutil.copytree(first, first.with_name(f"model-{number:03d}"))


def _published(history: History) -> Head:
    """The head with one more version, the newest."""
    head, there = opened(history.head, now_ms=int(time.time() * 1000))
    done = entry(there.number)
    return publish(history.under(claim_version(head, there.number, done.write_id)), done)


def _answers(url: str, shape: Shape) -> dict[str, tuple[float, float]]:
    """For each page, the seconds of the first request and of the slowest one after that."""
    found = {}
    with httpx.Client(base_url=url, timeout=60) as http:
        for path in ("/livez", "/", f"/models/{_MODEL}", f"/models/{_MODEL}/versions/1"):
            seconds = []
            for _ in range(shape.requests + 1):
                begun = time.perf_counter()
                http.get(path).raise_for_status()
                seconds.append(time.perf_counter() - begun)
            found[path] = (seconds[0], max(seconds[1:]))
    return found


def _costs(running: Any, model: TinyModel, shape: Shape) -> dict[str, tuple[float, float]]:
    """Processor time of the service, in cores, without open pages and with them."""
    pages = {"one model": [f"/models/{_MODEL}"], "each another model": _different(shape)}
    found = {}
    for what, paths in pages.items():
        for doing, pushing in (("idle", _nothing), ("a push runs", _pushing)):
            with pushing(running.grpc, model):
                without = _cores(running.pid, shape.seconds)
            with (
                _open(running.http, [paths[n % len(paths)] for n in range(shape.pages)]),
                pushing(running.grpc, model),
            ):
                found[f"{what}, {doing}"] = (without, _cores(running.pid, shape.seconds))
    return found


def _different(shape: Shape) -> list[str]:
    models = [f"/models/acme/model-{number:03d}" for number in range(shape.models)]
    return [*models, "/", *(f"{path}/versions/1" for path in models)]


def _cores(pid: int, seconds: float) -> float:
    before, begun = processes.processor_seconds(pid), time.monotonic()
    time.sleep(seconds)
    return (processes.processor_seconds(pid) - before) / (time.monotonic() - begun)


@contextmanager
def _nothing(_address: str, _model: TinyModel) -> Iterator[None]:
    yield


@contextmanager
def _pushing(address: str, model: TinyModel) -> Iterator[None]:
    """A version is received all the time, piece by piece, so that its progress changes; by a process of its own."""
    code = "import sys; from benchmarks.pages import push_slowly; push_slowly(*sys.argv[1:])"
    with processes.python("-c", code, address, str(model.folder)) as process:
        processes.first_line(process)
        yield


def push_slowly(address: str, folder: str) -> None:
    """Push versions without end, ten pieces a second."""
    model = _read(Path(folder))
    print("pushing", flush=True)
    with RawClient(address) as client:
        step = 1_000_000
        while True:
            step += 1
            number = client.open(_MODEL, step=step)
            layout = whole_layout(model.arrays)
            assigned = client.declare(_MODEL, number, layout)
            for piece in cut(stream_of(model.arrays, layout, assigned), _PUSH_PIECE):
                client.push(_MODEL, number, [piece])
                time.sleep(0.1)
            client.seal(_MODEL, number)


def _read(folder: Path) -> TinyModel:
    from safetensors.numpy import load_file

    return TinyModel(folder, load_file(folder / "model.safetensors"))


@contextmanager
def _open(address: str, paths: Sequence[str]) -> Iterator[None]:
    """Pages are open, each with its stream of events, in a process of its own."""
    code = "import sys; from benchmarks.pages import follow; follow(*sys.argv[1:])"
    with processes.python("-c", code, address, *paths) as process:
        processes.first_line(process)
        time.sleep(2.0)
        yield


def follow(address: str, *paths: str) -> None:
    """Open pages and read their streams until the process is ended."""
    asyncio.run(_follow(address, paths))


async def _follow(address: str, paths: Sequence[str]) -> None:
    split = urlsplit(address)
    ready = asyncio.Semaphore(0)
    readers = [asyncio.create_task(_reader(split.hostname or "", split.port or 0, path, ready)) for path in paths]
    for _ in paths:
        await ready.acquire()
    print("open", flush=True)
    await asyncio.gather(*readers)


async def _reader(host: str, port: int, path: str, ready: asyncio.Semaphore) -> None:
    events = "/events" if path == "/" else f"{path}/events"
    reader, writer = await asyncio.open_connection(host, port, limit=1 << 24)
    writer.write(f"GET {events} HTTP/1.1\r\nHost: {host}:{port}\r\n\r\n".encode())
    await reader.readuntil(b"event:")
    ready.release()
    while await reader.read(1 << 16):
        pass


if __name__ == "__main__":
    main()
