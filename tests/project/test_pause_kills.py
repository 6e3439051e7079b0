"""Does the benchmark of kills say what an engine has after a kill, and whether that is good?"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import pause_kills
from benchmarks.pause_kills import (
    AGENT,
    APPLY,
    KILLS,
    MODEL,
    SERVICE,
    STAGE,
    TRAINER,
    WORKER,
    Hung,
    round_of,
    rounds,
)


class FakeStage:
    """Processes of which the engine takes every version at once, but the one in whose update something is killed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.did: list[str] = []
        self.step = self.serves = 0
        self.mixed = ""
        self.trainer = SimpleNamespace(ask=lambda what: {"version": self.step} if not what else {})

    def start(self, name: str) -> None:
        self.did.append(f"start {name}")

    def kill(self, name: str) -> None:
        self.did.append(f"kill {name}")

    def ask(self, method: str, phase: str, folder: str) -> None:
        assert (method, Path(folder)) == ("bench_hold", self._folder)
        (self._folder / "held").touch()

    def push(self, *, waits: bool = True) -> None:
        self.step += 1
        self.serves = self.step if waits else self.serves

    def newest(self) -> Any:
        return SimpleNamespace(number=self.step, step=self.step)

    def served(self) -> str:
        return f"{MODEL}@{self.serves}" if self.serves else ""

    def facts(self) -> Any:
        return {"sums": {"norm": self.serves, "embed": -1 if self.mixed == self.served() else self.serves}}

    def sums(self, step: int) -> dict[str, int]:
        return {"norm": step, "embed": step}

    def step_of(self, sums: dict[str, int]) -> int:
        return next((step for step in range(1, self.step + 1) if self.sums(step) == sums), 0)


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeStage:
    monkeypatch.setattr(pause_kills, "_SECONDS", 0.0)
    return FakeStage(tmp_path / "holds")


def test_all_kills_are_made_and_what_was_killed_is_started_again(stage: Any, tmp_path: Path) -> None:
    found = list(rounds(stage, tmp_path, KILLS))
    assert [(each["killed"], each["in"], each["good"]) for each in found] == [(*each, True) for each in KILLS]
    started = [f"start {name}" for name in (SERVICE, TRAINER, WORKER, AGENT)]
    assert stage.did[:4] == started
    of_service = ["kill service", "start service", "kill trainer", "start trainer"]
    assert stage.did[4:] == [
        *("kill agent", "start agent", "kill trainer", "start trainer", *of_service, *of_service),
        *("kill worker", "start worker", "kill worker", "start worker"),
    ]
    assert found[0]["after"] == f"{MODEL}@1"
    assert "after" not in found[-1]


def test_an_engine_of_mixed_weights_is_no_good_and_one_of_none_is(stage: Any, tmp_path: Path) -> None:
    stage.push()
    stage.mixed = f"{MODEL}@1"
    assert not round_of(stage, AGENT, STAGE, tmp_path / "holds")["good"]
    stage.serves, stage.mixed = 0, ""
    found = round_of(stage, SERVICE, APPLY, tmp_path / "holds")
    assert (found["after"], found["good"]) == ("", True)
    stage.mixed = f"{MODEL}@{stage.step + 2}"
    found = round_of(stage, AGENT, STAGE, tmp_path / "holds")
    assert (found["wrong"], found["good"]) == (["embed"], False)


def test_what_does_not_come_to_pass_ends_the_run(stage: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pause_kills, "eventually", lambda what, *_: (_ for _ in ()).throw(Hung(what)))
    (found,) = rounds(stage, tmp_path, KILLS)
    assert found["failed"] == "Hung: the engine comes to stage"
    assert not found["good"]
