"""Are several engines updated together: none paused before all have prepared the version, and none left paused?"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

from weighbridge.errors import FailedPrecondition
from weighbridge.follow.engines import EngineFailed, Prepared, Serving
from weighbridge.follow.updates import Updated, apply_prepared, update


class Log:
    """The calls of all engines, in their order."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._lock = threading.Lock()

    def add(self, line: str) -> None:
        with self._lock:
            self.lines.append(line)

    def steps(self) -> list[str]:
        """The steps without the engines' names, each once for those that follow each other."""
        names = [line.partition(" ")[2] for line in self.lines]
        return [name for index, name in enumerate(names) if index == 0 or names[index - 1] != name]


class Recording:
    """An engine that records its calls, and refuses one step."""

    def __init__(
        self,
        name: str,
        log: Log,
        refuses: str = "",
        broken: str = "",
        error: BaseException | None = None,
    ) -> None:
        self.name, self.refuses, self.broken = name, refuses, broken
        self.error = error or FailedPrecondition("made up")
        self.paused = False
        self.label_ = ""
        self._log = log

    def _do(self, step: str) -> None:
        self._log.add(f"{self.name} {step}")
        if step == self.refuses:
            raise self.error

    def connect(self) -> None:
        self._do("connect")

    def serving(self) -> Serving:
        if self.refuses == "serving":
            raise FailedPrecondition("made up")
        return Serving(1, self.broken)

    def prepare(self, version: int) -> Prepared:
        self._do("prepare")
        return Prepared(version, 0.0)

    def discard(self) -> None:
        self._do("discard")

    def pause(self) -> None:
        self._do("pause")
        self.paused = True

    def apply(self, version: int, label: str) -> None:
        assert self.paused
        self._do("apply")
        self.label_ = label

    def resume(self) -> None:
        self._do("resume")
        self.paused = False

    def label(self, label: str) -> None: ...


def taken(engines: Sequence[Recording]) -> Updated:
    return update({engine.name: engine for engine in engines}, 7, "seven")


def test_all_have_the_version_before_the_first_is_paused_and_go_on_after_the_last_has_taken_it() -> None:
    log = Log()
    engines = [Recording(name, log) for name in "abc"]
    done = taken(engines)
    assert done.nbytes == 21
    assert done.pause_seconds >= 0
    assert [line for line in log.steps() if line not in ("connect", "prepare")] == [
        "pause",
        "apply",
        "resume",
    ]
    assert [engine.label_ for engine in engines] == ["seven"] * 3
    assert not any(engine.paused for engine in engines)


@pytest.mark.parametrize("step", ["connect", "prepare"])
def test_if_one_cannot_have_the_version_none_is_paused_and_all_forget_it(step: str) -> None:
    log = Log()
    engines = [Recording("a", log), Recording("b", log, refuses=step)]
    with pytest.raises(EngineFailed, match=r"none was paused(.|\n)*b: made up"):
        taken(engines)
    assert sorted(line for line in log.lines if "discard" in line) == ["a discard", "b discard"]
    assert not {"pause", "apply", "resume"} & set(log.steps())


def test_if_one_cannot_be_paused_none_gets_the_version_and_all_go_on() -> None:
    log = Log()
    engines = [Recording("a", log), Recording("b", log, refuses="pause")]
    with pytest.raises(EngineFailed, match="b: made up"):
        taken(engines)
    assert "apply" not in log.steps()
    assert sorted(line for line in log.lines if "resume" in line) == ["a resume", "b resume"]


def test_one_that_refuses_the_version_goes_on_with_what_it_has_and_is_named() -> None:
    log = Log()
    engines = [Recording("a", log), Recording("b", log, refuses="apply")]
    with pytest.raises(EngineFailed) as caught:
        taken(engines)
    assert caught.value.details == ("b: made up",)
    assert [engine.label_ for engine in engines] == ["seven", ""]
    assert not any(engine.paused for engine in engines)
    assert "b discard" in log.lines


def test_one_with_half_a_version_stays_paused_and_the_others_go_on() -> None:
    log = Log()
    engines = [Recording("a", log), Recording("b", log, refuses="apply", broken="half of it")]
    assert apply_prepared(engines, 7, "seven") == ["", "made up"]
    assert [engine.paused for engine in engines] == [False, True]


@pytest.mark.parametrize("broken", ["half of it", ""])
@pytest.mark.parametrize("signal", [KeyboardInterrupt, SystemExit])
def test_a_signal_while_a_version_is_taken_leaves_the_engine_paused_if_it_has_half_of_it(
    signal: type[BaseException], broken: str
) -> None:
    engine = Recording("a", Log(), refuses="apply", broken=broken, error=signal())
    with pytest.raises(signal):
        apply_prepared([engine], 7, "seven")
    assert engine.paused == bool(broken)


def test_one_that_cannot_be_told_to_go_on_is_named() -> None:
    log = Log()
    [problem] = apply_prepared([Recording("a", log, refuses="resume")], 7, "seven")
    assert "could not be resumed: made up" in problem


def test_without_engines_there_is_nothing_to_do() -> None:
    assert taken([]).nbytes == 0
