"""Does the HTTP face say what is there, export what transformers loads, and answer everything else with a problem?"""

from __future__ import annotations

import json
import os
import re
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx2 as httpx
import pytest
import torch
from safetensors import safe_open
from starlette.testclient import TestClient
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.reference import tiny_config, tiny_model
from tests.services import RunningService, running_service
from weighbridge import TrainerClient
from weighbridge_service import exports as exports_module
from weighbridge_service.exports import Exports
from weighbridge_service.http_app import create_app
from weighbridge_service.http_problems import MAX_BODY_BYTES
from weighbridge_service.server import HttpServer

MODEL = "tests/smol"
MODEL_URL = f"/v1/models/{MODEL}"


class Web:
    """A service with two versions of one model, and its HTTP face."""

    def __init__(self, running: RunningService, hf_model: PreTrainedModel, folder: Path) -> None:
        self.running = running
        self.hf_model = hf_model
        self.exports = Exports(running.service)
        self.app = create_app(running.service, self.exports, running.metrics, running.health)
        self.http = TestClient(self.app, raise_server_exceptions=False)
        self.folder = running.service.config.exports_folder
        self.hf_folder = folder

    def export(self, **request: Any) -> dict[str, Any]:
        """Export, and wait for the end."""
        started = self.http.post("/v1/exports", json={"model": MODEL, **request})
        assert started.status_code == 202, started.text
        assert started.headers["location"] == f"/v1/exports/{started.json()['id']}"
        return self.wait(started.json()["id"])

    def wait(self, job_id: str, *, until: Callable[[dict[str, Any]], bool] | None = None) -> dict[str, Any]:
        until = until or (lambda job: job["state"] not in ("queued", "running"))
        deadline = time.monotonic() + 20
        while not until(job := self.http.get(f"/v1/exports/{job_id}").json()):
            assert time.monotonic() < deadline, job
            time.sleep(0.01)
        return dict(job)


@pytest.fixture(scope="module")
def web(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Web]:
    hf_model = tiny_model(tiny_config("qwen2", tied=True), seed=1)
    folder = tmp_path_factory.mktemp("hf")
    hf_model.save_pretrained(folder)
    with running_service(tmp_path_factory.mktemp("store")) as running:
        with TrainerClient(running.address) as trainer:
            trainer.register_model(MODEL, folder)
            for step in (10, 20):
                trainer.push_folder(MODEL, folder, step=step).wait(timeout=60)
        found = Web(running, hf_model, folder)
        yield found
        found.exports.close()


@contextmanager
def held_at(monkeypatch: pytest.MonkeyPatch, share: float) -> Iterator[threading.Event]:
    """Exports stop on their way when this share is written, until the event is set."""
    go_on = threading.Event()
    write = exports_module.write_hf_folder

    def slowly(*args: Any, on_progress: Callable[[int, int], None], **settings: Any) -> list[str]:
        def report(done: int, total: int) -> None:
            if done >= share * total:
                go_on.wait(20)
            on_progress(done, total)

        return write(*args, on_progress=report, **settings)

    with monkeypatch.context() as patch:
        patch.setattr(exports_module, "write_hf_folder", slowly)
        try:
            yield go_on
        finally:
            go_on.set()


def is_problem(answer: httpx.Response, status: int, kind: str) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    problem: dict[str, Any] = answer.json()
    assert set(problem) == {"type", "title", "status", "detail", "fix", "details"}
    assert problem["type"] == f"urn:weighbridge:error:{kind}"
    assert problem["status"] == status
    assert problem["title"]
    assert problem["detail"]
    assert len(answer.content) < 4000
    return problem


# -- what is there ---------------------------------------------------------------------------------------------------


def test_models_versions_and_refs_are_shown(web: Web) -> None:
    [model] = web.http.get("/v1/models").json()["models"]
    assert model == web.http.get(MODEL_URL).json()
    assert model["name"] == MODEL
    assert model["model_type"] == "qwen2"
    assert model["dtype"] == "F32"
    assert model["refs"] == {"latest": 2, "live": 2}
    assert web.http.get("/v1/models", params={"after": MODEL}).json() == {"models": []}

    versions = web.http.get(f"{MODEL_URL}/versions").json()["versions"]
    assert [(v["number"], v["step"], v["state"]) for v in versions] == [
        (2, 20, "durable"),
        (1, 10, "durable"),
    ]
    assert web.http.get(f"{MODEL_URL}/versions", params={"limit": 1}).json()["versions"] == versions[:1]
    assert web.http.get(f"{MODEL_URL}/versions", params={"before": 2}).json()["versions"] == versions[1:]
    assert web.http.get(f"{MODEL_URL}/versions/latest").json() == versions[0]
    assert web.http.get(f"{MODEL_URL}/versions/1").json() == versions[1]


