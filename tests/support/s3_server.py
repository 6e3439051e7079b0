"""S3 servers on loopback for tests: SeaweedFS, which keeps conditions, and rclone, which ignores them.

``python -m tests.support.s3_server COMMAND ...`` runs a command with the location of a new store as its last argument.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from tests.support.ports import reserved_port, reserved_ports
from weighbridge_storage.stores.s3.settings import S3Settings

ACCESS_KEY = "weighbridge-tests"
SECRET_KEY = "not-a-secret-of-anybody"
BUCKET = "tests"
_START_SECONDS = 30.0
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class S3Server:
    """A running server with the bucket `BUCKET`.

    Attributes:
        endpoint: its URL.
        pid: its process.
    """

    endpoint: str
    pid: int

    def settings(self, **changes: Any) -> S3Settings:
        """Settings with a prefix of its own in the bucket, and timeouts that fit tests."""
        defaults: dict[str, Any] = {
            "bucket": BUCKET,
            "prefix": f"{uuid.uuid4().hex}/",
            "endpoint": self.endpoint,
            "region": "us-east-1",
            "read_timeout_s": 20.0,
        }
        return S3Settings(**{**defaults, **changes})

    def location(self) -> str:
        """A location with a prefix of its own in the bucket."""
        return f"s3://{BUCKET}/{uuid.uuid4().hex}?endpoint={quote(self.endpoint)}&region=us-east-1"


class SeaweedFS:
    """SeaweedFS with its data in a folder. It can be killed, and started again at the same address.

    Args:
        folder: folder for its data and its log.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        names = ("master", "volume", "filer", "s3", "admin")
        self._ports = ports = reserved_ports(2 * len(names))
        pairs = zip(names, ports[::2], ports[1::2], strict=True)
        self._command = [
            "weed", "-logtostderr=true", "mini", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1",
            f"-bucket={BUCKET}", "-admin.ui=false", "-webdav=false", "-master.telemetry=false", "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            *(flag for name, http, grpc in pairs for flag in (f"-{name}.port={http}", f"-{name}.port.grpc={grpc}")),
        ]  # fmt: skip
        self._endpoint = f"http://127.0.0.1:{ports[2 * names.index('s3')]}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> S3Server:
        """Start it; returns once it answers."""
        # it takes all the memory it finds otherwise
        settings = {"GOMEMLIMIT": "400MiB", "GOGC": "50"}
        self._process = _started(self._command, settings, self._folder, self._endpoint)
        return S3Server(self._endpoint, self._process.pid)

    def kill(self) -> None:
        """End it as ``kill -9`` does."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
            for port in self._ports:  # it puts its sockets nowhere else
                for socket in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):
                    socket.unlink(missing_ok=True)


@contextmanager
def seaweedfs(folder: Path) -> Iterator[S3Server]:
    """SeaweedFS with its data in a folder."""
    server = SeaweedFS(folder)
    try:
        yield server.start()
    finally:
        server.kill()


@contextmanager
def rclone(folder: Path) -> Iterator[S3Server]:
    """``rclone serve s3`` over a folder."""
    (folder / "data" / BUCKET).mkdir(parents=True)
    port = reserved_port()
    command = [
        "rclone", "serve", "s3", "--config=", f"--addr=127.0.0.1:{port}", f"--auth-key={ACCESS_KEY},{SECRET_KEY}",
        "--vfs-cache-mode=off", str(folder / "data"),
    ]  # fmt: skip
    endpoint = f"http://127.0.0.1:{port}"
    process = _started(command, {}, folder, endpoint)
    try:
        yield S3Server(endpoint, process.pid)
    finally:
        process.kill()
        process.wait()


def _started(command: list[str], settings: dict[str, str], folder: Path, endpoint: str) -> subprocess.Popen[bytes]:
    log = folder / "server.log"
    environment = {
        **os.environ,
        **settings,
        "AWS_ACCESS_KEY_ID": ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
    }
    with log.open("a") as output:
        process = subprocess.Popen(
            [_program(command[0]), *command[1:]],
            env=environment,
            cwd=folder,
            stdout=output,
            stderr=subprocess.STDOUT,
            preexec_fn=_end_with_parent,
        )
    try:
        _wait_until(_has_bucket(endpoint), process, log)
    except BaseException:
        process.kill()
        process.wait()
        raise
    return process


def _program(name: str) -> str:
    """The program next to this Python, where packages that carry one put it."""
    return str(Path(sys.executable).with_name(name))


def _end_with_parent() -> None:
    # a test process that is killed cannot end it
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _has_bucket(endpoint: str) -> Callable[[], bool]:
    client = boto3.session.Session().client(
        "s3",
        endpoint_url=endpoint,
        region_name="us-east-1",
        aws_access_key_id=ACCESS_KEY,
        aws_secret_access_key=SECRET_KEY,
        config=Config(retries={"total_max_attempts": 1}, connect_timeout=2, read_timeout=5),
    )

    def ask() -> bool:
        try:
            client.head_bucket(Bucket=BUCKET)
        except (BotoCoreError, ClientError):
            return False
        return True

    return ask


def _wait_until(holds: Callable[[], bool], process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while not holds():
        assert process.poll() is None, log.read_text()[-2000:]
        assert time.monotonic() < deadline, log.read_text()[-2000:]
        time.sleep(0.05)


def main() -> int:
    """Run a command beside a server, and give its exit code."""
    os.environ.update(AWS_ACCESS_KEY_ID=ACCESS_KEY, AWS_SECRET_ACCESS_KEY=SECRET_KEY)
    with tempfile.TemporaryDirectory(prefix="weighbridge-s3-") as folder, seaweedfs(Path(folder)) as server:
        return subprocess.run([*sys.argv[1:], server.location()], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
