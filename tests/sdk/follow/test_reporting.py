"""Does an agent report to the service what its engine serves, updates to and failed to update to, and label the engine
from the start?
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.sdk.follow.test_mistakes import MODEL, Recording
from tests.support.mortal_proxy import MortalProxy
from tests.support.raw_clients import TinyModel, tiny_folder
from tests.support.services import RunningService, running_service
from tests.support.sglang_fakes import fake_sglang
from tests.support.waiting import eventually
from weighbridge import Engine, EngineClient, EngineReporter, TrainerClient, WeighbridgeError
from weighbridge._cli import commands
from weighbridge._cli.following import _line
from weighbridge._clients.calls.engine_calls import REPORT_SECONDS
from weighbridge._core.engines.facts import EngineFacts
from weighbridge._reporting.said import Contact, ReportedState, status_of
from weighbridge.follow.agent import Followed, Follower
from weighbridge.follow.engines import Prepared, Serving


@pytest.fixture
def source(tmp_path: Path) -> TinyModel:
    return tiny_folder(tmp_path / "hf")


@pytest.fixture
def running(tmp_path: Path, source: TinyModel) -> Iterator[RunningService]:
    with running_service(tmp_path / "store", report_every=0.5) as service:
        with TrainerClient(service.address) as trainer:
            trainer.import_folder(MODEL, source.folder, step=1).wait(timeout=60)
        yield service


@pytest.fixture
def client(running: RunningService) -> Iterator[EngineClient]:
    with EngineClient(running.address) as found:
        yield found


def push(running: RunningService, source: TinyModel, step: int) -> None:
    with TrainerClient(running.address) as trainer:
        trainer.push_folder(MODEL, source.folder, step=step).wait(timeout=60)


def only(client: EngineClient) -> Engine:
    (found,) = client.engines(MODEL)
    return found


def follow(address: str, url: str, *more: str) -> threading.Thread:
    """The agent's command, in a thread; ends by its ``--count``."""
    line = ["follow", MODEL, "--engine", "sglang", "--url", url, "--server", address, "--json", *more]
    return threading.Thread(target=CliRunner().invoke, args=(commands, line), daemon=True)