def test_tags_are_set_and_taken_away(web: Web) -> None:
    assert web.http.put(f"{MODEL_URL}/refs/prod", json={"version": 1}).json()["number"] == 1
    assert web.http.get(f"{MODEL_URL}/refs").json() == {"refs": {"latest": 2, "live": 2, "prod": 1}}
    assert web.http.put(f"{MODEL_URL}/refs/prod", json={"version": "latest"}).json()["number"] == 2
    gone = web.http.delete(f"{MODEL_URL}/refs/prod")
    assert (gone.status_code, gone.content) == (204, b"")
    is_problem(web.http.delete(f"{MODEL_URL}/refs/prod"), 404, "not_found")
    is_problem(web.http.put(f"{MODEL_URL}/refs/latest", json={"version": 1}), 400, "invalid_argument")
    is_problem(web.http.put(f"{MODEL_URL}/refs/prod", json={"version": 99}), 404, "not_found")


def test_verification_reads_every_byte(web: Web) -> None:
    found = web.http.post(f"{MODEL_URL}/versions/latest/verify").json()
    assert found["number"] == 2
    assert found["problems"] == []
    assert found["tensors_checked"] == len({p.data_ptr() for p in web.hf_model.parameters()})
    assert found["bytes_checked"] > sum(p.nbytes for p in web.hf_model.parameters())


def test_probes_metrics_and_documentation(web: Web) -> None:
    assert web.http.get("/livez").status_code == 200
    assert 'weighbridge_versions{state="durable"} 2.0' in web.http.get("/metrics").text
    assert web.http.get("/docs").status_code == 200
    document = web.http.get("/openapi.json").json()
    operations = [operation for path in document["paths"].values() for operation in path.values()]
    assert len({operation["operationId"] for operation in operations}) == len(operations) == 23
    for operation in operations:
        assert operation["description"]
        assert "application/problem+json" in operation["responses"]["default"]["content"]
        assert "422" not in operation["responses"]


# -- exports ---------------------------------------------------------------------------------------------------------


def test_an_export_is_what_transformers_saved(web: Web) -> None:
    job = web.export()
    assert (job["state"], job["number"], job["error"]) == ("done", 2, "")
    assert job["bytes_done"] == job["bytes_total"] > 0
    assert job["end_time_ms"] >= job["create_time_ms"] > 0
    assert Path(job["folder"]) == web.folder / "tests--smol--2"
    loaded = AutoModelForCausalLM.from_pretrained(job["folder"])
    assert (
        loaded.config.to_diff_dict()
        == AutoModelForCausalLM.from_pretrained(web.hf_folder).config.to_diff_dict()
    )
    expected = web.hf_model.state_dict()
    found = loaded.state_dict()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
    assert Path(web.export()["folder"]).name == "tests--smol--2-2"


@pytest.mark.parametrize("dtype", ["bf16", "float16", "F64"])
def test_a_cast_is_torchs_cast(web: Web, dtype: str) -> None:
    torch_dtype = {"bf16": torch.bfloat16, "float16": torch.float16, "F64": torch.float64}[dtype]
    job = web.export(dtype=dtype, version="1", folder=f"cast/{dtype}")
    assert job["state"] == "done"
    loaded = AutoModelForCausalLM.from_pretrained(job["folder"], torch_dtype="auto")
    assert loaded.dtype is torch_dtype
    for name, tensor in web.hf_model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor.to(torch_dtype)), name


def test_tiny_files_hold_one_tensor_each(web: Web) -> None:
    job = web.export(max_shard_bytes=1, folder="tiny")
    folder = Path(job["folder"])
    weights = sorted(folder.glob("*.safetensors"))
    assert len(weights) == len({p.data_ptr() for p in web.hf_model.parameters()})
    for file in weights:
        with safe_open(file, "pt") as opened:
            [name] = opened.keys()
            assert torch.equal(opened.get_tensor(name), web.hf_model.state_dict()[name])
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    for name, tensor in web.hf_model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name


