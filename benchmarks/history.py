"""``python -m benchmarks.history``: what the last of many versions costs next to the first, and what many models do.

One service receives many versions of a tiny model one after the other, another one few; and one gets many models with a
version each, another one few. At the end the same is done at both in turn, so that a machine with other things to do
slows both down alike: what each operation takes, the bytes that a push reads from the store and writes to it, and the
service's memory. The ratio of the two is what history costs. It is compared with what may be: 1.3 times for everything,
and 50 MB of memory. Stores are folders, or SeaweedFS (``--s3``).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self, TypeVar

import numpy as np

from benchmarks import processes, report
from benchmarks.counted_service import Counts
from benchmarks.memory import resident
from tests.support.raw_clients import RawClient, TinyModel, cut, stream_of, tiny_folder, whole_layout
from tests.support.s3_server import ACCESS_KEY, SECRET_KEY, seaweedfs
from weighbridge import EngineClient, TrainerClient, VersionState
from weighbridge.v1 import model_service_pb2 as pb

T = TypeVar("T")
MODEL = "bench/history"
MOST_TIMES = 1.3
"""Highest ratio of an operation's time, or bytes, at the end of the history to those near its beginning."""
MOST_MEMORY = 50_000_000
"""Bytes by which the service's memory may grow."""
_CHANGING = "model.norm.weight"
_PAGE = 100
_WARM = 20
"""Versions or models after which everything that a process makes only once exists."""
_WAIT_SECONDS = 120.0


@dataclass
class Window:
    """Measurements between two moments.

    Attributes:
        begin, end: numbers of the first thing measured, and one past the last.
        samples: values in seconds or bytes, by the name of the measurement.
        memory: bytes by which the service has grown at the end.
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

    def note_counts(self, asked: Counts) -> None:
        """Add what a push has asked of the store."""
        self.note("head bytes", asked.head_read + asked.head_written)
        self.note("store bytes", asked.read + asked.written)
        self.note("store requests", asked.requests)

    def typical(self, name: str) -> float:
        """The median of times, and the mean of what is counted: the tree of a history is written now and then, and a
        lot at a time.
        """
        return (statistics.fmean if _counted(name) else statistics.median)(self.samples[name])


class Service:
    """A running service that counts.

    Args:
        process: process of `benchmarks.counted_service`.

    Attributes:
        address: its gRPC address.
        pid: its process.
    """

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.pid = process.pid
        self.address = processes.first_line(process).split("gRPC on ")[1].split(",", maxsplit=1)[0]
        self._process = process

    def counts(self) -> Counts:
        """Counts of the service's store requests and bytes so far."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return Counts(**json.loads(processes.first_line(self._process)))

    @property
    def memory(self) -> int:
        """Bytes that it has resident."""
        return resident(self.pid)


@contextmanager
def serving(store: str, scratch: Path) -> Iterator[Service]:
    """A service over a store that collects nothing by itself."""
    arguments = (
        *("-m", "benchmarks.counted_service", "serve", "--store", store, "--scratch", str(scratch)),
        *("--grpc", "127.0.0.1:0", "--http", "127.0.0.1:0", "--log-level", "error", "--collect-every", "0"),
    )
    with processes.python(*arguments) as process:
        yield Service(process)


class Pushing:
    """Pushes versions whose weights are not those of the version before, which would be copied within the store.

    Args:
        model: model whose weights are pushed, one tensor of them changed.
        service: receives them.
        page: number of versions in a listed page.
    """

    def __init__(self, model: TinyModel, service: Service, page: int) -> None:
        self.service = service
        self.page = page
        self.client = EngineClient(service.address, lane="grpc")
        self.raw = RawClient(service.address)
        self._trainer = TrainerClient(service.address, lane="grpc")
        self._model = model
        self._layout = whole_layout(model.arrays)

    def register(self, name: str) -> None:
        """Register the model under a name."""
        self._trainer.register_files(name, self._model.files)

    def push(self, name: str, step: int, window: Window) -> None:
        """Push a version until it is durable."""
        arrays = {
            **self._model.arrays,
            _CHANGING: np.full_like(self._model.arrays[_CHANGING], step),
        }
        before = self.service.counts()
        number = window.time("open", lambda: self.raw.open(name, step=step))

        def publish() -> None:
            assigned = self.raw.declare(name, number, self._layout)
            self.raw.push(name, number, cut(stream_of(arrays, self._layout, assigned), 1 << 20))
            self.raw.seal(name, number)
            self.client.wait_for(name, number, VersionState.DURABLE, timeout=_WAIT_SECONDS)

        window.time("publish", publish)
        window.note_counts(self.service.counts().minus(before))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._trainer.close()
        self.client.close()
        self.raw.channel.close()


class Rounds(Protocol):
    """Things of which there become many, one in each round."""

    service: Service

    def round(self, number: int, window: Window) -> None:
        """One more, and everything that is measured of it."""


class Versions(Pushing):
    """Versions of one model."""

    def __init__(self, model: TinyModel, service: Service, page: int) -> None:
        super().__init__(model, service, page)
        self.register(MODEL)

    def round(self, number: int, window: Window) -> None:
        """See `Rounds`: push one, tag the newest, list a page, hear of the newest."""
        self.push(MODEL, number, window)
        window.time("tag", lambda: self.client.set_ref(MODEL, "tag", "latest"))
        request = pb.ListVersionsRequest(model=MODEL, page_size=self.page)
        window.time("list", lambda: self.raw.call(self.raw.models.ListVersions, request))
        watch = self.client.watch(MODEL, "latest")
        window.time("watch", lambda: next(watch))


