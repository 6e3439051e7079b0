"""``python -m benchmarks.reading``: what it costs to pull a version that only the store has, next to boto3's own
download.

SeaweedFS on loopback holds one model of random bf16 weights. Every round starts a service that has never seen it and
pulls all of it twice, downloads the same objects with boto3, and pulls it from a service over a local folder. Then the
bytes that slices cost are compared with the bytes of the slices. ``--latency`` puts a wait before every GET, as a store
further away has.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import boto3
import torch

from benchmarks import models, processes
from benchmarks.client_process import MODEL
from tests.support.s3_server import ACCESS_KEY, SECRET_KEY, S3Server, seaweedfs
from weighbridge import Boxes, EngineClient, FullTensors, TensorParallel, TrainerClient
from weighbridge._clients.engine import Pull
from weighbridge._core.boxes import Box
from weighbridge._core.layouts import Layout, Shard
from weighbridge._core.slices import LayoutRequest
from weighbridge._core.tensor_spaces import TensorSpace
from weighbridge._formats.push_sources import StagingPool, TensorSource
from weighbridge_storage.stores.s3.settings import parse_location

FULL = FullTensors()
_SERVE = """
import sys, time
from weighbridge_storage.stores.s3.client import S3Client
latency, get_range = float(sys.argv.pop(1)), S3Client.get_range
def late(*arguments):
    time.sleep(latency)
    return get_range(*arguments)
if latency:
    S3Client.get_range = late
from weighbridge._cli import main
main()
"""


class Service:
    """A service that serves one store.

    Attributes:
        engine: a client of it.
    """

    def __init__(self, line: str) -> None:
        self.address = line.split("gRPC on ")[1].split(",", maxsplit=1)[0]
        self.http = line.split("HTTP on ")[1].split(",", maxsplit=1)[0]
        self.engine = EngineClient(self.address)

    def plan(self, request: LayoutRequest = FULL) -> Pull:
        """A pull that has not begun. The service has made its first imports and allocations by then."""
        return self.engine.pull(MODEL, "latest", request)

    def pull(self, request: LayoutRequest = FULL) -> tuple[float, int]:
        """Seconds and bytes of a pull whose bytes are dropped."""
        pull = self.plan(request)
        started, received = time.perf_counter(), 0
        for data in pull.stream():
            received += len(data)
        return time.perf_counter() - started, received

    def fetched(self) -> int:
        """Bytes that the service has brought from the store so far."""
        text = urllib.request.urlopen(f"{self.http}/metrics").read().decode()  # noqa: S310
        return int(float(text.split("\nweighbridge_store_fetched_bytes_total ")[1].split()[0]))


@contextmanager
def serving(store: str, scratch: Path, latency: float = 0.0, cache: str = "16GiB") -> Iterator[Service]:
    """A new service over a store."""
    options = ("serve", "--store", store, "--scratch", str(scratch), "--read-cache", cache)
    addresses = ("--grpc", "127.0.0.1:0", "--http", "127.0.0.1:0", "--log-level", "error")
    with processes.python("-c", _SERVE, str(latency), *options, *addresses) as process:
        service = Service(processes.first_line(process))
        yield service
        service.engine.close()


@contextmanager
def memory_grown(scratch: Path) -> Iterator[dict[str, int]]:
    """Bytes by which the anonymous memory of the process with this scratch folder grows at most."""
    mark, grown, over = str(scratch).encode(), {"bytes": 0}, threading.Event()
    [pid] = [
        p.name
        for p in Path("/proc").iterdir()
        if p.name.isdigit() and p.name != str(os.getpid()) and mark in _read(p / "cmdline")
    ]

    def anonymous() -> int:
        lines = _read(Path("/proc", pid, "status")).splitlines()
        return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(b"RssAnon:"))

    before = anonymous()

    def watch() -> None:
        while not over.wait(0.02):
            grown["bytes"] = max(grown["bytes"], anonymous() - before)

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        yield grown
    finally:
        over.set()
        watching.join()


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def push(store: str, folder: Path, gigabytes: float) -> dict[str, torch.Tensor]:
    """Put a version of a model into a store; its tensors."""
    config = models.write_config(models.config_of(gigabytes), folder / "hf")
    specs = models.hugging_face_specs(config)
    layout = Layout.stream(specs, [Shard(spec.name, Box.whole(spec.shape)) for spec in specs])
    held = models.RandomBits(p.nbytes for p in layout.placements).of_layout(layout)
    shards = TensorSource(StagingPool(), layout, held)
    with serving(store, folder / "writer") as service, TrainerClient(service.address) as trainer:
        trainer.register_model(MODEL, folder / "hf")
        handle = trainer.push_shards(MODEL, layout, TensorSpace.HUGGING_FACE, shards, step=1, rank=0, world_size=1)
        handle.wait(timeout=600)
    return {spec.name: tensor for spec, tensor in zip(specs, held, strict=True)}


def download(server: S3Server, store: str, into: Path) -> float:
    """Seconds for boto3 to download the version's weights with its own transfer manager."""
    settings = parse_location(store)
    client = boto3.client("s3", endpoint_url=server.endpoint, region_name="us-east-1")
    prefix = f"{settings.prefix}models/{MODEL}/versions/"
    listed = client.list_objects_v2(Bucket=settings.bucket, Prefix=prefix)["Contents"]
    names = [entry["Key"] for entry in listed if entry["Key"].endswith(".safetensors")]
    started = time.perf_counter()
    for name in names:
        client.download_file(settings.bucket, name, str(into / "peer"))
    seconds = time.perf_counter() - started
    (into / "peer").unlink()
    return seconds


