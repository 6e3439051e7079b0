"""``python -m benchmarks.nodes``: a push of eight ranks to one service, next to the same push to two services, one on
each "node".

All take place on one machine, in turn, round by round. A node is a service with a socket of its own, and the half of
the ranks that push to it. Two services are compared with one to which the same bytes go by the same lanes: where
pipeline stages lie on nodes, all by shared memory; where every tensor lies on both nodes, half of them over gRPC, from
ranks that have no lane, as if on another machine. Ratios are medians of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import models, processes, report
from benchmarks.client_process import MODEL, ClientSpec
from benchmarks.clients import ClientError, Clients, clients
from benchmarks.cuts import NODES
from weighbridge import Retention, TrainerClient
from weighbridge._lane.local_lane import GRPC, LOCAL

FILES = 16
"""Number of files of the model."""
CUTS = {"stages": "one", "contiguous": "half away"}
"""Cuts of the model.

The value names the push to one service that has as many bytes by each lane as the push to two services.
"""
JUDGED = ("held", "ready")
GOAL = 1.2
_GRACE_SECONDS = 1.1
_WARM_UP = 3
"""Rounds that do not count: later ones find known layouts and memory that exists already."""


@dataclass
class Figures:
    """Measurements of one cut.

    Attributes:
        cut: one of `CUTS`.
        lane: the lane that clients asked for.
        ranks: number of trainer ranks.
        model_bytes: bytes of the model.
        nbytes: bytes of one push of all ranks, by the services that it went to: ``local``, by shared memory, and
            ``streamed``.
        seconds: by the services, one value for each round: ``held`` of the rank that was held longest, ``ready`` and
            ``durable`` from the first byte that was read until the last rank has received that the version is ready or
            durable, and ``cpu``, processor time of all ranks and services from the start of the push until it was
            durable.
    """

    cut: str
    lane: str
    ranks: int
    model_bytes: int = 0
    nbytes: dict[str, dict[str, int]] = field(default_factory=dict)
    seconds: dict[str, dict[str, list[float]]] = field(default_factory=dict)

    def note(self, services: str, name: str, seconds: float) -> None:
        """Add a round's time."""
        self.seconds.setdefault(services, {}).setdefault(name, []).append(seconds)

    def ratio(self, name: str, to: str) -> float:
        """Two services to another way: the median of the rounds' ratios."""
        pairs = zip(self.seconds["two"][name], self.seconds[to][name], strict=True)
        return statistics.median(two / other for two, other in pairs)

    @property
    def others(self) -> list[str]:
        """Pushes that the push to two services was compared with."""
        return [services for services in self.seconds if services != "two"]

    @property
    def names(self) -> list[str]:
        """Names of the times."""
        return list(self.seconds["two"])

    @property
    def verdict(self) -> dict[str, float]:
        """Judged ratios to the push with the same bytes by the same lanes."""
        return {name: self.ratio(name, CUTS[self.cut]) for name in JUDGED}

    def to_json(self) -> dict[str, Any]:
        """Everything as JSON values, each round by itself."""
        ratios = {to: {name: self.ratio(name, to) for name in self.names} for to in self.others}
        return {**asdict(self), "ratios": ratios, "verdict": self.verdict, "goal": GOAL}


