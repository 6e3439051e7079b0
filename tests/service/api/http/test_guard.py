"""The guard of the HTTP face: what browsers are made to ask in the name of others is refused."""

from __future__ import annotations

import base64
import hashlib
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.datastructures import Headers
from starlette.testclient import TestClient

from tests.support.services import running_service
from weighbridge_service.api.http.app import create_app
from weighbridge_service.api.http.guard import HostNames, refusal
from weighbridge_service.exports.jobs import Exports

NAMES = HostNames.of(["weights.example.com"])


@pytest.fixture
def http(tmp_path: Path) -> Iterator[TestClient]:
    with running_service(tmp_path) as running:
        exports = Exports(running.service)
        yield TestClient(create_app(running.service, exports, running.metrics, running.health))
        exports.close()


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1:8080",
        "10.0.0.7",
        "[::1]:8080",
        "[fd00::1]",
        "localhost:8080",
        "weighbridge:8080",
        "weighbridge.default.svc:8080",
        "weighbridge.default.svc.cluster.local",
        "node7.local",
        "weights.example.com:443",
        "WEIGHTS.EXAMPLE.COM",
        socket.gethostname(),
    ],
)
def test_names_that_nobody_outside_can_own_are_answered(host: str) -> None:
    assert NAMES.allow(host)


@pytest.mark.parametrize(
    "host",
    [
        "attacker.com",
        "attacker.com:8080",
        "127.0.0.1.attacker.com",
        "localhost.attacker.com",
        "example.com",
        "x.weights.example.com",
        "svc.attacker.com",
        "[::1",
        "",
        "127.0.0.1@attacker.com",
    ],
)
def test_names_that_anybody_can_point_here_are_not(host: str) -> None:
    assert not NAMES.allow(host)
    assert HostNames(frozenset({"*"})).allow(host)


@pytest.mark.parametrize(
    ("method", "origin", "status"),
    [
        ("POST", None, None),
        ("POST", "http://10.0.0.7:8080", None),
        ("POST", "https://10.0.0.7:8080", None),
        ("POST", "http://10.0.0.7:3000", 403),
        ("POST", "https://attacker.com", 403),
        ("POST", "null", 403),
        ("POST", "http://[", 403),
        ("PUT", "https://attacker.com", 403),
        ("DELETE", "https://attacker.com", 403),
        ("GET", "https://attacker.com", None),  # it is not shown the answer
    ],
)
def test_pages_of_others_change_nothing(method: str, origin: str | None, status: int | None) -> None:
    headers = {"host": "10.0.0.7:8080", **({} if origin is None else {"origin": origin})}
    refused = refusal(method, Headers(headers), NAMES)
    assert (None if refused is None else refused.status) == status


def test_a_refused_request_does_nothing_and_says_what_to_do(http: TestClient) -> None:
    answer = http.get("/v1/models", headers={"Host": "attacker.com"})
    assert (answer.status_code, answer.json()["title"]) == (421, "Host not allowed")
    assert "--http-host" in answer.json()["fix"]
    answer = http.post("/v1/models/acme/smol/versions/1/verify", headers={"Origin": "https://attacker.com"})
    assert (answer.status_code, answer.json()["title"]) == (403, "Cross origin")
    assert http.options("/v1/models", headers={"Origin": "https://attacker.com"}).status_code == 405


def test_no_answer_can_be_framed_run_or_read_by_pages_of_others(http: TestClient) -> None:
    for path in ("/v1/models", "/livez", "/nowhere"):
        headers = http.get(path).headers
        assert headers["content-security-policy"] == "default-src 'none'; frame-ancestors 'none'"
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["cross-origin-resource-policy"] == "same-origin"
        assert "access-control-allow-origin" not in headers


def test_the_documentation_needs_no_other_host_and_runs_no_script_but_its_own(http: TestClient) -> None:
    page = http.get("/docs")
    assert page.status_code == 200
    used = re.findall(r'(?:src|href)="([^"]+)"', page.text)
    assert used
    for path in used:
        assert path.startswith("/")
        assert http.get(path).status_code == 200
    policy = page.headers["content-security-policy"]
    scripts = re.search(r"script-src ([^;]*)", policy)
    assert scripts is not None
    allowed = scripts[1].split()
    inline = re.findall(r"<script>(.*?)</script>", page.text, re.DOTALL)
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in inline]
    assert allowed == ["'self'", *(f"'sha256-{digest}'" for digest in digests)]
