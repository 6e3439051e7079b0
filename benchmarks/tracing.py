"""``python -m benchmarks.tracing``: what traces add to a push and a pull, next to the same without them in one run.

Two services on loopback hold one model of random bf16 weights each; one of them, and its client, send their spans to a collector. Each client is
a process of its own. Every round pushes and pulls all of it at each, one after the other, and begins with the other one each time. The goal is
that a traced push takes at most 1.02 of the time of one that is not. On a machine with other work that time says more about the other work; the
processor time of all rounds, of services and clients with their exporters, says more about traces.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc

from benchmarks import models, processes, report
from benchmarks.client_process import MODEL
from benchmarks.tls import Place
from weighbridge import Credentials, TrainerClient
from weighbridge._core.boxes import Box
from weighbridge._core.layouts import Layout, Shard

GOAL = 1.02
_EXPORT = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
_PLAIN, _TRACED = "plain", "traced"


def client(address: str, folder: str, lane: str) -> None:
    """Push and pull as often as a line comes, with a line of both times."""
    layout = _layout(Path(folder))
    held = models.RandomBits(each.nbytes for each in layout.placements).of_layout(layout)
    place = Place(address, Credentials(), layout, held, lane=lane)
    print(os.getpid(), flush=True)
    for number, _ in enumerate(sys.stdin, start=1):
        print(place.push(number), place.pull(), flush=True)
    place.trainer.close()
    place.engine.close()


def main() -> None:
    """Measure and print; exits with 1 if the goal is missed."""
    parser = argparse.ArgumentParser(prog="benchmarks.tracing", description=__doc__)
    parser.add_argument("--gb", type=float, default=0.25, help="size of the model (default 0.25)")
    parser.add_argument("--rounds", type=int, default=21, help="counted rounds (default 21)")
    parser.add_argument(
        "--lane", choices=["grpc", "local"], default="grpc", help="how weights travel (default grpc)"
    )
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    args = parser.parse_args()
    processes.end_tidily()
    pushes: dict[str, list[float]] = {_PLAIN: [], _TRACED: []}
    pulls: dict[str, list[float]] = {_PLAIN: [], _TRACED: []}
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        folder = Path(scratch)
        models.write_config(models.config_of(args.gb), folder / "hf")
        layout = _layout(folder / "hf")
        endpoint, spans = stack.enter_context(_collector())
        clients, pids = {}, {}
        for name in (_PLAIN, _TRACED):
            where = folder / name
            where.mkdir()
            options = ("--otlp", endpoint) if name == _TRACED else ()
            service = stack.enter_context(processes.service(where, layout.nbytes, *options))
            with TrainerClient(service.grpc) as trainer:
                trainer.register_model(MODEL, folder / "hf")
            code = "import sys; from benchmarks.tracing import client; client(*sys.argv[1:])"
            environment = {
                **os.environ,
                **({"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint} if name == _TRACED else {}),
            }
            made = processes.python(
                "-c", code, service.grpc, str(folder / "hf"), args.lane, environment=environment
            )
            clients[name] = stack.enter_context(made)
            pids[name] = service.pid, int(processes.first_line(clients[name]))
        before = dict.fromkeys(clients, 0.0)
        for number in range(args.rounds + 2):
            if number == 2:  # memory of the first is new
                before = {name: sum(map(processes.processor_seconds, pids[name])) for name in clients}
            for name in (_PLAIN, _TRACED) if number % 2 else (_TRACED, _PLAIN):
                pushed, pulled = _round(clients[name])
                if number > 1:
                    pushes[name].append(pushed)
                    pulls[name].append(pulled)
        processor = {
            name: sum(map(processes.processor_seconds, pids[name])) - before[name] for name in clients
        }
    print(
        f"{layout.nbytes / 1e9:.2f} GB by {args.lane}, {args.rounds} rounds, medians; "
        f"{spans() / (args.rounds + 2) / 1000:.1f} kB of spans a round"
    )
    ratio = {what: _ratio(seconds) for what, seconds in (("push", pushes), ("pull", pulls))}
    rows = [
        [
            what,
            *(f"{statistics.median(seconds[name]):.3f}" for name in (_PLAIN, _TRACED)),
            f"{ratio[what]:.3f}",
        ]
        for what, seconds in (("push", pushes), ("pull", pulls))
    ]
    print(report.table(["", "plain s", "traced s", "ratio"], rows))
    used = processor[_TRACED] / processor[_PLAIN]
    print(
        f"processor time of all rounds: {processor[_PLAIN]:.1f} s plain, {processor[_TRACED]:.1f} s traced, ratio {used:.3f}"
    )
    met = ratio["push"] <= GOAL
    print(
        f"a traced push takes {ratio['push']:.3f} of one that is not; the goal of {GOAL:g} is {'met' if met else 'missed'}"
    )
    if args.json is not None:
        report.write_json(
            args.json,
            bytes=layout.nbytes,
            lane=args.lane,
            pushes=pushes,
            pulls=pulls,
            processor=processor,
            ratios=ratio,
        )
    if not met:
        raise SystemExit(1)


def _layout(folder: Path) -> Layout:
    specs = models.hugging_face_specs((folder / "config.json").read_bytes())
    return Layout.stream(specs, [Shard(spec.name, Box.whole(spec.shape)) for spec in specs])


def _round(process: subprocess.Popen[str]) -> tuple[float, float]:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()
    pushed, pulled = processes.first_line(process).split()
    return float(pushed), float(pulled)


def _ratio(seconds: dict[str, list[float]]) -> float:
    return statistics.median(
        traced / plain for plain, traced in zip(seconds[_PLAIN], seconds[_TRACED], strict=True)
    )


@contextmanager
def _collector() -> Iterator[tuple[str, Any]]:
    """The address of a collector that throws spans away, and what counts their bytes."""
    taken, lock = [0], threading.Lock()

    def export(request: bytes, _: grpc.ServicerContext) -> bytes:
        with lock:
            taken[0] += len(request)
        return b""

    server = grpc.server(ThreadPoolExecutor(2))
    handler = grpc.unary_unary_rpc_method_handler(export)
    service, _, method = _EXPORT[1:].rpartition("/")
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"http://127.0.0.1:{port}", lambda: taken[0]
    finally:
        server.stop(0)


if __name__ == "__main__":
    main()
