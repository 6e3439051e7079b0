"""Settings of adapters: are they read by one rule, whatever a user's file has them in?"""

from __future__ import annotations

import json
import re
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest

from tests.support.json_servers import json_server
from weighbridge import InvalidArgument
from weighbridge.follow.engines import EngineFailed
from weighbridge.integrations.engine_rank.source import ModelSource
from weighbridge.integrations.trl import WeighbridgeTransfer
from weighbridge.integrations.vllm.colocated import ColocatedEngine
from weighbridge.integrations.vllm.settings import Settings
from weighbridge.integrations.weight_updates import PluginSettings, UpdateSettings, WorkerSettings

DOCS = Path(__file__).parents[2] / "docs"
DEFAULTS = {
    "model": MISSING, "server": None, "lane": None, "retry_seconds": 60.0, "engine_server": None, "hf_dir": None,
    "dtype": "", "run": "default", "cast": "allow", "device": None, "timeout_seconds": 600.0,
}  # fmt: skip


def test_names_and_defaults_are_those_that_the_documents_promise() -> None:
    assert {each.name: each.default for each in fields(WorkerSettings)} == DEFAULTS
    _, _, table = (DOCS / "frameworks.md").read_text("utf-8").partition("\n## Settings\n")
    rows = re.findall(r"^\| (`[^|]*) \|", table, re.MULTILINE)
    assert {name for row in rows for name in re.findall(r"\w+", row)} == {*DEFAULTS, "stale_drafter"}


@pytest.mark.parametrize("page", ["slime.md", "trl.md", "verl.md"])
def test_pages_of_frameworks_name_the_settings_that_all_have(page: str) -> None:
    text = (DOCS / page).read_text("utf-8")
    [row] = re.findall(r"^\| \[those of all frameworks\]\(frameworks.md#settings\) \|.*$", text, re.MULTILINE)
    missing = {each.name for each in fields(PluginSettings)} - set(re.findall(r"`(\w+)`", row))
    assert not missing


@pytest.mark.parametrize(
    ("said", "problem"),
    [
        ({"model": "a/b", "sever": "h:1"}, "did you mean server"),
        ({"model": "a/b", "retry_seconds": "60"}, "retry_seconds of the file is '60'"),
        ({"model": "a/b", "retry_seconds": True}, "retry_seconds of the file is True"),
        ({"model": 7}, "model of the file is 7"),
        ({"server": "h:1"}, "the file does not name a model"),
    ],
)
@pytest.mark.parametrize("kind", [ModelSource, UpdateSettings, PluginSettings, WorkerSettings])
def test_what_is_no_setting_is_named_with_what_there_is(
    kind: type[ModelSource], said: dict[str, Any], problem: str
) -> None:
    with pytest.raises(InvalidArgument, match=problem):
        kind.read(said, "the file")


def test_whole_numbers_of_seconds_and_settings_that_are_left_out_are_taken() -> None:
    found = WorkerSettings.read({"model": "a/b", "timeout_seconds": 60, "server": None, "hf_dir": "/hf"}, "")
    assert found == WorkerSettings("a/b", timeout_seconds=60, hf_dir="/hf")


def test_engines_reach_the_service_as_trainers_do_unless_it_is_said() -> None:
    settings = UpdateSettings("a/b", "here:1", "grpc", 5.0)
    assert settings.of_engines == ModelSource("a/b", "here:1", "grpc", 5.0)
    found = UpdateSettings("a/b", "here:1", engine_server="there:1").of_engines
    assert found == ModelSource("a/b", "there:1")


def test_engines_with_the_plug_in_are_told_whether_their_drafter_may_become_stale_if_it_is_said() -> None:
    settings = PluginSettings.read({"model": "a/b", "server": "h:1", "stale_drafter": "allow"}, "")
    assert settings.init_info == {"model": "a/b", "server": "h:1", "stale_drafter": "allow"}
    assert PluginSettings("a/b", "h:1").init_info == {"model": "a/b", "server": "h:1"}
    with pytest.raises(InvalidArgument, match="stale_drafter cannot be 'maybe'"):
        PluginSettings("a/b", stale_drafter="maybe")


@pytest.mark.parametrize("said", [{}, {"stale_drafter": "allow"}])
def test_a_servers_engine_is_told_so_by_trls_transfer_and_by_a_trainer_on_its_card(
    said: dict[str, Any],
) -> None:
    asked: list[Any] = []

    def answer(_path: str, body: Any) -> tuple[int, Any]:
        asked.append(body)
        return 500, {}

    with json_server(answer) as url:
        transfer = WeighbridgeTransfer("a/b", url, "h:1", **said)
        colocated = ColocatedEngine(url, "a/b", "h:1", **said)
        for engine in (transfer._engines[url], colocated._engine):
            assert engine is not None
            with pytest.raises(EngineFailed):
                engine.connect()
    infos = [json.loads(body["args"][0]) for body in asked if body]
    assert [info.get("stale_drafter") for info in infos] == [said.get("stale_drafter")] * 2


def test_an_engine_of_the_trainers_process_is_told_so() -> None:
    class Llm:
        said: Any

        def collective_rpc(self, _method: str, args: Any) -> list[Any]:
            self.said = json.loads(args[0])
            return []

    llm = Llm()
    engine = ColocatedEngine(llm, "a/b", "h:1", stale_drafter="allow")._engine
    assert engine is not None
    engine.connect()
    assert (llm.said["stale_drafter"], llm.said["when_asleep"]) == ("allow", "wait")


def test_a_setting_of_trls_transfer_that_does_not_exist_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="WeighbridgeTransfer has no 'hf_dri'; did you mean hf_dir"):
        WeighbridgeTransfer("a/b", [], hf_dri="/hf")


def test_vllms_extra_config_names_a_version_by_number_or_ref_of_the_served_model_or_another_one() -> None:
    found = Settings.of({"version": 17}, "acme/smol")
    assert (found.model, found.version) == ("acme/smol", "17")
    assert Settings.of({"model": "acme/other", "version": "live"}, "acme/smol").source == ModelSource("acme/other")
    assert Settings.of(found.write(), "none") == found
    with pytest.raises(InvalidArgument, match=r"version of the extra config of load format weighbridge is 1\.5"):
        Settings.of({"version": 1.5}, "acme/smol")
