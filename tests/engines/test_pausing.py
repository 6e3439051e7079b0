"""Does generation go on after an update, whatever fails, and is it said what did?"""

from __future__ import annotations

import pytest

from weighbridge import FailedPrecondition
from weighbridge.integrations.pausing import paused


class Engines:
    def __init__(self, *refuses: str) -> None:
        self.asked: list[str] = []
        self._refuses = refuses

    def ask(self, what: str) -> None:
        self.asked.append(what)
        if what in self._refuses:
            raise ConnectionError(f"no {what}")

    def update(self) -> None:
        with paused(lambda: self.ask("pause"), lambda: self.ask("resume")):
            self.ask("load")


def test_engines_are_told_to_go_on_after_an_update() -> None:
    engines = Engines()
    engines.update()
    assert engines.asked == ["pause", "load", "resume"]


@pytest.mark.parametrize("what", ["pause", "load"])
def test_engines_are_told_to_go_on_if_it_fails_and_it_is_raised_as_it_was(what: str) -> None:
    engines = Engines(what)
    with pytest.raises(ConnectionError, match=f"no {what}"):
        engines.update()
    assert engines.asked[-1] == "resume"


@pytest.mark.parametrize("before", [(), ("load",)])
def test_engines_that_stand_still_are_told_of_with_what_failed_before(before: tuple[str, ...]) -> None:
    engines = Engines("resume", *before)
    with pytest.raises(FailedPrecondition, match="generation is still paused: no resume") as raised:
        engines.update()
    assert ("no load" in str(raised.value)) == bool(before)


def test_an_interrupt_lets_engines_go_on_too() -> None:
    engines = Engines()
    with (
        pytest.raises(KeyboardInterrupt),
        paused(lambda: engines.ask("pause"), lambda: engines.ask("resume")),
    ):
        raise KeyboardInterrupt
    assert engines.asked == ["pause", "resume"]


def test_an_interrupt_stays_one_if_engines_cannot_be_told_to_go_on() -> None:
    engines = Engines("resume")
    with (
        pytest.raises(KeyboardInterrupt) as raised,
        paused(lambda: engines.ask("pause"), lambda: engines.ask("resume")),
    ):
        raise KeyboardInterrupt
    assert raised.value.__notes__ == ["generation is still paused: no resume"]
