"""Does a proxy of the environment get only connections that it cannot read, and does an error name it?"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.connect_proxies import PROXY_VARIABLES, ConnectProxy, connect_proxy
from tests.support.identities import Authority
from tests.support.json_servers import json_server
from tests.support.raw_clients import tiny_folder
from tests.support.services import RunningService, running_service
from weighbridge import Client, Credentials, EngineClient, InvalidArgument, TrainerClient, Unavailable
from weighbridge._transport import proxies
from weighbridge._transport.proxies import PROXY_VARIABLE, channel_options, proxy_of
from weighbridge.aio import AsyncEngineClient
from weighbridge.follow.sglang import SglangServer
from weighbridge.follow.vllm import VllmServer
from weighbridge_service.runtime.tls_files import TlsFiles

MODEL = "tests/proxies"
ELSEWHERE = "weigh.example:50051"
DIRECT = (("grpc.enable_http_proxy", 0),)


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment names none."""
    for name in (*PROXY_VARIABLES, PROXY_VARIABLE):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    source = tiny_folder(tmp_path_factory.mktemp("hf") / "model")
    with running_service(tmp_path_factory.mktemp("store")) as running:
        with TrainerClient(running.address) as trainer:
            trainer.register_model(MODEL, source.folder)
            trainer.push_folder(MODEL, source.folder, step=1).wait(timeout=60)
        yield running


@pytest.fixture
def refusing(monkeypatch: pytest.MonkeyPatch) -> Iterator[ConnectProxy]:
    """A proxy that refuses everything, and that the environment names for everything."""
    with connect_proxy() as proxy:
        for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "grpc_proxy", "all_proxy"):
            monkeypatch.setenv(name, proxy.url)
        yield proxy


@pytest.mark.parametrize(
    ("server", "tls", "environment", "options", "passed"),
    [
        (ELSEWHERE, False, {"http_proxy": "http://p:3128", "grpc_proxy": "http://p:3128"}, DIRECT, ""),
        (ELSEWHERE, True, {"https_proxy": "http://me:secret@p:3128"}, (), "p:3128"),
        (ELSEWHERE, True, {"https_proxy": "http://p:3128", "no_proxy": "localhost, .example"}, (), ""),
        (ELSEWHERE, True, {}, (), ""),
        (ELSEWHERE, False, {PROXY_VARIABLE: "http://p:1"}, (("grpc.http_proxy", "http://p:1"),), "p:1"),
        (ELSEWHERE, True, {PROXY_VARIABLE: "http://p:1"}, (("grpc.http_proxy", "http://p:1"),), "p:1"),
        ("127.0.0.1:50051", True, {"https_proxy": "http://p:3128", PROXY_VARIABLE: "http://p:1"}, DIRECT, ""),
        ("[::1]:50051", False, {PROXY_VARIABLE: "http://p:1"}, DIRECT, ""),
        ("unix:/run/weighbridge", False, {PROXY_VARIABLE: "http://p:1"}, DIRECT, ""),
    ],
)
def test_a_connection_without_tls_passes_only_the_proxy_that_is_named_for_it(
    server: str,
    tls: bool,
    environment: dict[str, str],
    options: tuple[tuple[str, int | str], ...],
    passed: str,
) -> None:
    assert channel_options(server, tls=tls, environment=environment) == options
    assert proxy_of(server, tls=tls, environment=environment) == passed


@pytest.mark.parametrize("url", ["p:3128", "https://p:3128", "http://p", "http://:1", "http://p:x", "p"])
def test_a_proxy_that_grpc_cannot_use_is_refused(url: str) -> None:
    with pytest.raises(InvalidArgument, match=f"{PROXY_VARIABLE} is not the URL of a proxy"):
        channel_options(ELSEWHERE, tls=True, environment={PROXY_VARIABLE: url})


