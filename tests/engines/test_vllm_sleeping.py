"""Does a vLLM engine that sleeps compute nothing before its wake-up has brought what waits? The plug-in's part is the
real one; core and workers are made up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.support.vllm_cores import Core, watched
from weighbridge.errors import FailedPrecondition

Answer = dict[str, Any]
BROUGHT: Answer = {"served": "acme/tiny@2", "changed": True, "owes": False, "failed": ""}
KEPT: Answer = {"served": "acme/tiny@1", "changed": False, "owes": False, "failed": ""}
NONE: Answer = {"served": "", "changed": False, "owes": True, "failed": "the service is away"}


def made(*answers: Answer, backend: str = "weighbridge") -> Core:
    """A core whose workers give these answers, one a call."""
    left = list(answers)

    def bring(core: Any, lost: bool, last: bool) -> Answer:
        core.did.append((lost, last))
        assert not core.running, "it was brought before anything could be computed"
        return left.pop(0)

    return watched(bring, backend)


@pytest.mark.parametrize("level", [1, 2])
def test_a_wake_up_of_all_brings_what_waits_before_the_engine_goes_on(level: int) -> None:
    core = made(BROUGHT)
    core.sleep(level)
    core.wake_up()
    assert core.did == ["pause abort", (level == 2, True), "forget", "go on"]
    assert core._weight_version == "acme/tiny@2"


def test_weights_that_wake_first_get_what_waits_and_the_engine_goes_on_with_the_cache() -> None:
    core = made(BROUGHT, KEPT)
    core.sleep(2)
    core.wake_up(["weights"])
    assert not core.running
    core.wake_up(["kv_cache"])
    assert core.did == ["pause abort", (True, False), "forget", (False, True), "go on"]


def test_an_engine_that_serves_no_version_stands_still_until_it_does() -> None:
    core = made(NONE, NONE, BROUGHT)
    core.sleep(2)
    for again in (core.wake_up, core.resume_scheduler):
        with pytest.raises(FailedPrecondition, match="serves no version") as raised:
            again()
        assert "the service is away" in str(raised.value)
        assert (core.running, core._weight_version) == (False, "default")
    core.wake_up()
    assert core.running
    assert core.did == ["pause abort", (True, True), (False, True), (False, True), "forget", "go on"]


def test_a_version_that_could_not_be_brought_leaves_the_engine_with_the_one_it_has(
    caplog: pytest.LogCaptureFixture,
) -> None:
    core = made({**KEPT, "failed": "version 2 was not prepared, and the engine keeps version 1"})
    core.sleep(1)
    core._weight_version = "acme/tiny@2"  # as vLLM's own end of an update names what waits
    core.wake_up()
    assert core.running
    assert "the engine keeps version 1" in caplog.text
    assert core._weight_version == "acme/tiny@1"


def test_pauses_and_ends_of_pauses_leave_an_engine_that_sleeps_alone() -> None:
    core = made(KEPT, KEPT)
    core.sleep(1, mode="keep")
    for part in (["weights"], ["kv_cache"]):
        core.pause_scheduler("wait")  # which would let it compute what is kept
        core.resume_scheduler()
        assert not core.running
        core.wake_up(part)
    assert core.did == ["pause keep", (False, False), (False, True), "go on"]
    core.pause_scheduler("wait")
    assert not core.running
    core.resume_scheduler()
    assert core.running


def test_weights_that_did_not_go_to_sleep_are_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    core = made(KEPT, KEPT, KEPT)
    with monkeypatch.context() as patch:
        patch.setattr(core, "pause_scheduler", lambda _mode: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            core.sleep(2)
    core.sleep(1)
    core.wake_up(["weights"])
    core.sleep(2)  # vLLM 0.24 does nothing
    core.wake_up(["kv_cache"])
    assert [each for each in core.did if isinstance(each, tuple)] == [(False, False), (False, True)]


def test_workers_that_are_put_to_sleep_one_by_one_get_what_waits_too() -> None:
    core = made(BROUGHT, KEPT)
    core.running = False  # as their caller has to see to
    core.collective_rpc("sleep", kwargs={"level": 2})
    core.collective_rpc("wake_up", args=(["weights"],))
    core.collective_rpc("wake_up", kwargs={"tags": ["kv_cache"]})
    assert core.did == [(True, False), "forget", (False, True)]


@pytest.mark.parametrize("do", [lambda core: core.sleep(0), lambda core: core.pause_scheduler("keep")])
def test_an_engine_that_only_pauses_is_brought_nothing(do: Callable[[Core], None]) -> None:
    core = made()
    do(core)
    core.wake_up(["scheduling"])
    assert core.running


def test_engines_with_another_backend_are_left_as_they_are() -> None:
    core = made(backend="ipc")
    core.sleep(2)
    core.pause_scheduler("wait")
    core.resume_scheduler()
    core.wake_up()
    assert core.did == ["pause abort", "pause wait", "go on", "go on"]
