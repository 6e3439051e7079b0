"""The Hub endpoint over a running service, and programs that use it as Hugging Face's clients do."""

from __future__ import annotations

import filecmp
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2 as httpx
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tests.support.services import RunningService
from weighbridge_service.api.http.app import create_app
from weighbridge_service.api.http.hub_routes import DEFAULT_SIZES, HubSizes
from weighbridge_service.exports.jobs import Exports
from weighbridge_service.server import HttpServer

CLIENT_PYTHON = os.environ.get("WEIGHBRIDGE_HUB_PYTHON", sys.executable)
"""Runs the clients: `make test-hub` names environments with other versions of them."""
MODEL = "tests/hub"
WEIGHTS = "model.safetensors"


@dataclass(frozen=True)
class Seen:
    """A request that the service answered."""

    method: str
    path: str
    range: str
    status: int


class Recorder:
    """Remembers the requests about the model that go through it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self.seen: list[Seen] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def watched(message: Message) -> None:
            # newer clients also ask the Hub about themselves
            if message["type"] == "http.response.start" and MODEL in scope["path"]:
                asked = dict(scope["headers"]).get(b"range", b"").decode("latin-1")
                self.seen.append(Seen(scope["method"], scope["path"], asked, message["status"]))
            await send(message)

        await self._app(scope, receive, watched)

    def files(self) -> list[Seen]:
        """Requests for files' bytes."""
        return [seen for seen in self.seen if seen.method == "GET" and "/resolve/" in seen.path]


class Endpoint:
    """A service with two durable versions of one model, the first of them tagged; and Hugging Face's clients for it."""

    def __init__(self, running: RunningService, url: str, recorder: Recorder) -> None:
        self.running = running
        self.url = url
        self.recorder = recorder
        self.http = httpx.Client(base_url=url, timeout=20, follow_redirects=True)

    def folder(self, number: int) -> Path:
        """The folder of a version in the store."""
        return Path(self.running.service.config.store) / f"models/{MODEL}/versions/{number:012d}"

    def sha(self, revision: str) -> str:
        answer = self.http.get(f"/api/models/{MODEL}/revision/{revision}")
        assert answer.status_code == 200, answer.text
        return str(answer.json()["sha"])

    def raw(self, method: str, path: str) -> httpx.Response:
        """The answer to a request for this path, sent verbatim: a client library would normalize it."""
        where = httpx.URL(self.url)
        with socket.create_connection((where.host, where.port or 80), timeout=60) as connection:
            request = f"{method} {path} HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\r\n"
            connection.sendall(request.encode("latin-1"))
            with connection.makefile("rb") as stream:
                head, _, body = stream.read().partition(b"\r\n\r\n")
        status, *fields = head.decode("latin-1").split("\r\n")
        headers = [(name, value.strip()) for name, _, value in (field.partition(":") for field in fields)]
        return httpx.Response(int(status.split()[1]), headers=headers, content=body)

    def run(self, home: Path, command: list[str]) -> str:
        """Run a client with a cache of its own."""
        mine = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
        mine |= {"HF_ENDPOINT": self.url, "HF_HOME": str(home), "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        mine |= {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1", "OMP_NUM_THREADS": "1"}
        self.recorder.seen.clear()
        done = subprocess.run(command, env=mine, cwd=home, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def python(self, home: Path, code: str, *arguments: str) -> Any:
        """Run Python code in a process of its own; the argument of its last call of ``say``."""
        script = f"import json, sys\ndef say(value): print(json.dumps(value))\nMODEL = {MODEL!r}\n{code}"
        return json.loads(self.run(home, [CLIENT_PYTHON, "-c", script, *arguments]).splitlines()[-1])


@contextmanager
def endpoint_of(running: RunningService, sizes: HubSizes = DEFAULT_SIZES) -> Iterator[Endpoint]:
    """The Hub endpoint of a service, at a port of its own."""
    exports = Exports(running.service)
    recorder = Recorder(create_app(running.service, exports, running.metrics, running.health, hub=sizes))
    server = HttpServer("127.0.0.1:0", 1024)
    server.start(recorder)
    found = Endpoint(running, f"http://{server.address}", recorder)
    try:
        yield found
    finally:
        found.http.close()
        server.stop()
        exports.close()


def files_of(folder: Path) -> list[Path]:
    """The files of a version's folder that the Hub shows: all but block digests."""
    return sorted(path for path in folder.iterdir() if path.suffix != ".blake3")


def is_copy(folder: Path, original: Path) -> None:
    names = [path.name for path in files_of(original)]
    assert sorted(path.name for path in folder.iterdir()) == names
    assert filecmp.cmpfiles(folder, original, names, shallow=False) == (names, [], [])
