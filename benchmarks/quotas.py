"""``python -m benchmarks.quotas``: what an identity at its limits that hammers the service takes from another one.

One service on loopback holds a model of random bf16 weights. Identity B pulls all of it over gRPC, by itself, and while
clients of identity A, which has a limit of streams and of bytes a second, pull as often as they can, in processes of
their own. Both in every round, one after the other; the goal is that B keeps 0.8 of its rate.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from benchmarks import models, processes, report
from benchmarks.client_process import MODEL
from benchmarks.tls import Place
from weighbridge import Credentials, EngineClient, WeighbridgeError
from weighbridge._core.boxes import Box
from weighbridge._core.layouts import Layout, Shard
from weighbridge_service.access import tokens

GOAL = 0.8
_HAMMERS = 4
_SETTLE_SECONDS = 1.0
"""Seconds for which A's clients pull before B is timed: a second's worth of bytes may come at once."""


def hammer(address: str, token: str) -> None:
    """Pull again and again, ignoring errors, until the process is ended; prints a line at the start.

    Its clients would be on other machines: they leave the processors to the service and to B.
    """
    os.nice(19)
    print("begun", flush=True)
    with EngineClient(address, lane="grpc", retry_seconds=0, credentials=Credentials(token=token)) as engine:
        while True:
            with suppress(WeighbridgeError):
                for _ in engine.pull(MODEL):
                    pass


def main() -> None:
    """Measure and print; exits with 1 if the goal is missed."""
    parser = argparse.ArgumentParser(prog="benchmarks.quotas", description=__doc__)
    parser.add_argument("--gb", type=float, default=0.25, help="size of the model (default 0.25)")
    parser.add_argument("--rounds", type=int, default=7, help="counted rounds (default 7)")
    parser.add_argument("--rate", default="10MB", help="bytes a second of the other identity (default 10MB)")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    args = parser.parse_args()
    processes.end_tidily()
    shown = {name: tokens.new_token() for name in ("a", "b")}
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        folder = Path(scratch)
        policy = folder / "policy.toml"
        policy.write_text(
            _identity("a", shown["a"], f'limits = {{streams = 2, bytes_per_second = "{args.rate}"}}')
            + _identity("b", shown["b"], "")
        )
        specs = models.hugging_face_specs(models.write_config(models.config_of(args.gb), folder / "hf"))
        layout = Layout.stream(specs, [Shard(spec.name, Box.whole(spec.shape)) for spec in specs])
        held = models.RandomBits(each.nbytes for each in layout.placements).of_layout(layout)
        (folder / "service").mkdir()
        running = stack.enter_context(processes.service(folder / "service", layout.nbytes, "--policy", str(policy)))
        place = Place(running.grpc, Credentials(token=shown["b"]), layout, held)
        stack.callback(place.trainer.close)
        stack.callback(place.engine.close)
        place.trainer.register_model(MODEL, folder / "hf")
        place.push(1)
        seconds: dict[str, list[float]] = {"alone": [], "beside A": []}
        for number in range(args.rounds + 1):
            alone = place.pull()
            with _hammered(running.grpc, shown["a"]):
                time.sleep(_SETTLE_SECONDS)
                beside = place.pull()
            if number:
                seconds["alone"].append(alone)
                seconds["beside A"].append(beside)
    kept = [alone / beside for alone, beside in zip(*seconds.values(), strict=True)]
    print(
        f"{layout.nbytes / 1e9:.2f} GB, {args.rounds} rounds, medians; A has 2 streams and "
        f"{args.rate}/s, and {_HAMMERS} clients"
    )
    rows = [[name, f"{statistics.median(each):.3f}"] for name, each in seconds.items()]
    print(report.table(["B pulls", "s"], rows))
    ratio = statistics.median(kept)
    print(f"B keeps {ratio:.2f} of its rate; the goal of {GOAL:g} is {'met' if ratio >= GOAL else 'missed'}")
    if args.json is not None:
        report.write_json(args.json, bytes=layout.nbytes, seconds=seconds, kept=kept)
    if ratio < GOAL:
        raise SystemExit(1)


def _identity(name: str, token: str, limits: str) -> str:
    proof = f'tokens = ["{tokens.digest(token)}"]'
    return f'[[identity]]\nname = "{name}"\nmay = ["push", "pull"]\n{proof}\n{limits}\n'


@contextmanager
def _hammered(address: str, token: str) -> Iterator[None]:
    with ExitStack() as stack:
        for _ in range(_HAMMERS):
            code = "import sys; from benchmarks.quotas import hammer; hammer(*sys.argv[1:])"
            process = stack.enter_context(processes.python("-c", code, address, token))
            processes.first_line(process)
        yield


if __name__ == "__main__":
    main()
