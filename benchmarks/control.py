"""``python -m benchmarks.control``: how soon thousands of engines hear that a tag has moved, and what they cost while
it does not.

A service and a bare ``grpc.aio`` server (`benchmarks.bare_watches`) are measured one after the other in the same run,
with the same watchers (`benchmarks.watcher_process`): the time from the beginning of the call that moves the tag until
each watch has the new version, memory of the server for each connection, its processor time while nothing happens, and
how many requests it makes to its store then, with one watch and with all. A tag is moved through another service over
the same store as well. Stores are folders, or SeaweedFS (``--s3``).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from benchmarks import processes, report
from benchmarks.control_verdicts import Case, Figures, Idle, Move, table, verdicts
from benchmarks.history import MODEL, Pushing, Service, Window, serving
from benchmarks.vital_signs import vital_signs
from benchmarks.watching import AIO, CLIENTS, Heard, WatcherSpec
from tests.support.raw_clients import TinyModel, tiny_folder
from tests.support.s3_server import ACCESS_KEY, SECRET_KEY, seaweedfs
from weighbridge._transport import rpc
from weighbridge.v1 import model_service_pb2 as pb
from weighbridge.v1 import model_service_pb2_grpc

TAG = "tag"
_CALL_SECONDS = 30.0
_SETTLE_SECONDS = 2.0
_PAUSE_SECONDS = 0.3


@dataclass(frozen=True)
class Settings:
    """Settings of all cases.

    Attributes:
        moves: how often the tag is moved.
        idle: seconds for which nothing happens.
        patience: seconds in which every watch has to receive a move.
        watchers: processes that play the engines.
        client: client of the watches, one of `CLIENTS`.
    """

    moves: int = 10
    idle: float = 10.0
    patience: float = 10.0
    watchers: int = 1
    client: str = AIO


@dataclass(frozen=True)
class Subject:
    """A server that is measured.

    Attributes:
        address: its gRPC address.
        pid: its process.
        requests: number of requests to its store so far; None if it has no store.
    """

    address: str
    pid: int
    requests: Callable[[], int] | None = None

    def idle(self, seconds: float) -> Idle:
        """Cost of the server while nothing happens."""
        before, asked = vital_signs(self.pid), self.requests() if self.requests else 0
        begun = time.monotonic()
        time.sleep(seconds)
        passed = time.monotonic() - begun
        after = vital_signs(self.pid)
        requests = (self.requests() - asked) / passed if self.requests else None
        return Idle((after.cpu_seconds - before.cpu_seconds) / passed, requests, after.threads)

    @property
    def resident(self) -> int:
        """Bytes that it has resident."""
        return vital_signs(self.pid).resident


class Mover:
    """Moves the tag between two versions.

    Args:
        address: address of the server that it asks to move the tag.
    """

    def __init__(self, address: str) -> None:
        self._channel = rpc.open_channel(address, shared=False)
        self._models = model_service_pb2_grpc.ModelServiceStub(self._channel)

    def move(self, number: int) -> tuple[float, float]:
        """Move it to a version; when the call began, and when it was answered."""
        begun = time.monotonic()
        request = pb.SetRefRequest(model=MODEL, ref=TAG, version=str(number))
        self._models.SetRef(request, timeout=_CALL_SECONDS)
        return begun, time.monotonic()

    def close(self) -> None:
        """Close its connection."""
        self._channel.close()


class Watching:
    """Processes that watch.

    Args:
        running: processes of `benchmarks.watcher_process`.
    """

    def __init__(self, running: Sequence[subprocess.Popen[str]]) -> None:
        self._running = running
        self.begun = _together([_answer(process) for process in running])

    @staticmethod
    @contextmanager
    def of(address: str, case: Case, count: int, client: str) -> Iterator[Watching]:
        """So many processes that share the connections of a case."""
        with ExitStack() as stack:
            running = []
            for i in range(count):
                connections = case.connections * (i + 1) // count - case.connections * i // count
                spec = WatcherSpec(address, MODEL, TAG, connections, case.streams, client)
                arguments = ("-m", "benchmarks.watcher_process", json.dumps(asdict(spec)))
                running.append(stack.enter_context(processes.python(*arguments)))
            yield Watching(running)

    def heard(self, number: int, seconds: float) -> Heard:
        """Moments at which each watch received a version."""
        for process in self._running:
            assert process.stdin is not None
            process.stdin.write(json.dumps({"number": number, "seconds": seconds}) + "\n")
            process.stdin.flush()
        return _together([_answer(process) for process in self._running])


def _answer(process: subprocess.Popen[str]) -> Heard:
    return Heard(**json.loads(processes.first_line(process)))


def _together(found: Sequence[Heard]) -> Heard:
    refused: dict[str, int] = {}
    for each in found:
        for code, count in each.refused.items():
            refused[code] = refused.get(code, 0) + count
    moments = [moment for each in found for moment in each.moments]
    return Heard(moments, sum(each.watching for each in found), refused)


def measure(name: str, subject: Subject, case: Case, settings: Settings, other: str | None = None) -> Figures:
    """Measure a server.

    Args:
        name: name of the server.
        subject: the server; its tag names version 1 of two.
        case: number of watches and connections.
        settings: settings of the measurement.
        other: address of another server over the same store; None if there is none.
    """
    with ExitStack() as stack:
        number = 1

        def moves(watching: Watching, address: str) -> list[Move]:
            nonlocal number
            mover, found = Mover(address), []
            for _ in range(settings.moves):
                number = 3 - number
                begun, answered = mover.move(number)
                moments = watching.heard(number, settings.patience).moments
                latencies = [moment - begun for moment in moments]
                found.append(Move(answered - begun, latencies, case.watches - len(latencies)))
                time.sleep(_PAUSE_SECONDS)
            mover.close()
            return found

        with Watching.of(subject.address, Case(1, 1), 1, settings.client) as one:
            moves(one, subject.address)  # what a process makes once is there
            idle_with_one = subject.idle(settings.idle)
            before = subject.resident
        begun = time.monotonic()
        watching = stack.enter_context(Watching.of(subject.address, case, settings.watchers, settings.client))
        begin_seconds = time.monotonic() - begun
        time.sleep(_SETTLE_SECONDS)
        after = subject.resident
        idle = subject.idle(settings.idle)
        own = moves(watching, subject.address)
        others = moves(watching, other) if other is not None else []
        after_moves = subject.resident
    return Figures(
        name, case, watching.begun.watching, watching.begun.refused, begin_seconds, before, after, after_moves,
        idle_with_one, idle, own, others,
    )  # fmt: skip


@contextmanager
def bare() -> Iterator[Subject]:
    """The bare server."""
    with processes.python("-m", "benchmarks.bare_watches") as process:
        yield Subject(processes.first_line(process), process.pid)


@contextmanager
def two_services(model: TinyModel, folder: Path, s3: bool) -> Iterator[tuple[Service, Service]]:
    """Two services over one store with two versions, the first of them tagged.

    Args:
        model: model of the versions.
        folder: an empty folder.
        s3: whether the store is SeaweedFS.
    """
    with ExitStack() as stack:
        location = str(folder / "store")
        if s3:
            (folder / "s3").mkdir()
            location = stack.enter_context(seaweedfs(folder / "s3")).location()
        first, second = (
            stack.enter_context(serving(location, folder / f"scratch-{name}")) for name in ("first", "second")
        )
        with Pushing(model, first, 1) as pushing:
            pushing.register(MODEL)
            for step in (1, 2):
                pushing.push(MODEL, step, Window(0, 1))
            pushing.client.set_ref(MODEL, TAG, 1)
        yield first, second


def compare(case: Case, settings: Settings, folder: Path, s3: bool) -> list[Figures]:
    """Measure a case with a service and with the bare server."""
    model = tiny_folder(folder / "hf", hidden_size=8)
    with two_services(model, folder, s3) as (first, second):
        requests = partial(_requests, first)
        service = Subject(first.address, first.pid, requests)
        ours = measure("service", service, case, settings, second.address)
    with bare() as subject:
        return [ours, measure("bare", subject, case, settings)]


def _requests(service: Service) -> int:
    return service.counts().requests


def _case(text: str) -> Case:
    connections, _, streams = text.partition("x")
    return Case(int(connections), int(streams))


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print; exits with 1 if a goal was missed."""
    parser = argparse.ArgumentParser(prog="benchmarks.control", description=__doc__)
    parser.add_argument(
        "--cases",
        nargs="+",
        type=_case,
        default=[Case(1000, 1), Case(500, 10)],
        help="connections x watches on each (default 1000x1 500x10)",
    )
    usual = Settings()
    parser.add_argument("--moves", type=int, default=usual.moves, help="of the tag (default 10)")
    parser.add_argument("--idle", type=float, default=usual.idle, help="seconds without a move (default 10)")
    parser.add_argument("--watchers", type=int, default=usual.watchers, help="processes that watch (default 1)")
    parser.add_argument(
        "--client",
        choices=CLIENTS,
        default=usual.client,
        help="of watchers: gRPC's own, or bare frames, which cost next to nothing (default aio)",
    )
    parser.add_argument("--s3", action="store_true", help="over SeaweedFS instead of a folder")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    args = parser.parse_args(argv)
    processes.end_tidily()
    os.environ.update(AWS_ACCESS_KEY_ID=ACCESS_KEY, AWS_SECRET_ACCESS_KEY=SECRET_KEY)
    settings = Settings(moves=args.moves, idle=args.idle, watchers=args.watchers, client=args.client)
    found: list[list[Figures]] = []
    for case in args.cases:
        with tempfile.TemporaryDirectory() as scratch:
            found.append(compare(case, settings, Path(scratch), args.s3))
        print(table(*found[-1]), end="\n\n", flush=True)
    if args.json is not None:
        report.write_json(
            args.json,
            store="s3" if args.s3 else "folder",
            settings=asdict(settings),
            cases=[
                {
                    "servers": [each.to_json() for each in pair],
                    "verdicts": [asdict(each) for each in verdicts(*pair)],
                }
                for pair in found
            ],
        )
    sys.exit(not all(each.ok is not False for pair in found for each in verdicts(*pair)))


if __name__ == "__main__":
    main()
