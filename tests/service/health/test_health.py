"""Are health probes answered at once from the last checks, with the name of each problem?"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx2 as httpx
import pytest
from starlette.testclient import TestClient

from tests.support.heads import edit_document
from tests.support.raw_clients import tiny_folder
from tests.support.services import RunningService, running_service
from tests.support.small_stores import MODEL, unpack
from tests.support.waiting import eventually
from weighbridge import TrainerClient
from weighbridge._core.checks import Check, CheckStatus
from weighbridge.errors import FailedPrecondition, Unavailable
from weighbridge_service.api.http.app import create_app
from weighbridge_service.exports.jobs import Exports
from weighbridge_service.health import Health
from weighbridge_service.health.checks import StoreChecks, check_clock, check_disk
from weighbridge_service.health.monitor import Monitor, NamedCheck, Observation, finding
from weighbridge_service.server import HttpServer
from weighbridge_storage.documents.names import ModelName
from weighbridge_storage.memory.memory_limits import DiskReading
from weighbridge_storage.stores.local import LocalStore
from weighbridge_storage.stores.objects import error_for

NAMES = [
    "accepting",
    "store-reachable",
    "store-writable",
    "clock",
    "disk-room",
    "memory-room",
    "models-readable",
    "versions-durable",
]
WELL = Check("store", CheckStatus.OK, "it answers")
SLOW = NamedCheck("store", lambda: WELL, every=5.0, patience=10.0)


@pytest.fixture
def running(tmp_path: Path) -> Iterator[RunningService]:
    with running_service(tmp_path) as running:
        yield running


@pytest.fixture
def http(running: RunningService) -> Iterator[TestClient]:
    exports = Exports(running.service)
    yield TestClient(create_app(running.service, exports, running.metrics, running.health))
    exports.close()


@pytest.mark.parametrize(
    ("observed", "now", "status"),
    [
        (Observation(), 0.0, CheckStatus.FAIL),
        (Observation(None, running_since=0.0), 1.0, CheckStatus.FAIL),
        (Observation(WELL), 1e9, CheckStatus.OK),
        (Observation(WELL, running_since=100.0), 110.0, CheckStatus.OK),
        (Observation(WELL, running_since=100.0), 110.1, CheckStatus.FAIL),
    ],
)
def test_a_check_without_an_answer_in_time_counts_as_failed(
    observed: Observation, now: float, status: CheckStatus
) -> None:
    found = finding(SLOW, observed, now)
    assert (found.name, found.status) == ("store", status)
    if now == 110.1:
        assert found.what == "no answer for 10 s"


def test_a_check_that_hangs_is_said_to_hang_and_holds_up_no_other() -> None:
    release, runs = threading.Event(), []

    def hangs() -> Check:
        runs.append(0)
        if len(runs) == 2:
            release.wait(60)
        return WELL

    def broken() -> Check:
        raise Unavailable("the store is away", fix="start it")

    monitor = Monitor(
        [
            NamedCheck("hangs", hangs, every=0.01, patience=0.05),
            NamedCheck("broken", broken, every=0.01, patience=5.0),
            NamedCheck("well", lambda: WELL, every=0.01, patience=5.0),
        ]
    )
    try:
        monitor.start(30.0)
        eventually(lambda: monitor.findings()[0].what.startswith("no answer for"))
        statuses = [(found.name, found.status, found.fix) for found in monitor.findings()[1:]]
        assert statuses == [("broken", CheckStatus.FAIL, "start it"), ("well", CheckStatus.OK, "")]
        release.set()
        eventually(lambda: monitor.findings()[0].status is CheckStatus.OK)
    finally:
        release.set()
        monitor.close()


def test_a_check_that_fails_is_logged_once_and_once_more_when_it_is_well(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "weighbridge_service.health")
    runs: list[int] = []

    def flaps() -> Check:
        runs.append(0)
        if 2 <= len(runs) <= 4:
            raise Unavailable("the store is away")
        return WELL

    monitor = Monitor([NamedCheck("flapping", flaps, every=0.01, patience=5.0)])
    monitor.start()
    try:
        eventually(lambda: len(runs) > 6)
    finally:
        monitor.close()
    said = [each.levelname for each in caplog.records if each.threadName == "check-flapping"]
    assert said == ["ERROR", "INFO"]


@pytest.mark.parametrize(
    ("modified_ms", "status"),
    [
        (1_000_500, CheckStatus.OK),
        (1_000_000, CheckStatus.OK),  # a store that rounds down to seconds
        (1_004_000, CheckStatus.WARN),
        (1_012_000, CheckStatus.FAIL),
        (980_000, CheckStatus.FAIL),
    ],
)
def test_clocks_that_differ_are_found_out(modified_ms: int, status: CheckStatus) -> None:
    assert check_clock((1_000_400, 1_001_000), modified_ms, 10_000).status is status


def test_a_full_disk_is_no_room() -> None:
    def status(available: int) -> CheckStatus:
        return check_disk(DiskReading("/data", 100 << 30, available, in_memory=False)).status

    assert [status(50 << 30), status(4 << 30), status(255 << 20)] == list(CheckStatus)
    for available in (4 << 30, 255 << 20):
        assert "268.4 MB" in check_disk(DiskReading("/data", 100 << 30, available, in_memory=False)).what


def test_doctor_is_told_what_readiness_says(running: RunningService, http: TestClient) -> None:
    running.health.start()
    found = [check["name"] for check in http.get("/v1/checks").json()["checks"]]
    assert found[: len(NAMES)] == NAMES


def test_readiness_says_each_check_and_each_can_be_asked_for(running: RunningService, http: TestClient) -> None:
    running.health.start()
    answer = http.get("/readyz")
    assert (answer.status_code, answer.json()["status"]) == (200, "ready")
    assert [check["name"] for check in answer.json()["checks"]] == NAMES
    for name in NAMES:
        assert http.get(f"/readyz/{name}").json()["name"] == name
    missing = http.get("/readyz/moon")
    assert missing.status_code == 404
    assert "store-writable" in missing.json()["fix"]


def test_a_store_that_hangs_leaves_probes_fast_liveness_green_and_readiness_red(
    running: RunningService, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = threading.Event()

    def hangs(*_: object) -> int:
        release.wait(120)
        return 0

    store = StoreChecks(running.service.catalog.store, "test", 1000)
    health = Health([NamedCheck("store-reachable", store.reachable, every=0.01, patience=0.1)], lambda: False)
    exports = Exports(running.service)
    server = HttpServer("127.0.0.1:0", 1024)
    server.start(create_app(running.service, exports, running.metrics, health))
    url = f"http://{server.address}"
    health.start()
    assert httpx.get(f"{url}/readyz").status_code == 200
    monkeypatch.setattr(LocalStore, "size", hangs)
    monkeypatch.setattr(LocalStore, "get", hangs)
    # more than HTTP's handlers have threads
    waiting = [
        threading.Thread(target=httpx.get, args=(f"{url}/v1/models/acme/smol",), kwargs={"timeout": 120})
        for _ in range(60)
    ]
    try:
        for thread in waiting:
            thread.start()
        eventually(lambda: httpx.get(f"{url}/readyz/store-reachable").status_code == 503)
        problem = httpx.get(f"{url}/readyz")
        assert problem.status_code == 503
        assert problem.json()["details"][0].startswith("store-reachable: no answer for")
        assert httpx.get(f"{url}/livez").status_code == 200
        assert "weighbridge_versions" in httpx.get(f"{url}/metrics").text
    finally:
        release.set()
        for thread in waiting:
            thread.join(30)
        health.close()
        server.stop()
        exports.close()


def test_what_checks_write_to_a_store_is_removed_again(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    checks = StoreChecks(store, "test", 1000)
    assert [check().status for check in (checks.reachable, checks.writable, checks.clock)] == [CheckStatus.OK] * 3
    assert list(store.list("")) == []


def test_a_store_that_takes_nothing_is_not_writable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> str:
        raise error_for(OSError(errno.EROFS, os.strerror(errno.EROFS)), "writing probe/x")

    monkeypatch.setattr(LocalStore, "put", refused)
    checks = StoreChecks(LocalStore(tmp_path), "test", 1000)
    health = Health([NamedCheck("store-writable", checks.writable, every=60.0, patience=5.0)], lambda: False)
    health.start()
    try:
        with pytest.raises(Unavailable, match="not ready: store-writable") as raised:
            health.check_ready(health.findings())
        assert "Read-only file system" in raised.value.details[0]
    finally:
        health.close()


def test_a_store_of_another_format_is_not_ready_and_lists_no_models_without_a_word(tmp_path: Path) -> None:
    store = unpack(tmp_path)
    for model in (MODEL, "acme/other"):
        edit_document(store / ModelName.parse(model).head_key, format=4)
    with running_service(store) as running, TrainerClient(running.address) as client:
        running.health.start()
        eventually(lambda: named(running, "models-readable").status is CheckStatus.FAIL)
        assert "reads format 4" in named(running, "models-readable").fix
        with pytest.raises(FailedPrecondition, match="format") as raised:
            client.models()
        assert "reads format 4" in raised.value.fix


def test_a_damaged_head_is_named_with_what_to_do_and_hides_no_other_model(tmp_path: Path) -> None:
    files = tiny_folder(tmp_path / "hf").files
    with running_service(tmp_path / "store") as running, TrainerClient(running.address) as client:
        for name in ("acme/whole", "acme/damaged"):
            client.register_files(name, files)
        head = tmp_path / "store/models/acme/damaged/head.json"
        head.write_bytes(head.read_bytes().replace(b'"next_version":1', b'"next_version":7', 1))
        assert [model.name for model in client.models()] == ["acme/whole"]
        running.health.start()
        eventually(lambda: named(running, "models-readable").status is CheckStatus.WARN)
        found = named(running, "models-readable")
        assert "models/acme/damaged/head.json" in found.what
        assert "1 of 2 models" in found.what
        assert "fsck" in found.fix


def named(running: RunningService, name: str) -> Check:
    """The newest result of a check of a service."""
    return next(found for found in running.health.findings() if found.name == name)
