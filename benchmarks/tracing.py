"""``python -m benchmarks.tracing``: what traces add to a push and a pull, by the same processes in one run.

One service on loopback sends its spans to a collector. One client in a process of its own switches its tracing on and
off; the service makes no spans for requests of an untraced client. So everything that differs from process to process,
such as the place of their memory, is the same on both sides. Rounds of a push and a pull of random bf16 weights come in
blocks of some seconds, with traces and without, in pairs; the order within a pair is random. A block has the medians of
its rounds' times, and the processor time of service and client, exporters included, until its spans have been sent. The
result is the mean of the middle three fifths of the pairs' ratios, with the interval that holds it in 95 of 100
resamplings.

Traces cost a fixed time for each push, and nothing for each byte: the smaller the model, the larger their share. So the
goal, at most 1.02 of the time without traces, is set for a small model; the result bounds that of larger ones.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from benchmarks import models, processes, report
from benchmarks.client_process import MODEL
from benchmarks.tls import Place
from weighbridge import Credentials, TrainerClient
from weighbridge._core.boxes import Box
from weighbridge._core.layouts import Layout, Shard
from weighbridge._tracing import spans
from weighbridge._tracing.settings import OF_PROCESS, TracingState

GOAL = 1.02
_EXPORT = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
_PLAIN, _TRACED = "plain", "traced"
_BLOCK_SECONDS, _LEAST_ROUNDS = 2.0, 5
"""Least seconds and rounds of a block, whichever takes longer: to send its spans costs the same for a few rounds as for
many.
"""
_EXPORT_SECONDS = 1.0
"""Between two exports; OpenTelemetry's own choice is 5."""
_MEASURED = ("push", "pull", "processor time, client", "processor time, service", "processor time")
_JUDGED = ("push", "pull", "processor time")
_RESAMPLED = 2000


class _Off(TracingState):
    """Settings of a process where tracing is off."""

    def tracer(self) -> None:
        return None


def client(address: str, folder: str, lane: str) -> None:
    """Push and pull for some seconds as often as a line says how, with a line of all times."""
    layout = _layout(Path(folder))
    held = models.RandomBits(each.nbytes for each in layout.placements).of_layout(layout)
    place = Place(address, Credentials(), layout, held, lane=lane)
    settings = {_PLAIN: _Off(), _TRACED: OF_PROCESS}
    print(os.getpid(), flush=True)
    step = 0
    for line in sys.stdin:
        times: list[tuple[float, float]] = []
        until = time.monotonic() + _BLOCK_SECONDS
        with patch.object(spans, "OF_PROCESS", settings[line.strip()]):
            while len(times) < _LEAST_ROUNDS or time.monotonic() < until:
                step += 1
                times.append((place.push(step), place.pull()))
        print(json.dumps(times), flush=True)
    place.trainer.close()
    place.engine.close()


def main() -> None:
    """Measure and print; exits with 1 if the goal is missed."""
    parser = argparse.ArgumentParser(prog="benchmarks.tracing", description=__doc__)
    parser.add_argument("--gb", type=float, default=0.02, help="size of the model (default 0.02)")
    parser.add_argument("--seconds", type=float, default=240.0, help="how long to measure (default 240)")
    parser.add_argument("--lane", choices=["grpc", "local"], default="grpc", help="how weights travel (default grpc)")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    args = parser.parse_args()
    processes.end_tidily()
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        folder = Path(scratch)
        models.write_config(models.config_of(args.gb), folder / "hf")
        layout = _layout(folder / "hf")
        collector = stack.enter_context(_collector())
        os.environ["OTEL_BSP_SCHEDULE_DELAY"] = f"{_EXPORT_SECONDS * 1000:.0f}"
        service = stack.enter_context(processes.service(folder, layout.nbytes, "--otlp", collector.endpoint))
        with TrainerClient(service.grpc) as trainer:
            trainer.register_model(MODEL, folder / "hf")
        process = stack.enter_context(
            processes.python(
                *("-c", "import sys; from benchmarks.tracing import client; client(*sys.argv[1:])"),
                *(service.grpc, str(folder / "hf"), args.lane),
                environment={**os.environ, "OTEL_EXPORTER_OTLP_ENDPOINT": collector.endpoint},
            )
        )
        pids = int(processes.first_line(process)), service.pid
        for name in (_PLAIN, _TRACED):  # memory of the first is new
            _block(process, pids, name)
        collector.spans.clear()
        blocks: dict[str, list[_Block]] = {_PLAIN: [], _TRACED: []}
        lots, until = random.Random(0), time.monotonic() + args.seconds
        while time.monotonic() < until:
            for name in lots.sample((_PLAIN, _TRACED), 2):
                blocks[name].append(_block(process, pids, name))
        rounds = sum(each.rounds for each in blocks[_TRACED])
        each_round = {name: count / rounds for name, count in sorted(collector.spans.items())}
    seconds = {
        name: dict(zip(_MEASURED, zip(*(each.seconds for each in of), strict=True), strict=True))
        for name, of in blocks.items()
    }
    ratios = {what: compared(seconds[_PLAIN][what], seconds[_TRACED][what]) for what in _MEASURED}
    count = sum(each_round.values())
    more = ratios["processor time"].more_seconds
    print(
        f"{layout.nbytes / 1e6:.0f} MB by {args.lane}, {len(blocks[_PLAIN])} pairs, {rounds} "
        "traced rounds; spans a round: "
        f"{', '.join(f'{name} {found:.1f}' for name, found in each_round.items())}; processor "
        f"time: {more / count * 1e6:.0f} us a span"
    )
    rows = [
        [
            what,
            *(f"{statistics.median(seconds[name][what]) * 1e3:.2f}" for name in (_PLAIN, _TRACED)),
            f"{found.more_seconds * 1e3:+.2f}",
            f"{found.ratio:.4f}",
            f"{found.low:.4f} to {found.high:.4f}",
            found.said,
        ]
        for what, found in ratios.items()
    ]
    print(report.table(["", "plain ms", "traced ms", "more ms", "ratio", "95%", f"at most {GOAL:g}"], rows))
    said = {ratios[what].said for what in _JUDGED}
    verdict = next(each for each in ("missed", "not told from noise", "met") if each in said)
    print(f"the goal, {GOAL:g} of push, pull and processor time: {verdict}")
    if args.json is not None:
        told = {what: asdict(found) for what, found in ratios.items()}
        report.write_json(
            args.json, bytes=layout.nbytes, lane=args.lane, spans=each_round, seconds=seconds, ratios=told
        )
    if verdict == "missed":
        raise SystemExit(1)


