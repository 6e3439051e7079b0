"""``python -m benchmarks.nodes``: a push of eight ranks to one service, next to the same push to two services, one on each "node".

Both take place on one machine, in turn, round by round. A node is a service with a socket of its own, and the half of the ranks that push
to it. Ratios are medians of the rounds' ratios: two services to one.
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
from weighbridge.local_lane import GRPC, LOCAL

FILES = 16
"""In which the model is laid out."""
CUTS = ("stages", "contiguous")
GOAL = 1.2
_GRACE_SECONDS = 1.1
_WARM_UP = 3
"""Rounds that do not count: until layouts are known and all memory is there."""


@dataclass
class Figures:
    """What was measured.

    Attributes:
        cut: one of `CUTS`.
        lane: the lane that clients asked for.
        ranks: trainer ranks.
        nbytes: of the model; ``local`` and ``streamed`` of one push to two services, of all ranks together.
        seconds: one value for each round: ``held`` of the rank that was held longest, ``ready`` from the first byte that was read
            until the last rank has heard that the version is ready, ``durable`` likewise; of ``one`` service and of ``two``.
    """

    cut: str
    lane: str
    ranks: int
    nbytes: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, dict[str, list[float]]] = field(default_factory=dict)

    def note(self, services: str, name: str, seconds: float) -> None:
        """Add a round's time."""
        self.seconds.setdefault(services, {}).setdefault(name, []).append(seconds)

    def ratio(self, name: str) -> float:
        """Two services to one: the median of the rounds' ratios."""
        pairs = zip(self.seconds["two"][name], self.seconds["one"][name], strict=True)
        return statistics.median(two / one for two, one in pairs)

    @property
    def names(self) -> list[str]:
        """Names of the times."""
        return list(self.seconds["one"])

    def to_json(self) -> dict[str, Any]:
        """Everything as JSON values, each round by itself."""
        return {**asdict(self), "ratios": {name: self.ratio(name) for name in self.names}, "goal": GOAL}


def run(gigabytes: float, ranks: int, cut: str, lane: str, rounds: int, folder: Path) -> Figures:
    """Measure one cut by one lane.

    Args:
        gigabytes: about how large the model is.
        ranks: how many push; half of them on each node.
        cut: one of `CUTS`.
        lane: ``auto`` or ``grpc``.
        rounds: how many count.
        folder: an empty folder for the stores.

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
    total = figures.nbytes["model"] = sum(spec.nbytes for spec in specs)
    program = ("-m", "benchmarks.many_files", str(total // FILES))
    with processes.raw_grpc_server() as raw, ExitStack() as stack:

        def group(name: str, services: int) -> tuple[Clients, TrainerClient]:
            options = ("--advertise", "127.0.0.1:0") if services > 1 else ()
            running = [
                stack.enter_context(
                    processes.service(folder / name, total // services, *options, program=program)
                )
                for _ in range(services)
            ]
            admin = stack.enter_context(TrainerClient(running[0].grpc))
            admin.register_model(MODEL, folder / "hf")
            admin.set_retention(MODEL, Retention(keep_last=1))
            spec = ClientSpec("trainer", "", raw, str(folder / "specs.json"), cut, lane, ranks, 0)
            servers = [running[rank * services // ranks].grpc for rank in range(ranks)]
            return stack.enter_context(clients(spec, servers)), admin

        groups = {"one": group("one", 1), "two": group("two", NODES)}
        for number in range(_WARM_UP + rounds):
            order = list(groups) if number % 2 else list(groups)[::-1]
            for name in order:
                trainers, admin = groups[name]
                pushed = trainers.start("push", step=number + 1)
                _make_room(admin)
                if number >= _WARM_UP:
                    _note(figures, name, pushed)
    return figures


def _note(figures: Figures, services: str, pushed: list[dict[str, Any]]) -> None:
    first_byte = min(each["first_byte"] for each in pushed)
    figures.note(services, "held", max(each["held"] for each in pushed))
    figures.note(services, "ready", max(each["ready"] for each in pushed) - first_byte)
    figures.note(services, "durable", max(each["durable"] for each in pushed) - first_byte)
    if services == "two":
        local = sum(each["local_bytes"] for each in pushed)
        figures.nbytes |= {"local": local, "streamed": sum(each["bytes"] for each in pushed) - local}


def _make_room(admin: TrainerClient) -> None:
    """Delete the version before for good, so that the disk holds two at most."""
    admin.collect(MODEL)
    time.sleep(_GRACE_SECONDS)
    admin.collect(MODEL)


def table(found: list[Figures]) -> str:
    """Times and ratios for people."""
    rows = []
    for figures in found:
        share = figures.nbytes["local"] / max(figures.nbytes["local"] + figures.nbytes["streamed"], 1)
        for name in figures.names:
            one, two = (statistics.median(figures.seconds[each][name]) for each in ("one", "two"))
            what = f"{figures.cut}, {figures.lane}, {share:.0%} by shared memory: {name}"
            rows.append([what, report.seconds(one), report.seconds(two), f"{figures.ratio(name):.2f}"])
    return report.table(["", "one service s", "two s", "ratio"], rows)


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
    for failure in failures:
        print(failure)
    if args.json is not None:
        report.write_json(args.json, nodes=[figures.to_json() for figures in found], failures=failures)
    return int(bool(failures))


if __name__ == "__main__":
    processes.end_tidily()
    sys.exit(main())