def slices(tensors: dict[str, torch.Tensor]) -> dict[str, list[LayoutRequest]]:
    """Requests of the comparison of bytes: by name, one request for each rank."""
    rows = {name: tuple(t.shape) for name, t in tensors.items() if name.endswith("q_proj.weight")}
    columns = {name: tuple(t.shape) for name, t in tensors.items() if name.endswith("down_proj.weight")}
    one = min(columns)
    return {
        "TP 4, rank 0": [TensorParallel(4, 0)],
        "TP 4, all ranks": [TensorParallel(4, rank) for rank in range(4)],
        "row cut, 1 of 4": [Boxes([(n, (0, 0), (s[0] // 4, s[1])) for n, s in rows.items()])],
        "column cut, 1 of 4": [Boxes([(n, (0, 0), (s[0], s[1] // 4)) for n, s in columns.items()])],
        "column cut, all 4": [
            Boxes([(n, (0, r * (s[1] // 4)), (s[0], s[1] // 4)) for n, s in columns.items()]) for r in range(4)
        ],
        "single tensor": [Boxes([(one, (0, 0), columns[one])])],
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="benchmarks.reading", description=__doc__)
    parser.add_argument("--gb", type=float, default=1.2, help="size of the model (default 1.2)")
    parser.add_argument("--rounds", type=int, default=3, help="counted rounds (default 3)")
    parser.add_argument("--latency", type=float, default=0.0, help="seconds before each GET (default 0)")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    args = parser.parse_args()
    os.environ.update(AWS_ACCESS_KEY_ID=ACCESS_KEY, AWS_SECRET_ACCESS_KEY=SECRET_KEY)
    series: dict[str, list[float]] = {}
    costs: dict[str, tuple[int, int]] = {}

    def note(name: str, value: float) -> None:
        series.setdefault(name, []).append(value)

    with tempfile.TemporaryDirectory() as scratch, seaweedfs(Path(scratch)) as server:
        folder = Path(scratch)
        store, local = server.location(), str(folder / "local")
        tensors = push(store, folder / "s3", args.gb)
        push(local, folder / "folder", args.gb)
        for number in range(args.rounds + 1):
            mine = folder / f"round{number}"
            with serving(store, mine, args.latency) as service:
                service.plan()
                with memory_grown(mine) as grown:
                    seconds, total = service.pull()
                note("memory", grown["bytes"])
                note("cold", seconds)
                costs["full"] = (service.fetched(), total)
                note("warm", service.pull()[0])
            note("boto3", download(server, store, folder))
            with serving(local, folder / "reader") as service:
                service.pull()
                note("local", service.pull()[0])
        for name, requests in slices(tensors).items():
            with serving(store, folder / name.replace(" ", "")) as service:
                pulled = sum(service.pull(request)[1] for request in requests)
                costs[name] = (service.fetched(), pulled)
        small = str(max(total // 4, 32 << 20))
        with serving(store, folder / "small", args.latency, small) as service:
            service.pull()
            note("with a cache of a quarter", service.pull()[0])
    counted = {name: values[1:] or values for name, values in series.items()}
    print(f"{total / 1e9:.2f} GB of bf16 weights, {args.rounds} rounds, medians, GETs {args.latency:g} s late")
    for name in ("cold", "warm", "boto3", "local", "with a cache of a quarter"):
        print(f"{name:34}{total / statistics.median(counted[name]) / 1e6:>12.0f} MB/s")
    print(f"{'memory grows by at most':34}{max(series['memory']) / 2**20:>12.0f} MiB")
    for name, (fetched, pulled) in costs.items():
        print(f"{name:34}{fetched:>14} fetched{pulled:>14} pulled{fetched / pulled:>9.3f}")
    if args.json is not None:
        args.json.write_text(json.dumps({"bytes": total, "series": series, "costs": costs}, indent=2) + "\n")


if __name__ == "__main__":
    main()
