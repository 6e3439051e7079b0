"""``python -m benchmarks.ranks``: how long a thousand ranks take to push one version, and what that costs the service.

The ranks are played by a few processes (`benchmarks.rank_process`). Their shards are tiny, so what is measured is what
each rank costs: opening, declaring, one stream, sealing. The first push waits until all ranks have declared and makes
the plan; later ones find it made.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks import models, processes, report
from benchmarks.memory import resident
from benchmarks.rank_process import MODEL, Push, RankSpec
from weighbridge import TrainerClient

_GIGABYTES = 0.004
_HEAD_START_SECONDS = 0.2
_PAUSE_SECONDS = 0.02
_MODEL_BYTES = 256 << 20
"""For which the service is given memory: more than the model has, as ranks need some, too."""


@dataclass(frozen=True)
class Pushed:
    """Measurements of one push.

    Attributes:
        declared, delivered, ready: seconds until the last rank had declared, had delivered, and the version was ready.
        threads: most threads that the service had.
        memory: most bytes that the service had resident.
    """

    declared: float
    delivered: float
    ready: float
    threads: int
    memory: int


class Peaks:
    """The most threads and memory that a process has while the context is open.

    Attributes:
        threads: threads.
        memory: resident bytes.
    """

    def __init__(self, pid: int) -> None:
        self.threads = self.memory = 0
        self._pid = pid
        self._over = threading.Event()
        self._watching = threading.Thread(target=self._watch, name="peaks")

    def _watch(self) -> None:
        while True:
            self.threads = max(self.threads, sum(1 for _ in Path(f"/proc/{self._pid}/task").iterdir()))
            self.memory = max(self.memory, resident(self._pid))
            if self._over.wait(_PAUSE_SECONDS):
                return

    def __enter__(self) -> Self:
        self._watching.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._watching.join()


def push_once(running: Sequence[subprocess.Popen[str]], pid: int, step: int) -> Pushed:
    """Let all ranks push a step.

    Raises:
        RuntimeError: a rank failed, or its process has died.
    """
    push = Push(step, time.time() + _HEAD_START_SECONDS)
    with Peaks(pid) as peaks:
        for process in running:
            assert process.stdin is not None
            process.stdin.write(json.dumps(asdict(push)) + "\n")
            process.stdin.flush()
        answers: list[dict[str, Any]] = [json.loads(processes.first_line(each)) for each in running]
    failed = [answer["error"] for answer in answers if "error" in answer]
    if failed:
        raise RuntimeError("; ".join(failed))
    last = {name: max(answer[name] for answer in answers) - push.at for name in answers[0]}
    return Pushed(last["declared"], last["delivered"], last["ready"], peaks.threads, peaks.memory)


def measure(folder: Path, ranks: int, played_by: int, pushes: int, lane: str) -> tuple[list[Pushed], int]:
    """Push so many steps; returns the measurements of each, and the service's resident bytes before."""
    models.write_model(_GIGABYTES, folder / "hf")
    bounds = [ranks * number // played_by for number in range(played_by + 1)]
    with ExitStack() as stack:
        service = stack.enter_context(processes.service(folder, _MODEL_BYTES))
        with TrainerClient(service.grpc) as trainer:
            trainer.register_model(MODEL, folder / "hf")
        running = []
        for first, end in pairwise(bounds):
            spec = RankSpec(service.grpc, str(folder / "hf" / "specs.json"), lane, first, end - first, ranks)
            arguments = ("-m", "benchmarks.rank_process", json.dumps(asdict(spec)))
            running.append(stack.enter_context(processes.python(*arguments)))
        for process in running:
            processes.first_line(process)
        before = resident(service.pid)
        return [push_once(running, service.pid, step) for step in range(1, pushes + 1)], before


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="benchmarks.ranks", description=__doc__)
    parser.add_argument("--ranks", type=int, default=1024, help="trainer ranks (default 1024)")
    parser.add_argument("--processes", type=int, default=8, help="processes that play them (default 8)")
    parser.add_argument("--pushes", type=int, default=2, help="pushes, one after the other (default 2)")
    parser.add_argument("--lane", choices=("grpc", "local"), default="grpc", help="of the ranks (default grpc)")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    args = parser.parse_args(argv)
    processes.end_tidily()
    with tempfile.TemporaryDirectory() as scratch:
        pushed, before = measure(Path(scratch), args.ranks, args.processes, args.pushes, args.lane)
    print(f"{args.ranks} ranks in {args.processes} processes, lane {args.lane}")
    print(
        report.table(
            ["push", "declared s", "delivered s", "ready s", "threads", "memory beyond start MiB"],
            (
                [
                    str(number),
                    *(f"{seconds:.2f}" for seconds in (each.declared, each.delivered, each.ready)),
                    str(each.threads),
                    f"{(each.memory - before) / 2**20:.0f}",
                ]
                for number, each in enumerate(pushed, 1)
            ),
        )
    )
    if args.json is not None:
        report.write_json(
            args.json,
            ranks=args.ranks,
            lane=args.lane,
            before=before,
            pushes=[asdict(each) for each in pushed],
        )


if __name__ == "__main__":
    main()