def run(
    gigabytes: float, ranks: int, cut: str, lane: str, rounds: int, folder: Path, warm_up: int = _WARM_UP
) -> Figures:
    """Measure one cut by one lane.

    Args:
        gigabytes: about how large the model is.
        ranks: number of ranks that push; half of them on each node.
        cut: one of `CUTS`.
        lane: ``auto`` or ``grpc``.
        rounds: number of rounds that count.
        folder: an empty folder for the stores.
        warm_up: rounds before these, which do not.

    Raises:
        ClientError: a client failed.
    """
    figures = Figures(cut, lane, ranks)
    described = models.config_of(gigabytes)
    layers = int(str(described["num_hidden_layers"]))
    described["num_hidden_layers"] = layers + layers % NODES  # as many on each pipeline stage
    config = models.write_config(described, folder / "hf")
    specs = models.hugging_face_specs(config)
    models.write_specs(specs, folder / "specs.json")
    total = figures.model_bytes = sum(spec.nbytes for spec in specs)
    program = ("-m", "benchmarks.many_files", str(total // FILES))
    with processes.raw_grpc_server() as raw, ExitStack() as stack:

        def group(name: str, services: int, away: int) -> _Group:
            options = ("--advertise", "127.0.0.1:0") if services > 1 else ()
            running = [
                stack.enter_context(processes.service(folder / name, total // services, *options, program=program))
                for _ in range(services)
            ]
            admin = stack.enter_context(TrainerClient(running[0].grpc))
            admin.register_model(MODEL, folder / "hf")
            admin.set_retention(MODEL, Retention(keep_last=1))
            spec = ClientSpec("trainer", "", raw, str(folder / "specs.json"), cut, lane, ranks, 0)
            servers = [running[rank * services // ranks].grpc for rank in range(ranks)]
            lanes = [lane] * (ranks - away) + [GRPC] * away
            trainers = stack.enter_context(clients(spec, servers, lanes))
            return _Group(trainers, admin, (*trainers.pids, *(each.pid for each in running)))

        groups = {"one": group("one", 1, 0), "two": group("two", NODES, 0)}
        if CUTS[cut] == "half away":
            groups["half away"] = group("half", 1, ranks // 2)
        for number in range(warm_up + rounds):
            order = list(groups) if number % 2 else list(groups)[::-1]
            for name in order:
                cpu, pushed = groups[name].push(number + 1)
                if number >= warm_up:
                    _note(figures, name, pushed, cpu)
    return figures


@dataclass(frozen=True)
class _Group:
    """One way to push, with its processes.

    Attributes:
        trainers: the ranks.
        admin: a client of a service.
        pids: process IDs of ranks and services.
    """

    trainers: Clients
    admin: TrainerClient
    pids: tuple[int, ...]

    def push(self, step: int) -> tuple[float, list[dict[str, Any]]]:
        """Push a step; processor seconds, and what the ranks say."""
        before = sum(map(processes.cpu_seconds, self.pids))
        pushed = self.trainers.start("push", step=step)
        spent = sum(map(processes.cpu_seconds, self.pids)) - before
        _make_room(self.admin)
        return spent, pushed


def _note(figures: Figures, services: str, pushed: list[dict[str, Any]], cpu: float) -> None:
    first_byte = min(each["first_byte"] for each in pushed)
    figures.note(services, "held", max(each["held"] for each in pushed))
    figures.note(services, "ready", max(each["ready"] for each in pushed) - first_byte)
    figures.note(services, "durable", max(each["durable"] for each in pushed) - first_byte)
    figures.note(services, "cpu", cpu)
    local = sum(each["local_bytes"] for each in pushed)
    streamed = sum(each["bytes"] for each in pushed) - local
    figures.nbytes[services] = {"local": local, "streamed": streamed}


def _make_room(admin: TrainerClient) -> None:
    """Delete the version before for good, so that the disk holds two at most."""
    admin.collect(MODEL)
    time.sleep(_GRACE_SECONDS)
    admin.collect(MODEL)


def table(found: list[Figures]) -> str:
    """Times and ratios for people."""
    rows = []
    for figures in found:
        for to in figures.others:
            judged = to == CUTS[figures.cut]
            for name in figures.names:
                one, two = (statistics.median(figures.seconds[each][name]) for each in (to, "two"))
                ratio = figures.ratio(name, to)
                meets = ("yes" if ratio <= GOAL else "no") if judged and name in JUDGED else ""
                shares = (f"{_local_share(figures.nbytes[each]):.0%}" for each in (to, "two"))
                what = f"{figures.cut}, {figures.lane}, to {to}: {name}"
                rows.append([what, *shares, report.seconds(one), report.seconds(two), f"{ratio:.2f}", meets])
    headings = ["", "by shared memory", "of two", "one service s", "two s", "ratio", f"<= {GOAL}"]
    return report.table(headings, rows)


def _local_share(nbytes: dict[str, int]) -> float:
    return nbytes["local"] / max(sum(nbytes.values()), 1)


def verdict(found: list[Figures]) -> str:
    """One line: whether the goal is met, and by what."""
    said = [f"{each.cut} {name} {ratio:.2f}" for each in found for name, ratio in each.verdict.items()]
    met = all(ratio <= GOAL for each in found for ratio in each.verdict.values())
    return f"goal of {GOAL} {'met' if met else 'missed'}: {', '.join(said)}"


def main(arguments: list[str] | None = None) -> int:
    """Measure, print and write; 1 if something failed."""
    options = argparse.ArgumentParser(prog="python -m benchmarks.nodes", description=__doc__)
    options.add_argument("--gb", type=float, default=0.5, help="size of the model (default 0.5)")
    options.add_argument("--ranks", type=int, default=8, choices=(2, 4, 8), help="trainer ranks (default 8)")
    options.add_argument("--cuts", nargs="+", default=["stages"], choices=CUTS, help="(default stages)")
    options.add_argument("--lane", default="auto", choices=("auto", GRPC, LOCAL), help="(default auto)")
    options.add_argument("--rounds", type=int, default=5, help="rounds that count (default 5)")
    options.add_argument("--folder", type=Path, help="where stores are made (default: a temporary folder)")
    options.add_argument("--json", type=Path, metavar="FILE", help="write all figures to this file")
    args = options.parse_args(arguments)
    found: list[Figures] = []
    failures: list[str] = []
    for cut in args.cuts:
        try:
            with tempfile.TemporaryDirectory(dir=args.folder, prefix="weighbridge-bench-") as name:
                found.append(run(args.gb, args.ranks, cut, args.lane, args.rounds, Path(name)))
        except (ClientError, OSError, RuntimeError) as error:
            failures.append(f"{cut}: {error}")
    print(table(found))
    print(verdict(found))
    for failure in failures:
        print(failure)
    if args.json is not None:
        report.write_json(args.json, nodes=[figures.to_json() for figures in found], failures=failures)
    return int(bool(failures))


if __name__ == "__main__":
    processes.end_tidily()
    sys.exit(main())
