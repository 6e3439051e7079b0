"""Do prime-rl's broadcasts reach another file system complete, wherever a relay is killed, with ``STABLE`` last?

prime-rl (0.8.1.dev, 2026-08, 559b447) is in no registry. Its trainer's writing (``FileSystemWeightBroadcast``: files
under names of their own, renamed; the index; ``STABLE``) and its orchestrator's looking (the newest ``step_*``, once it
has ``STABLE``) are done here as its source does them.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Self

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from tests.support.forked import forking
from tests.support.killable_service import KillableService
from tests.support.reference import tiny_config, tiny_model
from tests.support.waiting import eventually
from weighbridge import EngineClient, TrainerClient
from weighbridge.relay.incoming import Incoming
from weighbridge.relay.outgoing import Outgoing
from weighbridge.relay.places import StepPlaces

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

MODEL = "tests/prime"
RANKS = 2


def send(address: str, root: Path, hf_dir: Path) -> None:
    """The relay beside the trainer, until it is killed."""
    with TrainerClient(address, lane="grpc") as client:
        for _ in Outgoing(client, MODEL, root, hf_dir=hf_dir, poll_seconds=0.02).run():
            pass


def receive(address: str, root: Path) -> None:
    """The relay beside the engines, until it is killed."""
    with EngineClient(address, lane="grpc") as client:
        for _ in Incoming(client, MODEL, StepPlaces(root, keep=2), retry_seconds=0.05).run():
            pass


@dataclass
class Relay:
    """A relay in a process of its own."""

    target: Callable[..., None]
    arguments: tuple[object, ...]
    process: ForkServerProcess | None = None

    def start(self) -> None:
        self.process = forking().Process(target=self.target, args=self.arguments, daemon=True)
        self.process.start()

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.join()


@dataclass
class Trainer:
    """A writer of the files of prime-rl's trainer; all elements of a step are its number."""

    output_dir: Path
    shapes: dict[str, torch.Size]

    @property
    def broadcasts(self) -> Path:
        return self.output_dir / "broadcasts"

    def broadcast(self, step: int, keep: int = 3) -> None:
        """As `broadcast_weights` and `clean_older`."""
        folder = self.broadcasts / f"step_{step}"
        folder.mkdir(parents=True, exist_ok=True)
        names = list(self.shapes)
        weight_map = {}
        for rank in range(RANKS):
            mine = {
                name: torch.full(self.shapes[name], float(step), dtype=torch.bfloat16) for name in names[rank::RANKS]
            }
            save_file(mine, folder / f"tmp-rank{rank}.safetensors", metadata={"format": "pt"})
            final = f"model-{rank + 1:05d}-of-{RANKS:05d}.safetensors"
            (folder / f"tmp-rank{rank}.safetensors").rename(folder / final)
            weight_map |= dict.fromkeys(mine, final)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        (folder / "STABLE").touch()
        for old in steps_in(self.broadcasts):
            if old <= step - keep:
                shutil.rmtree(self.broadcasts / f"step_{old}", ignore_errors=True)


def steps_in(broadcasts: Path) -> list[int]:
    """As prime-rl's `get_all_ckpt_steps`, which takes every ``step_*``."""
    return sorted(int(folder.name.split("_")[-1]) for folder in broadcasts.glob("step_*"))


@dataclass
class Orchestrator:
    """prime-rl's weight watcher, and its engines that load the folder they receive; it polls without a pause."""

    output_dir: Path
    names: frozenset[str]
    loaded: list[int] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        broadcasts = self.output_dir / "broadcasts"
        while not self._stop.is_set():
            for step in steps_in(broadcasts)[-1:]:
                self._look(step, broadcasts / f"step_{step}")
            time.sleep(0.002)

    def _look(self, step: int, folder: Path) -> None:
        """Load a marked step.

        A problem counts only if the marker is still the same: a writer removes it first, and writes it last.
        """
        before = marked(folder)
        if before is None:
            return
        try:
            self._load(step, folder)
        except (OSError, ValueError) as error:
            if marked(folder) == before:
                self.problems.append(f"step {step}: {error}")

    def _load(self, step: int, folder: Path) -> None:
        opened = [safe_open(file, framework="pt") for file in sorted(folder.glob("*.safetensors"))]
        found: dict[str, torch.Tensor] = {}
        for file in opened:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no mapping
        if found.keys() != self.names or any((tensor != step).any() for tensor in found.values()):
            raise ValueError(f"it is marked and not complete: {len(found)} tensors")
        (folder / "NCCL_READY").touch()
        if step not in self.loaded[-1:]:
            self.loaded.append(step)


