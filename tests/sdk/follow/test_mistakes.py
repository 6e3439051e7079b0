"""An agent beside the wrong engine, or without its service: does it say so, and touch nothing?"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from contextlib import closing, suppress
from functools import partial
from pathlib import Path

import pytest

from tests.support.json_servers import json_server
from tests.support.mortal_proxy import MortalProxy
from tests.support.raw_clients import tiny_folder
from tests.support.services import running_service
from tests.support.waiting import eventually
from weighbridge import AsyncEngineClient, Client, EngineClient, TrainerClient
from weighbridge._clients.attempts import TRIES
from weighbridge._core.text import waits
from weighbridge._transport import outages
from weighbridge.errors import FailedPrecondition, Unavailable, WeighbridgeError
from weighbridge.follow.agent import Follower
from weighbridge.follow.engines import EngineDriver, EngineFailed, Prepared, Serving
from weighbridge.follow.reaching import ReachWatch, unreachable
from weighbridge.follow.sglang import SglangServer, is_sglang
from weighbridge.follow.vllm import VllmServer

MODEL = "acme/tiny"


class Recording:
    """An engine that says what it serves, and notes what it is asked for."""

    def __init__(self, serving: Serving) -> None:
        self.asked: list[str] = []
        self._serving = serving

    def connect(self) -> None:
        self.asked.append("connect")

    def serving(self) -> Serving:
        return self._serving

    def prepare(self, version: int) -> Prepared:
        self.asked.append(f"prepare {version}")
        return Prepared(1, 0.0)

    def discard(self) -> None: ...

    def pause(self) -> None: ...

    def apply(self, version: int, label: str) -> None:
        self.asked.append(f"apply {label}")

    def resume(self) -> None: ...

    def label(self, label: str) -> None: ...


def test_an_engine_of_another_model_is_left_alone_unless_it_is_meant(tmp_path: Path) -> None:
    source = tiny_folder(tmp_path / "hf")
    with running_service(tmp_path / "store") as running, EngineClient(running.address) as client:
        with TrainerClient(running.address) as trainer:
            trainer.import_folder(MODEL, source.folder).wait(timeout=60)
        other = Recording(Serving(None, model="acme/other"))
        with pytest.raises(FailedPrecondition, match=f"serves acme/other, and not {MODEL}"):
            next(Follower(client, MODEL, other).run())
        assert other.asked == []
        for engine, force in ((other, True), (Recording(Serving(None)), False)):
            done = next(Follower(client, MODEL, engine, force=force).run())
            assert (done.version, done.error) == (1, "")
            assert engine.asked[-1] == f"apply {MODEL}@1"


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_an_engine_of_the_other_kind_is_named_as_the_likely_mistake(kind: str) -> None:
    with json_server(lambda *_: (404, {"detail": "Not Found"})) as url:
        engine: EngineDriver = (
            SglangServer(url, "127.0.0.1:1", MODEL) if kind == "sglang" else VllmServer(url, MODEL, "127.0.0.1:1")
        )
        with pytest.raises(WeighbridgeError) as caught:
            engine.connect()
    assert f"--engine {'vllm' if kind == 'sglang' else 'sglang'}" in caught.value.fix


@pytest.mark.parametrize(
    ("status", "info", "found"),
    [
        (200, {"tp_size": 2}, True),
        (200, {"vllm_config": "..."}, False),
        (404, {"detail": "Not Found"}, False),
    ],
)
def test_it_is_found_out_which_engine_answers(status: int, info: dict[str, object], found: bool) -> None:
    with json_server(lambda *_: (status, info)) as url:
        assert is_sglang(url) == found
    with pytest.raises(EngineFailed, match="cannot be reached"):
        is_sglang(url)


class Mortal(Recording):
    """An engine that answers nothing while it is dead."""

    def __init__(self) -> None:
        super().__init__(Serving(None))
        self.dead = False

    def _answer(self) -> None:
        if self.dead:
            raise EngineFailed("the engine at http://node7:8000 cannot be reached: connection refused")

    def connect(self) -> None:
        self._answer()

    def serving(self) -> Serving:
        self._answer()
        return self._serving

    def discard(self) -> None:
        self._answer()

    def apply(self, version: int, label: str) -> None:
        super().apply(version, label)
        self._serving = Serving(version, model=MODEL)


def test_an_engine_that_comes_back_gets_the_version_that_it_has_missed(tmp_path: Path) -> None:
    source = tiny_folder(tmp_path / "hf")
    with running_service(tmp_path / "store") as running, EngineClient(running.address) as client:
        with TrainerClient(running.address) as trainer:
            trainer.import_folder(MODEL, source.folder).wait(timeout=60)
            engine = Mortal()
            updates = Follower(client, MODEL, engine, retry_seconds=0.01).run()
            assert next(updates).error == ""
            engine.dead = True
            trainer.push_folder(MODEL, source.folder, step=2).wait(timeout=60)
        failed = [next(updates) for _ in range(TRIES)]
        assert all("cannot be reached" in each.error and each.serves is None for each in failed)
        back = threading.Timer(0.1, setattr, (engine, "dead", False))
        back.start()
        done = next(updates)
        back.join()
        assert (done.version, done.serves, done.error) == (2, 2, "")


def test_an_engine_that_cannot_be_reached_is_told_of_until_it_is_back(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(outages, "_FIRST_SECONDS", 0.0)
    monkeypatch.setattr(waits, "REMIND_SECONDS", 0.02)
    caplog.set_level(logging.WARNING)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        url = f"http://127.0.0.1:{port}"
        assert unreachable(url) == ""
    assert "refused" in unreachable(url)
    with closing(ReachWatch(url, every=0.01)):
        eventually(lambda: len(caplog.messages) > 2)
        assert f"the engine at {url} has been away since" in caplog.messages[-1]
        assert ", for 0" in caplog.messages[-1]
        with socket.create_server(("127.0.0.1", port)):
            eventually(lambda: f"the engine at {url} is back" in caplog.messages[-1])
    assert unreachable("http://[") != "", "an address that is none"


def test_a_watch_says_since_when_the_service_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(outages, "_FIRST_SECONDS", 0.1)
    monkeypatch.setattr(waits, "REMIND_SECONDS", 0.1)
    caplog.set_level(logging.WARNING)

    def said(words: str) -> list[str]:
        return [each.getMessage() for each in caplog.records if words in each.getMessage()]

    with running_service(tmp_path / "store") as running:
        with TrainerClient(running.address) as trainer:
            trainer.import_folder(MODEL, tiny_folder(tmp_path / "hf").folder).wait(timeout=60)
        proxy = MortalProxy(running.address)
        with EngineClient(proxy.address) as client:
            watch = client.watch(MODEL, "latest")
            assert next(watch).number == 1
            proxy.die_after(0)

            def wait() -> None:
                with suppress(WeighbridgeError):  # the client is closed in the end
                    next(watch)

            waiting = threading.Thread(target=wait, daemon=True)
            waiting.start()
            with Client(running.address) as other:
                other.set_ref(MODEL, "prod", 1)
            proxy.close()
            # other tests' agents may be waiting for theirs
            about = f"{proxy.address} has been away since"
            eventually(lambda: len(said(about)) > 1)
        waiting.join(60.0)


@pytest.mark.parametrize("on_loop", [False, True])
def test_a_watch_says_that_the_service_is_back_without_waiting_for_a_version(
    on_loop: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(outages, "_FIRST_SECONDS", 0.0)
    caplog.set_level(logging.WARNING)
    heard, ended = list[int](), threading.Event()

    async def listen(address: str) -> None:
        async def each() -> None:
            async for version in client.watch(MODEL, "latest"):
                heard.append(version.number)

        async with AsyncEngineClient(address) as client:
            listening = asyncio.create_task(each())
            await asyncio.to_thread(ended.wait)
        with suppress(WeighbridgeError):  # the client is closed
            await listening

    def wait(client: EngineClient) -> None:
        with suppress(WeighbridgeError):
            for version in client.watch(MODEL, "latest"):
                heard.append(version.number)

    with running_service(tmp_path / "store") as running:
        with TrainerClient(running.address) as trainer:
            trainer.import_folder(MODEL, tiny_folder(tmp_path / "hf").folder).wait(timeout=60)
        proxy = MortalProxy(running.address)

        def said(words: str) -> bool:
            return any(f"{proxy.address} {words}" in each for each in caplog.messages)

        with EngineClient(proxy.address) as blocking:
            work = partial(asyncio.run, listen(proxy.address)) if on_loop else partial(wait, blocking)
            waiting = threading.Thread(target=work, daemon=True)
            waiting.start()
            eventually(lambda: heard == [1])
            proxy.close()
            eventually(lambda: said("has been away since"))
            assert not said("is back")
            again = MortalProxy(running.address, int(proxy.address.rpartition(":")[2]))
            eventually(lambda: said("is back; it was away since"))
            ended.set()
        waiting.join(60.0)
        again.close()
    assert (waiting.is_alive(), heard) == (False, [1])


def test_an_outage_that_was_told_is_told_to_be_over(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    outage, error = outages.Outage("host:1"), Unavailable("nobody there")

    def said() -> list[str]:
        return [each for each in caplog.messages if "host:1" in each]

    outage.failed(error)
    outage.failed(error)
    outage.over()
    assert said() == [], "it was over soon"
    monkeypatch.setattr(outages, "_FIRST_SECONDS", 0.0)
    outage.failed(error)
    outage.failed(error)
    outage.over()
    outage.over()
    away, back = said()
    assert "has been away since" in away
    assert "nobody there" in away
    assert "is back" in back


def test_an_engine_behind_a_proxy_is_not_said_to_be_away(monkeypatch: pytest.MonkeyPatch) -> None:
    url = "https://engine.invalid:8000"
    for name in ("https_proxy", "HTTPS_PROXY", "no_proxy", "NO_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    assert unreachable(url) != "", "there is no such host"
    monkeypatch.setenv("https_proxy", "http://proxy.invalid:3128")
    assert unreachable(url) == ""
    monkeypatch.setenv("no_proxy", "engine.invalid")
    assert unreachable(url) != ""
