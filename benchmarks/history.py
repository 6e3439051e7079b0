"""``python -m benchmarks.history``: does it cost more to push the last of many versions than the first, or to have many models?

A service over a folder, or over SeaweedFS (``--s3``), receives versions of a tiny model one after the other, and then registers many models.
What each operation takes, the bytes that a push reads from the store and writes to it, and the service's memory are measured in a window at
the beginning and in one at the end; the ratio of the two is what history costs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np

from benchmarks import processes, report
from benchmarks.counted_service import Counts
from benchmarks.memory import resident
from tests.raw_clients import RawClient, TinyModel, cut, stream_of, tiny_folder, whole_layout
from tests.s3_server import ACCESS_KEY, SECRET_KEY, seaweedfs
from weighbridge import EngineClient, TrainerClient, VersionState
from weighbridge.v1 import model_service_pb2 as pb

T = TypeVar("T")
MODEL = "bench/history"
_CHANGING = "model.norm.weight"
_PAGE = 100
_WAIT_SECONDS = 120.0


@dataclass
class Window:
    """What was measured between two moments.

    Attributes:
        begin, end: numbers of the first thing measured, and one past the last.
        samples: values by the name of what was measured; seconds, or bytes.
        memory: bytes that the service had resident at the end.
    """

    begin: int
    end: int
    samples: dict[str, list[float]] = field(default_factory=dict)
    memory: int = 0

    def note(self, name: str, value: float) -> None:
        """Add a value."""
        self.samples.setdefault(name, []).append(value)

    def time(self, name: str, work: Callable[[], T]) -> T:
        """Do something and add the seconds that it took."""
        started = time.perf_counter()
        result = work()
        self.note(name, time.perf_counter() - started)
        return result


class Service:
    """A running service that counts.

    Args:
        process: of `benchmarks.counted_service`.
    """

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.address = processes.first_line(process).split("gRPC on ")[1].split(",", maxsplit=1)[0]
        self._process = process

    def counts(self) -> Counts:
        """What it has asked of its store so far."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return Counts(**json.loads(processes.first_line(self._process)))

    @property
    def memory(self) -> int:
        """Bytes that it has resident."""
        return resident(self._process.pid)


@contextmanager
def serving(store: str, scratch: Path) -> Iterator[Service]:
    """A service over a store that collects nothing by itself."""
    arguments = (
        *("-m", "benchmarks.counted_service", "serve", "--store", store, "--scratch", str(scratch)),
        *("--grpc", "127.0.0.1:0", "--http", "127.0.0.1:0", "--log-level", "error", "--collect-every", "0"),
    )
    with processes.python(*arguments) as process:
        yield Service(process)


