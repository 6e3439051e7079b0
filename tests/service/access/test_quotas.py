"""Is a client over its limits refused with a time to retry after, without an effect on other clients?"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx2 as httpx
import numpy as np
import pytest
from click.testing import CliRunner
from starlette.requests import Request
from starlette.testclient import TestClient

from tests.service.access.test_tls import https
from tests.support.identities import identity, policy_file
from tests.support.raw_clients import TinyModel, tiny_folder
from tests.support.services import RunningService, running_service
from tests.support.waiting import eventually
from weighbridge import (
    Client,
    Credentials,
    EngineClient,
    Quota,
    ResourceExhausted,
    Retention,
    TrainerClient,
    WeighbridgeError,
)
from weighbridge._cli import commands
from weighbridge._core import striping
from weighbridge_service.access.identities import Identity, PresentedCredentials
from weighbridge_service.access.peer import Peer
from weighbridge_service.admission.byte_budget import Direction
from weighbridge_service.api.http import hub_routes
from weighbridge_service.api.http.app import create_app
from weighbridge_service.api.http.callers import CredentialsCheck
from weighbridge_service.api.http.hub_routes import HubSizes
from weighbridge_service.exports.jobs import Exports
from weighbridge_service.fsck.repair import check_store
from weighbridge_service.runtime.clock import unix_ms
from weighbridge_storage.documents.names import ModelName, ledger_key
from weighbridge_storage.head.ledger import Amount, Ledger
from weighbridge_storage.stores.local import LocalStore

MODEL, OTHER = "acme/smol", "acme/other"
A, B, OWNER = (Credentials(token=f"token-of-{name}") for name in ("a", "b", "owner"))


@dataclass
class Clock:
    """Seconds, moved by hand."""

    now: float = 1000.0
    moved: threading.Event = field(default_factory=threading.Event)

    def __call__(self) -> float:
        return self.now


def limited(name: str, may: list[str], limits: str) -> str:
    return identity(name, may, token=f"token-of-{name}") + (f"limits = {{{limits}}}\n" if limits else "")


@contextmanager
def service(folder: Path, limits: str = "", stored: int = 0, **settings: Any) -> Iterator[RunningService]:
    """A service where ``a`` has these limits, ``b`` and the owner none, and namespace acme may hold so many bytes."""
    policy = policy_file(
        folder,
        limited("a", ["push:acme/*", "pull:acme/*"], limits),
        limited("b", ["push:acme/*", "pull:acme/*"], ""),
        limited("owner", ["admin"], ""),
        f'[[namespace]]\nname = "acme"\nstored = "{stored}B"\n' if stored else "",
    )
    arguments = {"policy": policy, "audit": folder / "audit.jsonl", **settings}
    with running_service(folder / "store", **arguments) as running:
        yield running


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return tiny_folder(tmp_path_factory.mktemp("hf") / "model")


def size_of(source: TinyModel) -> int:
    """Bytes of a version's weights: of a version's file, as they lie in a store."""
    return (source.folder / "model.safetensors").stat().st_size


def push(address: str, source: TinyModel, step: int, shown: Credentials = A, model: str = MODEL) -> int:
    with TrainerClient(address, credentials=shown, retry_seconds=5) as trainer:
        return trainer.push_folder(model, source.folder, step=step).wait(timeout=60).number


def register(running: RunningService, source: TinyModel, *models: str) -> None:
    with TrainerClient(running.address, credentials=OWNER) as trainer:
        for model in models:
            trainer.register_model(model, source.folder)


def refusals(folder: Path, identity_: str) -> list[str]:
    """Actions in the audit log that were refused because a quota was used up."""
    lines = [json.loads(line) for line in (folder / "audit.jsonl").read_text().splitlines()]
    return [line["action"] for line in lines if (line["identity"], line["result"]) == (identity_, "RESOURCE_EXHAUSTED")]


# --- stored bytes


def test_a_namespace_holds_no_more_than_it_may_and_deleting_makes_room(tmp_path: Path, source: TinyModel) -> None:
    stored = 2 * size_of(source) + 1000
    with service(tmp_path, stored=stored, count_rest=0.0, grace_seconds=1.0) as running:
        register(running, source, MODEL, OTHER)
        assert [push(running.address, source, 1), push(running.address, source, 2, model=OTHER)] == [1, 1]
        for model in (MODEL, OTHER):
            with pytest.raises(ResourceExhausted) as refused:
                push(running.address, source, 3, model=model)
        assert "namespace acme holds" in refused.value.message
        assert OTHER in refused.value.message
        assert "stored" in refused.value.fix
        assert refused.value.retry_after is None
        assert refusals(tmp_path, "a") == ["OpenVersion"] * 2
        with Client(running.address, credentials=OWNER) as client:
            assert client.version(MODEL, "latest").number == 1
            client.delete_model(OTHER)
        assert push(running.address, source, 3) == 2, "no number was taken by what was refused"
        with pytest.raises(ResourceExhausted):
            push(running.address, source, 4)
        with Client(running.address, credentials=OWNER) as client:
            client.set_retention(MODEL, Retention(keep_last=1))
            client.collect(MODEL)
            with pytest.raises(ResourceExhausted):
                push(running.address, source, 4)  # the store still holds retired versions
            eventually(lambda: client.collect(MODEL).deleted)
        assert push(running.address, source, 4) == 3


def test_a_version_that_is_given_up_makes_room(tmp_path: Path, source: TinyModel) -> None:
    with service(tmp_path, stored=size_of(source) + 1000, count_rest=0.0) as running:
        register(running, source, MODEL)
        opener = running.service.intake.opener
        opened = opener.open_version(MODEL, step=1, run="r", ranks=2, request_id="q", client_id="c")
        with pytest.raises(ResourceExhausted):
            push(running.address, source, 2)
        again = opener.open_version(MODEL, step=1, run="r", ranks=2, request_id="q", client_id="d")
        assert again.number == opened.number, "who joins takes nothing"
        with Client(running.address, credentials=OWNER) as client:
            client.abort(MODEL, opened.number)
        assert push(running.address, source, 2) == 2


def test_what_a_namespace_holds_is_known_after_a_restart_and_without_the_ledger(
    tmp_path: Path, source: TinyModel
) -> None:
    stored = size_of(source) + 1000
    with service(tmp_path) as running:  # without a limit, the service keeps no ledger
        register(running, source, MODEL, OTHER)
        push(running.address, source, 1)
    for _ in range(2):
        with service(tmp_path, stored=stored) as running, pytest.raises(ResourceExhausted):
            push(running.address, source, 2, model=OTHER)
    [ledger] = (tmp_path / "store" / "service" / "stored").iterdir()
    ledger.write_bytes(b"damaged")
    with service(tmp_path, stored=stored) as running:
        with pytest.raises(ResourceExhausted):
            push(running.address, source, 2, model=OTHER)
        with Client(running.address, credentials=A) as client:
            assert client.usage().quotas == (Quota("stored", "acme", size_of(source), stored),)


def test_what_a_namespace_holds_is_counted_anew_once_a_head_was_rebuilt(tmp_path: Path, source: TinyModel) -> None:
    stored = size_of(source) + 1000
    name = ModelName.parse(MODEL)
    with service(tmp_path, stored=stored) as running:
        register(running, source, MODEL)
        push(running.address, source, 1)
    with closing(LocalStore(tmp_path / "store")) as store:
        # the ledger counts 1 MB of a head that is then lost
        lost = Ledger({name.name: Amount(1_000_000, 0)}, unix_ms())
        store.put(ledger_key(name.namespace), lost.to_json(), mode="overwrite")
        store.delete(name.head_key)
        assert all(model.ok for model in check_store(store, repair=True))
    with service(tmp_path, stored=stored) as running, Client(running.address, credentials=A) as client:
        assert client.usage().quotas == (Quota("stored", "acme", size_of(source), stored),)


@pytest.mark.parametrize("models", [(MODEL, OTHER), (MODEL, MODEL)], ids=["two models", "one model"])
def test_of_pushes_at_two_replicas_at_one_time_no_more_pass_than_there_is_room_for(
    tmp_path: Path, source: TinyModel, models: tuple[str, str]
) -> None:
    with (
        service(tmp_path, stored=3 * size_of(source) + 1000) as first,
        service(tmp_path, stored=3 * size_of(source) + 1000) as second,
    ):
        register(first, source, MODEL, OTHER)
        register(second, source, MODEL, OTHER)

        def opened(each: int) -> bool:
            running = (first, second)[each % 2]
            try:
                running.service.intake.opener.open_version(
                    models[each % 2], step=each, run="r", ranks=2, request_id=f"q{each}", client_id="c"
                )
            except ResourceExhausted:
                return False
            return True

        with ThreadPoolExecutor(8) as pool:
            passed = list(pool.map(opened, range(8)))
        assert sum(passed) <= 3
        with Client(first.address, credentials=OWNER) as client:
            receiving = [
                version
                for model in set(models)
                for version in client.versions(model, include_invisible=True)
                if not version.state.given_up
            ]
        assert len(receiving) == sum(passed)
        if len(set(models)) == 2:
            assert sum(passed) == 3, "of different models, those that come first pass"


# --- versions an hour


def test_an_identity_opens_as_many_versions_in_an_hour_as_it_may_and_hears_when_the_next_may_come(
    tmp_path: Path, source: TinyModel
) -> None:
    with service(tmp_path, "versions_per_hour = 2") as running:
        clock = running.service.quotas.identities.clock = Clock()
        register(running, source, MODEL, OTHER)
        push(running.address, source, 1)
        clock.now += 600
        push(running.address, source, 2, model=OTHER)
        clock.now += 600
        with pytest.raises(ResourceExhausted, match="a has opened 2 versions within an hour") as refused:
            push(running.address, source, 3)
        assert refused.value.retry_after == 2400
        assert push(running.address, source, 4, shown=B) == 2, "others go on"
        assert refusals(tmp_path, "a") == ["OpenVersion"]
        clock.now += 2400
        assert push(running.address, source, 3) == 3


def test_ranks_of_one_push_count_as_one_version_at_whatever_replica(tmp_path: Path, source: TinyModel) -> None:
    with (
        service(tmp_path, "versions_per_hour = 1") as first,
        service(tmp_path, "versions_per_hour = 1") as second,
    ):
        register(first, source, MODEL)
        [a] = first.service.access.limited()

        def opened(running: RunningService, request_id: str, client_id: str) -> int:
            return running.service.intake.opener.open_version(
                MODEL,
                step=1,
                run="r",
                ranks=3,
                request_id=request_id,
                client_id=client_id,
                by=Peer("host", identity=a),
            ).number

        ranks = [(first, "c0"), (first, "c1"), (second, "c2")]
        assert [opened(running, "q", client_id) for running, client_id in ranks] == [1, 1, 1]
        with pytest.raises(ResourceExhausted):
            opened(first, "another", "c0")
        assert opened(second, "another", "c0") == 2, "each replica counts what was opened there"


@pytest.mark.parametrize("limit", ["stored", "versions_per_hour"])
def test_a_rank_is_not_refused_what_another_rank_of_its_push_has_taken_at_another_replica(
    tmp_path: Path, source: TinyModel, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    limits = "versions_per_hour = 1" if limit == "versions_per_hour" else ""
    stored = size_of(source) + 1000 if limit == "stored" else 0
    with service(tmp_path, limits, stored) as first, service(tmp_path, limits, stored) as second:
        register(first, source, MODEL)
        a = Peer("host", identity=first.service.access.identify(PresentedCredentials("Bearer token-of-a")))

        def opened(running: RunningService, request_id: str, client_id: str) -> int:
            return running.service.intake.opener.open_version(
                MODEL, step=1, run="r", ranks=2, request_id=request_id, client_id=client_id, by=a
            ).number

        if limit == "versions_per_hour":
            opened(second, "before", "c")
        check_room = second.service.quotas.stored.check_room

        def check_late(*arguments: Any) -> None:
            opened(first, "q", "c0")
            check_room(*arguments)

        with monkeypatch.context() as patched:
            patched.setattr(second.service.quotas.stored, "check_room", check_late)
            number = opened(second, "q", "c1")
        assert number == opened(first, "q", "c0")
        with pytest.raises(ResourceExhausted):
            opened(second, "another", "c1")


def test_a_version_that_is_opened_again_as_soon_as_it_is_given_up_is_another_one(
    tmp_path: Path, source: TinyModel
) -> None:
    with service(tmp_path, "versions_per_hour = 3") as running:
        register(running, source, MODEL)
        intake = running.service.intake
        [a] = running.service.access.limited()
        opened: set[int] = set()

        def open_and_give_up() -> None:
            number = intake.opener.open_version(
                MODEL, step=1, run="r", ranks=1, request_id="q", client_id="c", by=Peer("h", identity=a)
            ).number
            opened.add(number)
            intake.abort_version(MODEL, number, "", 60)
            # here, before the head says so
            eventually(lambda: running.service.catalog.get_version(MODEL, str(number)).state.given_up)

        def refused() -> bool:
            try:
                open_and_give_up()
            except ResourceExhausted:
                return True
            return False

        assert any(refused() for _ in range(20))
        assert opened == {1, 2, 3}


def test_an_identity_that_opens_without_end_leaves_room_for_versions_of_others(
    tmp_path: Path, source: TinyModel
) -> None:
    with service(tmp_path) as running:
        register(running, source, MODEL)
        opener = running.service.intake.opener

        def opened(name: str, number: int) -> int:
            return opener.open_version(
                MODEL,
                step=1,
                run="r",
                ranks=1,
                request_id=f"{name}{number}",
                client_id=name,
                by=Peer("h", identity=Identity(name)),
            ).number

        with pytest.raises(ResourceExhausted, match="48 versions are being received, 48 of them from greedy"):
            list(map(partial(opened, "greedy"), range(64)))
        assert opened("other", 1) == 49
        with pytest.raises(ResourceExhausted):
            opened("greedy", 64)


def test_a_client_that_is_told_of_a_short_time_comes_back_after_it_and_not_before(
    tmp_path: Path, source: TinyModel
) -> None:
    with service(tmp_path, "versions_per_hour = 1") as running:
        clock = running.service.quotas.identities.clock = Clock()
        register(running, source, MODEL)
        push(running.address, source, 1)
        clock.now += 3599
        asked = b'weighbridge_grpc_calls_total{code="RESOURCE_EXHAUSTED",method="OpenVersion"} 1.0'
        with ThreadPoolExecutor(1) as pool:
            pushed = pool.submit(push, running.address, source, 2)
            eventually(lambda: asked in running.metrics.text())
            clock.now += 1
            assert pushed.result(60) == 2
        assert asked in running.metrics.text(), "it did not ask in vain again"


# --- streams, and their pace


@contextmanager
def slow_stream(running: RunningService) -> Iterator[None]:
    """A pull by ``a`` that holds a stream slot, and is throttled until the block ends."""
    quotas = running.service.quotas.identities
    clock = quotas.clock
    assert isinstance(clock, Clock)
    a = next(each for each in running.service.access.limited() if each.name == "a")
    quotas.rates.take(a.name, 3 * 10**6, rate=a.limits.bytes_per_second)
    with EngineClient(running.address, credentials=A) as engine, ThreadPoolExecutor(1) as pool:
        pulled = pool.submit(lambda: dict(engine.pull(MODEL)))
        eventually(lambda: quotas.use_of(a).streams == 1)
        try:
            yield
            assert not pulled.done()
        finally:
            clock.now += 10**9
            pulled.result(60)


def assert_pulled(running: RunningService, source: TinyModel, shown: Credentials, **settings: Any) -> None:
    with EngineClient(running.address, credentials=shown, **settings) as engine:
        pulled = {name: tensor.numpy() for name, tensor in engine.pull(MODEL)}
    assert all(np.array_equal(pulled[name], array) for name, array in source.arrays.items())


def test_a_stream_that_is_slowed_keeps_nothing_that_others_need(tmp_path: Path, source: TinyModel) -> None:
    with service(tmp_path, 'streams = 1, bytes_per_second = "1MB"') as running:
        running.service.quotas.identities.clock = Clock()
        register(running, source, MODEL)
        push(running.address, source, 1, shown=B)
        with slow_stream(running):
            eventually(lambda: not any(running.service.byte_budget.in_flight.nbytes.values()))
            assert not any(running.service.byte_budget.in_flight.waiting.values())
            for step in (2, 3):
                push(running.address, source, step, shown=B)
                assert_pulled(running, source, B)
            assert running.service.byte_budget.in_flight.nbytes[Direction.OUT] == 0


def test_calls_of_who_is_refused_streams_without_end_are_put_off_and_those_of_others_are_not(
    tmp_path: Path, source: TinyModel
) -> None:
    with service(tmp_path, 'streams = 1, bytes_per_second = "1MB"', bulk_port="auto") as running:
        quotas = running.service.quotas.identities
        quotas.clock = clock = Clock()
        register(running, source, MODEL)
        push(running.address, source, 1, shown=B)
        with EngineClient(running.address, credentials=A, retry_seconds=0) as engine:

            def refused() -> None:
                with pytest.raises(ResourceExhausted, match="a has 1 stream"):
                    list(engine.pull(MODEL))

            with slow_stream(running):
                a = next(each for each in running.service.access.limited() if each.name == "a")
                for _ in range(99):
                    with pytest.raises(ResourceExhausted), quotas.streaming(a):
                        pass
                refused()
                assert quotas.put_off(a) == 0.0
                refused()
                frozen = clock.now
                started = time.monotonic()
                engine.models()
                assert time.monotonic() - started > 0.9, "also what asks for no stream"
                with EngineClient(running.address, credentials=B) as other:
                    started = time.monotonic()
                    for _ in range(30):
                        other.models()
                    assert time.monotonic() - started < 27.0, "each would be put off for a second"
            # the slot is free, but a refused client still has to wait
            clock.now = frozen
            refused()
            clock.now += 10**9
            list(engine.pull(MODEL))


def test_a_stream_more_than_the_identity_may_have_is_refused_with_a_time_and_comes_when_one_ends(
    tmp_path: Path, source: TinyModel
) -> None:
    with service(tmp_path, 'streams = 1, bytes_per_second = "1MB"') as running:
        running.service.quotas.identities.clock = Clock()
        register(running, source, MODEL)
        push(running.address, source, 1, shown=B)
        asked = b'weighbridge_grpc_calls_total{code="RESOURCE_EXHAUSTED",method="Pull"}'
        with EngineClient(running.address, credentials=A) as engine, ThreadPoolExecutor(1) as pool:
            with slow_stream(running):
                with EngineClient(running.address, credentials=A, retry_seconds=0) as hasty:
                    with pytest.raises(ResourceExhausted, match="a has 1 stream of weights") as refused:
                        dict(hasty.pull(MODEL))
                    assert refused.value.retry_after == 1.0
                assert asked in running.metrics.text()
                waiting = pool.submit(lambda: dict(engine.pull(MODEL)))
                assert_pulled(running, source, B)
            assert waiting.result(60).keys() == source.arrays.keys()
        assert set(refusals(tmp_path, "a")) == {"Pull"}


@pytest.mark.parametrize("streams", [1, 2, 3])
def test_a_client_with_more_connections_than_streams_pushes_and_pulls_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, streams: int
) -> None:
    monkeypatch.setattr(striping, "_LEAST_BYTES", 0)
    source = tiny_folder(tmp_path / "hf", hidden_size=1024)  # of several MiB
    with service(tmp_path, f"streams = {streams}") as running:
        register(running, source, MODEL)
        settings: dict[str, Any] = {"connections": 3, "lane": "grpc"}
        with TrainerClient(running.address, credentials=A, **settings) as trainer:
            trainer.push_folder(MODEL, source.folder, step=1).wait(timeout=60)
        with ThreadPoolExecutor(2) as pool:
            for pulled in [pool.submit(assert_pulled, running, source, A, **settings) for _ in range(2)]:
                pulled.result(120)
        a = next(each for each in running.service.access.limited() if each.name == "a")
        eventually(lambda: running.service.quotas.identities.use_of(a).streams == 0)


def test_limits_that_change_count_for_what_is_under_way(tmp_path: Path, source: TinyModel) -> None:
    looks = {"policy_look": 0.0, "standing_look": 0.2}
    with service(tmp_path, 'streams = 1, bytes_per_second = "1MB"', **looks) as running:
        quotas = running.service.quotas.identities
        quotas.clock = Clock()
        register(running, source, MODEL)
        push(running.address, source, 1, shown=B)
        a = next(each for each in running.service.access.limited() if each.name == "a")
        quotas.rates.take(a.name, 3 * 10**6, rate=a.limits.bytes_per_second)
        with EngineClient(running.address, credentials=A) as engine, ThreadPoolExecutor(1) as pool:
            pulled = pool.submit(lambda: dict(engine.pull(MODEL)))
            eventually(lambda: quotas.use_of(a).streams == 1)
            policy = running.service.config.policy
            assert policy is not None
            policy.write_text(policy.read_text().replace('streams = 1, bytes_per_second = "1MB"', "streams = 1"))
            assert pulled.result(60).keys() == source.arrays.keys()


def test_a_download_more_is_answered_429_with_a_time_and_others_are_served(tmp_path: Path, source: TinyModel) -> None:
    def download(url: str, token: str) -> httpx.Response:
        headers = {"authorization": f"Bearer {token}"}
        path = f"{url}/{MODEL}/resolve/latest/model.safetensors"
        return httpx.get(path, headers=headers, timeout=60, follow_redirects=True)

    with service(tmp_path, 'streams = 1, bytes_per_second = "1MB"') as running, https(running) as url:
        running.service.quotas.identities.clock = Clock()
        register(running, source, MODEL)
        push(running.address, source, 1, shown=B)
        with slow_stream(running):
            refused = download(url, "token-of-a")
            assert refused.status_code == 429
            assert math.ceil(float(refused.headers["retry-after"])) == 1
            assert refused.json()["type"].endswith("resource_exhausted")
            assert "1 stream" in refused.json()["detail"]
            whole = download(url, "token-of-b")
            assert whole.status_code == 200
        assert download(url, "token-of-a").content == whole.content
        assert refusals(tmp_path, "a") == ["file"]


def test_a_download_that_is_slowed_waits_for_its_pace_and_holds_up_nothing(tmp_path: Path, source: TinyModel) -> None:
    with (
        service(tmp_path, 'streams = 1, bytes_per_second = "1MB"') as running,
        https(running) as url,
        ThreadPoolExecutor(1) as pool,
    ):
        quotas = running.service.quotas.identities
        clock = quotas.clock = Clock()
        register(running, source, MODEL)
        push(running.address, source, 1, shown=B)
        a = next(each for each in running.service.access.limited() if each.name == "a")
        quotas.rates.take(a.name, 3 * 10**6, rate=a.limits.bytes_per_second)

        def download() -> bytes:
            headers = {"authorization": "Bearer token-of-a"}
            path = f"{url}/{MODEL}/resolve/latest/model.safetensors"
            return httpx.get(path, headers=headers, timeout=60, follow_redirects=True).content

        slow = pool.submit(download)
        eventually(lambda: quotas.use_of(a).streams == 1)
        for _ in range(3):
            assert httpx.get(f"{url}/livez").status_code == 200
        assert not slow.done()
        clock.now += 10
        assert len(slow.result(60)) == size_of(source)
        eventually(lambda: quotas.use_of(a).streams == 0)


def test_a_download_ends_for_whom_the_policy_has_dropped_since_the_request_was_let_in(
    tmp_path: Path, source: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = {"policy_look": 0.0, "standing_look": 0.0}
    with service(tmp_path, "streams = 1", **looks) as running, https(running) as url:
        register(running, source, MODEL)
        push(running.address, source, 1, shown=B)
        policy = running.service.config.policy
        assert policy is not None
        before = policy.read_text()

        def standing(request: Request) -> CredentialsCheck:
            policy.write_text(before.replace('name = "a"', 'name = "another"'))
            return CredentialsCheck(request)

        monkeypatch.setattr(hub_routes, "CredentialsCheck", standing)
        headers = {"authorization": "Bearer token-of-a"}
        path = f"{url}/{MODEL}/resolve/latest/model.safetensors"
        with pytest.raises(httpx.RemoteProtocolError):
            httpx.get(path, headers=headers, timeout=60, follow_redirects=True)


def test_a_download_that_is_slowed_ends_when_its_caller_may_not_go_on(tmp_path: Path, source: TinyModel) -> None:
    looks = {"policy_look": 0.0, "standing_look": 0.0}
    with (
        service(tmp_path, 'streams = 1, bytes_per_second = "1MB"', **looks) as running,
        https(running, HubSizes(send=4096)) as url,
        ThreadPoolExecutor(1) as pool,
    ):
        quotas = running.service.quotas.identities
        clock = quotas.clock = Clock()
        register(running, source, MODEL)
        push(running.address, source, 1, shown=B)
        a = next(each for each in running.service.access.limited() if each.name == "a")
        quotas.rates.take(a.name, 3 * 10**6, rate=a.limits.bytes_per_second)

        def download() -> int:
            headers = {"authorization": "Bearer token-of-a"}
            path = f"{url}/{MODEL}/resolve/latest/model.safetensors"
            received: list[bytes] = []
            with httpx.stream("GET", path, headers=headers, timeout=60, follow_redirects=True) as answer:
                assert answer.status_code == 200
                with pytest.raises(httpx.RemoteProtocolError):
                    received.extend(answer.iter_raw())
            return sum(map(len, received))

        slow = pool.submit(download)
        eventually(lambda: quotas.use_of(a).streams == 1)
        policy = running.service.config.policy
        assert policy is not None
        policy.write_text(policy.read_text().replace('name = "a"', 'name = "another"'))
        clock.now += 10
        assert slow.result(60) <= 4096, "no more than the part that had waited"


# --- what is used


def test_everybody_sees_their_own_limits_and_those_of_namespaces_that_they_may_look_at(
    tmp_path: Path, source: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = 5 * size_of(source)
    limits = 'streams = 3, bytes_per_second = "5MB", versions_per_hour = 9'
    with service(tmp_path, limits, stored) as running:
        running.service.quotas.identities.clock = Clock()
        register(running, source, MODEL)
        push(running.address, source, 1)
        expected = {
            ("streams", "a"): (0, 3),
            ("bytes_per_second", "a"): (0, 5_000_000),
            ("versions_per_hour", "a"): (1, 9),
            ("stored", "acme"): (size_of(source), stored),
        }
        with Client(running.address, credentials=A) as client:
            usage = client.usage()
        found = {(quota.kind, quota.of): (quota.used, quota.limit) for quota in usage.quotas}
        used = found.pop(("bytes_per_second", "a"))
        assert usage.identity == "a"
        assert used[0] == sum(array.nbytes for array in source.arrays.values()), "just now"
        assert used[1] == expected.pop(("bytes_per_second", "a"))[1]
        assert found == expected
        with Client(running.address, credentials=B) as client:
            assert [quota.of for quota in client.usage().quotas] == ["acme"]

        exports = Exports(running.service)
        app = create_app(running.service, exports, running.metrics, running.health)
        answer = TestClient(app).get("/v1/usage", headers={"authorization": "Bearer token-of-a"}).json()
        exports.close()
        assert answer == usage.to_json()

        monkeypatch.setenv("WEIGHBRIDGE_TOKEN", "token-of-a")
        shown = CliRunner().invoke(commands, ["usage", "--server", running.address, "--json"])
        assert json.loads(shown.stdout) == usage.to_json()
        table = CliRunner().invoke(commands, ["usage", "--server", running.address]).stdout
        assert ["versions_per_hour", "a", "1", "9"] in [line.split() for line in table.splitlines()]

        metrics = running.metrics.text().decode()
        assert 'weighbridge_quota_used{kind="versions_per_hour",of="a"} 1.0' in metrics
        assert f'weighbridge_quota_used{{kind="stored",of="acme"}} {float(size_of(source))}' in metrics
        assert 'weighbridge_quota_limit{kind="streams",of="a"} 3.0' in metrics


def test_who_may_look_at_no_model_of_a_namespace_does_not_see_what_it_holds(tmp_path: Path) -> None:
    policy = policy_file(
        tmp_path,
        limited("a", ["pull:else/*"], ""),
        '[[namespace]]\nname = "acme"\nstored = "1TB"\n',
    )
    with (
        running_service(tmp_path / "store", policy=policy) as running,
        Client(running.address, credentials=A) as client,
    ):
        assert client.usage().quotas == ()


def test_without_a_policy_there_are_no_limits(tmp_path: Path) -> None:
    with running_service(tmp_path / "store") as running, Client(running.address) as client:
        usage = client.usage()
        assert (usage.identity, usage.quotas) == ("anonymous", ())
        shown = CliRunner().invoke(commands, ["usage", "--server", running.address])
        assert "no limits" in shown.stdout


def test_a_store_that_fails_when_a_version_was_opened_leaves_no_version_behind(
    tmp_path: Path, source: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    with service(tmp_path, stored=2 * size_of(source)) as running:
        register(running, source, MODEL)

        def fail(*_: object) -> None:
            raise WeighbridgeError("the ledger cannot be written")

        with monkeypatch.context() as patched:
            patched.setattr(running.service.quotas.stored, "_note", fail)
            with pytest.raises(WeighbridgeError, match="ledger"):
                push(running.address, source, 1)
        with Client(running.address, credentials=OWNER) as client:
            [given_up] = client.versions(MODEL, include_invisible=True)
            assert given_up.state.given_up
        assert push(running.address, source, 1) == 2
