"""Memory that a process needs, and that several need which share some of it.

Two answers, both beyond what was there at the start. The proportional set size (PSS) of Linux divides shared pages by
the number of processes that map them, so that a sum over processes counts them once; it has to be sampled, which
disturbs what is measured. The kernel's own high-water mark of the resident set (VmHWM) misses no peak and costs
nothing, and counts shared pages in each process.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

_PAUSE_SECONDS = 0.05


@dataclass(frozen=True)
class Memory:
    """Memory of a process and its children in bytes.

    Attributes:
        anonymous: bytes with no file behind them, shared memory included.
        proportional: all bytes; shared ones are divided by the number of processes that share them.
    """

    anonymous: int
    proportional: int


def memory_of(root: int) -> Memory:
    """Memory of a process and its children now; processes that have ended count nothing."""
    anonymous = proportional = 0
    for pid in (root, *_children(root)):
        try:
            text = Path(f"/proc/{pid}/smaps_rollup").read_text("ascii")
        except (OSError, ValueError):
            continue
        fields = dict(line.split(":", 1) for line in text.splitlines()[1:])
        proportional += int(fields["Pss"].split()[0]) * 1024
        anonymous += int(fields["Pss_Anon"].split()[0]) * 1024 + int(fields["Pss_Shmem"].split()[0]) * 1024
    return Memory(anonymous, proportional)


def _children(pid: int) -> list[int]:
    found = []
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (task / "children").read_text("ascii").split()):
                found += [child, *_children(child)]
    except OSError:
        pass
    return found


class Sampler:
    """Samples several processes while the context is open.

    Args:
        pids: the processes.
        starts: the proportional memory that each had at the start; what is given is beyond it.

    Attributes:
        peaks: the most that each process had, in bytes beyond its start.
        peak_sum: the most that all had together at one time.
    """

    def __init__(self, pids: Sequence[int], starts: Sequence[int]) -> None:
        self._pids = pids
        self._starts = starts
        self.peaks = [0] * len(pids)
        self.peak_sum = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="memory")

    def _watch(self) -> None:
        while not self._done.wait(_PAUSE_SECONDS):
            self.sample()

    def sample(self) -> None:
        """Take one more sample."""
        now = [memory_of(pid).proportional - start for pid, start in zip(self._pids, self._starts, strict=True)]
        self.peaks = [max(peak, each) for peak, each in zip(self.peaks, now, strict=True)]
        self.peak_sum = max(self.peak_sum, sum(now))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._thread.join()


class HighWaterMark:
    """The most that this process has been resident, in bytes beyond the moment when this was made."""

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")
        self._start = resident(os.getpid())

    @property
    def beyond_start(self) -> int:
        """The high-water mark now."""
        return max(_status(os.getpid(), "VmHWM") - self._start, 0)


def resident(pid: int) -> int:
    """Resident set of a process now, in bytes."""
    return _status(pid, "VmRSS")


def _status(pid: int, field: str) -> int:
    for line in Path(f"/proc/{pid}/status").read_text("utf-8").splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    raise RuntimeError(f"/proc/{pid}/status has no {field}")
