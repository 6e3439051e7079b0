"""Is every HTTP request authorized for its action, on the model and the ref that it names?"""

from __future__ import annotations

from typing import Any

import pytest

from tests.service.api.http.web import MODEL, MODEL_URL, Web
from weighbridge._core.operations.verbs import Verb
from weighbridge.errors import NotFound
from weighbridge_service.access.peer import Peer
from weighbridge_service.api.http import callers

LOOK, PULL, TAG, MANAGE = Verb.LOOK, Verb.PULL, Verb.TAG, Verb.MANAGE


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Verb, str, str]]:
    """The requested authorizations, all of which are refused."""
    found: list[tuple[Verb, str, str]] = []

    def refuse(_peer: Peer, verb: Verb, model: str = "", ref: str = "") -> None:
        found.append((verb, model, ref))
        raise NotFound("nothing is allowed")

    monkeypatch.setattr(callers, "authorize", refuse)
    return found


@pytest.mark.parametrize(
    ("method", "path", "body", "expected"),
    [
        ("GET", "/v1/models", None, (LOOK, "", "")),
        ("GET", MODEL_URL, None, (LOOK, MODEL, "")),
        ("GET", f"{MODEL_URL}/versions/latest", None, (LOOK, MODEL, "latest")),
        ("POST", f"{MODEL_URL}/versions/1/verify", None, (PULL, MODEL, "1")),
        ("DELETE", f"{MODEL_URL}/versions/1", None, (MANAGE, MODEL, "1")),
        ("POST", f"{MODEL_URL}/versions/1/approve", {}, (Verb.APPROVE, MODEL, "1")),
        ("PUT", f"{MODEL_URL}/gate", {}, (MANAGE, MODEL, "")),
        ("DELETE", MODEL_URL, None, (MANAGE, MODEL, "")),
        ("PUT", f"{MODEL_URL}/refs/prod", {"version": 1}, (TAG, MODEL, "prod")),
        ("POST", f"{MODEL_URL}/refs/prod/requests", {"version": 1}, (TAG, MODEL, "prod")),
        ("POST", f"{MODEL_URL}/refs/prod/requests/q/approve", {}, (Verb.APPROVE, MODEL, "prod")),
        ("DELETE", f"{MODEL_URL}/refs/prod/requests/q", None, (TAG, MODEL, "prod")),
        ("PUT", f"{MODEL_URL}/refs/prod/protection", {}, (MANAGE, MODEL, "prod")),
        ("DELETE", f"{MODEL_URL}/refs/prod/protection", None, (MANAGE, MODEL, "prod")),
        ("PUT", f"{MODEL_URL}/retention", {"keep_last": 1}, (MANAGE, MODEL, "")),
        ("POST", "/v1/exports", {"model": MODEL, "version": 2}, (MANAGE, MODEL, "2")),
        ("GET", "/v1/exports", None, (LOOK, "", "")),
        ("GET", f"/api/models/{MODEL}/revision/prod", None, (LOOK, MODEL, "prod")),
        ("POST", f"/api/models/{MODEL}/paths-info/prod", None, (LOOK, MODEL, "prod")),
        ("GET", f"/{MODEL}/resolve/latest/config.json", None, (PULL, MODEL, "latest")),
        ("GET", "/metrics", None, (Verb.OBSERVE, "", "")),
    ],
)
def test_a_request_is_asked_for_what_it_does_to_which_model_and_ref(
    web: Web,
    asked: list[tuple[Verb, str, str]],
    method: str,
    path: str,
    body: Any,
    expected: tuple[Verb, str, str],
) -> None:
    answer = web.http.request(method, path, json=body)
    assert asked == [expected]
    assert answer.status_code == 404
