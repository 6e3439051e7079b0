"""Do events follow an export to its end, however many follow?"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx2 as httpx
import pytest

from tests.service.api.http.web import MODEL, MODEL_URL, Web, held_at, is_problem


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
        httpx.Client(base_url=url, timeout=60, limits=httpx.Limits()) as http,
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
