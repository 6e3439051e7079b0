"""Does an engine serve one version or none, whatever is killed in whichever phase of an update, and the newest when all
are back?

``WEIGHBRIDGE_ENGINE_KILLS=15`` kills as often in each phase; ``WEIGHBRIDGE_SEED`` repeats a run's random numbers.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.killable_service import KillableService
from tests.support.mortal_engines import AGENT, MODEL, PUSHING, RANKS, TRAINER, Cast
from tests.support.reference import tiny_config, tiny_model
from tests.support.rounds import first_seed, rounds
from weighbridge import EngineClient, TrainerClient
from weighbridge._core.resources import VersionState

KILLS = rounds("ENGINE_KILLS")
CONFIG = tiny_config("llama", tied=False, head_dim=8)
SERVICE = "service"
TARGETS = (RANKS[1], AGENT, SERVICE, TRAINER, RANKS[0])
PHASES = {
    "early": ("live", ("early",)),
    "stage": ("latest", ("stage",)),
    "ready": ("live", ("ready",)),
    "agree": ("live", ("agree",)),
    "apply": ("live", ("apply", "applied")),
    "resume": ("live", ("pause", "resume")),
}
"""Ref that the engine follows, and where one of its processes waits, by phase."""


class Stage:
    """A service, an engine with its agent, and a trainer; and which step each version has."""

    def __init__(self, folder: Path, ref: str) -> None:
        tiny_model(CONFIG, 1).save_pretrained(folder / "hf")
        self.service = KillableService(folder / "store", local_socket=str(folder / "lane.sock"), open_lease=6.0)
        self.service.start()
        with TrainerClient(self.service.address) as trainer:
            trainer.register_model(MODEL, folder / "hf")
        shapes = {name: list(p.shape) for name, p in tiny_model(CONFIG, 1).state_dict().items()}
        self.cast = Cast(folder, self.service.address, CONFIG, shapes)
        self.client = EngineClient(self.service.address)
        self._ref = ref
        self.step = 0
        self.cast.start_trainer()
        self.push()
        self.start_engine()
        self.cast.start_agent(ref)

    def push(self) -> None:
        """Push the next step, whole."""
        self.step += 1
        self.cast.push(self.step)
        pushed = self.pushed()
        assert isinstance(pushed, int), pushed

    def pushed(self) -> int | str:
        """Version of the step that was pushed last, once it is ready; or why it does not get there."""
        self.cast.wait(lambda: self._answers(), f"step {self.step} is not pushed")
        found: int | str = self._answers()[0]
        return found

    def _answers(self) -> list[Any]:
        mine = (what for name, what in self.cast.said if name == TRAINER and isinstance(what, tuple))
        return [number for step, number in mine if step == self.step]

    def start_engine(self) -> None:
        """Start the ranks with the first version that there is."""
        first = min(each.number for each in self.client.versions(MODEL) if not each.error and each.ready_time_ms)
        self.cast.start_engine(first)

    def begin(self, chance: random.Random, where: str) -> None:
        """Begin to push the next step, and wait until a process of the engine has come to a phase of its update."""
        stops = AGENT if where in ("pause", "resume") else chance.choice(RANKS)
        self.cast.hold(stops, where)
        if where == "early":
            self.cast.hold(TRAINER, PUSHING)
        self.step += 1
        self.cast.push(self.step)
        self.cast.until_held(stops)

    def kill(self, target: str) -> None:
        """Kill a process, and let all others go on."""
        if target == SERVICE:
            self.service.kill()
            self.service.start()
        else:
            self.cast.kill(target)
        self.cast.release()

    def check(self) -> set[tuple[str, int]]:
        """All ranks that live serve the same version, of which all their parameters are, or say that they serve none;
        the version, and its step.
        """
        found = set()
        for number, (status, parameters, _) in self.cast.look().items():
            if not status.served:
                assert status.broken
                continue
            (step,) = (
                step
                for step in range(1, self.step + 1)
                if all(
                    np.array_equal(parameters[name], array) for name, array in self.cast.expected(number, step).items()
                )
            )
            assert self.client.version(MODEL, int(status.served.rpartition("@")[2])).step == step
            found.add((status.served, step))
        return found

    def recover(self, target: str) -> None:
        """Start what was killed; the engine takes the newest version, and the one that comes then."""
        if target in RANKS:
            self.cast.kill(*RANKS)
            self.start_engine()
        elif target == AGENT:
            self.cast.start_agent(self._ref)
        if target == TRAINER:
            self.cast.start_trainer()
        else:
            self.pushed()
            self.check_newest()
        self.push()
        self.check_newest()

    def check_newest(self) -> None:
        """The engine comes to serve the newest version, and goes on."""
        newest = self.client.version(MODEL, "live")
        if self._ref == "latest":
            self.client.wait_for(MODEL, newest.number, VersionState.DURABLE, timeout=60)
        self.cast.wait(lambda: self._serves(newest.number), f"the engine does not take {newest}")
        assert self.check() == {(f"{MODEL}@{newest.number}", newest.step)}
        assert [paused for _, _, paused in self.cast.look().values()] == [False] * len(RANKS)

    def _serves(self, number: int) -> bool:
        last = [what for name, what in self.cast.said if name == AGENT and isinstance(what, tuple)]
        return bool(last) and last[-1] == (number, number, False)

    def close(self) -> None:
        self.cast.close()
        self.client.close()
        self.service.kill()


@pytest.fixture
def stage(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Stage]:
    made = Stage(tmp_path, PHASES[request.param][0])
    yield made
    made.close()


@pytest.mark.parametrize(("stage", "phase"), [(phase, phase) for phase in PHASES], indirect=["stage"])
def test_whatever_is_killed_an_engine_serves_one_version_or_none_and_then_the_newest(stage: Stage, phase: str) -> None:
    chance = random.Random(f"{phase}{first_seed()}")
    stage.check_newest()
    for count in range(KILLS):
        target = TARGETS[(count + list(PHASES).index(phase)) % len(TARGETS)]
        stage.begin(chance, chance.choice(PHASES[phase][1]))
        stage.kill(target)
        assert len(stage.check()) <= 1
        stage.recover(target)
