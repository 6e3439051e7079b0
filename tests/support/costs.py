"""Processor time of each test, its own and that of the processes it starts; the costliest are listed at the end of a
run.

A pytest plugin. Wall time says little about a test on a machine with other work; processor time repeats within some
percent.
"""

from __future__ import annotations

import json
import os
import time
from collections import defaultdict
from collections.abc import Generator, Mapping
from pathlib import Path

import pytest

_PROPERTY = "processor_seconds"
_TICK = os.sysconf("SC_CLK_TCK")


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--costs`` and ``--costs-json``."""
    group = parser.getgroup("costs")
    group.addoption("--costs", type=int, default=20, metavar="N", help="list the N costliest tests")
    group.addoption("--costs-json", type=Path, metavar="FILE", help="write the processor seconds of each test")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add what a test has cost to its last report, which workers send to the process that prints."""
    report = yield
    if report.when == "teardown":
        clock = item.config.stash[_CLOCK]
        report.user_properties.append((_PROPERTY, round(clock.seconds(), 4)))
    return report


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start the clock of the first test."""
    session.config.stash[_CLOCK] = _Clock()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """List the costliest tests."""
    costs = costs_of(terminalreporter)
    if file := config.getoption("costs_json"):
        file.write_text(json.dumps({test: round(seconds, 3) for test, seconds in costs.items()}, indent=0))
    costliest = sorted(costs.items(), key=lambda each: -each[1])[: config.getoption("costs")]
    if costliest:
        total = sum(costs.values())
        terminalreporter.section(f"processor seconds: {total:.0f} in {len(costs):,} tests, the costliest")
        for test, seconds in costliest:
            terminalreporter.write_line(f"{seconds:7.2f}  {test}")


def costs_of(reporter: pytest.TerminalReporter) -> Mapping[str, float]:
    """Processor seconds of each test of a run, by its id."""
    costs: dict[str, float] = defaultdict(float)
    for reports in reporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                costs[report.nodeid] += sum(value for name, value in report.user_properties if name == _PROPERTY)
    return costs


def processor_seconds() -> float:
    """Processor time of this process and of all that it has started, in seconds: those that run, and those that have
    ended.

    A process that has left for another parent is not counted.
    """
    ticks: dict[int, int] = {}
    children: dict[int, list[int]] = defaultdict(list)
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            try:
                there = os.open(f"/proc/{entry}/stat", os.O_RDONLY)
            except OSError:
                continue  # it has ended since
            try:
                fields = os.read(there, 4096).rpartition(b")")[2].split(maxsplit=16)
            except OSError:
                continue
            finally:
                os.close(there)
            ticks[int(entry)] = sum(map(int, fields[11:15]))
            children[int(fields[1])].append(int(entry))
    total, waiting = 0, [os.getpid()]
    while waiting:
        pid = waiting.pop()
        total += ticks.get(pid, 0)
        waiting += children[pid]
    return total / _TICK


class _Clock:
    """Processor time since it was last asked.

    Looking for processes takes a millisecond: what begins and ends within some is counted later.
    """

    def __init__(self) -> None:
        self._all, self._own, self._looked = processor_seconds(), time.process_time(), time.monotonic()

    def seconds(self) -> float:
        before, own = self._all, time.process_time() - self._own
        self._own += own
        if time.monotonic() - self._looked > _QUICK:
            self._all, self._looked = processor_seconds(), time.monotonic()
        else:
            self._all += own
        return self._all - before


_QUICK = 0.05
_CLOCK = pytest.StashKey[_Clock]()
