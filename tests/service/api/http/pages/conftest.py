"""Services with pages, and a browser."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.browser import Tab, running_browser, tab
from tests.support.raw_clients import TinyModel, tiny_folder
from tests.support.services import RunningService, running_service
from weighbridge_service.api.http.app import create_app
from weighbridge_service.exports.jobs import Exports
from weighbridge_service.server import HttpServer


@dataclass
class Place:
    """A service with its pages, and a model that can be pushed to it."""

    running: RunningService
    source: TinyModel
    url: str


@contextmanager
def place_of(folder: Path, **settings: Any) -> Iterator[Place]:
    """A service over a store of its own."""
    source = tiny_folder(folder / "hf", seed=1)
    with running_service(folder / "store", **settings) as running:
        exports = Exports(running.service)
        server = HttpServer("127.0.0.1:0", 1024)
        server.start(create_app(running.service, exports, running.metrics, running.health))
        yield Place(running, source, f"http://{server.address}")
        running.service.catalog.stopping.set()
        server.stop()
        exports.close()


@pytest.fixture(scope="session")
def shots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder for screenshots: ``WEIGHBRIDGE_SHOTS``, or a temporary folder of the run."""
    folder = Path(os.environ.get("WEIGHBRIDGE_SHOTS") or tmp_path_factory.mktemp("shots"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A browser for each test file, because Playwright runs an event loop in the thread of the tests."""
    with running_browser() as found:
        yield found


@pytest.fixture
def opened(browser: Any, place: Place, shots: Path) -> Iterator[Tab]:
    """A tab at the service of a test."""
    with tab(browser, place.url, shots) as found:
        yield found


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    with place_of(tmp_path, receive_timeout=8.0) as found:
        yield found