HOSTILE_FOLDERS = [
    "",
    ".",
    "..",
    "../x",
    "a/../../x",
    "a/..",
    "/x",
    "/tmp/x",
    "a//b",
    "a/",
    "a\0b",
    "a\\b",
    ".hidden",
    ".export-x",
    "-rf",
    "a b",
    "é",
    "a\n",
    "a" * 129,
    "a/" * 10_000 + "a",
    "a" * 10_000,
]


@pytest.mark.parametrize("folder", HOSTILE_FOLDERS, ids=lambda f: repr(f[:20]))
def test_no_export_leaves_its_folder(web: Web, folder: str) -> None:
    before = sorted(web.running.service.config.store.rglob("*"))
    answer = web.http.post("/v1/exports", json={"model": MODEL, "folder": folder})
    assert is_problem(answer, 400, "invalid_argument")["fix"]
    assert sorted(web.running.service.config.store.rglob("*")) == before


def test_no_export_follows_a_link(web: Web, tmp_path: Path) -> None:
    web.folder.mkdir(exist_ok=True)
    links = {
        "out": tmp_path,
        "dangling": tmp_path / "nowhere",
        "loop": web.folder / "loop",
        "here": web.folder,
    }
    for name, target in links.items():
        (web.folder / name).symlink_to(target)
    try:
        for name in links:
            for folder in (name, f"{name}/x"):
                answer = web.http.post("/v1/exports", json={"model": MODEL, "folder": folder})
                is_problem(answer, 400, "invalid_argument")
    finally:
        for name in links:
            (web.folder / name).unlink()
    assert list(tmp_path.iterdir()) == []


