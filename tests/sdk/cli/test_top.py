"""`weighbridge top` on real services: once, as JSON, and live at a terminal, while pushes come and the service goes and
is back.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tests.support.killable_service import KillableService
from tests.support.raw_clients import RawClient, TinyModel, cut, rows_layout, stream_of, tiny_folder
from tests.support.services import RunningService, running_service
from tests.support.terminals import Terminal
from tests.support.waiting import eventually
from weighbridge import EngineClient, EngineReporter, TrainerClient
from weighbridge._cli import commands
from weighbridge._core.references import training_of

MODEL = "acme/tiny"
LEAVE_SCREEN, SHOW_CURSOR = "\x1b[?1049l", "\x1b[?25h"
LIVE = [sys.executable, "-m", "weighbridge", "top", "--every", "0.2"]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return tiny_folder(tmp_path_factory.mktemp("source") / "hf")


@pytest.fixture
def service(tmp_path: Path, source: TinyModel) -> Iterator[RunningService]:
    with running_service(tmp_path / "store", {MODEL: source.files}) as running:
        yield running


def top(*args: object) -> Result:
    return CliRunner().invoke(commands, ["top", *map(str, args)])


def test_once_shows_versions_models_and_engines(service: RunningService, source: TinyModel) -> None:
    with TrainerClient(service.address) as trainer:
        number = trainer.push_folder(MODEL, source.folder, step=7).wait().number
        trainer.set_ref(MODEL, "prod", number)
    with (
        EngineClient(service.address) as engine,
        closing(EngineReporter(engine, MODEL, kind="vllm", address="http://node7:8000", ref="live", version=number)),
    ):
        eventually(lambda: engine.engines(MODEL))
        result = top("--once", "--server", service.address)
        assert result.exit_code == 0, result.output
        assert "\x1b" not in result.stdout
        assert f"{MODEL}@{number}" in result.stdout
        assert "vllm at http://node7:8000" in result.stdout
        said = json.loads(top("--server", service.address, "--json").stdout)
        (version,) = said["versions"]
        assert version["version"]["number"] == number
        assert set(version["refs"]) == {"live", "latest", "prod"}
        assert version["durable_s"] >= version["ready_s"] >= 0
        assert [each["version"] for each in said["engines"]] == [number]


def test_a_push_shows_what_has_come_of_each_rank_and_who_is_missing(service: RunningService, source: TinyModel) -> None:
    with RawClient(service.address) as raw:
        number = raw.open(MODEL, ranks=2)
        layouts = [rows_layout(source.arrays, rank, 2) for rank in (0, 1)]
        with ThreadPoolExecutor(2) as pool:  # the answer comes when both have declared
            declared = [
                pool.submit(raw.declare, MODEL, number, layout, rank=rank) for rank, layout in enumerate(layouts)
            ]
            assigned = [each.result() for each in declared]
        streams = [stream_of(source.arrays, layouts[rank], assigned[rank]) for rank in (0, 1)]
        raw.push(MODEL, number, cut(streams[0])[:3], rank=0)
        said = json.loads(top("--server", service.address, "--every", "0.2", "--json").stdout)
        (push,) = said["pushes"]
        assert push["version"]["number"] == number
        assert [(each["progress"]["received_bytes"], each["progress"]["total_bytes"]) for each in push["ranks"]] == [
            (15_000, len(streams[0])),
            (0, len(streams[1])),
        ]
        assert push["rate"] >= 0
        assert push["version"]["waits_for"]
        text = top("--server", service.address, "--every", "0.2").stdout
        assert "RECEIVING" in text
        assert "waits for" in text
        raw.push(MODEL, number, cut(streams[0])[3:], rank=0)
        raw.push(MODEL, number, cut(streams[1]), rank=1)
        for rank in (0, 1):
            raw.seal(MODEL, number, rank=rank)


def test_only_models_that_are_named_are_shown(service: RunningService, source: TinyModel) -> None:
    with TrainerClient(service.address) as trainer:
        trainer.register_files("other/one", source.files)
    both = json.loads(top("--server", service.address, "--json").stdout)
    assert [model["name"] for model in both["models"]] == [MODEL, "other/one"]
    one = json.loads(top(training_of("other/one"), "--server", service.address, "--json").stdout)
    assert [model["name"] for model in one["models"]] == ["other/one"]


def test_what_is_not_there_is_an_error_with_what_to_do() -> None:
    result = top("--server", "127.0.0.1:1", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["error"]["reason"] == "UNAVAILABLE"


def test_live_it_follows_pushes_and_a_service_that_goes_and_comes_back_and_ends_tidily(
    tmp_path: Path, source: TinyModel
) -> None:
    service = KillableService(tmp_path / "store")
    service.start()
    with TrainerClient(service.address, retry_seconds=60) as trainer:
        trainer.register_files(MODEL, source.files)
        with Terminal([*LIVE, "--server", service.address], {"WEIGHBRIDGE_HTTP": "127.0.0.1:1"}) as terminal:
            terminal.said("", MODEL)
            first = trainer.push_folder(MODEL, source.folder, step=1).wait().number
            terminal.said("", f"{MODEL}@{first}")
            service.kill()
            terminal.said("", "no answer for")
            service.start()
            second = trainer.push_folder(MODEL, source.folder, step=2).wait().number
            terminal.said("", f"{MODEL}@{second}")
            terminal.said("", "VERSIONS")
            assert "no answer for" not in terminal.said("", "VERSIONS")
            terminal.resize(40, 20)
            terminal.process.send_signal(signal.SIGWINCH)
            terminal.said("", "VERSIONS")
            terminal.shown = ""
            terminal.said("\x03", LEAVE_SCREEN)
            assert terminal.ended() == 0
            assert SHOW_CURSOR in terminal.shown
            assert "Traceback" not in terminal.shown
    service.kill()


def test_a_terminal_is_left_as_it_was_when_the_process_is_told_to_end(
    service: RunningService,
) -> None:
    with Terminal([*LIVE, "--server", service.address], {}) as terminal:
        terminal.said("", MODEL)
        terminal.shown = ""
        terminal.process.terminate()
        assert terminal.ended() == 128 + signal.SIGTERM
        assert LEAVE_SCREEN in terminal.shown
        assert SHOW_CURSOR in terminal.shown
