"""``python -m benchmarks.first_push``: what the first pushes of a model cost next to a later one, with and without
`weighbridge warm` before.

A service that has never seen the model is pushed to ten times, several times over, and each push waits until the
version before is durable: a slow disk under the stores makes all of that long. `held` is how long a push kept its
trainer, `ready` the time from its first byte until the version could be pulled. Memory that the machine, or its own
host, has not used before takes longer than any of that.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks import processes
from benchmarks.cases import Case, run_case
from benchmarks.client_process import MODEL
from weighbridge import TrainerClient


def main() -> None:
    """Measure, print and write."""
    options = argparse.ArgumentParser(prog="python -m benchmarks.first_push", description=__doc__)
    options.add_argument("--gb", type=float, default=0.5, help="size of the model (default 0.5)")
    options.add_argument("--clients", type=int, nargs="+", default=[1, 2], help="numbers of ranks (default 1 2)")
    options.add_argument("--services", type=int, default=3, help="how many services are begun (default 3)")
    options.add_argument("--lane", default="local", choices=("local", "grpc"))
    options.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    options.add_argument("--pushes", type=int, default=10, help="pushes to each of them (default 10)")
    options.add_argument("--folder", type=Path, help="where stores are made (default: a temporary folder)")
    options.add_argument("--json", type=Path, metavar="FILE", help="write all figures to this file")
    args = options.parse_args()
    found = []
    print("clients  memory      push      held s   /last   ready s   /last")
    for clients in args.clients:
        for warm in (True, False):
            case = Case(args.gb, clients, "contiguous", args.lane, args.device)
            runs = [_seconds(case, args.pushes, args.folder, warm=warm) for _ in range(args.services)]
            found.append({"clients": clients, "warm": warm, "runs": runs})
            for number in sorted({0, 1, 2, args.pushes - 1}):
                cells = [_cell(runs, what, number) for what in ("held", "ready")]
                print(
                    f"{clients:7}  {'made ahead' if warm else 'new':10}  {number + 1:4}  {'  '.join(cells)}",
                    flush=True,
                )
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=1), encoding="utf-8")


def _seconds(case: Case, pushes: int, parent: Path | None, *, warm: bool) -> Mapping[str, list[float]]:
    """Seconds of each push to a new service."""

    def before(admin: TrainerClient) -> None:
        if warm:
            admin.warm(MODEL)

    with tempfile.TemporaryDirectory(dir=parent, prefix="weighbridge-bench-") as folder:
        figures = run_case(case, pushes, Path(folder).resolve(), warm_up=0, before=before, pulls=False)
    return {what: figures.seconds[what] for what in ("held", "ready")}


def _cell(runs: Sequence[Mapping[str, list[float]]], what: str, number: int) -> str:
    """Medians over the services: seconds, and times those of the last push."""
    seconds = statistics.median(run[what][number] for run in runs)
    ratio = statistics.median(run[what][number] / run[what][-1] for run in runs)
    return f"{seconds:8.3f}  {ratio:6.2f}"


if __name__ == "__main__":
    processes.end_tidily()
    main()