@pytest.fixture(autouse=True)
def signals_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command runs in a thread here, which must not set signal handlers."""
    monkeypatch.setattr("weighbridge._cli.following.end_tidily", lambda: None)


def test_the_command_reports_each_version_and_its_end(
    running: RunningService, client: EngineClient, source: TinyModel
) -> None:
    with fake_sglang() as engine:
        agent = follow(running.address, engine.url, "--count", "2")
        agent.start()
        eventually(lambda: client.engines(MODEL) and only(client).version == 1)
        found = only(client)
        assert (found.kind, found.state, found.standing, found.ref) == (
            "sglang",
            "serving",
            "current",
            "latest",
        )
        assert (found.update_version, found.update_bytes) == (1, engine.holds)
        assert found.address.endswith(engine.url.rpartition(":")[2])
        push(running, source, 2)
        agent.join(60)
        assert (only(client).version, only(client).standing) == (2, "gone")
        shown = CliRunner().invoke(commands, ["engines", MODEL, "--server", running.address]).output
        assert "sglang at http" in shown
        assert "latest=2" in shown
        as_json = CliRunner().invoke(commands, ["engines", "--json", "--server", running.address]).output
        assert json.loads(as_json)[0] == only(client).to_json()


def test_an_engine_that_could_not_be_taken_along_is_failing_and_behind(
    running: RunningService, client: EngineClient, source: TinyModel
) -> None:
    with fake_sglang() as engine:
        engine.refuse = {"2": "prepare"}
        agent = follow(running.address, engine.url, "--count", "2")
        agent.start()
        eventually(lambda: client.engines(MODEL) and only(client).version == 1)
        push(running, source, 2)
        eventually(lambda: "made up" in only(client).error)
        failing = only(client)
        assert (failing.version, failing.behind, failing.named) == (1, 1, 2)
        agent.join(60)


class Slow(Recording):
    """An engine whose preparation lasts until ``go_on`` is set."""

    def __init__(self) -> None:
        super().__init__(Serving(None))
        self.go_on = threading.Event()

    def prepare(self, version: int) -> Prepared:
        self.go_on.wait(60)
        return super().prepare(version)


def test_an_update_is_seen_while_it_goes_on(client: EngineClient) -> None:
    engine = Slow()
    with closing(EngineReporter(client, MODEL, kind="mine", ref="latest")) as reporter:
        steps = Follower(client, MODEL, engine, reporter=reporter).run()
        thread = threading.Thread(target=lambda: next(steps))
        thread.start()
        eventually(lambda: client.engines(MODEL) and only(client).state == "updating")
        assert (only(client).target, only(client).version) == (1, 0)
        engine.go_on.set()
        thread.join(60)


class Labelled(Recording):
    """An engine that records the labels for its clients."""

    def __init__(self, serving: Serving) -> None:
        super().__init__(serving)
        self.labels: list[str] = []

    def label(self, label: str) -> None:
        self.labels.append(label)


def test_an_engine_tells_its_clients_what_it_serves_before_the_service_can_be_reached(
    running: RunningService,
) -> None:
    proxy = MortalProxy(running.address)
    proxy.close()
    engine = Labelled(Serving(1, model=MODEL))
    with EngineClient(proxy.address, retry_seconds=0.5) as client:
        reporter = EngineReporter(client, MODEL, kind="mine", ref="latest")
        with closing(reporter), suppress(WeighbridgeError):
            next(Follower(client, MODEL, engine, reporter=reporter).run())
        eventually(lambda: reporter.status.unreachable_since_ms)
    assert engine.labels == [f"{MODEL}@1"]
    assert reporter.status.version == 1


def test_a_file_says_how_the_engine_stands_from_the_start_and_while_the_service_is_away(
    running: RunningService, source: TinyModel, tmp_path: Path
) -> None:
    path = tmp_path / "status.json"

    def status() -> dict[str, object]:
        return dict(json.loads(path.read_text())) if path.exists() else {}

    with fake_sglang() as engine:
        engine.refuse = {"2": "prepare"}
        proxy = MortalProxy(running.address)
        agent = follow(proxy.address, engine.url, "--engine-server", running.address, "--status", str(path))
        agent.start()
        eventually(lambda: status().get("standing") == "current")
        push(running, source, 2)
        eventually(lambda: status()["behind"] == 1)
        assert (status()["version"], status()["named"], status()["unreachable_since_ms"]) == (1, 2, 0)
        proxy.close()
        eventually(lambda: status()["standing"] == "stale")
        away = status()
        assert away["unreachable_since_ms"]
        assert proxy.address in str(away["unreachable"])
        assert (away["version"], away["named"]) == (1, 2)


def test_a_status_file_that_cannot_be_written_is_refused_at_once(tmp_path: Path) -> None:
    line = ["follow", MODEL, "--status", str(tmp_path / "none" / "status.json"), "--server", "127.0.0.1:1"]
    done = CliRunner().invoke(commands, line)
    assert done.exit_code == 1
    assert "No such file or directory" in done.output


def test_a_line_says_how_far_behind_an_engine_is_that_failed() -> None:
    failed = Followed(MODEL, 18, 16, error="made up", behind=2)
    assert _line(failed) == f"{MODEL}@18: failed, and the engine serves version 16, 2 versions behind: made up"


def test_a_service_that_takes_reports_and_answers_none_delays_no_update(client: EngineClient) -> None:
    engine = Recording(Serving(None))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        host, port = silent.getsockname()
        with EngineClient(f"{host}:{port}") as nobody:
            reporter = EngineReporter(nobody, MODEL, kind="mine", ref="latest")
            follower = Follower(client, MODEL, engine, reporter=reporter)
            begun = time.monotonic()
            assert [follower.take_to(1).error for _ in range(20)] == [""] * 20
            assert time.monotonic() - begun < 15 * REPORT_SECONDS, "not as long as 20 reports take to fail"
            reporter.close()


@pytest.mark.parametrize(
    ("model", "url", "said"),
    [
        (MODEL, "127.0.0.1:8000", "write http://127.0.0.1:8000"),
        (f"{MODEL}:training", "http://127.0.0.1:8000", f"follow {MODEL}"),
    ],
)
def test_what_no_engine_can_follow_is_refused_before_anything_is_asked(model: str, url: str, said: str) -> None:
    done = CliRunner().invoke(commands, ["follow", model, "--url", url, "--server", "127.0.0.1:1"])
    assert done.exit_code == 2
    assert said in done.output


def test_a_proof_that_is_due_and_cannot_be_made_leaves_the_time_of_the_last_one() -> None:
    said = ReportedState(EngineFacts("e1", MODEL), 0.0, 0.0).with_changes({"proof": "not proved"}, 10.0)
    assert status_of(said, Contact(), 20.0, 20_000).proof_time_ms == 0
    said = said.with_changes({"proof": "not proved"}, 30.0)
    assert said.proved_s == 10.0, "since then one is asked for"
    said = said.with_changes({"proof": "proved", "proofs": 1}, 40.0)
    said = said.with_changes({"proof": "not proved", "proof_error": "the engine sleeps"}, 50.0)
    assert status_of(said, Contact(), 60.0, 60_000).proof_time_ms == 40_000
    assert "last proof " in said.facts.proof_when
