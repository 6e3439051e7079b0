"""Is a copy of a store complete when it is made as docs/operations.md says while versions are pushed and retired?"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sysconfig
import threading
from contextlib import closing
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.support.rounds import rounds
from tests.support.services import running_service
from tests.support.small_stores import add_model, unpack, version_folder
from weighbridge import TrainerClient
from weighbridge._cli import commands
from weighbridge._core.resources import Retention
from weighbridge_storage.documents.names import ModelName
from weighbridge_storage.head.head_store import HeadStore
from weighbridge_storage.stores.local import LocalStore
from weighbridge_storage.versions.verifying import verify_version

LONG = ModelName.parse("acme/long")
OPERATIONS = Path(__file__).parents[2] / "docs/operations.md"


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A store with a model of 150 versions, so that pushes edit the tree of its history."""
    folder = unpack(tmp_path)
    add_model(folder, str(LONG), range(1, 151))
    return folder


def back_up(store: Path, backup: Path, heads: Path) -> None:
    """Run the commands of the documentation."""
    (lines,) = re.findall(r"```\n(rclone copy .*?)```", OPERATIONS.read_text(), re.DOTALL)
    rclone = str(Path(sysconfig.get_path("scripts")) / "rclone")
    places = {"rclone": rclone, "STORE": str(store), "BACKUP": str(backup), "HEADS": str(heads)}
    for line in lines.splitlines():
        command = [places.get(word, word) for word in shlex.split(line)]
        subprocess.run(command, check=True, timeout=100)


def fsck(folder: Path, *options: str) -> dict[str, list[str]]:
    """The repair (``mend``) of each unrepaired finding, by model."""
    said = json.loads(CliRunner().invoke(commands, ["fsck", str(folder), *options, "--json"]).stdout)
    return {model["name"]: [f["mend"] for f in model["findings"] if not f["repaired"]] for model in said["models"]}


def versions_of(folder: Path) -> dict[int, bool]:
    """The versions of the model, and whether each matches its manifest."""
    with closing(LocalStore(folder)) as opened:
        history = HeadStore(opened).history(LONG)
        assert history is not None
        return {n: not verify_version(opened, LONG, n).problems for n in history.versions()}


def test_a_copy_made_while_versions_are_pushed_and_retired_is_consistent(store: Path, tmp_path: Path) -> None:
    backup, pushed, stop = tmp_path / "backup", threading.Event(), threading.Event()
    numbers: list[int] = []
    source = shutil.copytree(version_folder(store, 2), tmp_path / "hf")

    def push(trainer: TrainerClient) -> None:
        while not stop.is_set():
            numbers.append(trainer.push_folder(str(LONG), source, step=1).wait(timeout=60).number)
            pushed.set()

    with running_service(store, collect_every=0.2) as running, TrainerClient(running.address) as trainer:
        trainer.set_retention(str(LONG), Retention(keep_last=120))
        thread = threading.Thread(target=push, args=(trainer,))
        thread.start()
        try:
            assert pushed.wait(60)
            for attempt in range(2 if rounds("CELLS") else 1):  # into the same backup
                before = len(numbers)
                back_up(store, backup, tmp_path / f"heads{attempt}")
                while len(numbers) == before and thread.is_alive():
                    stop.wait(0.05)
                copy = shutil.copytree(backup, tmp_path / f"copy{attempt}")
                # nothing that a head leads to is missing; what is newer than the head may be in any state
                assert "drop" not in fsck(copy)[str(LONG)]
                there = versions_of(copy)
                assert len(there) >= 100
                assert all(there.values())
                assert max(there) >= numbers[before - 1]
                fsck(copy, "--repair")
                assert not {"head", "stray", "drop"} & set(fsck(copy)[str(LONG)])
                assert versions_of(copy).keys() >= there.keys()
        finally:
            stop.set()
            thread.join(60)
    assert len(numbers) > 5


def test_a_copy_in_the_other_order_leads_to_versions_that_are_not_there(store: Path, tmp_path: Path) -> None:
    backup = tmp_path / "backup"
    shutil.copytree(store, backup, ignore=shutil.ignore_patterns("head.json"))
    source = shutil.copytree(version_folder(store, 2), tmp_path / "hf")
    with running_service(store) as running, TrainerClient(running.address) as trainer:
        trainer.push_folder(str(LONG), source, step=1).wait(timeout=60)
    for head in store.rglob("head.json"):
        shutil.copy(head, backup / head.relative_to(store))
    assert fsck(backup)[str(LONG)] == ["drop"]


def test_a_store_that_is_restored_gives_no_number_twice(store: Path, tmp_path: Path) -> None:
    backup = tmp_path / "backup"
    back_up(store, backup, tmp_path / "heads")
    source = shutil.copytree(version_folder(store, 2), tmp_path / "hf")
    (store / LONG.head_key).unlink()
    for path in backup.rglob("head.json"):
        shutil.copy(path, store / path.relative_to(backup))
    with running_service(store) as running, TrainerClient(running.address) as trainer:
        newer = trainer.push_folder(str(LONG), source, step=1).wait(timeout=60).number
    # the head of the backup again, over a store that has gone on
    shutil.copy(backup / LONG.head_key, store / LONG.head_key)
    assert fsck(store, "--repair")[str(LONG)] == []
    assert versions_of(store)[newer]
    with running_service(store) as running, TrainerClient(running.address) as trainer:
        assert trainer.push_folder(str(LONG), source, step=2).wait(timeout=60).number > newer
