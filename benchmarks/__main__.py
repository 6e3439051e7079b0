"""``python -m benchmarks``: what moving weights costs, next to what it must cost at least, in one run.

Every figure is measured in turn with its yardstick, several rounds, and given as medians and their ratio: machines are
shared, so single times mean little. One model of random bf16 weights, one rank, everything over loopback.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import safetensors.torch
import torch

from benchmarks import models, raw_grpc
from weighbridge import EngineClient, TensorParallel, TrainerClient, rpc, wire
from weighbridge.layouts import Layout
from weighbridge.push_sources import StagingPool, StreamSource
from weighbridge.tensor_stream import copy_out

MODEL = "bench/model"
START_SECONDS = 120


@contextmanager
def process(*arguments: str, ready: str = "") -> Iterator[str]:
    """A Python process; gives its first line of output, and ends it afterwards."""
    command = [sys.executable, "-W", "ignore", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True) as running:
        try:
            assert running.stdout is not None
            line = running.stdout.readline().strip()
            if ready not in line or not line:
                raise SystemExit(f"{' '.join(arguments)} did not start: {line!r}")
            yield line
        finally:
            running.terminate()
            running.wait(60)


class Bench:
    """One model, one service, one raw gRPC server; each method measures one round of something.

    Args:
        folder: for the store and the files.
        gigabytes: size of the model.
        server: the service's address.
    """

    def __init__(self, folder: Path, gigabytes: float, server: str) -> None:
        self.folder = folder
        config = models.write_config(models.config_of(gigabytes), folder / "hf")
        self.tensors = models.hugging_face_tensors(config)
        self.layout = models.layout_of(self.tensors)
        self.nbytes = self.layout.nbytes
        self.trainer = TrainerClient(server)
        self.engine = EngineClient(server)
        self.trainer.register_model(MODEL, folder / "hf")
        self._step = 0
        self._staging = StagingPool()
        self._into: list[torch.Tensor] | None = None
        self._copy = np.empty(self.nbytes, np.uint8)

    def push(self) -> dict[str, float]:
        """Push all weights as one rank, until durable."""
        tensors = list(self.tensors.values())

        def stage(indexes: Sequence[int], stream: Layout) -> StreamSource:
            return self._staging.stage(stream, [tensors[i] for i in indexes])

        self._step += 1
        handle = self.trainer.push_shards(
            MODEL, self.layout, wire.HUGGING_FACE, stage, step=self._step, rank=0, world_size=1
        )
        report = handle.report()
        version = handle.wait(timeout=600)
        return {
            "held": report.held_seconds,
            "stream": report.stream_seconds,
            "commit": (version.durable_time_ms - version.ready_time_ms) / 1e3,
        }

    def copy(self) -> float:
        """Seconds for one warm copy of all weights."""
        started = time.perf_counter()
        copy_out(self.layout, list(self.tensors.values()), self._copy)
        return time.perf_counter() - started

    def pull(self) -> float:
        """Seconds to pull all weights into tensors that are used again, as an engine does."""
        pull = self.engine.pull(MODEL, "live")
        if self._into is None:
            self._into = [
                torch.zeros(p.shard.box.extent, dtype=torch.bfloat16) for p in pull.layout.placements
            ]
        started = time.perf_counter()
        for _ in pull.into(self._into.__getitem__):
            pass
        return time.perf_counter() - started

    def save_file(self) -> float:
        """Seconds for safetensors to save the same weights."""
        path = self.folder / "peer.safetensors"
        started = time.perf_counter()
        safetensors.torch.save_file(self.tensors, path)
        seconds = time.perf_counter() - started
        path.unlink()
        return seconds

    def slice_bytes(self, size: int) -> tuple[int, int]:
        """Payload bytes that one tensor-parallel rank received, and bytes of the slices it needs."""
        pull = self.engine.pull(MODEL, "live", TensorParallel(size, 0))
        needed = sum(t.numel() * t.element_size() for _, t in pull)
        return sum(map(len, pull.stream())), needed


def measure(bench: Bench, raw: str, rounds: int) -> dict[str, object]:
    """All figures, as medians over the rounds. The first round warms up and does not count."""
    channel = rpc.open_channel(raw)
    data = raw_grpc.payloads(bench.nbytes)
    series: dict[str, list[float]] = {}

    def note(name: str, value: float) -> None:
        series.setdefault(name, []).append(value)

    for _ in range(rounds + 1):
        pushed = bench.push()
        note("push_seconds", pushed["stream"])
        note("raw_push_seconds", raw_grpc.push(channel, data))
        note("pull_seconds", bench.pull())
        note("raw_pull_seconds", raw_grpc.pull(channel))
        note("held_seconds", pushed["held"])
        note("copy_seconds", bench.copy())
        note("commit_seconds", pushed["commit"])
        note("save_file_seconds", bench.save_file())
    median = {name: statistics.median(values[1:]) for name, values in series.items()}
    moved, needed = bench.slice_bytes(2)

    def ratio(ours: str, yardstick: str) -> float:
        """Median of the ratios, round by round: both were measured under the same load."""
        return statistics.median(a / b for a, b in zip(series[ours][1:], series[yardstick][1:], strict=True))

    return {
        "model_bytes": bench.nbytes,
        "rounds": rounds,
        "machine": {"cpus": os.cpu_count(), "python": platform.python_version(), "torch": torch.__version__},
        "seconds": series,
        "push_gb_per_s": bench.nbytes / median["push_seconds"] / 1e9,
        "raw_push_gb_per_s": bench.nbytes / median["raw_push_seconds"] / 1e9,
        "push_to_raw": 1 / ratio("push_seconds", "raw_push_seconds"),
        "pull_gb_per_s": bench.nbytes / median["pull_seconds"] / 1e9,
        "raw_pull_gb_per_s": bench.nbytes / median["raw_pull_seconds"] / 1e9,
        "pull_to_raw": 1 / ratio("pull_seconds", "raw_pull_seconds"),
        "held_seconds": median["held_seconds"],
        "copy_seconds": median["copy_seconds"],
        "held_to_copy": ratio("held_seconds", "copy_seconds"),
        "commit_seconds": median["commit_seconds"],
        "save_file_seconds": median["save_file_seconds"],
        "commit_to_save_file": ratio("commit_seconds", "save_file_seconds"),
        "bytes_moved": moved,
        "bytes_needed": needed,
        "moved_to_needed": moved / needed,
    }


def table(f: dict[str, object]) -> str:
    """The figures for people."""
    return "\n".join(
        (
            f"{int(str(f['model_bytes'])) / 1e9:.2f} GB of bf16 weights, {f['rounds']} rounds, medians",
            f"{'':34}{'weighbridge':>14}{'yardstick':>14}{'ratio':>9}",
            _row("push, GB/s (raw grpcio)", f, "push_gb_per_s", "raw_push_gb_per_s", "push_to_raw"),
            _row("pull, GB/s (raw grpcio)", f, "pull_gb_per_s", "raw_pull_gb_per_s", "pull_to_raw"),
            _row("push holds the rank, s (one copy)", f, "held_seconds", "copy_seconds", "held_to_copy"),
            _row(
                "ready to durable, s (save_file)",
                f,
                "commit_seconds",
                "save_file_seconds",
                "commit_to_save_file",
            ),
            _row("TP 2 rank: bytes moved (needed)", f, "bytes_moved", "bytes_needed", "moved_to_needed"),
        )
    )


def _row(what: str, f: dict[str, object], ours: str, yardstick: str, ratio: str) -> str:
    a, b = (v if isinstance(v := f[key], int) else f"{v:.3f}" for key in (ours, yardstick))
    return f"{what:34}{a:>14}{b:>14}{f[ratio]:>9.3f}"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="benchmarks", description=__doc__)
    parser.add_argument("--gb", type=float, default=0.5, help="size of the model (default 0.5)")
    parser.add_argument("--rounds", type=int, default=7, help="counted rounds (default 7)")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        serve = ("-m", "weighbridge", "serve", "--store", str(folder / "store"))
        addresses = ("--grpc", "127.0.0.1:0", "--http", "127.0.0.1:0", "--log-level", "error")
        with process(*serve, *addresses, ready="serving gRPC on") as line:
            bench = Bench(folder, args.gb, line.split("gRPC on ")[1].split(",")[0])
            with process("-m", "benchmarks.raw_grpc", str(bench.nbytes)) as raw:
                figures = measure(bench, raw, args.rounds)
    print(table(figures))
    if args.json is not None:
        args.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
