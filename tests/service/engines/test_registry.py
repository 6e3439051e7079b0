"""Is the registry of engines bounded, and does one caller that reports too many leave room for others?"""

from __future__ import annotations

from dataclasses import replace

import pytest

from weighbridge._core.engines.facts import EngineReport
from weighbridge.errors import ResourceExhausted
from weighbridge_service.engines.entries import Leases, Owner
from weighbridge_service.engines.registry import EngineRegistry

MODEL = "acme/smol"
HOSTILE, OTHER = Owner("hostile", "10.0.0.6"), Owner("agent", "10.0.0.7")


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def report(number: int, **changes: object) -> EngineReport:
    return replace(EngineReport(f"e{number}", MODEL, "vllm", state="serving", beat=1), **changes)  # type: ignore[arg-type]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def registry(clock: Clock) -> EngineRegistry:
    return EngineRegistry(Leases(5.0), most=16, clock=clock)


def fill(registry: EngineRegistry, owner: Owner) -> int:
    """Report new engines until one is refused; the number accepted."""
    for number in range(100):
        try:
            registry.take(owner, report(number))
        except ResourceExhausted:
            return number
    raise AssertionError("it has no end")


def test_one_identity_leaves_a_fourth_to_others(registry: EngineRegistry) -> None:
    assert fill(registry, HOSTILE) == 12
    for number in range(4):
        registry.take(OTHER, report(number))
    with pytest.raises(ResourceExhausted, match="16 engines of 16"):
        registry.take(OTHER, report(4))
    assert not registry.take(HOSTILE, report(0, beat=2))[1], "one that is known goes on reporting"


def test_without_a_policy_it_is_hosts_that_leave_room(registry: EngineRegistry) -> None:
    assert fill(registry, Owner(host="10.0.0.6")) == 12
    registry.take(Owner(host="10.0.0.7"), report(100))


def test_who_is_gone_makes_room(registry: EngineRegistry, clock: Clock) -> None:
    fill(registry, HOSTILE)
    for number in range(4):
        registry.take(OTHER, report(number))
    clock.now += 60.0
    registry.take(OTHER, report(4))
    assert [entry.report.engine_id for entry in registry.all()] == ["e4"]
    assert fill(registry, HOSTILE) == 11, "and what they held was given back"


def test_who_is_silent_is_forgotten(registry: EngineRegistry, clock: Clock) -> None:
    registry.take(OTHER, report(0))
    clock.now += 599.0
    assert len(registry.all()) == 1
    clock.now += 1.0
    assert registry.all() == []


def test_nobody_speaks_for_the_engine_of_another_identity(registry: EngineRegistry) -> None:
    registry.take(OTHER, report(0, version=16))
    registry.take(HOSTILE, report(0, version=1, beat=99))
    found = {entry.owner.identity: entry.report.version for entry in registry.of_model(MODEL)}
    assert found == {"agent": 16, "hostile": 1}


def test_an_agent_that_was_started_again_takes_the_place_of_the_one_that_ended(
    registry: EngineRegistry, clock: Clock
) -> None:
    place = {"address": "http://node7:8000", "host": "node7"}
    registry.take(OTHER, report(0, **place, state="ended"))
    registry.take(OTHER, report(1, **place))
    assert [entry.report.engine_id for entry in registry.all()] == ["e1"]
    registry.take(OTHER, report(2, **place))
    assert len(registry.all()) == 2, "two agents at one engine are two as long as both report"


def test_only_what_was_not_known_is_news(registry: EngineRegistry) -> None:
    assert registry.take(OTHER, report(0))[1]
    assert not registry.take(OTHER, report(0, beat=2, state_seconds=5.0))[1]
    assert registry.take(OTHER, report(0, beat=3, version=17))[1]
    assert not registry.take(OTHER, report(0, beat=2, version=16))[1], "it is an older one"


def test_an_agent_that_counts_anew_is_heard_once_the_one_before_is_gone(registry: EngineRegistry, clock: Clock) -> None:
    registry.take(OTHER, report(0, beat=1000, version=16))
    registry.take(OTHER, report(0, beat=1, version=17))
    assert registry.all()[0].report.version == 16
    clock.now += 60.0
    registry.take(OTHER, report(0, beat=1, version=17))
    assert registry.all()[0].report.version == 17