def test_a_link_that_comes_later_is_not_followed(
    web: Web, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with held_at(monkeypatch, 0.5) as go_on:
        job_id = web.http.post("/v1/exports", json={"model": MODEL, "folder": "later/x"}).json()["id"]
        web.wait(job_id, until=lambda job: job["state"] == "running")
        (web.folder / "later").symlink_to(tmp_path)
        go_on.set()
        assert web.wait(job_id)["state"] == "failed"
    (web.folder / "later").unlink()
    assert list(tmp_path.iterdir()) == []
    assert hidden(web) == []


def test_nothing_that_is_there_is_written_over(web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    web.folder.mkdir(exist_ok=True)
    (web.folder / "file").write_text("mine")
    is_problem(web.http.post("/v1/exports", json={"model": MODEL, "folder": "file"}), 409, "already_exists")
    is_problem(
        web.http.post("/v1/exports", json={"model": MODEL, "folder": "file/x"}), 400, "invalid_argument"
    )
    assert (web.folder / "file").read_text() == "mine"
    with held_at(monkeypatch, 0) as go_on:
        first = web.http.post("/v1/exports", json={"model": MODEL, "folder": "once"}).json()
        is_problem(
            web.http.post("/v1/exports", json={"model": MODEL, "folder": "once"}), 409, "already_exists"
        )
        go_on.set()
        assert web.wait(first["id"])["state"] == "done"
    is_problem(web.http.post("/v1/exports", json={"model": MODEL, "folder": "once"}), 409, "already_exists")


def hidden(web: Web) -> list[Path]:
    return [path for path in web.folder.iterdir() if path.name.startswith(".")]


def test_two_exports_run_at_a_time_and_cancelled_ones_leave_nothing(
    web: Web, monkeypatch: pytest.MonkeyPatch
) -> None:
    with held_at(monkeypatch, 0.3) as go_on:
        ids = []
        for number in range(4):
            answer = web.http.post("/v1/exports", json={"model": MODEL, "folder": f"gone/{number}"})
            ids.append(answer.json()["id"])
        for job_id in ids[:2]:
            web.wait(job_id, until=lambda job: job["state"] == "running")
        assert [web.wait(job_id, until=lambda job: True)["state"] for job_id in ids[2:]] == ["queued"] * 2
        assert len(hidden(web)) == 2
        assert (
            web.http.delete(f"/v1/exports/{ids[2]}").json()["state"] == "cancelled"
        )  # at once: it only waited
        assert web.http.delete(f"/v1/exports/{ids[0]}").json()["state"] == "running"
        go_on.set()
        assert [web.wait(job_id)["state"] for job_id in ids] == ["cancelled", "done", "cancelled", "done"]
    assert sorted(path.name for path in (web.folder / "gone").iterdir()) == ["1", "3"]
    assert hidden(web) == []
    assert web.http.delete(f"/v1/exports/{ids[1]}").json()["state"] == "done"
    listed = [job["id"] for job in web.http.get("/v1/exports").json()["exports"]]
    assert listed[:4] == ids[::-1]


def test_a_full_disk_fails_the_export_and_says_so(web: Web) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        job = web.export(folder="full")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert job["state"] == "failed"
    assert os.strerror(27) in job["error"]  # EFBIG: the kernel's answer to a write beyond the limit
    assert not (web.folder / "full").exists()
    assert hidden(web) == []


def test_what_a_killed_service_left_is_removed_and_a_running_ones_is_not(
    web: Web, monkeypatch: pytest.MonkeyPatch
) -> None:
    web.folder.mkdir(exist_ok=True)
    (web.folder / ".export-dead").mkdir()
    (web.folder / ".export-dead" / "model.safetensors").write_bytes(b"half")
    with held_at(monkeypatch, 0.5) as go_on:
        job_id = web.http.post("/v1/exports", json={"model": MODEL, "folder": "alive"}).json()["id"]
        web.wait(job_id, until=lambda job: job["bytes_done"] > 0)
        Exports(web.running.service).close()
        assert [path.name for path in hidden(web)] == [f".export-{job_id}"]
        go_on.set()
        assert web.wait(job_id)["state"] == "done"


def test_only_so_many_ended_exports_are_remembered(web: Web) -> None:
    exports = Exports(web.running.service)
    try:
        monitor = [exports.start(MODEL, "1", folder=f"many/{n}", max_shard_bytes=1 << 30) for n in range(90)]
        deadline = time.monotonic() + 30
        while not exports.get(monitor[-1].id).state.ended and time.monotonic() < deadline:
            time.sleep(0.01)
        for n in range(90, 120):
            job = exports.start(MODEL, "1", folder=f"many/{n}")
            while not exports.get(job.id).state.ended and time.monotonic() < deadline:
                time.sleep(0.005)
        assert 100 <= len(exports.list()) <= 101
        is_gone = [job for job in monitor if job.id not in {kept.id for kept in exports.list()}]
        assert monitor[0] in is_gone
    finally:
        exports.close()


@pytest.mark.parametrize(
    "request_body",
    [
        {"version": "99"},
        {"version": "nope"},
        {"model": "tests/other"},
        {"model": "no-slash"},
        {"dtype": "i8"},
        {"dtype": "fp8_e4m3"},
        {"dtype": "nonsense"},
        {"dtype": ""},
        {"max_shard_bytes": 0},
        {"max_shard_bytes": -5},
        {"max_shard_bytes": "many"},
        {"max_shard_bytes": 1 << 100},
        {"folder": 7.5},
        {"unknown": 1},
        {"model": None},
    ],
    ids=str,
)
def test_a_wrong_export_is_refused_at_once(web: Web, request_body: dict[str, Any]) -> None:
    before = web.http.get("/v1/exports").json()
    answer = web.http.post("/v1/exports", json={"model": MODEL, **request_body})
    status, kind = (404, "not_found") if answer.status_code == 404 else (400, "invalid_argument")
    is_problem(answer, status, kind)
    assert web.http.get("/v1/exports").json() == before


# -- a real server ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def url(web: Web) -> Iterator[str]:
    server = HttpServer("127.0.0.1:0", 1024)
    server.start(web.app)
    yield f"http://{server.address}"
    server.stop()


def events(lines: Iterator[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    name = ""
    for line in lines:
        field, _, value = line.partition(": ")
        if field == "event":
            name = value
        elif field == "data":
            yield name, json.loads(value)


def test_events_follow_an_export_to_its_end(web: Web, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with held_at(monkeypatch, 0.5) as go_on, httpx.Client(base_url=url, timeout=20) as http:
        job = http.post("/v1/exports", json={"model": MODEL, "folder": "followed"}).json()
        with http.stream("GET", f"/v1/exports/{job['id']}/events") as answer:
            assert answer.headers["content-type"].startswith("text/event-stream")
            found = []
            for name, data in events(answer.iter_lines()):
                found.append((name, data))
                if data["state"] == "running" and data["bytes_done"] > 0:
                    go_on.set()
        assert {name for name, _ in found[:-1]} == {"progress"}
        name, last = found[-1]
        assert (name, last["state"]) == ("end", "done")
        done = [data["bytes_done"] for _, data in found]
        assert done == sorted(done)
        assert last == http.get(f"/v1/exports/{job['id']}").json()
        # one that has ended is a stream of one event
        with http.stream("GET", f"/v1/exports/{job['id']}/events") as answer:
            assert [name for name, _ in events(answer.iter_lines())] == ["end"]
        is_problem(http.get("/v1/exports/nope/events"), 404, "not_found")


def test_many_followers_do_not_hold_up_others(web: Web, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        held_at(monkeypatch, 0.5) as go_on,
        httpx.Client(base_url=url, timeout=5, limits=httpx.Limits()) as http,
    ):
        job = http.post("/v1/exports", json={"model": MODEL, "folder": "popular"}).json()
        streams = [http.stream("GET", f"/v1/exports/{job['id']}/events") for _ in range(80)]
        for stream in streams:
            assert stream.__enter__().status_code == 200
        assert http.get(MODEL_URL).status_code == 200
        for stream in streams:
            stream.__exit__(None, None, None)
        go_on.set()
        web.wait(job["id"])


# -- problems --------------------------------------------------------------------------------------------------------


def get_raw(url: str, path: bytes) -> httpx.Response:
    """GET this path as it is: a client library would tidy it up."""
    with socket.create_connection((httpx.URL(url).host, httpx.URL(url).port or 80), timeout=10) as connection:
        connection.sendall(b"GET %s HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\r\n" % path)
        with connection.makefile("rb") as stream:
            head, _, body = stream.read().partition(b"\r\n\r\n")
    status, *fields = head.decode("latin-1").split("\r\n")
    headers = [(name, value.strip()) for name, _, value in (field.partition(":") for field in fields)]
    return httpx.Response(int(status.split()[1]), headers=headers, content=body)


@pytest.mark.parametrize(
    "segment",
    [
        "a" * 10_000,
        "%00",
        "..%2f..",
        "..",
        "%2e%2e",
        "%ff%fe",
        "%ed%a0%80",
        "a b",
        "é",
        "-",
        "a%0d%0aX:1",
        "%5c",
        "*",
        "%",
    ],
    ids=lambda s: s[:12],
)
@pytest.mark.parametrize(
    "path",
    [
        "/v1/models/{}/smol",
        "/v1/models/tests/{}",
        "/v1/models/tests/{}/versions",
        "/v1/models/tests/smol/versions/{}",
        "/v1/models/{}/smol/refs",
        "/v1/exports/{}",
        "/v1/exports/{}/events",
    ],
)
def test_hostile_paths_are_client_errors(url: str, path: str, segment: str) -> None:
    answer = get_raw(url, path.format(segment).encode())
    assert 400 <= answer.status_code < 500, answer.text
    if answer.headers["content-type"] == "application/problem+json":
        is_problem(answer, answer.status_code, answer.json()["type"].rpartition(":")[2])
    else:
        assert (
            answer.text == "Invalid HTTP request received."
        )  # not HTTP at all: the server itself refuses it


def test_hostile_paths_of_methods_that_write(web: Web) -> None:
    for segment in ("a" * 10_000, "%00", "..%2f..", "17", "live", ".x"):
        for answer in (
            web.http.put(f"{MODEL_URL}/refs/{segment}", json={"version": 1}),
            web.http.delete(f"{MODEL_URL}/refs/{segment}"),
            web.http.delete(f"/v1/exports/{segment}"),
            web.http.post(f"{MODEL_URL}/versions/{segment}/verify"),
        ):
            if segment == "live" and answer.request.url.path.endswith("/verify"):
                assert answer.status_code == 200
            else:
                assert 400 <= answer.status_code < 500, (segment, answer.request.url, answer.text)
                assert answer.headers["content-type"] == "application/problem+json"
    assert web.http.get(f"{MODEL_URL}/refs").json() == {"refs": {"latest": 2, "live": 2}}


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"null", b"[]", b"\xff\xfe", b"[" * 500_000, b'{"version":' + b"9" * 5000 + b"}", b'{"version":"\\ud800"}',
     b'{"version":true}', b'{"version":[1]}', b'{"version":1,"\\ud800":1}', b'{"version":1,"x":' + b'"y"' + b"}"],
    ids=lambda b: str(b[:16]),
)  # fmt: skip
def test_hostile_bodies_are_client_errors(web: Web, body: bytes) -> None:
    answer = web.http.put(
        f"{MODEL_URL}/refs/prod", content=body, headers={"content-type": "application/json"}
    )
    is_problem(answer, 400, "invalid_argument")


def test_wrong_fields_are_listed(web: Web) -> None:
    answer = web.http.get(f"{MODEL_URL}/versions", params={"limit": 0, "before": "x"})
    assert [line.partition(":")[0] for line in is_problem(answer, 400, "invalid_argument")["details"]] == [
        "query.limit",
        "query.before",
    ]


def test_large_bodies_are_refused_announced_or_not(url: str) -> None:
    headers = {"content-type": "application/json"}
    announced = httpx.post(f"{url}/v1/exports", content=b" " * (MAX_BODY_BYTES + 1), headers=headers)
    is_problem(announced, 413, "body_too_large")
    pieces = (b" " * 65_536 for _ in range(MAX_BODY_BYTES // 65_536 + 1))
    is_problem(httpx.post(f"{url}/v1/exports", content=pieces, headers=headers), 413, "body_too_large")
    allowed = httpx.post(f"{url}/v1/exports", content=b" " * (MAX_BODY_BYTES - 2) + b"{}", headers=headers)
    is_problem(allowed, 400, "invalid_argument")


def test_unknown_routes_and_methods_are_problems(web: Web) -> None:
    is_problem(web.http.get("/"), 404, "not_found")
    is_problem(web.http.get("/v1/models/"), 404, "not_found")
    is_problem(web.http.get("/v1/models/tests/other"), 404, "not_found")
    answer = web.http.patch(MODEL_URL)
    is_problem(answer, 405, "method_not_allowed")
    assert answer.headers["allow"] == "GET"
    for place, operations in web.http.get("/openapi.json").json()["paths"].items():
        concrete = re.sub(r"\{\w+\}", "1", place)
        answer = web.http.patch(concrete)
        is_problem(answer, 405, "method_not_allowed")
        assert set(answer.headers["allow"].split(", ")) == {method.upper() for method in operations}


def test_patterns_of_names_are_declared_as_they_are_enforced(web: Web) -> None:
    document = web.http.get("/openapi.json").json()
    declared = {
        parameter["name"]: parameter["schema"].get("pattern")
        for operations in document["paths"].values()
        for operation in operations.values()
        for parameter in operation.get("parameters", ())
        if parameter["in"] == "path"
    }
    assert all(declared[name] for name in ("namespace", "name", "version", "ref", "job_id"))
    for name in (
        "a",
        "a.b-c",
        "-a",
        "a-",
        "a b",
        "a" * 96,
        "a" * 97,
        "a\n",
        "a--b",
        "a..b",
        "a.git",
        "a.gitx",
    ):
        answer = web.http.get(f"/v1/models/{quote(name)}/x")
        fits = re.fullmatch(declared["name"], name) is not None
        is_problem(answer, *((404, "not_found") if fits else (400, "invalid_argument")))
    whole = document["components"]["schemas"]["ExportIn"]["properties"]["model"]["pattern"]
    for model in ("a/b", "a", "a/b/c", "a--b/c", "a/b..c", "a.git/b", "a/b.git", "a.gitx/b", ""):
        answer = web.http.post("/v1/exports", json={"model": model})
        fits = re.fullmatch(whole, model) is not None
        is_problem(answer, *((404, "not_found") if fits else (400, "invalid_argument")))


def test_unexpected_errors_say_nothing_of_the_inside(web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("secret /path")

    monkeypatch.setattr(web.running.service.catalog, "get_model", broken)
    answer = web.http.get(MODEL_URL)
    is_problem(answer, 500, "internal")
    assert "secret" not in answer.text
    assert "RuntimeError" not in answer.text


def test_while_draining_nothing_new_is_begun(tmp_path: Path, web: Web) -> None:
    with running_service(tmp_path) as running:
        exports = Exports(running.service)
        http = TestClient(create_app(running.service, exports, running.metrics, running.health))
        running.health.start()
        assert http.get("/readyz").status_code == 200
        running.service.drain()
        is_problem(http.get("/readyz"), 503, "unavailable")
        is_problem(http.post("/v1/exports", json={"model": MODEL}), 503, "unavailable")
        assert http.get("/livez").status_code == 200
        assert http.get("/v1/models").status_code == 200
        exports.close()
