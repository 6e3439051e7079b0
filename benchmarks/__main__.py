"""``python -m benchmarks``: what moving weights costs, next to what it must cost at least, in one run.

Clients are processes that start together. Every figure is measured in turn with its yardsticks, one warm copy of the
same shards and the same bytes through bare grpcio, and given as medians of rounds and medians of the rounds' ratios:
machines are shared, so single times mean little. docs/benchmarks.md says what the columns are.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
from pathlib import Path

from benchmarks import against, processes, report
from benchmarks.cases import Case, Figures, run_in_turn
from benchmarks.clients import ClientError
from benchmarks.cuts import CUTS
from benchmarks.plot import plot_cases
from weighbridge._lane.local_lane import GRPC, LOCAL


def parser() -> argparse.ArgumentParser:
    """The options."""
    options = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    options.add_argument("--gb", type=float, nargs="+", default=[0.5], help="sizes of models (default 0.5)")
    options.add_argument(
        "--clients", type=int, nargs="+", default=[1, 2], choices=range(1, 9), metavar="N",
        help="numbers of trainer ranks and engines, up to 8 (default 1 2)",
    )  # fmt: skip
    options.add_argument(
        "--cuts", nargs="+", default=list(CUTS), choices=CUTS, help="how shards are cut (default: all)"
    )
    options.add_argument(
        "--lane",
        nargs="+",
        default=[GRPC, LOCAL],
        choices=(GRPC, LOCAL),
        help="lanes for bytes (default: both)",
    )
    options.add_argument(
        "--device", default="cpu", choices=("cpu", "cuda"), help="where clients' tensors lie (default cpu)"
    )
    options.add_argument(
        "--against",
        type=Path,
        metavar="DIR",
        help="measure in turn with another checkout, and print the ratios",
    )
    options.add_argument("--rounds", type=int, default=5, help="rounds that count (default 5)")
    options.add_argument("--folder", type=Path, help="where stores are made (default: a temporary folder)")
    options.add_argument("--json", type=Path, metavar="FILE", help="write all figures to this file")
    options.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the ratios")
    return options


def main(arguments: list[str] | None = None) -> int:
    """Measure, print and write; 1 if a case failed or bytes were not the same."""
    args = parser().parse_args(arguments)
    checkouts = [None] if args.against is None else [None, args.against.resolve()]
    ours: list[Figures] = []
    theirs: list[Figures] = []
    compared: list[against.Compared] = []
    failures: list[str] = []
    cases = itertools.product(args.gb, args.clients, args.cuts, args.lane, [args.device])
    for case in itertools.starmap(Case, cases):
        print(f"{case.gigabytes:g} GB, {case.clients} clients, {case.cut}, {case.lane} ...", file=sys.stderr)
        try:
            with tempfile.TemporaryDirectory(dir=args.folder, prefix="weighbridge-bench-") as name:
                figures, *others = run_in_turn(case, args.rounds, Path(name).resolve(), checkouts)
        except (ClientError, OSError, RuntimeError) as error:
            failures.append(f"{case}: {error}")
        else:
            ours.append(figures)
            theirs += others
            compared += (against.Compared(figures, other) for other in others)
        if args.json is not None:  # after each case: many take long
            report.write_json(
                args.json,
                cases=[figures.to_json() for figures in ours],
                against=[each.to_json() for each in compared],
                failures=failures,
            )
    print(report.cases_table(ours))
    if compared:
        print(f"\n{args.against}:\n{report.cases_table(theirs)}\n\n{against.tables(compared)}")
    for failure in failures:
        print(failure)
    if args.plot is not None and ours:
        plot_cases(ours, args.plot)
    return int(bool(failures) or any(figures.verified is False for figures in (*ours, *theirs)))


if __name__ == "__main__":
    processes.end_tidily()
    sys.exit(main())
