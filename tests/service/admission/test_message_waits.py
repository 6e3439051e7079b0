"""Do waits for messages end at their time, sooner when memory grows, and the longest first?"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.support.waiting import eventually
from weighbridge_service.admission.message_waits import MOST_GROWTH, MessageWaits, Wait, overdue
from weighbridge_service.runtime import process_memory


def wait(since: float, until: float = float("inf")) -> Wait:
    return Wait(since, until, lambda: None)


@pytest.mark.parametrize("growth", [-(1 << 30), 0, MOST_GROWTH])
def test_without_much_growth_a_wait_ends_at_its_time_and_not_before(growth: int) -> None:
    due, patient, for_ever = wait(0.0, 10.0), wait(0.0, 10.1), wait(-1000.0)
    assert overdue([due, patient, for_ever], 10.0, growth) == [due]


def test_the_more_memory_grows_the_sooner_waits_end_and_the_longest_first() -> None:
    waits = [wait(10.0 - age) for age in (1.0, 0.12, 0.03, 0.01, 0.0005)]
    ended = [len(overdue(waits, 10.0, round(MOST_GROWTH * times))) for times in (1.01, 2.0, 4.0, 8.0)]
    assert ended == [2, 3, 3, 3]
    assert overdue(waits, 10.0, round(MOST_GROWTH * 1.01)) == waits[:2]


def test_a_message_that_comes_at_ten_megabytes_a_second_outlives_the_first_alarm() -> None:
    coming = wait(10.0 - (1 << 20) / 11e6)
    assert overdue([coming], 10.0, MOST_GROWTH + 1) == []


class Memory:
    """The private memory of the process as the watching thread reads it, set by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.nbytes, self.trims, self.looks = 1 << 30, 0, 0
        monkeypatch.setattr(process_memory, "private_bytes", self._look)
        monkeypatch.setattr(process_memory, "give_back", lambda kept, _growth: kept)
        monkeypatch.setattr(process_memory, "trim", self._trim)

    def _look(self) -> int:
        self.looks += 1
        return self.nbytes

    def _trim(self) -> None:
        self.trims += 1


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Memory:
    return Memory(monkeypatch)


@pytest.fixture
def waits(memory: Memory) -> Iterator[MessageWaits]:
    running = MessageWaits(lambda: 0)
    yield running
    running.close()


def run_away(waits: MessageWaits, memory: Memory, nbytes: int) -> None:
    """Let memory grow during a wait: the wait ends, and the memory goes back to the system."""
    ended, before = threading.Event(), memory.trims
    with waits.waiting(ended.set):
        time.sleep(0.03)  # longer than a wait that is never ended
        looks = memory.looks
        eventually(lambda: memory.looks >= looks + 2)  # the size before the growth was read
        memory.nbytes += nbytes
        assert ended.wait(60)
    eventually(lambda: memory.trims > before)


def test_what_ended_callers_leave_goes_back_also_if_nobody_waits_any_more(waits: MessageWaits, memory: Memory) -> None:
    run_away(waits, memory, 2 * MOST_GROWTH)


def test_growth_is_noticed_also_if_every_wait_is_short(waits: MessageWaits, memory: Memory) -> None:
    ended = threading.Event()
    lasting: deque[ExitStack] = deque()
    for _ in range(2000):
        lasting.append(ExitStack())
        lasting[-1].enter_context(waits.waiting(ended.set))
        if len(lasting) > 4:
            lasting.popleft().close()
        memory.nbytes += MOST_GROWTH // 8
        if ended.wait(0.02):
            break
    for each in lasting:
        each.close()
    assert ended.is_set()


def test_growth_that_stays_when_the_slow_have_been_ended_is_nobodys_fault(waits: MessageWaits, memory: Memory) -> None:
    run_away(waits, memory, 4 * MOST_GROWTH)
    innocent = threading.Event()
    with waits.waiting(innocent.set):
        assert not innocent.wait(1.0)