class Models(Pushing):
    """Models with one version each, which is live."""

    def round(self, number: int, window: Window) -> None:
        """See `Rounds`: register one, push a version, tag it, list a page of models, and pull it."""
        name = f"many/m{number:06d}"
        window.time("register", lambda: self.register(name))
        self.push(name, number, window)
        window.time("tag", lambda: self.client.set_ref(name, "tag", "latest"))
        page = pb.ListModelsRequest(page_size=self.page)
        before = self.service.counts()
        window.time("list", lambda: self.raw.call(self.raw.models.ListModels, page))
        asked = self.service.counts().minus(before)
        window.note("bytes of a list", asked.read + asked.written)
        window.time("pull", lambda: dict(self.client.pull(name, "live")))


def measure(
    subjects: Callable[[Service, int], AbstractContextManager[Rounds]],
    services: tuple[Service, Service],
    count: int,
    size: int,
) -> tuple[Window, Window]:
    """Make few of something at one service and many at another one, and measure both.

    Args:
        subjects: makes versions or models at a service, with so many of them in a listed page.
        services: one for few, and one for many.
        count: number of versions or models at the end.
        size: number of those measured at either end.

    Returns:
        A window near the beginning, behind the first page if there are enough for that, and one at the end.
    """
    skipped = min(_PAGE, count // 4)
    size = min(size, (count - skipped) // 2)
    ends = Window(skipped, skipped + size), Window(count - size, count)
    with ExitStack() as stack:
        both = [stack.enter_context(subjects(service, skipped)) for service in services]
        starts = [0, 0]
        for i, (rounds, window) in enumerate(zip(both, ends, strict=True)):
            unmeasured = Window(0, window.begin)
            for number in range(window.begin):
                if number == min(_WARM, window.begin - 1):
                    starts[i] = rounds.service.memory
                rounds.round(number, unmeasured)
        for done in range(size):
            turn = list(zip(both, ends, strict=True))
            for rounds, window in turn[:: 1 if done % 2 else -1]:
                rounds.round(window.begin + done, window)
        for rounds, window, start in zip(both, ends, starts, strict=True):
            window.memory = rounds.service.memory - start
    return ends


def _counted(name: str) -> bool:
    return "bytes" in name or "requests" in name


@dataclass(frozen=True)
class Verdict:
    """A figure near the beginning and at the end.

    Attributes:
        name: name of the measurement.
        first, last: typical values; seconds, bytes or a number.
        grown: ratio of the last value to the first; for memory, bytes.
        ok: whether that is within its limit.
    """

    name: str
    first: float
    last: float
    grown: float
    ok: bool

    def row(self) -> list[str]:
        """As a row of a table."""
        values = [_shown(self.name, value) for value in (self.first, self.last)]
        if self.name == "memory":
            return [
                self.name,
                *values,
                f"{self.grown / 1e6:.0f} MB",
                f"{MOST_MEMORY / 1e6:.0f} MB",
                self._said,
            ]
        return [self.name, *values, f"{self.grown:.2f}", f"{MOST_TIMES:.2f}", self._said]

    @property
    def _said(self) -> str:
        return "ok" if self.ok else "OVER"


def _shown(name: str, value: float) -> str:
    if name == "memory":
        return f"{value / 1e6:+.0f} MB"
    return f"{value:.0f}" if _counted(name) else f"{value * 1e3:.2f} ms"


def verdicts(ends: tuple[Window, Window]) -> list[Verdict]:
    """Verdict on each figure."""
    first, last = ends
    found = []
    for name in first.samples:
        before, after = first.typical(name), last.typical(name)
        times = after / before if before else float(after > 0)
        found.append(Verdict(name, before, after, times, times <= MOST_TIMES))
    return [
        *found,
        Verdict("memory", first.memory, last.memory, last.memory, last.memory <= MOST_MEMORY),
    ]


def table(what: str, ends: tuple[Window, Window]) -> str:
    """A table of both windows, and what was to be shown."""
    headings = [what, *(f"{w.begin + 1} to {w.end}" for w in ends), "grown", "limit", ""]
    return report.table(headings, (verdict.row() for verdict in verdicts(ends)))


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print; exits with 1 if something has grown by more than it may."""
    parser = argparse.ArgumentParser(prog="benchmarks.history", description=__doc__)
    parser.add_argument("--versions", type=int, default=300, help="versions of one model (default 300)")
    parser.add_argument("--models", type=int, default=200, help="models (default 200)")
    parser.add_argument("--window", type=int, default=40, help="measured at each end (default 40)")
    parser.add_argument("--s3", action="store_true", help="over SeaweedFS instead of a folder")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    args = parser.parse_args(argv)
    processes.end_tidily()
    os.environ.update(AWS_ACCESS_KEY_ID=ACCESS_KEY, AWS_SECRET_ACCESS_KEY=SECRET_KEY)
    found = {}
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        folder = Path(scratch)
        model = tiny_folder(folder / "hf", hidden_size=8)

        def location(name: str) -> str:
            if not args.s3:
                return str(folder / name)
            (folder / name).mkdir()
            return stack.enter_context(seaweedfs(folder / name)).location()

        for what, kind, count in (("versions", Versions, args.versions), ("models", Models, args.models)):
            if not count:
                continue
            with ExitStack() as running:
                few, many = (
                    running.enter_context(serving(location(f"{how}-{what}"), folder / f"{how}-{what}-scratch"))
                    for how in ("few", "many")
                )
                found[what] = measure(partial(kind, model), (few, many), count, args.window)
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
    sys.exit(not all(verdict.ok for ends in found.values() for verdict in verdicts(ends)))


if __name__ == "__main__":
    main()
