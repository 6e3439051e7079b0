"""``python -m benchmarks.calls --against DIR``: times of small calls, as ratios to those of another checkout.

Each checkout has its own service and its own client (`benchmarks.calls_client`). In each round they take turns for each
kind of call. The last kind also includes a watch: it lasts until a watch of the same client has received the moved ref.
Calls are made one after the other over gRPC on loopback.
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
from dataclasses import dataclass
from pathlib import Path

from benchmarks import processes, report
from benchmarks.against import Ratio
from tests.support.raw_clients import TinyModel, tiny_folder
from weighbridge import TrainerClient

MODEL = "bench/calls"
_CLIENT = Path(__file__).with_name("calls_client.py")
_WARM_UP = 2


@dataclass(frozen=True)
class Side:
    """A client of a service, both of one checkout, and the names of the calls that it can time."""

    client: subprocess.Popen[str]
    names: tuple[str, ...]

    def seconds(self, name: str, count: int) -> float:
        """Seconds of a call, made ``count`` times."""
        assert self.client.stdin is not None
        self.client.stdin.write(f"{count} {name}\n")
        self.client.stdin.flush()
        return float(processes.first_line(self.client))


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
        yield Side(client, tuple(json.loads(processes.first_line(client))))


def measure(checkouts: Sequence[Path | None], rounds: int, count: int) -> list[list[dict[str, float]]]:
    """Seconds of a call by name of each round, for each checkout; a different one begins in each round."""
    with tempfile.TemporaryDirectory(prefix="weighbridge-bench-") as name, ExitStack() as stack:
        root = Path(name)
        model = tiny_folder(root / "hf")
        sides = []
        for number, checkout in enumerate(checkouts):
            (root / str(number)).mkdir()
            sides.append(stack.enter_context(opened(root / str(number), model, checkout)))
        found: list[list[dict[str, float]]] = [[] for _ in sides]
        for number in range(_WARM_UP + rounds):
            order = sorted(range(len(sides)), reverse=bool(number % 2))
            timed: list[dict[str, float]] = [{} for _ in sides]
            for kind in sides[0].names:
                for index in order:
                    timed[index][kind] = sides[index].seconds(kind, count)
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
        row = [name, f"{1000 * statistics.median(each[name] for each in ours):.2f}"]
        for theirs in others:
            pairs = zip(ours, theirs, strict=True)
            row.append(str(Ratio.of([mine[name] / other[name] for mine, other in pairs])))
        rows.append(row)
    print(report.table(["call", "ms", *(["ours/theirs"] if others else [])], rows))
    if args.json is not None:
        report.write_json(args.json, rounds=[ours, *others])


if __name__ == "__main__":
    main(sys.argv[1:])