@dataclass(frozen=True)
class _Block:
    """A block of rounds.

    Attributes:
        rounds: number of rounds.
        seconds: seconds of a round, in the order of `_MEASURED`.
    """

    rounds: int
    seconds: tuple[float, ...]


def _block(process: subprocess.Popen[str], pids: tuple[int, int], name: str) -> _Block:
    before = [processes.processor_seconds(pid) for pid in pids]
    assert process.stdin is not None
    process.stdin.write(f"{name}\n")
    process.stdin.flush()
    pushes, pulls = zip(*json.loads(processes.first_line(process)), strict=True)
    time.sleep(_EXPORT_SECONDS * 1.2)
    used = [(processes.processor_seconds(pid) - begun) / len(pushes) for pid, begun in zip(pids, before, strict=True)]
    return _Block(len(pushes), (statistics.median(pushes), statistics.median(pulls), *used, sum(used)))


@dataclass(frozen=True)
class Compared:
    """Seconds with traces beside those without, by pairs.

    Attributes:
        ratio: mean of the middle three fifths of the pairs' ratios.
        low, high: interval that holds the ratio in 95 of 100 resamplings of the pairs.
        more_seconds: mean of the middle three fifths of the pairs' differences.
    """

    ratio: float
    low: float
    high: float
    more_seconds: float

    @property
    def said(self) -> str:
        """Whether the goal is met."""
        return "met" if self.high <= GOAL else "missed" if self.low > GOAL else "not told from noise"


def compared(plain: Sequence[float], traced: Sequence[float]) -> Compared:
    """The comparison of blocks, two of a pair at the same place."""
    pairs = list(zip(plain, traced, strict=True))
    ratios = [mine / its for its, mine in pairs]
    chosen = random.Random(0)
    found = sorted(_middle(chosen.choices(ratios, k=len(ratios))) for _ in range(_RESAMPLED))
    low, high = found[_RESAMPLED // 40], found[-_RESAMPLED // 40]
    return Compared(_middle(ratios), low, high, _middle([mine - its for its, mine in pairs]))


def _middle(values: Sequence[float]) -> float:
    cut = len(values) // 5
    return statistics.fmean(sorted(values)[cut : len(values) - cut])


def _layout(folder: Path) -> Layout:
    specs = models.hugging_face_specs((folder / "config.json").read_bytes())
    return Layout.stream(specs, [Shard(spec.name, Box.whole(spec.shape)) for spec in specs])


@dataclass(frozen=True)
class _Collector:
    """A collector that throws spans away.

    Attributes:
        endpoint: its OTLP address.
        spans: number of received spans, by the name of their process.
    """

    endpoint: str
    spans: Counter[str]


@contextmanager
def _collector() -> Iterator[_Collector]:
    counts: Counter[str] = Counter()
    lock = threading.Lock()

    def export(request: Any, _: grpc.ServicerContext) -> bytes:
        with lock:
            for each in request.resource_spans:
                named = {it.key: it.value.string_value for it in each.resource.attributes}
                counts[named["service.name"]] += sum(len(scope.spans) for scope in each.scope_spans)
        return b""

    server = grpc.server(ThreadPoolExecutor(2))
    handler = grpc.unary_unary_rpc_method_handler(export, ExportTraceServiceRequest.FromString)
    service, _, method = _EXPORT[1:].rpartition("/")
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield _Collector(f"http://127.0.0.1:{port}", counts)
    finally:
        server.stop(0)


if __name__ == "__main__":
    main()
