"""The HTTP face over a running service, and what its answers have to be."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from starlette.testclient import TestClient
from transformers import PreTrainedModel

from tests.support.reference import tiny_config, tiny_model
from tests.support.services import RunningService, running_service
from weighbridge import TrainerClient
from weighbridge_service.api.http.app import create_app
from weighbridge_service.exports import jobs
from weighbridge_service.exports.jobs import Exports

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


@contextmanager
def web_of_two_versions(folders: pytest.TempPathFactory) -> Iterator[Web]:
    """The HTTP face of a service of its own, with one model of two versions."""
    hf_model = tiny_model(tiny_config("qwen2", tied=True), seed=1)
    folder = folders.mktemp("hf")
    hf_model.save_pretrained(folder)
    with running_service(folders.mktemp("store")) as running:
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
    write = jobs.write_hf_folder

    def slowly(*args: Any, on_progress: Callable[[int, int], None], **settings: Any) -> list[str]:
        def report(done: int, total: int) -> None:
            if done >= share * total:
                go_on.wait(20)
            on_progress(done, total)

        return write(*args, on_progress=report, **settings)

    with monkeypatch.context() as patch:
        patch.setattr(jobs, "write_hf_folder", slowly)
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