def windows(count: int, size: int) -> tuple[Window, Window]:
    """A window near the beginning, behind the first page if there are enough for that, and one at the end."""
    skipped = min(_PAGE, count // 4)
    size = min(size, (count - skipped) // 2)
    return Window(skipped, skipped + size), Window(count - size, count)


class Versions:
    """Pushes versions of one model, and looks at them.

    Args:
        service: receives them.
        model: whose weights they are, but for one tensor.
    """

    def __init__(self, service: Service, model: TinyModel) -> None:
        self._service = service
        self._client = EngineClient(service.address, lane="grpc")
        self._raw = RawClient(service.address)
        self._layout = whole_layout(model.arrays)
        self._arrays = model.arrays
        with TrainerClient(service.address) as trainer:
            trainer.register_files(MODEL, model.files)

    def push(self, step: int) -> tuple[float, float, Counts]:
        """Push a version: seconds to open it, seconds from then until it is durable, and what that asked of the store.

        Its weights are not those of the version before, which would be copied within the store.
        """
        arrays = {**self._arrays, _CHANGING: np.full_like(self._arrays[_CHANGING], step)}
        before = self._service.counts()
        started = time.perf_counter()
        number = self._raw.open(MODEL, step=step)
        opened = time.perf_counter()
        assigned = self._raw.declare(MODEL, number, self._layout)
        self._raw.push(MODEL, number, cut(stream_of(arrays, self._layout, assigned), 1 << 20))
        self._raw.seal(MODEL, number)
        self._client.wait_for(MODEL, number, VersionState.DURABLE, timeout=_WAIT_SECONDS)
        done = time.perf_counter()
        return opened - started, done - opened, self._service.counts().minus(before)

    def look(self, window: Window) -> None:
        """Tag the newest version, list a hundred, hear of the newest."""
        window.time("tag", lambda: self._client.set_ref(MODEL, "tag", "latest"))
        request = pb.ListVersionsRequest(model=MODEL, page_size=_PAGE)
        window.time("list 100", lambda: self._raw.call(self._raw.models.ListVersions, request))
        watch = self._client.watch(MODEL, "latest")
        window.time("watch", lambda: next(watch))

    def close(self) -> None:
        """End the connections."""
        self._client.close()
        self._raw.channel.close()


def measure_versions(service: Service, model: TinyModel, count: int, size: int) -> tuple[Window, Window]:
    """Push so many versions; the windows at both ends."""
    ends = windows(count, size)
    versions = Versions(service, model)
    try:
        for number in range(count):
            opened, published, asked = versions.push(number)
            for window in ends:
                if window.begin <= number < window.end:
                    window.note("open", opened)
                    window.note("publish", published)
                    window.note("head bytes", asked.head_read + asked.head_written)
                    window.note("store bytes", asked.read + asked.written)
                    window.note("store requests", asked.requests)
                    versions.look(window)
                    window.memory = service.memory
    finally:
        versions.close()
    return ends


def measure_models(service: Service, model: TinyModel, count: int, size: int) -> tuple[Window, Window]:
    """Register so many models; the windows at both ends. Those within them get a version, to be tagged."""
    ends = windows(count, size)
    page = pb.ListModelsRequest(page_size=_PAGE)
    with TrainerClient(service.address, lane="grpc") as client, RawClient(service.address) as raw:
        for number in range(count):
            name = f"many/m{number:06d}"
            within = [window for window in ends if window.begin <= number < window.end]
            register = partial(client.register_files, name, model.files)
            if not within:
                register()
            for window in within:
                window.time("register", register)
                client.push_folder(name, model.folder).wait(timeout=_WAIT_SECONDS)
                window.time("tag", partial(client.set_ref, name, "tag", "latest"))
                before = service.counts()
                window.time("list 100", partial(raw.call, raw.models.ListModels, page))
                asked = service.counts().minus(before)
                window.note("store bytes of a list", asked.read + asked.written)
                window.memory = service.memory
    return ends


def rows(ends: tuple[Window, Window]) -> Iterator[list[str]]:
    """Medians of both windows, and their ratio."""
    first, last = ends
    for name in first.samples:
        medians = [statistics.median(window.samples[name]) for window in ends]
        counted = "bytes" in name or "requests" in name
        shown = [f"{m:.0f}" if counted else f"{m * 1e3:.2f} ms" for m in medians]
        yield [name, *shown, f"{medians[1] / medians[0]:.2f}" if medians[0] else "-"]
    grown = (last.memory - first.memory) / 2**20
    yield ["memory", *(f"{w.memory / 2**20:.0f} MiB" for w in ends), f"{grown:+.0f} MiB"]


def table(what: str, ends: tuple[Window, Window]) -> str:
    """A table of both windows."""
    headings = [what, *(f"{w.begin + 1} to {w.end}" for w in ends), "ratio"]
    return report.table(headings, rows(ends))


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="benchmarks.history", description=__doc__)
    parser.add_argument("--versions", type=int, default=300, help="versions of one model (default 300)")
    parser.add_argument("--models", type=int, default=200, help="models (default 200)")
    parser.add_argument("--window", type=int, default=40, help="measured at each end (default 40)")
    parser.add_argument("--s3", action="store_true", help="over SeaweedFS instead of a folder")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    args = parser.parse_args(argv)
    processes.end_tidily()
    os.environ.update(AWS_ACCESS_KEY_ID=ACCESS_KEY, AWS_SECRET_ACCESS_KEY=SECRET_KEY)
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        folder = Path(scratch)
        model = tiny_folder(folder / "hf", hidden_size=8)
        if args.s3:
            (folder / "s3").mkdir()
            server = stack.enter_context(seaweedfs(folder / "s3"))
        found = {}
        for what, measure, count in (
            ("versions", measure_versions, args.versions),
            ("models", measure_models, args.models),
        ):
            store = server.location() if args.s3 else str(folder / what)
            with serving(store, folder / f"{what}-scratch") as service:
                if count:
                    found[what] = measure(service, model, count, args.window)
                    print(table(what, found[what]), end="\n\n", flush=True)
    if args.json is not None:
        report.write_json(
            args.json,
            store="s3" if args.s3 else "folder",
            **{
                what: [{"begin": w.begin, "end": w.end, "memory": w.memory, **w.samples} for w in ends]
                for what, ends in found.items()
            },
        )


if __name__ == "__main__":
    main()
