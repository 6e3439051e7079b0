"""Is an engine asked for one token with the new weights if the user wants it, and is the time to its answer
measured?
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from click.testing import CliRunner

from tests.sdk.follow.test_mistakes import MODEL, Recording
from tests.sdk.follow.test_steps import Watch, refuse
from tests.support.json_servers import Answer, json_server
from tests.support.raw_clients import tiny_folder
from tests.support.services import running_service
from tests.support.sglang_fakes import FakeSglang
from tests.support.vllm_engines import FakeEngine, FakeVllm
from weighbridge import TrainerClient
from weighbridge._cli import commands
from weighbridge._core.engines.facts import EngineFacts
from weighbridge._reporting.said import ReportedState
from weighbridge.errors import FailedPrecondition, InvalidArgument
from weighbridge.follow.agent import Follower
from weighbridge.follow.answers import EngineApi
from weighbridge.follow.engines import AnswersToken, EngineFailed, Serving
from weighbridge.follow.sglang import SglangServer
from weighbridge.follow.updates import Laps
from weighbridge.follow.vllm import VllmServer

ROUTES = {"vllm": "/v1/completions", "sglang": "/generate"}
ONE: dict[str, dict[str, Any]] = {
    "vllm": {"choices": [{"text": "a"}], "usage": {"completion_tokens": 1}},
    "sglang": {"text": "a", "meta_info": {"completion_tokens": 1}},
}
BODIES: dict[str, dict[str, Any]] = {
    "vllm": {"prompt": [0], "max_tokens": 1, "temperature": 0, "ignore_eos": True},
    "sglang": {
        "input_ids": [0],
        "sampling_params": {"max_new_tokens": 1, "temperature": 0, "ignore_eos": True},
    },
}


def driver(kind: str, url: str) -> AnswersToken:
    return VllmServer(url, MODEL, "service:1") if kind == "vllm" else SglangServer(url, "service:1", MODEL)


@pytest.mark.parametrize("kind", ROUTES)
def test_an_engine_is_asked_for_one_token_of_a_prompt_of_one(kind: str) -> None:
    asked: list[tuple[str, dict[str, Any]]] = []

    def answer(path: str, body: dict[str, Any]) -> Answer:
        asked.append((path, body))
        return (200, ONE[kind]) if path == ROUTES[kind] else (404, {})

    with json_server(answer) as url:
        driver(kind, url).answer_token()
    assert [each for each in asked if each[0] == ROUTES[kind]] == [(ROUTES[kind], BODIES[kind])]


@pytest.mark.parametrize("kind", ROUTES)
@pytest.mark.parametrize(
    "said",
    [{"usage": {"completion_tokens": 0}, "meta_info": {"completion_tokens": 0}}, {"choices": []}, {}],
    ids=["no token", "no count", "nothing"],
)
def test_an_answer_without_a_token_is_none(kind: str, said: dict[str, Any]) -> None:
    with (
        json_server(lambda path, _: (200, said) if path == ROUTES[kind] else (404, {})) as url,
        pytest.raises(EngineFailed, match=f"{url}{ROUTES[kind]} .*unexpected response"),
    ):
        driver(kind, url).answer_token()


@pytest.mark.parametrize(
    ("kind", "route", "said"),
    [
        ("vllm", "/is_sleeping", {"is_sleeping": True}),
        ("vllm", "/is_paused", {"is_paused": True}),
        ("sglang", "/weights_checker", {"success": True, "message": json.dumps({"ranks": [], "asleep": ["weights"]})}),
    ],
)  # fmt: skip
def test_an_engine_that_sleeps_or_is_paused_is_asked_for_no_token(kind: str, route: str, said: dict[str, Any]) -> None:
    asked: list[str] = []

    def answer(path: str, _: dict[str, Any]) -> Answer:
        asked.append(path)
        return (200, said) if path == route else (404, {})

    with (
        json_server(answer) as url,
        pytest.raises(FailedPrecondition, match=r"the engine (sleeps|is paused)"),
    ):
        driver(kind, url).answer_token()
    assert ROUTES[kind] not in asked


def test_all_engines_behind_a_server_are_asked_at_the_same_time_each_by_its_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = FakeVllm([FakeEngine(index, 2) for index in range(3)])
    together = threading.Barrier(3, timeout=30)
    ranks: list[str | None] = []

    def call(api: EngineApi, path: str, body: Any = None) -> Any:
        if path == ROUTES["vllm"]:
            ranks.append(api.headers.get("X-data-parallel-rank"))
            together.wait()
            return ONE["vllm"]
        status, said = server.answer(path, body or {})
        return said if status == 200 else {}

    monkeypatch.setattr(EngineApi, "call", call)
    VllmServer("http://engine:1", MODEL, "service:1").answer_token()
    assert sorted(map(str, ranks)) == ["0", "1", "2"]


class Answering(Recording):
    """An engine that serves the version it applied last, and answers with a token by a call.

    Attributes:
        answers: is called for a token.
    """

    def __init__(self, answers: Callable[[], None]) -> None:
        super().__init__(Serving(None))
        self.answers = answers
        self.served = 0

    def apply(self, version: int, label: str) -> None:
        super().apply(version, label)
        self._serving = Serving(version)

    def answer_token(self) -> None:
        assert self._serving.version is not None
        self.served = self._serving.version
        self.asked.append("token")
        self.answers()


class Noted:
    """A reporter that records the changes it is given."""

    status = SimpleNamespace(behind=0)

    def __init__(self) -> None:
        self.changes: list[dict[str, Any]] = []

    def say(self, **changes: Any) -> None:
        self.changes.append(changes)


def take_to(engine: Recording, number: int, noted: Noted | None = None, **options: Any) -> Any:
    follower = Follower(
        cast("Any", None), MODEL, engine, reporter=cast("Any", noted or Noted()), ask_token=True, **options
    )
    return follower.take_to(number)


def test_an_update_lasts_until_the_engine_has_answered_a_token_by_the_new_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watch, noted = Watch(monkeypatch), Noted()
    engine = Answering(watch.passes(0.06))
    monkeypatch.setattr(engine, "resume", watch.passes(0.5))
    done = take_to(engine, 7, noted)
    assert (done.error, engine.served) == ("", 7)
    assert done.parts == {
        "stage": 0.0, "agree": 0.0, "pause": 0.0, "apply": 0.0, "resume": 0.5, "confirm": 0.0, "answer": 0.06,
    }  # fmt: skip
    last = noted.changes[-1]
    assert (last["update_parts"], last["updated_s"]) == (done.parts, 100.56)


def test_an_engine_that_answers_no_token_has_taken_the_version_and_the_part_is_missing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    watch, noted = Watch(monkeypatch), Noted()
    late = watch.passes(60.0)

    def answers() -> None:
        late()
        raise EngineFailed("made up")

    monkeypatch.setattr(engine := Answering(answers), "resume", watch.passes(0.5))
    with caplog.at_level(logging.WARNING):
        done = take_to(engine, 7, noted)
    assert (done.error, done.serves, list(done.parts)[-1]) == ("", 7, "confirm")
    assert "not returned a token with version 7: made up" in caplog.text
    last = noted.changes[-1]
    assert (last["state"], last["update_version"]) == ("serving", 7)
    assert last["updated_s"] == 100.5, "the wait for an answer is no part of the update, nor of what lies before it"


def test_an_engine_that_has_not_taken_the_version_or_sleeps_is_asked_for_no_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = Answering(lambda: None)
    monkeypatch.setattr(engine, "pause", lambda: refuse(7, ""))
    assert take_to(engine, 7).error == "made up"
    monkeypatch.undo()
    monkeypatch.setattr(engine, "serving", lambda: Serving(6, waiting=7))
    assert take_to(engine, 7).waits
    monkeypatch.setattr(engine, "serving", lambda: refuse(7, ""))
    assert take_to(engine, 7).error == ""
    assert "token" not in engine.asked


def test_an_engine_is_asked_only_if_that_is_wanted_and_its_driver_can() -> None:
    engine = Answering(lambda: None)
    done = Follower(cast("Any", None), MODEL, engine).take_to(7)
    assert list(done.parts)[-1] == "confirm"
    assert "token" not in engine.asked
    with pytest.raises(InvalidArgument, match="Recording cannot request a token from its engine"):
        take_to(Recording(Serving(None)), 7)


def test_laps_say_when_the_last_part_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch(monkeypatch)
    laps = Laps()
    for name in ("pause", "apply"):
        watch.now_s += 2.0
        laps.end(name)
    watch.now_s += 5.0
    assert laps.ended_s == 104.0


def test_an_update_is_as_old_as_its_end_and_not_as_what_is_told_of_it() -> None:
    said = ReportedState(EngineFacts("e1", MODEL), 0.0, 0.0)
    assert said.with_changes({"update_version": 2}, 10.0, 4.0).updated_s == 4.0
    assert said.with_changes({"update_version": 2}, 10.0).updated_s == 10.0
    assert said.with_changes({"error": "x"}, 10.0, 4.0).updated_s == 0.0


def test_the_command_asks_for_a_token_and_tells_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weighbridge._cli.following.end_tidily", lambda: None)
    engine = FakeSglang(1)
    asked: list[tuple[int, bool]] = []

    def answer(path: str, body: dict[str, Any]) -> Answer:
        if path == ROUTES["sglang"]:
            asked.append((len(engine.history), engine.paused))
            return 200, ONE["sglang"]
        return engine.answer(path, body)

    with running_service(tmp_path / "store") as running, json_server(answer) as url:
        with TrainerClient(running.address) as trainer:
            trainer.import_folder(MODEL, tiny_folder(tmp_path / "hf").folder).wait(timeout=60)
        line = ["follow", MODEL, "--engine", "sglang", "--url", url, "--server", running.address]
        done = CliRunner().invoke(commands, [*line, "--count", "1", "--ask-token"])
        (seen,) = running.service.engines.listed(MODEL)
    assert done.exit_code == 0, (done.output, done.exception)
    assert ", answer " in done.output
    assert asked == [(1, False)], "once it had the version, and went on"
    assert list(seen.update_parts)[-1] == "answer"
