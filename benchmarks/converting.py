"""``python -m benchmarks.converting``: what a conversion of a folder costs, next to ``cp -r`` of the same bytes, in one
run.

Both directions, several rounds in turn, as medians and their ratio; and the most memory that all processes of a
conversion have together, with one, two and four times as many layers. ``cp -r`` is timed as it is and with the ``sync``
that makes its copy as durable as a conversion's result is. A conversion is the whole command, start of the interpreter
and imports included; that part is given by itself as well, as the time that a model of almost nothing takes.

Before each command all writes are waited for, then some seconds more, and its source is read once. The seconds are for
virtual machines: pages that were freed a moment ago are up to four times cheaper to write to than others, and the
command that comes first after a removal would get them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks import models
from benchmarks.memory import Memory, memory_of
from weighbridge._formats import safetensors_files

_CONVERT = [
    *(sys.executable, "-W", "ignore", "-m", "weighbridge", "convert", "--json"),
    *("--max-shard-size", "2GB"),
]
_AT_ONCE = 64 << 20
_PAUSE = 0.02
_SETTLE_SECONDS = 20.0


def write_model(gigabytes: float, folder: Path, *, deeper: int = 1) -> int:
    """Write a Hugging Face folder of random weights, of so many times as many layers; its bytes of tensors."""
    config = models.config_of(gigabytes)
    layers = int(str(config["num_hidden_layers"])) * deeper
    specs = models.hugging_face_specs(models.write_config({**config, "num_hidden_layers": layers}, folder))
    files = safetensors_files.lay_out_files(specs, 2_000_000_000)
    noise = np.random.default_rng(0).integers(0, 256, _AT_ONCE + 1, np.uint8)
    noise &= 0xBF  # finite, whatever the dtype: see `models.RandomBits`
    for file in files.files:
        with (folder / file.name).open("wb") as out:
            out.write(file.header)
            left = file.nbytes - len(file.header)
            while left:
                out.write(noise[left % 2 :][: min(left, _AT_ONCE)].data)
                left -= min(left, _AT_ONCE)
            out.flush()
            os.fsync(out.fileno())
    if files.index_json is not None:
        (folder / safetensors_files.INDEX_FILE).write_bytes(files.index_json)
    return files.layout.nbytes


def settle(source: Path) -> None:
    """Let the disk and the memory come to rest, and have the source in the page cache, so that no command profits from
    another.
    """
    os.sync()
    time.sleep(_SETTLE_SECONDS)
    subprocess.run(["cat", *map(str, source.rglob("*.*"))], stdout=subprocess.DEVNULL, check=True)


def run(*command: str) -> float:
    """Run a command to its end; returns the seconds that it took."""
    started = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed: {done.stdout}{done.stderr}")
    return time.monotonic() - started


def most_memory(*command: str) -> Memory:
    """Run a command to its end and watch its memory, which takes time of its own."""
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        most = Memory(0, 0)
        while process.poll() is None:
            now = memory_of(process.pid)
            most = Memory(max(most.anonymous, now.anonymous), max(most.proportional, now.proportional))
            time.sleep(_PAUSE)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} failed")
    return most


def compare(folder: Path, source: Path, rounds: int) -> dict[str, object]:
    """Time both directions next to cp, in turn."""
    times: dict[str, list[float]] = {}
    checkpoint, back, copy = folder / "checkpoint", folder / "back", folder / "copy"
    for _ in range(rounds):
        for name, (one, other) in {
            "to torch_dist": (source, checkpoint),
            "to hugging_face": (checkpoint, back),
        }.items():
            settle(one)
            started = time.monotonic()
            run("cp", "-r", str(one), str(copy))
            times.setdefault(f"{name}: cp -r", []).append(time.monotonic() - started)
            subprocess.run(["sync", "-f", str(copy)], check=True)
            times.setdefault(f"{name}: cp -r and sync", []).append(time.monotonic() - started)
            shutil.rmtree(copy)
            settle(one)
            times.setdefault(f"{name}: convert", []).append(run(*_CONVERT, str(one), str(other)))
        for path in source.glob("*.safetensors"):
            subprocess.run(["cmp", str(path), str(back / path.name)], check=True)
        shutil.rmtree(checkpoint)
        shutil.rmtree(back)
    nothing = folder / "nothing"
    write_model(0.01, nothing)
    times["start alone"] = [run(*_CONVERT, str(nothing), str(folder / "made of nothing"))]
    medians = {name: statistics.median(values) for name, values in times.items()}
    report: dict[str, object] = {name: round(value, 2) for name, value in medians.items()}
    for name in ("to torch_dist", "to hugging_face"):
        report[f"{name}: ratio"] = round(medians[f"{name}: convert"] / medians[f"{name}: cp -r"], 2)
        report[f"{name}: ratio to cp -r and sync"] = round(
            medians[f"{name}: convert"] / medians[f"{name}: cp -r and sync"], 2
        )
    return report


def memory(folder: Path, gigabytes: float) -> dict[str, object]:
    """The most memory with one, two and four times as many layers, both directions."""
    report: dict[str, object] = {}
    for times in (1, 2, 4):
        source, checkpoint, back = (folder / name for name in ("small", "checkpoint", "back"))
        nbytes = write_model(gigabytes, source, deeper=times)
        for name, (one, other) in {
            "to torch_dist": (source, checkpoint),
            "to hugging_face": (checkpoint, back),
        }.items():
            found = most_memory(*_CONVERT, str(one), str(other))
            report[f"{name}, {nbytes / 1e9:.2f} GB"] = {
                "without file pages": f"{found.anonymous / (1 << 20):.0f} MiB",
                "in proportion (PSS)": f"{found.proportional / (1 << 20):.0f} MiB",
            }
        for path in (source, checkpoint, back):
            shutil.rmtree(path)
    return report


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gb", type=float, default=4.0, help="size of the model that is timed")
    parser.add_argument("--memory-gb", type=float, default=1.0, help="the smallest size whose memory is measured")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where to write; a temporary folder if left out")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        nbytes = write_model(arguments.gb, folder / "hf")
        report: dict[str, object] = {
            "machine": f"{platform.machine()}, {len(os.sched_getaffinity(0))} CPUs, load {os.getloadavg()[0]:.1f}",
            "bytes": nbytes,
            "rounds": arguments.rounds,
            "seconds": compare(folder, folder / "hf", arguments.rounds),
        }
        shutil.rmtree(folder / "hf")
        report["memory"] = memory(folder, arguments.memory_gb)
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
