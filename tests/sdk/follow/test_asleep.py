"""Does an agent hand a version to an engine that sleeps, and see that the wake-up has brought it?"""

from __future__ import annotations

import json
from typing import Any, cast

import pytest
from click.testing import CliRunner

from tests.sdk.follow.test_mistakes import MODEL
from tests.sdk.follow.test_started_again import Restarted, Said, followed
from tests.support.json_servers import json_server
from tests.support.vllm_engines import MODEL as FAKE
from tests.support.vllm_engines import FakeEngine, FakeVllm
from weighbridge._cli import commands
from weighbridge._cli.following import _line
from weighbridge.follow.agent import Follower
from weighbridge.follow.engines import Serving
from weighbridge.follow.vllm import VllmServer


class Asleep(Restarted):
    """An engine whose next update waits for its wake-up."""

    def apply(self, version: int, label: str) -> None:
        if self._next and self._serving.version != version:
            self._serving = Serving(1, model=MODEL, instances=("a",), waiting=version)
            self.looks, self._next = [self._serving, self._serving, *self._next], []
            return
        super().apply(version, label)


def woken(version: int) -> Serving:
    return Serving(version, model=MODEL, instances=("a",))


def test_a_version_that_waits_is_said_and_then_that_the_wake_up_has_brought_it() -> None:
    again = Serving(2, model=MODEL, instances=("b",))  # ends the test: the agent says something only then
    engine, said = Asleep(woken(2), woken(2), again), Said()
    first, _ = followed(engine, said)
    assert (first.waits, first.serves, first.error, first.parts) == (True, 1, "", {})
    assert _line(first).endswith("prepared in 0 ms; the engine loads it when it wakes up")
    states = [(each["state"], each.get("version"), each["target"]) for each in said.changes if "state" in each]
    assert states[1:3] == [("waiting", 1, 2), ("serving", 2, 0)]  # the service keeps both meanwhile
    assert "failing" not in [state for state, *_ in states]
    assert [each for each in engine.asked if "prepare" in each] == ["prepare 2"]


def test_a_version_that_the_wake_up_has_not_brought_is_brought_again() -> None:
    engine, said = Asleep(woken(1)), Said()
    first, second = followed(engine, said)
    assert (first.waits, second.waits, second.serves, second.error) == (True, False, 2, "")


def test_an_engine_that_has_lost_its_version_in_its_sleep_gets_the_refs() -> None:
    lost = Serving(None, f"{MODEL}@2 was discarded while the engine slept", instances=("a",))
    engine, said = Restarted(lost, lost), Said()
    first, second = followed(engine, said)
    assert (first.serves, second.serves, second.error) == (2, 2, "")
    failing = [each["error"] for each in said.changes if each.get("state") == "failing"]
    assert failing == [lost.broken]
    assert [each for each in engine.asked if "prepare" in each] == ["prepare 2"] * 2


def test_an_engine_with_the_refs_version_is_told_if_another_one_waits() -> None:
    engine = Restarted()
    engine._serving = Serving(2, model=MODEL, instances=("a",), waiting=3)
    [first] = followed(engine, count=1)
    assert first.serves == 2
    assert "prepare 2" in engine.asked


@pytest.mark.parametrize("count", [1, 2])
def test_a_server_that_sleeps_gets_no_label_of_what_waits(count: int) -> None:
    server = FakeVllm([FakeEngine(index, asleep=True) for index in range(count)])
    with server.serving() as url:
        engine = VllmServer(url, FAKE, "service:1", when_asleep="wait")
        done = Follower(cast("Any", None), FAKE, engine).take_to(2)
        assert (done.error, done.waits, done.serves, engine.serving().waiting) == ("", True, 1, 2)
    assert [each.label for each in server.engines] == ["default"] * count
    assert server.served == [1] * count


def test_engines_that_sleep_give_up_what_another_one_cannot_take() -> None:
    server = FakeVllm([FakeEngine(0, asleep=True), FakeEngine(1, fails={"apply"})])
    with server.serving() as url:
        done = Follower(cast("Any", None), FAKE, VllmServer(url, FAKE, "service:1")).take_to(2)
    assert "engine 1: apply of version 2 failed" in done.error
    assert [each.waiting for each in server.engines] == [None, None]


@pytest.mark.parametrize(("given", "told"), [(None, "wait"), ("wait", "wait"), ("refuse", "refuse")])
def test_the_command_tells_the_engine_what_becomes_of_versions_while_it_sleeps(given: str | None, told: str) -> None:
    said: list[dict[str, Any]] = []

    def answer(_path: str, body: dict[str, Any]) -> tuple[int, Any]:
        said.append(body)
        return 500, {}

    with json_server(answer) as url:
        from weighbridge._cli.following import _engine

        engine = _engine("vllm", url, FAKE, "service:1", None, None, cast("Any", given), "")
        with pytest.raises(Exception, match="refused"):
            engine.connect()
    [info] = [json.loads(each["args"][0]) for each in said if each.get("method") == "weighbridge_connect"]
    assert info["when_asleep"] == told


def test_a_command_for_sglang_has_no_such_setting() -> None:
    line = ["follow", MODEL, "--engine", "sglang", "--when-asleep", "wait", "--server", "127.0.0.1:1"]
    done = CliRunner().invoke(commands, line)
    assert (done.exit_code, "does not support --when-asleep" in done.output) == (2, True)
