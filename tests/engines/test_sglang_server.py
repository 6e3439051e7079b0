"""Does the driver take an SGLang server from version to version in SGLang's own order of steps, and say what it serves
when one fails?

The server here answers as the source of SGLang 0.5.23 says (``entrypoints/http_server.py``,
``scheduler_components/weight_updater.py``), or as that of 0.5.15, which has no sessions, and its ranks as the plug-in
does. `test_sglang_live` runs the same driver against a real one.
"""

from __future__ import annotations

import base64
import json
import pickle
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.support.json_servers import json_server
from tests.support.sglang_engines import update
from weighbridge.errors import DeadlineExceeded, FailedPrecondition, InvalidArgument
from weighbridge.follow.agent import Follower
from weighbridge.follow.engines import EngineFailed, Serving
from weighbridge.follow.sglang import SglangServer
from weighbridge.follow.wanted import Wanted

MODEL = "acme/smol"


class FakeSglang:
    """Two ranks and their HTTP face."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.paused = self.session = self.running = False
        self.label = "default"
        self.served = ["acme/smol@1", "acme/smol@1"]
        self.prepared = ""
        self.preparing = ""
        self.error = self.broken = ""
        self.refuses = ""
        self.plugin = self.has_sessions = True
        self.broken_by_update = False
        self.hidden_key = ""
        self.settings: dict[str, int] = {}

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        self.calls.append(path if path != "/weights_checker" else body["action"].partition(" ")[0])
        match path:
            case "/server_info":
                return 200, {"tp_size": len(self.served), **self.settings}
            case "/weights_checker":
                return self._checker(body)
            case "/pause_generation":
                assert body["mode"] in ("abort", "retract", "in_place")
                self.paused = True
                return 200, {"message": "Generation paused successfully.", "status": "ok"}
            case "/continue_generation":
                self.paused = False
                return 200, {"message": "Generation continued successfully.", "status": "ok"}
            case "/update_weight_version":
                self.label = body["new_version"]
                return self._said(True, "Success")
            case "/begin_weight_update" | "/end_weight_update" if not self.has_sessions:
                return 404, {"detail": "Not Found"}
            case "/begin_weight_update":
                if self.session:
                    return self._said(False, "a weight-update session is already open; call end_weight_update() first")
                self.session = True
                return self._said(True, "Success")
            case "/end_weight_update":
                if not self.session:
                    return self._said(False, "no weight-update session is open; call begin_weight_update() first")
                self.session = False
                return self._said(True, "Success")
            case "/update_weights_from_tensor":
                return self._update(body)
        return 404, {"detail": "Not Found"}

    def _checker(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if not self.plugin:
            return self._said(False, f"Unsupported action={body['action']!r}")
        action, _, order = body["action"].partition(" ")
        if action == "weighbridge.prepare":
            if self.refuses:
                return self._said(False, self.refuses)
            wanted = Wanted.from_json(order)
            self.prepared = "" if self.error or self.preparing else f"{wanted.model}@{wanted.version}"
        ranks = [
            {
                "served": served,
                "preparing": self.preparing,
                "prepared": self.prepared,
                "nbytes": 100,
                "error": self.error,
                "broken": self.broken,
            }
            for served in self.served
        ]
        return self._said(True, json.dumps({"ranks": ranks}))

    def _update(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if self.has_sessions and not self.session:
            return self._said(
                False,
                "update_weights_from_tensor must run between begin_weight_update() and end_weight_update()",
            )
        assert body["load_format"] == "weighbridge.integrations.sglang.load"
        assert body["selector"] == "target" if self.has_sessions else body["disable_draft_model"]
        assert len(body["serialized_named_tensors"]) == len(self.served)
        for payload in body["serialized_named_tensors"]:
            [(name, tensor)] = pickle.loads(base64.b64decode(payload))
            assert tensor.numel() == 0
            wanted = Wanted.from_json(name)
        if self.refuses:
            return self._said(False, self.refuses)
        if self.broken_by_update:
            self.served, self.broken = [""] * len(self.served), f"{wanted} was applied in part"
            return self._said(False, "out of memory")
        self.served = [f"{wanted.model}@{wanted.version}"] * len(self.served)
        if body["flush_cache"] and self.running and not self.paused:
            return self._said(
                False,
                "Weights were updated, but the cache was not flushed because requests are still running",
            )
        self.label = body["weight_version"]
        return self._said(True, f"Success Weight version updated to {self.label}.")

    @staticmethod
    def _said(success: bool, message: str) -> tuple[int, dict[str, Any]]:
        return 200 if success else 400, {"success": success, "message": message}


@pytest.fixture
def engine() -> FakeSglang:
    return FakeSglang()


@pytest.fixture
def url(engine: FakeSglang) -> Iterator[str]:
    with json_server(engine.answer, key=lambda: engine.hidden_key) as url:
        yield url


@pytest.fixture
def driver(url: str) -> SglangServer:
    return SglangServer(url, "127.0.0.1:50051", MODEL, timeout=5)


def test_an_update_prepares_while_the_engine_serves_and_pauses_it_only_for_the_rest(
    engine: FakeSglang, driver: SglangServer
) -> None:
    assert driver.serving().version == 1
    engine.calls.clear()
    engine.running = True
    assert 0 <= update(driver, 2) < 5
    assert engine.calls == [
        "/server_info",
        "weighbridge.prepare",
        "weighbridge.status",
        "/pause_generation",
        "/begin_weight_update",
        "/update_weights_from_tensor",
        "/end_weight_update",
        "/continue_generation",
    ]
    assert driver.serving().version == 2
    assert engine.label == "acme/smol@2"
    assert not engine.paused
    assert not engine.session


@pytest.mark.parametrize("refuses", ["", "rank 1: vocab_size is 256, and 128 in the engine"])
def test_a_release_without_sessions_is_updated_or_refuses_without_one(
    refuses: str, engine: FakeSglang, driver: SglangServer
) -> None:
    engine.has_sessions = False
    driver.prepare(2)
    engine.calls.clear()
    engine.refuses = refuses
    if refuses:
        with pytest.raises(EngineFailed, match="vocab_size is 256"):
            driver.apply(2, f"{MODEL}@2")
    else:
        driver.apply(2, f"{MODEL}@2")
    assert engine.calls == ["/begin_weight_update", "/update_weights_from_tensor"]
    assert driver.serving().version == (1 if refuses else 2)


def test_bytes_that_are_ready_are_those_of_all_ranks(driver: SglangServer) -> None:
    assert driver.prepare(2).nbytes == 200


@pytest.mark.parametrize("where", ["prepare", "apply"])
def test_an_engine_that_refuses_goes_on_with_what_it_has_and_the_error_says_why(
    where: str, engine: FakeSglang, driver: SglangServer
) -> None:
    if where == "apply":
        driver.prepare(2)
    engine.refuses = "rank 1: vocab_size is 256, and 128 in the engine"
    with pytest.raises(EngineFailed, match="vocab_size is 256"):
        update(driver, 2) if where == "prepare" else driver.apply(2, f"{MODEL}@2")
    assert driver.serving().version == 1
    assert not engine.paused
    assert not engine.session


def test_an_engine_whose_bytes_do_not_come_is_never_paused(engine: FakeSglang, driver: SglangServer) -> None:
    engine.error = "the service cannot be reached"
    with pytest.raises(FailedPrecondition, match="rank 1: the service cannot be reached"):
        update(driver, 2)
    assert "/pause_generation" not in engine.calls


def test_waiting_for_bytes_ends(engine: FakeSglang, url: str) -> None:
    engine.preparing = "acme/smol@2"
    with pytest.raises(DeadlineExceeded):
        SglangServer(url, "127.0.0.1:50051", MODEL, timeout=0.5).prepare(2)


def test_of_two_updates_at_once_the_second_is_refused(engine: FakeSglang, driver: SglangServer) -> None:
    engine.session = True
    with pytest.raises(EngineFailed, match="already open"):
        update(driver, 2)
    assert engine.session, "the session is the other's"
    assert not engine.paused
    assert driver.serving().version == 1


def test_what_is_served_is_what_the_ranks_have_though_the_server_reports_a_failure(
    engine: FakeSglang, driver: SglangServer
) -> None:
    engine.running = True
    with pytest.raises(EngineFailed, match="cache was not flushed"):
        driver.apply(2, f"{MODEL}@2")  # without a pause
    assert driver.serving().version == 2


@pytest.mark.parametrize("setting", ["dp_size", "tokenizer_worker_num"])
def test_a_server_of_several_parts_is_refused_before_an_update(
    engine: FakeSglang, driver: SglangServer, setting: str
) -> None:
    engine.settings = {setting: 2}
    with pytest.raises(FailedPrecondition, match=f"--{setting.replace('_', '-')} 2") as refused:
        driver.connect()
    assert "several servers" in refused.value.fix
    assert engine.calls == ["/server_info"]


def test_ranks_that_serve_different_versions_serve_none(engine: FakeSglang, driver: SglangServer) -> None:
    engine.served[1] = "acme/smol@2"
    assert driver.serving().version is None
    assert "different versions are served: acme/smol@1 by rank 0; acme/smol@2 by rank 1" in driver.serving().broken


def test_an_engine_with_half_a_version_says_so(engine: FakeSglang, driver: SglangServer) -> None:
    engine.served, engine.broken = ["", ""], "acme/smol@2 was applied in part"
    assert driver.serving() == Serving(None, "acme/smol@2 was applied in part")


@pytest.mark.parametrize("served", ["", "acme/other@7"])
def test_an_engine_with_other_weights_serves_no_version(served: str, engine: FakeSglang, driver: SglangServer) -> None:
    engine.served = [served, served]
    assert driver.serving().version is None


def test_a_server_without_the_plug_in_is_told_apart(engine: FakeSglang, driver: SglangServer) -> None:
    engine.plugin = False
    with pytest.raises(EngineFailed, match="Unsupported action"):
        driver.serving()


def test_a_key_is_sent_if_there_is_one(engine: FakeSglang, url: str) -> None:
    engine.hidden_key = "secret"
    assert SglangServer(url, "127.0.0.1:50051", MODEL, api_key="secret").serving().version == 1
    with pytest.raises(EngineFailed, match="Unauthorized"):
        SglangServer(url, "127.0.0.1:50051", MODEL).serving()


def test_a_server_that_is_not_there_cannot_be_reached() -> None:
    with pytest.raises(EngineFailed, match="cannot be reached"):
        SglangServer("http://127.0.0.1:9", "127.0.0.1:50051", MODEL, timeout=2).serving()


class Versions:
    """A service whose ref has named these versions, one after the other."""

    def __init__(self, *numbers: int) -> None:
        self.numbers = numbers

    def watch_refs(self, refs: list[tuple[str, str]]) -> Iterator[tuple[str, SimpleNamespace]]:
        return ((refs[0][1], SimpleNamespace(number=number, traceparent="", metadata={})) for number in self.numbers)

    def version(self, model: str, ref: str) -> SimpleNamespace:
        return SimpleNamespace(number=self.numbers[-1], traceparent="")


def test_an_agent_takes_the_server_along_and_says_which_version_it_serves(
    engine: FakeSglang, driver: SglangServer
) -> None:
    followed = Follower(cast("Any", Versions(1, 2)), MODEL, driver).run()
    first, second = next(followed), next(followed)
    assert (first.version, first.serves, first.error) == (1, 1, "")
    assert (second.version, second.serves, second.nbytes, second.error) == (2, 2, 200, "")
    assert second.pause_seconds > 0
    assert engine.label == "acme/smol@2"


def test_an_agent_whose_server_refuses_lets_it_go_on_with_what_it_has(engine: FakeSglang, driver: SglangServer) -> None:
    engine.refuses = "rank 1: vocab_size is 256, and 128 in the engine"
    [failed, *_] = Follower(cast("Any", Versions(2)), MODEL, driver, retry_seconds=0).run()
    assert (failed.version, failed.serves) == (2, 1)
    assert "vocab_size is 256" in failed.error
    assert not engine.paused


def test_an_agent_does_not_let_half_a_version_answer(engine: FakeSglang, driver: SglangServer) -> None:
    engine.broken_by_update = True
    [failed, *_] = Follower(cast("Any", Versions(2)), MODEL, driver, retry_seconds=0).run()
    assert failed.serves is None
    assert engine.paused


@pytest.mark.parametrize(("url", "mode"), [("127.0.0.1:30000", "retract"), ("http://127.0.0.1:30000", "stop")])
def test_what_is_no_address_or_no_way_to_pause_is_refused(url: str, mode: str) -> None:
    with pytest.raises(InvalidArgument):
        SglangServer(url, "127.0.0.1:50051", MODEL, pause_mode=mode)


@pytest.mark.parametrize(
    ("url", "version"),
    [
        ("weighbridge://10.0.0.1:50051/acme/smol@17", "17"),
        ("weighbridge://10.0.0.1:50051/acme/smol@prod", "prod"),
        ("weighbridge://10.0.0.1:50051/acme/smol", "latest"),
    ],
)
def test_a_model_path_names_a_version(url: str, version: str) -> None:
    assert Wanted.from_url(url) == Wanted("10.0.0.1:50051", "acme/smol", version)


@pytest.mark.parametrize(
    "url",
    [
        "weighbridge://",
        "weighbridge://h:1",
        "weighbridge://h:1/smol",
        "weighbridge://h:1/a/b@",
        "weighbridge://h:1/a/b/c",
    ],
)
def test_a_model_path_that_names_none_is_refused(url: str) -> None:
    with pytest.raises(InvalidArgument):
        Wanted.from_url(url)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"server": "h:1"}', '{"server": "h:1", "model": "a/b", "other": 1}'])
def test_a_request_that_does_not_say_what_is_wanted_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument):
        Wanted.from_json(text)
