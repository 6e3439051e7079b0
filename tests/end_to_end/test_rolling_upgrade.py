"""Do two replicas over one store go from the last release to this one and back, one after the other, unnoticed by
clients?

`make test-rolling` runs it, with the last tag as ``WEIGHBRIDGE_RELEASE``, or with any other commit that it is given.
Services, trainers and engines of that release run from its wheel, those of this one from the wheel of what is committed
here.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.ports import reserved_port
from tests.support.released import Release, installed
from tests.support.waiting import eventually
from weighbridge import EngineClient, Unavailable

LAST = os.environ.get("WEIGHBRIDGE_RELEASE")
pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(not LAST, reason="no last release: `make test-rolling` names it in WEIGHBRIDGE_RELEASE"),
]
LEAST = 3
"""Versions of each trainer, and of each engine, between two changes of a replica."""


class Role:
    """A trainer's rank or an engine in a process of its own, and the versions that it has reported."""

    def __init__(self, command: Sequence[str], log: Path) -> None:
        self.versions: list[dict[str, int]] = []
        self._log = log
        with log.open("w") as errors:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                self.versions.append(json.loads(line))

    def check_alive(self) -> None:
        assert self.process.poll() is None, self._log.read_text()[-3000:]

    def ended(self) -> int:
        code = self.process.wait(120)
        self._reader.join()
        assert code in (0, -signal.SIGTERM), self._log.read_text()[-3000:]
        return code

    def stop(self) -> None:
        """End an engine."""
        self.process.terminate()
        self.ended()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join()


class Replica:
    """A replica on a port of its own, which runs one release after the other."""

    def __init__(self, store: str, folder: Path) -> None:
        self.address = f"127.0.0.1:{reserved_port()}"
        self._store = store
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        folder.mkdir()

    def start(self, release: Release) -> None:
        """Start a release, and return when it answers."""
        command = release.command(
            "serve", "--store", self._store, "--grpc", self.address, "--http", "127.0.0.1:0", "--bulk-port", "off", "--advertise", self.address,
            "--memory-budget", "128MiB", "--scratch", str(self._folder), "--local-socket", str(self._folder / "lane.sock"),
        )  # fmt: skip
        with (self._folder / "log").open("a") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        with EngineClient(self.address, retry_seconds=0.2) as client:

            def answers() -> bool:
                assert self._process is not None
                assert self._process.poll() is None, self.log()
                try:
                    client.models()
                except Unavailable:
                    return False
                return True

            eventually(answers)

    def stop(self) -> int:
        """Drain it, and give its exit code."""
        assert self._process is not None
        self._process.terminate()
        return self._process.wait(60)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def log(self) -> str:
        return (self._folder / "log").read_text()[-3000:]


@pytest.fixture(scope="module")
def releases(tmp_path_factory: pytest.TempPathFactory) -> tuple[Release, Release]:
    """The last release and this one."""
    assert LAST is not None
    folder = tmp_path_factory.mktemp("releases")
    return installed(LAST, folder / "last"), installed("HEAD", folder / "this")


class Cluster:
    """Two replicas, and for each release a job of two ranks and an engine."""

    def __init__(self, store: str, folder: Path, releases: tuple[Release, Release], stack: ExitStack) -> None:
        self.releases = releases
        self.replicas = [Replica(store, folder / f"replica{index}") for index in range(2)]
        for replica in self.replicas:
            stack.callback(replica.kill)
        self._stack = stack
        self._folder = folder
        self.trainers: list[Role] = []
        self.engines: list[Role] = []

    def servers(self, first: int) -> str:
        """Both addresses, that of the replica of the caller's own node first."""
        return ",".join(self.replicas[(first + index) % 2].address for index in range(2))

    def start_jobs(self) -> None:
        for index, release in enumerate(self.releases):
            jobs = self._folder / f"job{index}"
            jobs.mkdir()
            for rank in range(2):
                command = release.role("trainer", self.model(index), str(jobs), str(rank), self.servers(rank))
                self.trainers.append(self._started(command, f"trainer{index}-{rank}"))
        eventually(lambda: all(each.versions for each in self.trainers[::2]) or self._check())
        for index in range(2):
            for release, first in zip(self.releases, (0, 1), strict=True):
                command = release.role("engine", self.model(index), self.servers(first))
                self.engines.append(self._started(command, f"engine{index}-{first}"))

    def _started(self, command: list[str], name: str) -> Role:
        role = Role(command, self._folder / f"{name}.log")
        self._stack.callback(role.kill)
        return role

    @staticmethod
    def model(index: int) -> str:
        return f"acme/job{index}"

    def _check(self) -> None:
        for role in (*self.trainers, *self.engines):
            role.check_alive()

    def go_on(self) -> None:
        """Wait until each trainer has pushed `LEAST` versions more, and each engine has pulled as many."""
        told = [*self.trainers[::2], *self.engines]
        before = [len(role.versions) for role in told]
        eventually(
            lambda: (
                all(len(role.versions) >= count + LEAST for role, count in zip(told, before, strict=True))
                or self._check()
            )
        )

    def end_jobs(self) -> None:
        """Let trainers end, and engines once they have the last version."""
        for index in range(2):
            (self._folder / f"job{index}" / "stop").touch()
        assert [role.ended() for role in self.trainers] == [0] * 4
        for position, engine in enumerate(self.engines):
            last = self.trainers[2 * (position // 2)].versions[-1]
            eventually(lambda engine=engine, last=last: engine.versions[-1] == last or engine.check_alive())
            engine.stop()


def test_replicas_go_to_this_release_and_back_under_pushes_and_pulls_and_no_version_is_lost(
    releases: tuple[Release, Release], location: str, tmp_path: Path
) -> None:
    last, this = releases
    with ExitStack() as stack:
        cluster = Cluster(location, tmp_path, releases, stack)
        for replica in cluster.replicas:
            replica.start(last)
        cluster.start_jobs()
        cluster.go_on()
        for release in (this, last):
            for replica in cluster.replicas:
                assert replica.stop() == 0, replica.log()
                replica.start(release)
                cluster.go_on()
            for index in range(2):
                for client in releases:
                    subprocess.run(
                        client.role("restore", cluster.model(index), cluster.servers(0)),
                        check=True,
                        timeout=120,
                    )
        cluster.end_jobs()

        for index in range(2):
            pushed = cluster.trainers[2 * index].versions
            # no step was pushed twice, none is missing, and numbers rise with steps
            assert [version["step"] for version in pushed] == list(range(1, len(pushed) + 1))
            assert [version["number"] for version in pushed] == sorted({version["number"] for version in pushed})
            told = [
                _cli(release, "versions", cluster.model(index), "--server", cluster.servers(0)) for release in releases
            ]
            assert told[0] == told[1]
        for replica in cluster.replicas:
            assert replica.stop() == 0, replica.log()
        for release in releases:
            found = subprocess.run(
                release.command("fsck", location, "--digests"),
                capture_output=True,
                text=True,
                check=False,
            )
            assert found.returncode == 0, found.stdout + found.stderr


def _cli(release: Release, *arguments: str) -> object:
    done = subprocess.run(release.command(*arguments, "--json"), capture_output=True, text=True, check=True, timeout=60)
    return json.loads(done.stdout)