def marked(folder: Path) -> tuple[int, int] | None:
    """Inode and modification time of a folder's marker; None without one."""
    try:
        found = (folder / "STABLE").stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns


@dataclass
class Place:
    """A trainer on one file system, engines on another one, a service and two relays between them."""

    trainer: Trainer
    orchestrator: Orchestrator
    sender: Relay
    receiver: Relay
    service: KillableService

    def start(self) -> None:
        """Both relays, with a first step; beside the engines nothing can be followed before the trainer's side has
        registered the model.
        """
        self.trainer.broadcast(1)
        self.sender.start()
        with TrainerClient(self.service.address) as client:
            eventually(lambda: [model.name for model in client.models()] == [MODEL] and client.versions(MODEL))
        self.receiver.start()
        self.reaches(1)

    def reaches(self, step: int) -> None:
        eventually(lambda: self.orchestrator.loaded[-1:] == [step])
        assert self.orchestrator.problems == []


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    config = tiny_config("qwen3", tied=False, num_hidden_layers=2, hidden_size=128, intermediate_size=512)
    config.save_pretrained(tmp_path / "hf")
    shapes = {name: tensor.shape for name, tensor in tiny_model(config, seed=1).state_dict().items()}
    service = KillableService(tmp_path / "store")
    service.start()
    with tempfile.TemporaryDirectory(prefix="weighbridge-test-", dir="/dev/shm") as shared:
        trainer = Trainer(Path(shared), shapes)
        outputs = tmp_path / "inference"
        (outputs / "broadcasts").mkdir(parents=True)
        assert os.stat(shared).st_dev != os.stat(outputs).st_dev, "two file systems"
        sender = Relay(send, (service.address, trainer.broadcasts, tmp_path / "hf"))
        receiver = Relay(receive, (service.address, outputs / "broadcasts"))
        try:
            with Orchestrator(outputs, frozenset(shapes)) as orchestrator:
                yield Place(trainer, orchestrator, sender, receiver, service)
        finally:
            for relay in (sender, receiver):
                if relay.process is not None:
                    relay.kill()
            service.kill()


def test_folders_arrive_complete_on_another_file_system_and_the_newest_come_first(place: Place) -> None:
    for step in (1, 2, 3):
        place.trainer.broadcast(step)
    place.sender.start()
    with TrainerClient(place.service.address) as client:
        eventually(lambda: [model.name for model in client.models()] == [MODEL] and client.versions(MODEL))
        assert [version.step for version in client.versions(MODEL)] == [3]
    place.receiver.start()
    place.reaches(3)
    for step in range(4, 10):
        place.trainer.broadcast(step)
    place.reaches(9)
    assert place.orchestrator.loaded == sorted(place.orchestrator.loaded)
    eventually(lambda: len(steps_in(place.orchestrator.output_dir / "broadcasts")) <= 2)


def test_relays_that_are_killed_at_random_leave_no_folder_half_and_go_on(place: Place) -> None:
    chance = random.Random(17)
    place.start()
    step = 1
    for _ in range(25):
        step += chance.randint(1, 3)
        place.trainer.broadcast(step)
        victim = chance.choice([place.sender, place.receiver])
        # some time of what it takes a relay to move a step, or more
        time.sleep(chance.uniform(0.0, 0.25))
        victim.kill()
        victim.start()
        assert place.orchestrator.problems == []
    place.reaches(step)
    broadcasts = place.orchestrator.output_dir / "broadcasts"
    eventually(lambda: not list(broadcasts.glob(".weighbridge-*")))


def test_steps_that_are_written_again_and_gone_back_to_arrive_as_they_are_now(place: Place) -> None:
    place.start()
    for step in (5, 6):
        place.trainer.broadcast(step)
        place.reaches(step)
    # training resumes from step 5: prime-rl's `clean_future_steps`, and then the same steps anew
    shutil.rmtree(place.trainer.broadcasts / "step_6")
    place.reaches(5)
    place.trainer.broadcast(6)
    place.reaches(6)


def test_a_service_that_is_killed_delays_steps_and_loses_none_that_is_still_the_newest(place: Place) -> None:
    place.start()
    for step in (2, 3):
        place.trainer.broadcast(step)
        place.service.kill()
        place.service.start()
        place.reaches(step)
