"""``python -m benchmarks.uploading``: what an upload to S3 costs, next to boto3's own multipart upload of the same
bytes, in one run.

SeaweedFS on loopback; several rounds in turn, as medians and their ratio. The bytes lie in memory, as those of a
version's image do. boto3 gets parts of the same size and as many threads. Memory is the most that the process had
beyond the bytes themselves, each in a process of its own, for one, two and four times the bytes.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import boto3
import numpy as np
from boto3.s3.transfer import TransferConfig
from botocore.config import Config

from tests.support.s3_server import ACCESS_KEY, SECRET_KEY, seaweedfs
from weighbridge_storage.stores.s3.settings import S3Settings
from weighbridge_storage.stores.s3.store import S3Store

_PIECE = 16 << 20
_SETTLE_SECONDS = 2.0


class Ours:
    """The store, as publishing uses it."""

    def __init__(self, settings: S3Settings) -> None:
        self._store = S3Store(settings)

    def upload(self, data: np.ndarray, key: str) -> None:
        """Upload an object."""
        view = data.data
        self._store.put(key, (view[i : i + _PIECE] for i in range(0, len(view), _PIECE)), mode="overwrite")

    def delete(self, key: str) -> None:
        """Delete it again."""
        self._store.delete(key)


class Bare:
    """boto3's managed multipart upload."""

    def __init__(self, settings: S3Settings) -> None:
        config = Config(
            signature_version="s3v4", s3={"addressing_style": "path"}, max_pool_connections=settings.parallel
        )
        self._client = boto3.client("s3", endpoint_url=settings.endpoint, region_name=settings.region, config=config)
        self._settings = settings
        self._transfer = TransferConfig(
            multipart_threshold=settings.part_bytes,
            multipart_chunksize=settings.part_bytes,
            max_concurrency=settings.parallel,
        )

    def upload(self, data: np.ndarray, key: str) -> None:
        """Upload an object."""
        self._client.upload_fileobj(
            _View(data), self._settings.bucket, self._settings.prefix + key, Config=self._transfer
        )

    def delete(self, key: str) -> None:
        """Delete it again."""
        self._client.delete_object(Bucket=self._settings.bucket, Key=self._settings.prefix + key)


class _View(io.RawIOBase):
    """A file over memory: reading copies a part, and nothing before that."""

    def __init__(self, data: np.ndarray) -> None:
        self._data = data.data
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: len(self._data)}[whence]
        self._position = base + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def read(self, size: int = -1) -> bytes:
        end = len(self._data) if size < 0 else min(self._position + size, len(self._data))
        found = bytes(self._data[self._position : end])
        self._position = end
        return found


def data_of(gigabytes: float) -> np.ndarray:
    """Bytes that do not compress."""
    return np.random.default_rng(0).integers(0, 256, int(gigabytes * 1e9), np.uint8)


def peak_beyond(settings: S3Settings, gigabytes: float) -> int:
    """The most memory that a process of its own had for an upload, beyond what it had before it, in bytes."""
    command = [sys.executable, "-m", "benchmarks.uploading", "--memory-of", str(gigabytes)]
    environment = {
        **os.environ,
        "WEIGHBRIDGE_BENCH_ENDPOINT": str(settings.endpoint),
        "WEIGHBRIDGE_BENCH_BUCKET": settings.bucket,
    }
    return int(subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout)


def _measure_memory(gigabytes: float) -> int:
    settings = S3Settings(
        os.environ["WEIGHBRIDGE_BENCH_BUCKET"],
        endpoint=os.environ["WEIGHBRIDGE_BENCH_ENDPOINT"],
        region="us-east-1",
    )
    ours = Ours(settings)
    data = data_of(gigabytes)
    ours.upload(data[: 40 << 20], "warm")  # modules, connections and the first buffers
    before = _resident()
    most = before
    done = threading.Event()

    def watch() -> None:
        nonlocal most
        while not done.wait(0.01):
            most = max(most, _resident())

    watcher = threading.Thread(target=watch)
    watcher.start()
    ours.upload(data, "large")
    done.set()
    watcher.join()
    ours.delete("large")
    return most - before


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.uploading", description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--memory-of", type=float, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.memory_of is not None:
        print(_measure_memory(arguments.memory_of))
        return 0
    os.environ.update(AWS_ACCESS_KEY_ID=ACCESS_KEY, AWS_SECRET_ACCESS_KEY=SECRET_KEY)
    with (
        tempfile.TemporaryDirectory(prefix="weighbridge-bench-") as folder,
        seaweedfs(Path(folder)) as server,
    ):
        settings = server.settings()
        data = data_of(arguments.gigabytes)
        sides: dict[str, Ours | Bare] = {"weighbridge": Ours(settings), "boto3": Bare(settings)}
        seconds: dict[str, list[float]] = {name: [] for name in sides}
        for round_ in range(arguments.rounds + 1):
            # who comes first alternates
            for name in sorted(sides, reverse=round_ % 2 == 0):
                time.sleep(_SETTLE_SECONDS)
                started = time.perf_counter()
                sides[name].upload(data, f"{name}-{round_}")
                taken = time.perf_counter() - started
                sides[name].delete(f"{name}-{round_}")
                if round_:  # the first warms up
                    seconds[name].append(taken)
        memory = {f"{times}x": peak_beyond(settings, arguments.gigabytes * times / 4) for times in (1, 2, 4)}
    result = {
        "machine": f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores",
        "bytes": len(data),
        "seconds": seconds,
        "rate_next_to_boto3": statistics.median(
            bare / ours for ours, bare in zip(seconds["weighbridge"], seconds["boto3"], strict=True)
        ),
        "memory_beyond_the_bytes": memory,
        "memory_bound": settings.memory_bytes,
    }
    if arguments.json:
        print(json.dumps(result))
        return 0
    for name, each in seconds.items():
        print(f"{name:12} {statistics.median(each):6.2f} s  {len(data) / statistics.median(each) / 1e6:6.0f} MB/s")
    print(f"rate next to boto3: {result['rate_next_to_boto3']:.2f} (median of rounds)")
    for name, nbytes in memory.items():
        print(
            f"memory for {name} the bytes: {nbytes / 2**20:.0f} MiB of at most "
            f"{settings.memory_bytes / 2**20:.0f} for parts"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
