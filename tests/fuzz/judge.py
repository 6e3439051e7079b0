"""Verdict on one input: what it cost, and whether that or its outcome is a finding."""

from __future__ import annotations

import os
import re
import signal
import time
import traceback
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import NoReturn

from tests.fuzz.target import Parse, Target

_OURS = ("/weighbridge/", "/weighbridge_storage/", "/weighbridge_service/")
_PEAK_RESET = b"5"
"""Written to /proc/self/clear_refs: proc(5)."""
_PEAK = re.compile(rb"VmHWM:\s+(\d+) kB")
_LONGEST = 30.0
"""Seconds of a processor after which an input is given up."""


class TooSlow(BaseException):
    """An input is given up; nothing that catches errors catches it."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Verdict on one input.

    Attributes:
        seconds: processor time of the input.
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
        target: the target.
        parse: parser that `Target.start` yields.
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
        grown = self._peaks.grown(before)
        problem = problem or self._target.bounds.problem(len(data), seconds, grown)
        return Verdict(seconds, grown, problem, where, said)


class _Peaks:
    """Peak of this process's memory, set back before each input to what the process has then.

    `getrusage` does not do: its peak is never below that of the process which has started this one.
    """

    def __init__(self) -> None:
        self._status = os.open("/proc/self/status", os.O_RDONLY)
        self._clear = os.open("/proc/self/clear_refs", os.O_WRONLY)

    def begin(self) -> float:
        """The level from which an input's peak counts, in MiB."""
        os.write(self._clear, _PEAK_RESET)
        return self._peak()

    def grown(self, before: float) -> float:
        """MiB by which the peak is above that level."""
        return self._peak() - before

    def _peak(self) -> float:
        found = _PEAK.search(os.pread(self._status, 4096, 0))
        assert found is not None
        return int(found[1]) / 1024


def _innermost(trace: TracebackType | None) -> str:
    """The innermost line of the packages under test; of the last file at all if there is none."""
    frames = traceback.extract_tb(trace)
    ours = [each for each in frames if any(part in each.filename for part in _OURS)] or frames
    return f"{ours[-1].filename.rpartition('/')[2]}:{ours[-1].lineno}" if ours else ""


def _give_up(signum: int, frame: FrameType | None) -> NoReturn:
    raise TooSlow
