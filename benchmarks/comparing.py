"""``python -m benchmarks.comparing``: Weighbridge next to what others use, in one run: from a trainer's shards to files
that others load.

In each round everything runs once, one after the other, each in processes of its own, which have warmed up. In a first
round, whose times do not count, memory is sampled. What the figures are: docs/benchmarks.md. A peer that fails or is
not installed is named, and the others go on.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import models, processes, report
from benchmarks.cases import Case, run_case
from benchmarks.clients import ClientError
from benchmarks.peers import BY_NAME, HUB_PEER, PEERS, Peer
from benchmarks.plot import plot_peers

_LIMIT_SECONDS = 900.0
_TINY_GIGABYTES = 0.004
_OURS = {
    # our figures: of which case's seconds, and what they begin with and end in
    "weighbridge push, held": ("held", "shards", "memory"),
    "weighbridge push, ready": ("ready", "shards", "hf image"),
    "weighbridge push, durable": ("durable", "shards", "hf files"),
    "weighbridge pull": ("pull", "hf image", "memory"),
}


@dataclass
class Series:
    """Results of one way of moving weights.

    Attributes:
        begins: input, as in `benchmarks.peers.Peer`.
        ends: kind of its output.
        seconds: one value for each round.
        memory: peak growth in bytes of its process and its children; for Weighbridge, of the client without the
            service.
        problems: why there are no seconds, or what is wrong with its files.
    """

    begins: str
    ends: str
    seconds: list[float] = field(default_factory=list)
    memory: int = 0
    problems: list[str] = field(default_factory=list)


class Comparison:
    """All that runs on one size of model.

    Args:
        gigabytes: about how large the model is.
        lane: which lane our clients take.
        only: names of the peers that run; all if empty.
        folder: folder for everything that is written.
    """

    def __init__(self, gigabytes: float, lane: str, only: list[str], folder: Path) -> None:
        self.case = Case(gigabytes, 1, "megatron", lane)
        self.folder = folder
        self.peers = [peer for peer in PEERS if not only or peer.name in only]
        self.with_hub = not only or HUB_PEER.name in only
        self.series = {name: Series(begins, ends) for name, (_, begins, ends) in _OURS.items()}
        models.write_model(gigabytes, folder / "model")
        models.write_model(_TINY_GIGABYTES, folder / "tiny-model")

    def round(self, *, sampled: bool) -> None:
        """Run everything once, for its times or with its memory sampled."""
        self._ours(sampled)
        for number, peer in enumerate(self.peers):
            self._peer(peer, sampled)
            read_later = {later.reads for later in self.peers[number + 1 :]}
            for name in {each.writes for each in PEERS if each.writes} - read_later:
                shutil.rmtree(self.folder / name, ignore_errors=True)

    def _ours(self, sampled: bool) -> None:
        def while_serving(service: processes.Service) -> None:
            if self.with_hub:
                self._peer(HUB_PEER, sampled, "--hub", service.http)
                shutil.rmtree(self.folder / HUB_PEER.writes, ignore_errors=True)
                shutil.rmtree(self.folder / "cache", ignore_errors=True)

        store = self.folder / "weighbridge"
        try:
            figures = run_case(self.case, 1, store, while_serving)
        except (ClientError, OSError, RuntimeError) as error:
            for name in _OURS:
                self.series[name].problems.append(str(error))
            return
        finally:
            shutil.rmtree(store, ignore_errors=True)
        for name, (seconds, begins, _) in _OURS.items():
            series = self.series[name]
            if sampled:
                series.memory = figures.memory["trainer" if begins == "shards" else "engine"]
            else:
                series.seconds += figures.seconds[seconds]

    def _peer(self, peer: Peer, sampled: bool, *options: str) -> None:
        series = self.series.setdefault(peer.name, Series(peer.begins, peer.ends))
        if peer.reads and not (self.folder / peer.reads).is_dir():
            series.problems.append(f"there is nothing in {peer.reads} to read")
            return
        print(f"  {peer.name}", file=sys.stderr)
        if peer.writes:
            shutil.rmtree(self.folder / peer.writes, ignore_errors=True)
        command = [sys.executable, "-m", "benchmarks.peer_process", peer.name, str(self.folder), *options]
        command += ["--memory"] if sampled else []
        environment = {**os.environ, "HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_OFFLINE": "0"}
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, env=environment,
                timeout=_LIMIT_SECONDS, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            series.problems.append(f"not done in {_LIMIT_SECONDS:g} s")
            return
        lines = done.stdout.splitlines()
        answer: dict[str, Any] = json.loads(lines[-1]) if lines else {"error": done.stderr[-300:]}
        if "error" in answer:
            series.problems.append(answer["error"])
            return
        if sampled:
            series.memory = answer["memory"]
        else:
            series.seconds.append(answer["seconds"])
        series.problems += answer["problems"][:3]

    def medians(self) -> dict[str, float]:
        """Median seconds by name, of what ran."""
        return {name: statistics.median(each.seconds) for name, each in self.series.items() if each.seconds}

    def ratio(self, name: str, ours: str) -> float | None:
        """Seconds of one way over those of one of ours: the median of the rounds' ratios; None if the rounds do not
        match.
        """
        theirs, mine = (self.series[each].seconds for each in (name, ours))
        if not theirs or len(theirs) != len(mine):
            return None
        return statistics.median(a / b for a, b in zip(theirs, mine, strict=True))

    def to_json(self) -> dict[str, Any]:
        """Everything as JSON values."""
        return {"gigabytes": self.case.gigabytes, "lane": self.case.lane} | {
            "series": {name: asdict(each) for name, each in self.series.items()},
            "medians": self.medians(),
        }

    def table(self) -> str:
        """The figures for people, and what went wrong."""
        medians = self.medians()
        yardsticks = ("weighbridge push, ready", "weighbridge push, durable", "weighbridge pull")
        rows = []
        for name, each in self.series.items():
            ratios = ["-" if (ratio := self.ratio(name, ours)) is None else f"{ratio:.2f}" for ours in yardsticks]
            spent = report.seconds(medians.get(name))
            rows.append([name, each.begins, each.ends, spent, *ratios, f"{each.memory / 1e6:.0f}"])
        headings = ["", "begins with", "ends in", "seconds", "/ready", "/durable", "/pull", "memory MB"]
        heading = f"{self.case.gigabytes:g} GB of bf16 weights, one rank, lane {self.case.lane}, medians"
        problems = [f"{name}: {text}" for name, each in self.series.items() for text in each.problems]
        return "\n".join([heading, report.table(headings, rows), *problems])


def main(arguments: list[str] | None = None) -> int:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.comparing", description=__doc__)
    parser.add_argument("--gb", type=float, nargs="+", default=[0.5], help="sizes of models (default 0.5)")
    parser.add_argument("--rounds", type=int, default=3, help="(default 3)")
    parser.add_argument("--lane", default="local", help="lane of our clients, local or grpc (default local)")
    parser.add_argument("--peers", nargs="+", default=[], choices=BY_NAME, metavar="NAME", help="only these")
    parser.add_argument("--folder", type=Path, help="where to write (default: a temporary folder)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to this file")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the times of the largest model")
    args = parser.parse_args(arguments)
    found = []
    for gigabytes in args.gb:
        with tempfile.TemporaryDirectory(dir=args.folder, prefix="weighbridge-bench-") as name:
            comparison = Comparison(gigabytes, args.lane, args.peers, Path(name))
            for number in range(args.rounds + 1):
                print(f"{gigabytes:g} GB, round {number} of {args.rounds} ...", file=sys.stderr)
                comparison.round(sampled=number == 0)
        print(comparison.table(), flush=True)
        found.append(comparison)
    if args.json is not None:
        report.write_json(args.json, comparisons=[each.to_json() for each in found])
    if args.plot is not None:
        largest = max(found, key=lambda each: each.case.gigabytes)
        plot_peers(largest.medians(), f"{largest.case.gigabytes:g} GB, {largest.case.lane}", args.plot)
    return 0


if __name__ == "__main__":
    processes.end_tidily()
    sys.exit(main())
