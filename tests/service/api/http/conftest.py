"""The HTTP face over a running service."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.service.api.http.web import Web, web_of_two_versions
from weighbridge_service.server import HttpServer


@pytest.fixture(scope="package")
def web(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Web]:
    with web_of_two_versions(tmp_path_factory) as found:
        yield found


@pytest.fixture(scope="package")
def url(web: Web) -> Iterator[str]:
    server = HttpServer("127.0.0.1:0", 1024)
    server.start(web.app)
    yield f"http://{server.address}"
    server.stop()
