"""Do a trainer's steps become versions, and versions become folders, whatever happens to the folders in between?"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from subprocess import PIPE
from typing import Any, ClassVar

import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.numpy import load_file, save_file

from tests.support.raw_clients import TinyModel, tiny_folder
from tests.support.services import RunningService, running_service
from tests.support.waiting import eventually
from weighbridge import EngineClient, FailedPrecondition, TrainerClient, VersionState
from weighbridge._cli import commands
from weighbridge._clients.push_handle import PushHandle, PushReport
from weighbridge.relay.incoming import Incoming
from weighbridge.relay.outgoing import Outgoing
from weighbridge.relay.places import StepPlaces
from weighbridge.relay.relayed import Relayed
from weighbridge.relay.steps import STEPS, StepNames
from weighbridge_service.push import publisher
from weighbridge_storage.documents.names import ModelName

MODEL = "tests/relayed"


@pytest.fixture
def source(tmp_path: Path) -> TinyModel:
    return tiny_folder(tmp_path / "hf")


@pytest.fixture
def running(tmp_path: Path) -> Iterator[RunningService]:
    with running_service(tmp_path / "store") as service:
        yield service


@pytest.fixture
def trainer(running: RunningService) -> Iterator[TrainerClient]:
    with TrainerClient(running.address) as client:
        yield client


class Trainer:
    """A writer of steps: two files and an index, each under a temporary name first, then the marker."""

    def __init__(self, root: Path, source: TinyModel) -> None:
        self.root = root
        self._source = source

    def save(self, step: int, value: float, *, marked: bool = True, leave_out: str = "") -> Path:
        """Write a step whose elements all are one number."""
        folder = self.root / f"step_{step}"
        folder.mkdir(parents=True, exist_ok=True)
        arrays = {name: np.full(array.shape, value, np.float32) for name, array in self._source.arrays.items()}
        arrays.pop(leave_out, None)
        names = sorted(arrays)
        half = len(names) // 2
        placed = {}
        for number, part in enumerate((names[:half], names[half:]), 1):
            file = f"model-{number:05}-of-00002.safetensors"
            save_file({name: arrays[name] for name in part}, folder / "tmp.safetensors")
            (folder / "tmp.safetensors").rename(folder / file)
            placed |= dict.fromkeys(part, file)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
        if marked:
            (folder / "STABLE").touch()
        return folder


@pytest.fixture
def steps(tmp_path: Path, source: TinyModel) -> Trainer:
    return Trainer(tmp_path / "broadcasts", source)


@pytest.fixture
def relay(trainer: TrainerClient, steps: Trainer, source: TinyModel) -> Callable[..., Iterator[Relayed]]:
    def start(client: TrainerClient = trainer, names: StepNames = STEPS) -> Iterator[Relayed]:
        return Outgoing(client, MODEL, steps.root, names, hf_dir=source.folder, poll_seconds=0.02).run()

    return start


def value_of(client: EngineClient | TrainerClient, number: int, folder: Path) -> float:
    """The number that all elements of a version are."""
    with EngineClient(client.server) as engine:
        engine.export(MODEL, number, folder / f"export-{number}")
    return value_in(folder / f"export-{number}")


def value_in(folder: Path) -> float:
    arrays = [array for file in folder.glob("*.safetensors") for array in load_file(file).values()]
    found = {float(value) for array in arrays for value in np.unique(array)}
    assert len(found) == 1, f"{folder} mixes {found}"
    return found.pop()


def test_the_newest_complete_step_is_pushed_and_a_new_process_goes_on_from_there(
    relay: Callable[..., Iterator[Relayed]], steps: Trainer, trainer: TrainerClient, tmp_path: Path
) -> None:
    for step in (1, 2, 3):
        steps.save(step, step)
    steps.save(4, 4, marked=False)
    going = relay()
    first = next(going)
    assert (first.step, first.version, first.error) == (3, 1, "")
    assert first.folder == str(steps.root / "step_3")
    assert value_of(trainer, 1, tmp_path) == 3.0

    (steps.root / "step_4" / "STABLE").touch()
    assert next(going).step == 4
    steps.save(2, 2.5)  # out of order
    again = relay()
    steps.save(6, 6)
    assert next(again).step == 6
    assert [version.step for version in trainer.versions(MODEL)] == [6, 4, 3]
    trainer.wait_for(MODEL, 3, VersionState.DURABLE, timeout=60)


def test_a_step_that_is_written_again_and_one_that_is_gone_back_to_become_versions(
    relay: Callable[..., Iterator[Relayed]], steps: Trainer, trainer: TrainerClient, tmp_path: Path
) -> None:
    going = relay()
    steps.save(5, 5)
    assert next(going).step == 5
    steps.save(6, 6)
    assert next(going).step == 6
    steps.save(6, 6.5)
    assert next(going).version == 3
    assert value_of(trainer, 3, tmp_path) == 6.5

    (steps.root / "step_6" / "STABLE").unlink()  # about to be written again: the older one does not count
    steps.save(7, 7)
    assert next(going).step == 7

    shutil.rmtree(steps.root / "step_6")
    shutil.rmtree(steps.root / "step_7")
    gone_back = next(going)
    assert (gone_back.step, gone_back.version) == (5, 5)
    assert trainer.version(MODEL, "live").number == 5


def test_a_step_that_contradicts_the_model_is_refused_once_and_the_next_one_is_pushed(
    relay: Callable[..., Iterator[Relayed]], steps: Trainer, trainer: TrainerClient
) -> None:
    going = relay()
    steps.save(1, 1)
    assert not next(going).error
    steps.save(2, 2, leave_out="model.norm.weight")
    refused = next(going)
    assert "model.norm.weight" in refused.error
    steps.save(3, 3)
    assert next(going).step == 3
    (steps.root / "step_4").mkdir()
    (steps.root / "step_4" / "STABLE").touch()
    assert "no safetensors files" in next(going).error


class Meddling(TrainerClient):
    """A client during whose push something happens to the folder."""

    meddle: Callable[[], Any]

    def push_folder(self, model: str, hf_dir: str | Path, **said: Any) -> Any:
        handle = super().push_folder(model, hf_dir, **said)
        self.meddle()
        return handle


@pytest.mark.parametrize("how", ["deleted", "written again"])
def test_a_step_that_is_deleted_or_written_again_while_it_is_read_becomes_no_version(
    relay: Callable[..., Iterator[Relayed]],
    running: RunningService,
    steps: Trainer,
    trainer: TrainerClient,
    tmp_path: Path,
    how: str,
) -> None:
    with Meddling(running.address) as client:
        meddled: list[str] = []

        def meddle() -> None:
            if not meddled:
                meddled.append(how)
                if how == "deleted":
                    shutil.rmtree(steps.root / "step_1")
                else:
                    steps.save(1, 1.5)

        client.meddle = meddle
        going = relay(client)
        steps.save(1, 1)
        failed = next(going)
        assert f"step 1 was {how} while" in failed.error
        assert trainer.versions(MODEL) == []
        if how == "deleted":
            steps.save(2, 1.5)
        done = next(going)
        assert (done.error, done.version) == ("", 2)
        assert value_of(trainer, 2, tmp_path) == 1.5


class Looking(StepNames):
    """Step names that record each search for the newest complete step."""

    looked: ClassVar[list[Path]] = []

    def newest_complete(self, root: Path) -> int | None:
        self.looked.append(root)
        return super().newest_complete(root)


@pytest.mark.parametrize("target", ["nowhere", "model-extra.safetensors"], ids=["dangling", "circular"])
def test_a_marked_step_that_cannot_be_read_is_told_once_and_the_next_one_is_pushed(
    relay: Callable[..., Iterator[Relayed]], steps: Trainer, target: str
) -> None:
    steps.save(1, 1)
    names = Looking()
    going = relay(names=names)
    assert next(going).step == 1
    folder = steps.save(2, 2, marked=False)
    (folder / "model-extra.safetensors").symlink_to(target)
    (folder / "STABLE").touch()
    told = next(going)
    assert (told.step, told.version, told.folder) == (2, None, str(folder))
    assert f"{folder / 'model-extra.safetensors'} cannot be read: " in told.error
    names.looked.clear()
    with ThreadPoolExecutor(1) as pool:
        following = pool.submit(next, going)
        eventually(lambda: len(names.looked) > 3)
        steps.save(3, 3)
        assert following.result(60).step == 3


def test_a_folder_of_steps_that_cannot_be_listed_is_told_once_and_looked_at_again(
    relay: Callable[..., Iterator[Relayed]], steps: Trainer
) -> None:
    steps.root.write_text("in the way")
    going = relay()
    told = next(going)
    assert (told.step, told.folder) == (None, str(steps.root))
    assert "cannot be read: Not a directory" in told.error
    steps.root.unlink()
    steps.save(1, 1)
    assert next(going).step == 1


def test_a_relay_that_is_told_to_end_aborts_what_it_pushes(
    running: RunningService,
    steps: Trainer,
    source: TinyModel,
    trainer: TrainerClient,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reported = PushHandle.report

    def end(handle: PushHandle, timeout: float | None = None) -> PushReport:
        signal.raise_signal(signal.SIGTERM)
        return reported(handle, timeout)

    monkeypatch.setattr(PushHandle, "report", end)
    steps.save(1, 1)
    before = signal.getsignal(signal.SIGTERM)
    try:
        line = ["relay", MODEL, "--from", str(steps.root), "--config", str(source.folder)]
        ended = CliRunner().invoke(commands, [*line, "--server", running.address])
    finally:
        signal.signal(signal.SIGTERM, before)
    assert ended.exit_code == 128 + signal.SIGTERM
    version = trainer.version(MODEL, 1)
    assert version.state is VersionState.ABORTED
    assert "the relay was ended" in version.error


def test_a_version_that_is_lost_before_it_is_stored_is_pushed_again(
    relay: Callable[..., Iterator[Relayed]],
    steps: Trainer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def away(*_: object) -> None:
        raise OSError("the store is away")

    with ExitStack() as stack:
        replicas = [
            stack.enter_context(running_service(tmp_path / "store", drain_seconds=0.2, open_lease=5.0))
            for _ in range(2)
        ]
        client = stack.enter_context(TrainerClient(",".join(each.address for each in replicas)))
        going = relay(client)
        with monkeypatch.context() as patched:
            patched.setattr(publisher, "write_weights", away)
            steps.save(1, 1)
            assert next(going).version == 1
            # on a busy machine a call to the first address may time out, and the push go to the second
            (holder,) = (each for each in replicas if each.service.registry.get(ModelName.parse(MODEL), 1))
            holder.stop()
        again = next(going)
        assert (again.step, again.version, again.error) == (1, 2, "")
        client.wait_for(MODEL, 2, VersionState.DURABLE, timeout=60)


def test_versions_become_folders_of_their_steps_bit_by_bit(
    running: RunningService, trainer: TrainerClient, source: TinyModel, tmp_path: Path
) -> None:
    trainer.import_folder(MODEL, source.folder, step=4).wait(timeout=60)
    root = tmp_path / "placed"
    with EngineClient(running.address) as client:
        going = Incoming(client, MODEL, StepPlaces(root, keep=2)).run()
        placed = next(going)
        assert (placed.step, placed.version, placed.error) == (4, 1, "")
        found = load_file(root / "step_4" / "model.safetensors")
        assert found.keys() == source.arrays.keys()
        assert all(np.array_equal(found[name], array) for name, array in source.arrays.items())
        assert (root / "step_4" / "config.json").read_bytes() == source.files["config.json"]
        inode = os.stat(root / "step_4").st_ino

        for step in (5, 6):
            trainer.push_folder(MODEL, source.folder, step=step).wait(timeout=60)
            assert next(going).step == step
        assert [path.name for path in sorted(root.glob("step_*"))] == ["step_5", "step_6"]
        assert inode not in {os.stat(path).st_ino for path in root.glob("step_*")}

        with pytest.raises(FailedPrecondition, match="another process places"):
            next(Incoming(client, MODEL, StepPlaces(root)).run())
        going.close()  # type: ignore[attr-defined]
        there = next(Incoming(client, MODEL, StepPlaces(root)).run())
        assert (there.step, there.version, there.nbytes) == (6, 3, 0)


def test_a_folder_in_the_way_is_told_and_the_next_version_is_placed(
    running: RunningService, trainer: TrainerClient, source: TinyModel, tmp_path: Path
) -> None:
    trainer.import_folder(MODEL, source.folder, step=1).wait(timeout=60)
    root = tmp_path / "placed"
    shutil.copytree(source.folder, root / "step_1")
    with EngineClient(running.address) as client:
        going = Incoming(client, MODEL, StepPlaces(root), retry_seconds=0.01).run()
        assert "step_1 was not placed by weighbridge" in next(going).error
        trainer.push_folder(MODEL, source.folder, step=2).wait(timeout=60)
        done = next(each for each in going if not each.error)
        assert (done.step, done.version) == (2, 2)


def test_the_command_relays_one_way_or_the_other(
    running: RunningService, steps: Trainer, source: TinyModel, tmp_path: Path
) -> None:
    def run(*arguments: str) -> Any:
        return CliRunner().invoke(commands, ["relay", *arguments, "--server", running.address])

    steps.save(12, 12)
    assert run(MODEL).exit_code == 2
    assert run(MODEL, "--from", str(steps.root), "--to", str(tmp_path)).exit_code == 2
    unknown = run(MODEL, "--from", str(steps.root), "--count", "1")
    assert unknown.exit_code == 1
    assert "--config" in unknown.output

    line = [MODEL, "--from", str(steps.root), "--config", str(source.folder), "--count", "1"]
    sent = run(*line, "--run", "ppo")
    assert sent.output.startswith(f"{MODEL}@1: {steps.root / 'step_12'}, "), sent.output
    received = run(MODEL, "--to", str(tmp_path / "placed"), "--count", "1", "--json")
    assert json.loads(received.output) | {"seconds": 0} == {
        "model": MODEL,
        "step": 12,
        "folder": str(tmp_path / "placed" / "step_12"),
        "version": 1,
        "nbytes": sum(array.nbytes for array in source.arrays.values()),
        "seconds": 0,
        "error": "",
    }
    assert value_in(tmp_path / "placed" / "step_12") == 12.0
    with EngineClient(running.address) as client:
        assert client.version(MODEL, 1).run == "ppo"


def test_the_command_beside_the_engines_waits_for_the_model(
    running: RunningService, trainer: TrainerClient, source: TinyModel, tmp_path: Path
) -> None:
    line = [sys.executable, "-m", "weighbridge", "relay", MODEL, "--to", str(tmp_path / "placed")]
    with subprocess.Popen(
        [*line, "--count", "1", "--server", running.address], stdout=PIPE, stderr=PIPE, text=True
    ) as process:
        try:
            assert process.stderr is not None
            assert process.stderr.readline() == f"there is no model {MODEL}. Waiting until there is one.\n"
            trainer.import_folder(MODEL, source.folder, step=7).wait(timeout=60)
            out, err = process.communicate(timeout=120)
        finally:
            process.kill()
    assert (process.returncode, err) == (0, "")
    assert out.startswith(f"{MODEL}@1: {tmp_path / 'placed' / 'step_7'}, ")
