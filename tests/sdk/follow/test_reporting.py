"""Does an agent tell the service what its engine serves, is taken to and could not be taken to, and the engine from its start what it serves?"""

from __future__ import annotations

import json
import threading
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
from weighbridge import Engine, EngineClient, TrainerClient, WeighbridgeError
from weighbridge._cli import commands
from weighbridge.follow.agent import Follower
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
    """The command runs in a thread here, which may set no handlers."""
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
    """An engine that prepares until it is told to go on."""

    def __init__(self) -> None:
        super().__init__(Serving(None))
        self.go_on = threading.Event()

    def prepare(self, version: int) -> Prepared:
        self.go_on.wait(60)
        return super().prepare(version)


def test_an_update_is_seen_while_it_goes_on(client: EngineClient) -> None:
    engine = Slow()
    with closing(client.report_engine(MODEL, kind="mine", ref="latest")) as reporter:
        steps = Follower(client, MODEL, engine, reporter=reporter).run()
        thread = threading.Thread(target=lambda: next(steps))
        thread.start()
        eventually(lambda: client.engines(MODEL) and only(client).state == "updating")
        assert (only(client).target, only(client).version) == (1, 0)
        engine.go_on.set()
        thread.join(60)


class Labelled(Recording):
    """An engine that notes what it was told to tell its clients."""

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
        reporter = client.report_engine(MODEL, kind="mine", ref="latest")
        with closing(reporter), suppress(WeighbridgeError):
            next(Follower(client, MODEL, engine, reporter=reporter).run())
        eventually(lambda: reporter.status.unreachable_since_ms)
    assert engine.labels == [f"{MODEL}@1"]
    assert reporter.status.version == 1
