"""A disk that is full or fails: do versions stay live, is the trainer told, and is nothing durable lost?"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.service.bad_input.bench import Bench
from tests.support.raw_clients import RawClient, assert_equal, cut, stream_of, tiny_folder, whole_layout
from tests.support.services import running_service
from tests.support.waiting import eventually
from weighbridge._clients.engine import EngineClient
from weighbridge._core.resources import VersionState
from weighbridge._trainers.trainer import TrainerClient
from weighbridge.errors import (
    DataLoss,
    DeadlineExceeded,
    FailedPrecondition,
    ResourceExhausted,
    WeighbridgeError,
)


class Disk:
    """A small disk that can be filled: a real one where mounting is permitted, otherwise one that says so."""

    def __init__(self, folder: Path, mounted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self._mounted = mounted
        self._room: int | None = None
        if not mounted:
            write = os.write

            def limited(file: int, data: Any) -> int:
                if self._room is not None and len(data) > self._room:
                    raise OSError(28, "No space left on device")
                return write(file, data)

            monkeypatch.setattr(os, "write", limited)

    def fill(self, room: int) -> None:
        self._room = room
        if self._mounted:
            status = os.statvfs(self.folder)
            with (self.folder / "filler").open("ab") as file:
                file.write(b"\0" * max(status.f_bavail * status.f_frsize - room, 0))

    def make_room(self) -> None:
        self._room = None
        (self.folder / "filler").unlink(missing_ok=True)


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    folder = tmp_path / "disk"
    folder.mkdir()
    with contextlib.suppress(OSError):
        mounted = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", folder], capture_output=True, check=False
        )
    try:
        yield Disk(folder, mounted.returncode == 0, monkeypatch)
    finally:
        if mounted.returncode == 0:
            subprocess.run(["umount", "-l", folder], check=True)


def test_with_a_full_disk_versions_stay_live_the_trainer_is_told_and_they_become_durable_when_there_is_room(
    bench: Bench, disk: Disk, tmp_path: Path
) -> None:
    source = bench.source
    # what is the same as in the version before would need no room
    other, another = (tiny_folder(tmp_path / str(seed), seed=seed) for seed in (7, 8))
    with (
        running_service(disk.folder / "store") as running,
        TrainerClient(running.address) as trainer,
        RawClient(running.address) as raw,
        EngineClient(running.address) as engine,
    ):
        trainer.register_files("acme/full", source.files)
        first = trainer.push_folder("acme/full", source.folder, step=1).wait()
        number = raw.open("acme/full")
        layout = whole_layout(other.arrays)
        stream = stream_of(other.arrays, layout, raw.declare("acme/full", number, layout))
        disk.fill(40_000)  # a head fits, a model does not
        raw.push("acme/full", number, cut(stream))
        raw.seal("acme/full", number)
        catalog = running.service.catalog
        eventually(lambda: [version.number for version in catalog.snapshots.not_durable] == [number])
        with pytest.raises(DeadlineExceeded, match=r"not durable yet: .*no space is left"):
            trainer.wait_for("acme/full", number, VersionState.DURABLE, timeout=1)
        found = trainer.version("acme/full", number)
        assert found.state is VersionState.VERIFIED
        assert trainer.refs("acme/full") == {"latest": first.number, "live": number}
        assert_equal(engine, "acme/full", "live", other.arrays)
        assert_equal(engine, "acme/full", "latest", source.arrays)
        with pytest.raises(FailedPrecondition):
            trainer.set_ref("acme/full", "prod", number)
        third = trainer.push_folder("acme/full", another.folder, step=3)
        eventually(lambda: third.number in [version.number for version in catalog.snapshots.not_durable])
        with pytest.raises(DeadlineExceeded, match="no space is left"):
            third.wait(timeout=1)
        disk.fill(0)
        with pytest.raises(ResourceExhausted, match="no space is left"):
            trainer.push_folder("acme/full", another.folder, step=4)
        assert_equal(engine, "acme/full", "live", another.arrays)
        disk.make_room()
        last = trainer.push_folder("acme/full", source.folder, step=5).wait(timeout=60)
        assert last.state is VersionState.DURABLE
        assert not trainer.verify("acme/full", last.number).problems
        assert trainer.refs("acme/full")["latest"] == last.number
        assert trainer.versions("acme/full")[0].state is VersionState.DURABLE
        for each, arrays in ((number, other.arrays), (third.number, another.arrays)):
            trainer.wait_for("acme/full", each, VersionState.DURABLE, timeout=60)
            assert not trainer.verify("acme/full", each).problems
            assert_equal(engine, "acme/full", each, arrays)
        left = {path.name for path in (disk.folder / "store/models/acme/full/versions").iterdir()}
        assert left == {f"{n:012}" for n in (first.number, number, third.number, last.number)}


def test_an_error_after_the_head_was_written_never_costs_the_versions_files(
    bench: Bench, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk fails between the renaming of the new head and the flushing of its folder."""
    store = bench.running.service.catalog.store
    install = store._install

    def fails_late(temp: str, key: str, mode: Any, what: str) -> None:
        install(temp, key, mode, what)
        if key.endswith("head.json") and json.loads(store.get(key)[0])["recent"]:
            raise DataLoss("the device reports 'Input/output error'")

    monkeypatch.setattr(store, "_install", fails_late)
    number = bench.trainer.push_folder(model, bench.source.folder).number
    with contextlib.suppress(WeighbridgeError):
        bench.trainer.wait_for(model, number, VersionState.DURABLE, timeout=10)
    monkeypatch.undo()
    assert bench.trainer.refs(model)["latest"] == number
    assert not bench.trainer.verify(model, number).problems
    assert_equal(bench.engine, model, "latest", bench.source.arrays)
