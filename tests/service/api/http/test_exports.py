"""Is an export what transformers saved, inside its folder, over nothing that is there, and gone when it is broken
off?
"""

from __future__ import annotations

import os
import resource
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from tests.service.api.http.web import MODEL, Web, held_at, is_problem
from tests.support.waiting import eventually
from weighbridge.errors import ResourceExhausted
from weighbridge_service.access.peer import Peer
from weighbridge_service.exports.jobs import Exports, ExportState


def test_an_export_is_what_transformers_saved(web: Web) -> None:
    job = web.export()
    assert (job["state"], job["number"], job["error"]) == ("done", 2, "")
    assert job["bytes_done"] == job["bytes_total"] > 0
    assert job["end_time_ms"] >= job["create_time_ms"] > 0
    assert Path(job["folder"]) == web.folder / "tests--smol--2"
    loaded = AutoModelForCausalLM.from_pretrained(job["folder"])
    assert loaded.config.to_diff_dict() == AutoModelForCausalLM.from_pretrained(web.hf_folder).config.to_diff_dict()
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


def test_no_export_goes_into_another_one(web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    export = Path(web.export(folder="outer/whole")["folder"])
    before = sorted(export.iterdir())
    for folder in ("outer/whole/in", "outer/whole/in/deeper"):
        answer = web.http.post("/v1/exports", json={"model": MODEL, "folder": folder})
        is_problem(answer, 400, "invalid_argument")
    assert sorted(export.iterdir()) == before
    with held_at(monkeypatch, 0.5):
        running = web.http.post("/v1/exports", json={"model": MODEL, "folder": "growing/here"}).json()
        for folder in ("growing/here/in", "growing"):
            answer = web.http.post("/v1/exports", json={"model": MODEL, "folder": folder})
            is_problem(answer, 409, "already_exists")
    assert web.wait(running["id"])["state"] == "done"


def test_a_host_that_asks_for_many_exports_keeps_none_from_another(web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    greedy, modest = Peer("10.0.0.1"), Peer("10.0.0.2")
    with held_at(monkeypatch, 0.5):
        started = [web.exports.start(MODEL, "1", peer=greedy).id for _ in range(75)]
        with pytest.raises(ResourceExhausted):
            web.exports.start(MODEL, "1", peer=greedy)
        wanted = web.exports.start(MODEL, "1", peer=modest).id
    ended = web.wait(wanted)["end_time_ms"]
    for job_id in started:
        web.exports.cancel(job_id)
    jobs = [web.wait(job_id) for job_id in started]
    before = [job for job in jobs if job["state"] == "done" and job["end_time_ms"] < ended]
    assert len(before) < 25, "it waits for those in whose turn it comes, and not for all that were asked for before"
    last = web.exports.start(MODEL, "1", peer=greedy)
    assert web.wait(last.id)["state"] == "done", "their places are free again"


def test_a_system_without_threads_refuses_an_export_and_keeps_nothing_of_it(
    web: Web, monkeypatch: pytest.MonkeyPatch
) -> None:
    exports = Exports(web.running.service)

    begin = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if thread.name == "export":
            raise RuntimeError("can't start new thread")
        begin(thread)

    try:
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", start)
            with pytest.raises(ResourceExhausted, match="no thread"):
                exports.start(MODEL, "1", folder="no-thread")
        assert exports.list() == []
        job = exports.start(MODEL, "1", folder="no-thread")
        eventually(lambda: exports.get(job.id).state.ended)
        assert exports.get(job.id).state is ExportState.DONE
    finally:
        exports.close()


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


def test_a_link_that_comes_later_is_not_followed(web: Web, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    is_problem(web.http.post("/v1/exports", json={"model": MODEL, "folder": "file/x"}), 400, "invalid_argument")
    assert (web.folder / "file").read_text() == "mine"
    with held_at(monkeypatch, 0) as go_on:
        first = web.http.post("/v1/exports", json={"model": MODEL, "folder": "once"}).json()
        is_problem(web.http.post("/v1/exports", json={"model": MODEL, "folder": "once"}), 409, "already_exists")
        go_on.set()
        assert web.wait(first["id"])["state"] == "done"
    is_problem(web.http.post("/v1/exports", json={"model": MODEL, "folder": "once"}), 409, "already_exists")


def hidden(web: Web) -> list[Path]:
    return [path for path in web.folder.iterdir() if path.name.startswith(".")]


def test_two_exports_run_at_a_time_and_cancelled_ones_leave_nothing(web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    with held_at(monkeypatch, 0.3) as go_on:
        ids = []
        for number in range(4):
            answer = web.http.post("/v1/exports", json={"model": MODEL, "folder": f"gone/{number}"})
            ids.append(answer.json()["id"])
        for job_id in ids[:2]:
            web.wait(job_id, until=lambda job: job["state"] == "running")
        assert [web.wait(job_id, until=lambda job: True)["state"] for job_id in ids[2:]] == ["queued"] * 2
        assert len(hidden(web)) == 2
        assert web.http.delete(f"/v1/exports/{ids[2]}").json()["state"] == "cancelled"  # at once: it only waited
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
        jobs = []
        for n in range(120):
            jobs.append(exports.start(MODEL, "1", folder=f"many/{n}"))
            eventually(lambda: exports.get(jobs[-1].id).state.ended)
        assert 100 <= len(exports.list()) <= 101
        is_gone = [job for job in jobs if job.id not in {kept.id for kept in exports.list()}]
        assert jobs[0] in is_gone
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
        {"max_shard_bytes": True},
        {"max_shard_bytes": "5"},
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
