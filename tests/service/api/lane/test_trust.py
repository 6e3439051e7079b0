"""To whom is memory granted for writing, and how do the others push?"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.support.raw_clients import TinyModel, tiny_folder
from tests.support.services import RunningService, running_service
from weighbridge import EngineClient, TrainerClient
from weighbridge.errors import FailedPrecondition, InvalidArgument
from weighbridge_service.api.lane.trust import Writers
from weighbridge_storage.memory.regions import Region, why_not_granted

MODEL = "acme/tiny"
FOREIGN = 12_345
PUSH = """
import json, os, socket, sys
from weighbridge import EngineClient, TrainerClient
address, folder, lane, uid = sys.argv[1:]

class Socket(socket.socket):
    # the kernel tells a server who a client was when it connected
    def connect(self, where):
        os.seteuid(int(uid) if self.family == socket.AF_UNIX else 0)
        try:
            super().connect(where)
        finally:
            os.seteuid(0)

socket.socket = Socket
with TrainerClient(address, lane=lane) as trainer, EngineClient(address, lane="local") as engine:
    handle = trainer.push_folder("acme/tiny", folder, step=1)
    handle.wait(timeout=60)
    report = handle.report()
    pull = engine.pull("acme/tiny", handle.number)
    names = [name for name, _ in pull]
    print(json.dumps([report.lane, report.lane_reason, pull.lane, len(names)]))
"""

needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user")


@pytest.fixture
def folder() -> Iterator[Path]:
    """One that every user can enter."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        yield Path(name)


@pytest.fixture
def source(folder: Path) -> TinyModel:
    return tiny_folder(folder / "hf")


@pytest.fixture
def granted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The keys of regions that were granted for writing."""
    assert not why_not_granted()  # which tries it out once
    found: list[str] = []
    reopen = Region.reopen

    def noted(region: Region, *, writable: bool) -> int:
        if writable:
            found.append(region.key)
        return reopen(region, writable=writable)

    monkeypatch.setattr(Region, "reopen", noted)
    return found


def serve(folder: Path, *trusted: int) -> RunningService:
    return RunningService(folder / "store", local_socket=str(folder / "lane.sock"), lane_trust_uids=tuple(trusted))


def push_as(uid: int, service: RunningService, source: TinyModel, lane: str = "auto") -> list[object]:
    """Push and pull in a process that connects to the lane as a user; lane and reason of the push, lane of the pull,
    and how many tensors it brought.
    """
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PUSH, service.address, str(source.folder), lane, str(uid)],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    answer: list[object] = json.loads(ended.stdout)
    return answer


@needs_root
def test_a_push_of_another_user_shares_no_memory_with_the_version_and_says_why(
    folder: Path, source: TinyModel, granted: list[str]
) -> None:
    service = serve(folder)
    try:
        with TrainerClient(service.address) as trainer:
            trainer.register_files(MODEL, source.files)
        lane, reason, pulled_by, count = push_as(FOREIGN, service, source)
        assert (lane, pulled_by, count) == ("grpc", "local", len(source.arrays))
        assert f"user {FOREIGN}" in str(reason)
        assert not granted
        with EngineClient(service.address, lane="grpc") as engine:
            pulled = {name: tensor.numpy() for name, tensor in engine.pull(MODEL, "live")}
        assert all(np.array_equal(pulled[name], each) for name, each in source.arrays.items())
        with pytest.raises(AssertionError, match=f"--lane-trust-uid {FOREIGN}"):
            push_as(FOREIGN, service, source, lane="local")
        assert not granted
    finally:
        service.stop()


@needs_root
def test_a_user_that_is_trusted_writes_to_the_memory(folder: Path, source: TinyModel, granted: list[str]) -> None:
    service = serve(folder, FOREIGN)
    try:
        with TrainerClient(service.address) as trainer:
            trainer.register_files(MODEL, source.files)
        assert push_as(FOREIGN, service, source)[:2] == ["local", ""]
        assert granted
    finally:
        service.stop()


def test_the_services_own_user_needs_no_setting(folder: Path, source: TinyModel, granted: list[str]) -> None:
    with (
        running_service(folder / "store", local_socket=str(folder / "lane.sock")) as service,
        TrainerClient(service.address, lane="local") as trainer,
    ):
        trainer.register_files(MODEL, source.files)
        handle = trainer.push_folder(MODEL, source.folder, step=1)
        handle.wait(timeout=60)
        assert handle.report().lane == "local"
        assert granted


def test_users_are_told_apart() -> None:
    writers = Writers(7, frozenset({9}))
    writers.check(7)
    writers.check(9)
    with pytest.raises(FailedPrecondition, match="user 8") as refused:
        writers.check(8)
    assert "--lane-trust-uid 8" in refused.value.fix


def test_the_user_that_stands_for_all_unknown_ones_is_never_trusted() -> None:
    overflow = int(Path("/proc/sys/kernel/overflowuid").read_text("ascii"))
    with pytest.raises(InvalidArgument, match="cannot be trusted"):
        Writers.of([overflow])
