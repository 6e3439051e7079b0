"""Is everything that cannot be answered a problem with its status, which says nothing of the inside?"""

from __future__ import annotations

import re
import socket
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx2 as httpx
import pytest
from starlette.testclient import TestClient

from tests.service.api.http.web import MODEL, MODEL_URL, Web, is_problem
from tests.support.services import running_service
from weighbridge_service.api.http.app import create_app
from weighbridge_service.api.http.bodies import MAX_BODY_BYTES
from weighbridge_service.exports.jobs import Exports


def get_raw(url: str, path: bytes) -> httpx.Response:
    """GET this path as it is: a client library would tidy it up."""
    with socket.create_connection((httpx.URL(url).host, httpx.URL(url).port or 80), timeout=60) as connection:
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
        assert answer.text == "Invalid HTTP request received."  # not HTTP at all: the server itself refuses it


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
    assert web.http.get(f"{MODEL_URL}/refs").json()["refs"] == {"latest": 2, "live": 2}


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"null", b"[]", b"\xff\xfe", b"[" * 500_000, b'{"version":' + b"9" * 5000 + b"}", b'{"version":"\\ud800"}',
     b'{"version":true}', b'{"version":[1]}', b'{"version":1,"\\ud800":1}', b'{"version":1,"x":' + b'"y"' + b"}"],
    ids=lambda b: str(b[:16]),
)  # fmt: skip
def test_hostile_bodies_are_client_errors(web: Web, body: bytes) -> None:
    answer = web.http.put(f"{MODEL_URL}/refs/prod", content=body, headers={"content-type": "application/json"})
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
    is_problem(web.http.get("/nothing"), 404, "not_found")
    is_problem(web.http.get("/v1/models/"), 404, "not_found")
    is_problem(web.http.get("/v1/models/tests/other"), 404, "not_found")
    answer = web.http.patch(MODEL_URL)
    is_problem(answer, 405, "method_not_allowed")
    assert answer.headers["allow"] == "DELETE, GET"
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
        if parameter["in"] == "path" and parameter["schema"]["type"] == "string"
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