@pytest.mark.parametrize("local", [True, False])
def test_clients_without_tls_ask_no_proxy_of_the_environment(
    service: RunningService, refusing: ConnectProxy, monkeypatch: pytest.MonkeyPatch, local: bool
) -> None:
    if not local:  # as if the service were on another machine
        monkeypatch.setattr(proxies, "stays_here", lambda _: False)
    with EngineClient(service.address, lane="grpc", retry_seconds=0.0) as engine:
        pulled = dict(engine.pull(MODEL, 1))

    async def pull() -> int:
        async with AsyncEngineClient(service.address, lane="grpc", retry_seconds=0.0) as engine:
            return len([name async for name, _ in engine.pull(MODEL, 1)])

    assert asyncio.run(pull()) == len(pulled) > 0
    assert refusing.asked == []


def test_weights_come_by_the_proxy_that_is_named_for_them(
    service: RunningService, monkeypatch: pytest.MonkeyPatch
) -> None:
    with connect_proxy(service.address) as proxy:
        monkeypatch.setenv(PROXY_VARIABLE, proxy.url)
        with EngineClient(ELSEWHERE, lane="grpc", retry_seconds=0.0) as engine:
            pulled = dict(engine.pull(MODEL, 1))
        assert set(proxy.asked) == {f"CONNECT {ELSEWHERE} HTTP/1.1"}
        assert all(tensor.numpy().tobytes()[:64] in proxy.read for tensor in pulled.values())


def test_over_tls_weights_come_by_the_proxy_of_the_environment_which_reads_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority, source = Authority(tmp_path / "ca"), tiny_folder(tmp_path / "hf")
    tls = TlsFiles(*authority.issue("weigh.example", "127.0.0.1"), None)
    with running_service(tmp_path / "store", tls=tls, bulk_port="auto") as running:
        with TrainerClient(running.address, credentials=authority.client()) as trainer:
            trainer.register_model(MODEL, source.folder)
            trainer.push_folder(MODEL, source.folder, step=1).wait(timeout=60)
        with connect_proxy(running.address) as proxy:
            monkeypatch.setenv("https_proxy", proxy.url)
            shown = authority.client(token="a-token")
            with EngineClient(ELSEWHERE, credentials=shown, lane="grpc", retry_seconds=0.0) as engine:
                pulled = {name: tensor.numpy() for name, tensor in engine.pull(MODEL, 1)}
            assert set(proxy.asked) == {f"CONNECT {ELSEWHERE} HTTP/1.1"}
            assert {name: array.tobytes() for name, array in pulled.items()} == {
                name: array.tobytes() for name, array in source.arrays.items()
            }
            assert len(proxy.read) > sum(array.nbytes for array in pulled.values())
            assert b"a-token" not in proxy.read
            assert not any(array.tobytes()[:64] in proxy.read for array in pulled.values())


def test_an_error_names_the_proxy_that_does_not_connect(
    refusing: ConnectProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        Client(ELSEWHERE, credentials=Credentials(ca="system"), retry_seconds=0.0) as client,
        pytest.raises(Unavailable) as told,
    ):
        client.models()
    assert refusing.asked[0] == f"CONNECT {ELSEWHERE} HTTP/1.1"
    assert f"through the proxy {refusing.address}" in str(told.value)
    assert "weigh.example to no_proxy" in told.value.fix
    assert "weighbridge serve" not in str(told.value)
    assert told.value.worth_retrying < 10
    monkeypatch.setenv(PROXY_VARIABLE, "http://127.0.0.1:1")  # where none listens
    with Client(ELSEWHERE, retry_seconds=0.0) as client, pytest.raises(Unavailable) as told:
        client.models()
    assert "through the proxy 127.0.0.1:1: " in str(told.value)


def test_agents_ask_engines_without_a_proxy_of_the_environment(refusing: ConnectProxy) -> None:
    def answer(path: str, _: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        return 200, {"path": path}

    with json_server(answer) as url:
        assert VllmServer(url, MODEL, "127.0.0.1:1")._api.call("/x") == {"path": "/x"}
        assert SglangServer(url, "127.0.0.1:1", MODEL).api.call("/x") == {"path": "/x"}
    assert refusing.asked == []
