"""``python -m benchmarks.calls --against DIR``: times of small calls, as ratios to those of another checkout.

Each checkout has its own service and its own client (`benchmarks.calls_client`). In each round they take turns for each
kind of call, every few calls. The last kind also includes a watch: it lasts until a watch of the same client has
received the moved ref. Calls are made one after the other over gRPC on loopback. The processor time is that of client
and service together.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks import processes, report
from benchmarks.against import Ratio
from tests.support.raw_clients import TinyModel, tiny_folder
from weighbridge import TrainerClient

MODEL = "bench/calls"
_CLIENT = Path(__file__).with_name("calls_client.py")
_WARM_UP = 2
_BLOCK = 4
"""Number of calls of one side before it is the other's turn, because the speed of a shared machine changes within a
second. It is even: calls that move a ref alternate between two versions, also from one block to the next.
"""


@dataclass(frozen=True)
class Took:
    """Seconds of one call, and seconds of processor time in the client and the service."""

    seconds: float
    processor: float

    @staticmethod
    def mean(found: Sequence[Took]) -> Took:
        """The mean of several."""
        return Took(
            statistics.fmean(each.seconds for each in found), statistics.fmean(each.processor for each in found)
        )


@dataclass(frozen=True)
class Side:
    """A client of a service, both of one checkout, and the names of the calls that it can time."""

    client: subprocess.Popen[str]
    service_pid: int
    names: tuple[str, ...]

    def time(self, name: str, count: int) -> Took:
        """Make a call ``count`` times."""
        assert self.client.stdin is not None
        before = self._processor_seconds()
        self.client.stdin.write(f"{count} {name}\n")
        self.client.stdin.flush()
        seconds = float(processes.first_line(self.client))
        return Took(seconds, (self._processor_seconds() - before) / count)

    def _processor_seconds(self) -> float:
        return sum(map(processes.processor_seconds, (self.client.pid, self.service_pid)))


@contextmanager
def opened(folder: Path, model: TinyModel, checkout: Path | None) -> Iterator[Side]:
    """A side whose service has two versions of a model; the checkout None is that of this process."""
    nbytes = sum(array.nbytes for array in model.arrays.values())
    with ExitStack() as stack:
        service = stack.enter_context(processes.service(folder, nbytes, checkout=checkout))
        with TrainerClient(service.grpc) as trainer:
            trainer.register_files(MODEL, model.files)
            for step in (1, 2):
                trainer.push_folder(MODEL, model.folder, step=step).wait(timeout=60)
        script = processes.python(str(_CLIENT), service.grpc, MODEL, checkout=checkout)
        client = stack.enter_context(script)
        yield Side(client, service.pid, tuple(json.loads(processes.first_line(client))))


def measure(checkouts: Sequence[Path | None], rounds: int, count: int) -> list[list[dict[str, Took]]]:
    """Calls by name of each round, for each checkout; a different one begins in each round."""
    with tempfile.TemporaryDirectory(prefix="weighbridge-bench-") as name, ExitStack() as stack:
        root = Path(name)
        model = tiny_folder(root / "hf")
        sides = []
        for number, checkout in enumerate(checkouts):
            (root / str(number)).mkdir()
            sides.append(stack.enter_context(opened(root / str(number), model, checkout)))
        found: list[list[dict[str, Took]]] = [[] for _ in sides]
        for number in range(_WARM_UP + rounds):
            order = sorted(range(len(sides)), reverse=bool(number % 2))
            timed: list[dict[str, Took]] = [{} for _ in sides]
            for kind in sides[0].names:
                blocks: list[list[Took]] = [[] for _ in sides]
                for _ in range(max(1, count // _BLOCK)):
                    for index in order:
                        blocks[index].append(sides[index].time(kind, min(count, _BLOCK)))
                for index in order:
                    timed[index][kind] = Took.mean(blocks[index])
            for index in order:
                found[index].append(timed[index])
        return [each[_WARM_UP:] for each in found]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    options = argparse.ArgumentParser(prog="python -m benchmarks.calls", description=__doc__)
    options.add_argument("--against", type=Path, metavar="DIR", help="the other checkout")
    options.add_argument("--rounds", type=int, default=15, help="rounds that count (default 15)")
    options.add_argument("--calls", type=int, default=200, help="calls of each kind in a round (default 200)")
    options.add_argument("--json", type=Path, metavar="FILE", help="write all figures to this file")
    args = options.parse_args(arguments)
    processes.end_tidily()
    checkouts = [None] if args.against is None else [None, args.against.resolve()]
    ours, *others = measure(checkouts, args.rounds, args.calls)
    rows = []
    for name in ours[0]:
        row = [name, f"{1000 * statistics.median(each[name].seconds for each in ours):.2f}"]
        for theirs in others:
            pairs = [(mine[name], other[name]) for mine, other in zip(ours, theirs, strict=True)]
            row.append(str(Ratio.of([mine.seconds / other.seconds for mine, other in pairs])))
            row.append(str(Ratio.of([mine.processor / other.processor for mine, other in pairs])))
        rows.append(row)
    print(report.table(["call", "ms", *(["ours/theirs", "processor time"] if others else [])], rows))
    if args.json is not None:
        report.write_json(
            args.json,
            rounds=[[{name: asdict(took) for name, took in each.items()} for each in side] for side in (ours, *others)],
        )


if __name__ == "__main__":
    main(sys.argv[1:])
