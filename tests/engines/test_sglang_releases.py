"""Does a scheduler of an older SGLang empty its caches in a pause though requests wait, and only then, and are methods found by the names they have?"""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from weighbridge.integrations.sglang import releases


class Scheduler:
    """As far as SGLang 0.5.15's looks at itself when it flushes: nothing is flushed while a request waits."""

    def __init__(self, paused: bool, mode: str = "NULL") -> None:
        self._engine_paused = paused
        self.disaggregation_mode = SimpleNamespace(name=mode)
        self.waiting_queue = ["a request"]

    def is_fully_idle(self) -> bool:
        return not self.waiting_queue

    def flush_cache(self, empty_cache: bool = True) -> bool:
        return self.is_fully_idle() and empty_cache


class NewerScheduler(Scheduler):
    """As 0.5.23's, which knows by itself when to ignore requests that wait; here, never."""

    def is_fully_idle(self, ignore_waiting: bool = False) -> bool:
        return not self.waiting_queue


@pytest.mark.parametrize(
    ("scheduler", "flushes"),
    [
        (Scheduler(paused=True), True),
        (Scheduler(paused=False), False),
        (Scheduler(paused=True, mode="DECODE"), False),  # whose waiting requests hold what they were sent
        (NewerScheduler(paused=True), False),
    ],
)
def test_requests_that_wait_do_not_keep_a_paused_scheduler_from_flushing(
    scheduler: Scheduler, flushes: bool
) -> None:
    assert releases.flush(type(scheduler).flush_cache, scheduler, empty_cache=True) is flushes
    assert scheduler.waiting_queue == ["a request"]


def test_requests_still_wait_when_a_flush_fails() -> None:
    def fails(_scheduler: Scheduler) -> bool:
        raise RuntimeError("out of memory")

    scheduler = Scheduler(paused=True)
    with pytest.raises(RuntimeError):
        releases.flush(fails, scheduler)
    assert scheduler.waiting_queue == ["a request"]


def test_a_method_is_found_by_the_first_name_whose_module_there_is() -> None:
    newest, older = "json.components.weights.JSONDecoder.decode", "json.decoder.JSONDecoder.decode"
    assert releases.present((newest, older)) == older
    assert releases.present((older, newest)) == older


def test_a_hook_is_put_around_a_method_for_all_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scheduler, "flush_cache", Scheduler.flush_cache)  # put back in the end
    releases.wrap({f"{__name__}.Scheduler.flush_cache": releases.flush})
    assert Scheduler(paused=True).flush_cache()
    assert not Scheduler(paused=False).flush_cache()
