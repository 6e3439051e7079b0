"""Verdict on one input: what it cost, and whether that or its outcome is a finding."""

from __future__ import annotations

import os
import resource
import signal
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import NoReturn

from tests.fuzz.target import Parse, Target

_OURS = ("/weighbridge/", "/weighbridge_storage/", "/weighbridge_service/")
_PEAK_RESET = b"5"
"""Written to /proc/self/clear_refs: proc(5)."""
_LONGEST = 30.0
"""Seconds of a processor after which an input is given up."""
_RAISED_MB = 1.0


class TooSlow(BaseException):
    """An input is given up; nothing that catches errors catches it."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one input led to.

    Attributes:
        seconds: of a processor that it took.
        grown: MiB by which it has raised the process's peak of memory.
        problem: kind of finding, ``time``, ``memory`` or the error's name; empty if it is none.
        where: innermost line of the packages under test; with `problem`, it tells findings apart.
        said: the error and its traceback.
    """

    seconds: float
    grown: float
    problem: str = ""
    where: str = ""
    said: str = ""

    @property
    def key(self) -> str:
        """The same for inputs that show the same fault."""
        return f"{self.problem} {self.where}".strip()


class Judge:
    """Runs inputs of one target in this process. For the main thread.

    Args:
        target: whose.
        parse: what `Target.start` gave.
    """

    def __init__(self, target: Target, parse: Parse) -> None:
        self._target = target
        self._parse = parse
        self._peaks = _Peaks()
        signal.signal(signal.SIGVTALRM, _give_up)

    def verdict(self, data: bytes) -> Verdict:
        """Run one input."""
        problem = where = said = ""
        before = self._peaks.begin()
        signal.setitimer(signal.ITIMER_VIRTUAL, _LONGEST)
        begin = time.process_time()
        try:
            self._parse(data)
        except self._target.refusals:
            pass
        except TooSlow as error:
            problem, where, said = "time", _innermost(error.__traceback__), traceback.format_exc(limit=-40)
        except Exception as error:
            problem, where = type(error).__name__, _innermost(error.__traceback__)
            said = traceback.format_exc(limit=-40)
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        seconds = time.process_time() - begin
        grown = self._peaks.end(before)
        problem = problem or self._target.bounds.problem(len(data), seconds, grown)
        return Verdict(seconds, grown, problem, where, said)


class _Peaks:
    """Peaks of this process's memory. What an input takes counts from the level that the inputs before it have reached and not given
    back; where the kernel lets a process set its peak back, that is done whenever one was raised."""

    def __init__(self) -> None:
        self._clear = -1
        with suppress(OSError):
            self._clear = os.open("/proc/self/clear_refs", os.O_WRONLY)
        self._reset()

    def begin(self) -> float:
        return _peak()

    def end(self, before: float) -> float:
        grown = _peak() - before
        if grown > _RAISED_MB:
            self._reset()
        return grown

    def _reset(self) -> None:
        if self._clear >= 0:
            os.write(self._clear, _PEAK_RESET)


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _innermost(trace: TracebackType | None) -> str:
    """The innermost line of the packages under test; of the last file at all if there is none."""
    frames = traceback.extract_tb(trace)
    ours = [each for each in frames if any(part in each.filename for part in _OURS)] or frames
    return f"{ours[-1].filename.rpartition('/')[2]}:{ours[-1].lineno}" if ours else ""


def _give_up(signum: int, frame: FrameType | None) -> NoReturn:
    raise TooSlow
