"""Is HEAD answered as GET is, without content, also where the content would not end?"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx2 as httpx
import pytest

from tests.service.api.http.web import MODEL, MODEL_URL, Web, held_at
from tests.support.waiting import eventually


@pytest.mark.parametrize(
    "path",
    ["/livez", "/readyz", "/readyz/nope", "/metrics", "/v1/models", MODEL_URL, "/v1/models/no/no", "/"],
)
def test_head_has_the_status_and_the_type_of_get_and_no_content(url: str, path: str) -> None:
    with httpx.Client(base_url=url, timeout=20) as http:
        get, head = http.get(path), http.head(path)
        assert (head.status_code, head.content) == (get.status_code, b"")
        assert head.headers["content-type"] == get.headers["content-type"]
        assert http.get("/livez").json() == {"status": "ok"}  # the connection goes on


def test_head_of_what_only_takes_changes_is_refused(url: str) -> None:
    assert httpx.head(f"{url}{MODEL_URL}/collect").status_code == 405


def test_head_of_a_stream_of_events_ends(web: Web, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    followers: list[int] = []
    changes = web.exports.changes

    async def counted(*asked: Any) -> AsyncIterator[Any]:
        followers.append(1)
        try:
            async for job in changes(*asked):
                yield job
        finally:
            followers.pop()

    with held_at(monkeypatch, 0.5) as go_on, httpx.Client(base_url=url, timeout=20) as http:
        monkeypatch.setattr(web.exports, "changes", counted)
        job = http.post("/v1/exports", json={"model": MODEL, "folder": "headed"}).json()
        answer = http.head(f"/v1/exports/{job['id']}/events")
        assert answer.headers["content-type"].startswith("text/event-stream")
        eventually(lambda: not followers)
        go_on.set()
        web.wait(job["id"])
