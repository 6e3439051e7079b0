"""Do threads take short turns exactly as long as a version is prepared, however preparations overlap?"""

from __future__ import annotations

import sys

from weighbridge.integrations.engine_rank.turns import ShortTurns, short_turns


class Interpreter:
    """An interpreter of its own: tests beside this one prepare versions in the same process."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def turns(self) -> ShortTurns:
        return ShortTurns(lambda: self.seconds, lambda seconds: setattr(self, "seconds", seconds))


def test_turns_are_short_until_the_last_preparation_ends() -> None:
    interpreter = Interpreter(0.005)
    turns = interpreter.turns()
    turns.__enter__()
    short = interpreter.seconds
    assert short < 0.005
    turns.__enter__()
    turns.__exit__()
    assert interpreter.seconds == short
    turns.__exit__()
    assert interpreter.seconds == 0.005


def test_turns_are_never_made_longer() -> None:
    interpreter = Interpreter(0.0001)
    with interpreter.turns():
        assert interpreter.seconds == 0.0001
    assert interpreter.seconds == 0.0001


def test_turns_of_this_process_are_python_s_own() -> None:
    with short_turns:
        assert sys.getswitchinterval() < 0.001
