"""Does each identity have the rights in the table of docs/access.md at every entry point, and no others?"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from fastapi.routing import APIRoute
from google.protobuf.message_factory import GetMessageClass
from starlette.testclient import TestClient

from tests.service.api.grpc.test_asking import CALLS
from tests.support.identities import TokenIssuer, bearer, identity, policy_file
from tests.support.services import RunningService, running_service
from weighbridge._core.operations.verbs import Verb
from weighbridge._transport import rpc
from weighbridge_service.access import tokens
from weighbridge_service.access.scopes import ADMIN
from weighbridge_service.api.http import app as http_app
from weighbridge_service.api.http.app import create_app
from weighbridge_service.api.http.callers import CredentialsCheck
from weighbridge_service.exports.jobs import Exports

MODEL, OTHER = "acme/smol", "acme/other"
_DOCUMENT = Path(__file__).parents[3] / "docs" / "access.md"
_VERBS = [verb for verb in Verb if verb not in (Verb.PROBE, Verb.REPLICATE, Verb.OBSERVE)]
SCOPES = [
    *(f"{verb}:{model}" for verb in (*_VERBS, ADMIN) for model in (MODEL, OTHER)),
    *(verb.value for verb in Verb if verb is not Verb.PROBE),
    ADMIN,
    f"tag:{MODEL}@prod",
    f"tag:{MODEL}@other",
    f"approve:{MODEL}@prod",
    f"approve:{MODEL}@other",
]
UNKNOWN = ["", "wrong", "expired", "other audience"]
"""Credentials that belong to no identity."""


def table(column: int) -> dict[str, Verb]:
    """The verb of each method or route, by the document."""
    found = {}
    for line in _DOCUMENT.read_text().splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if len(cells) == 3 and (verb := re.match(r"`(\w+)`", cells[0])) and verb[1] in set(Verb):
            found.update(dict.fromkeys(re.findall(r"`([\w.]+)`", cells[column]), Verb(verb[1])))
    return found


METHODS, ROUTES = table(1), table(2)


def may(scope: str, verb: Verb, model: str, ref: str) -> bool:
    """Whether a scope allows something, by the document's words."""
    name, _, pattern = scope.partition(":")
    named_model, _, named_ref = pattern.partition("@")
    if verb is Verb.PROBE or (verb is Verb.LOOK and not model):
        return True
    if name == ADMIN:
        return not named_model or named_model == model
    if verb is Verb.LOOK and name in ("observe", "replicate"):
        return False
    if verb is not Verb.LOOK and name != verb:
        return False
    if named_model and named_model != model:
        return False
    return verb not in (Verb.TAG, Verb.APPROVE) or not named_ref or named_ref == ref


@dataclass
class Doors:
    """A service with an identity for each scope."""

    running: RunningService
    web: TestClient
    tokens: dict[str, str]


@pytest.fixture(scope="module")
def doors(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Doors]:
    folder = tmp_path_factory.mktemp("doors")
    issuer = TokenIssuer(folder / "issuer")
    given = {scope: tokens.new_token() for scope in SCOPES}
    policy = policy_file(
        folder,
        issuer.table,
        *(identity(scope, [scope], token=token) for scope, token in given.items()),
        identity("web", ["admin"], subjects=["test|me"]),
    )
    given |= {
        "wrong": tokens.new_token(),
        "expired": issuer.token("me", seconds=-60),
        "other audience": issuer.token("me", aud="other"),
        "right": issuer.token("me"),
    }
    with running_service(folder / "store", policy=policy, bulk_port="auto") as running:
        exports = Exports(running.service)
        app = create_app(running.service, exports, running.metrics, running.health)
        yield Doors(running, TestClient(app, raise_server_exceptions=False), given)
        exports.close()


def test_the_document_has_each_method_and_each_route() -> None:
    assert set(METHODS) == {f"{service}.{method.name}" for service, method in CALLS} | {"Health.List"}
    assert set(ROUTES) == set(http_app.VERBS) | set(http_app.ASKING)


def _request(method: Any) -> tuple[bytes, str, str]:
    """A request about the model, and the model and ref that it names."""
    kind = GetMessageClass(method.input_type)
    fields = method.input_type.fields_by_name
    if "refs" in fields:
        return kind(refs=[{"model": MODEL, "ref": "prod"}]).SerializeToString(), MODEL, "prod"
    if "header" in fields:
        return kind(header={"model": MODEL}).SerializeToString(), MODEL, ""
    if "report" in fields:
        return kind(report={"model": MODEL}).SerializeToString(), MODEL, ""
    said = {name: value for name, value in (("model", MODEL), ("ref", "prod")) if name in fields}
    return kind(**said).SerializeToString(), said.get("model", ""), said.get("ref", "")


def _code(channel: grpc.Channel, path: str, request: bytes, metadata: Any) -> str:
    call: Any = channel.stream_stream(path, None, None)(iter([request]), metadata=metadata, timeout=20)
    try:
        if not rpc.is_accepted(call.initial_metadata()):  # a watch of a missing resource stays open
            next(call)
    except StopIteration:
        return "OK"
    except grpc.RpcError as error:
        return str(error.code().name)  # type: ignore[attr-defined]
    finally:
        call.cancel()
    return "OK"


@pytest.mark.parametrize(("service", "method"), CALLS, ids=lambda each: getattr(each, "full_name", ""))
def test_a_method_is_for_those_whose_scope_allows_it(doors: Doors, service: str, method: Any) -> None:
    verb = METHODS[f"{service}.{method.name}"]
    request, model, ref = _request(method)
    path = f"/{method.containing_service.full_name}/{method.name}"
    with rpc.open_channel(doors.running.address) as channel:
        for scope, token in doors.tokens.items():
            code = _code(channel, path, request, bearer(token))
            if scope in UNKNOWN:
                assert (code == "UNAUTHENTICATED") == (verb is not Verb.PROBE), (scope, code)
            elif scope == "right":
                assert code not in ("UNAUTHENTICATED", "PERMISSION_DENIED"), (scope, code)
            else:
                assert (code == "PERMISSION_DENIED") == (not may(scope, verb, model, ref)), (scope, code)
                assert code != "UNAUTHENTICATED", scope
        code = _code(channel, path, request, ())
        assert (code == "UNAUTHENTICATED") == (verb is not Verb.PROBE), code
        several = _code(channel, path, request, bearer(doors.tokens["right"]) * 2)
        assert (several == "UNAUTHENTICATED") == (verb is not Verb.PROBE), "of two tokens none counts"


_PATH = {
    "namespace": "acme",
    "name": "smol",
    "version": "1",
    "number": "1",
    "ref": "prod",
    "job_id": "0" * 32,
    "request_id": "0" * 32,
    "signature": "0" * 64,
}
_PATH |= {"digest": "0", "file": "page.css"}
_PATH |= {"rest": "prod/config.json", "check": "store-reachable"}


@pytest.mark.parametrize("name", sorted(ROUTES))
def test_a_route_is_for_those_whose_scope_allows_it(doors: Doors, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CredentialsCheck, "ended", True)  # streams of events end at once: they are authorized before
    verb = ROUTES[name]
    routes = [route for route in _leaves(doors.web.app.routes) if route.name == name]  # type: ignore[attr-defined]
    assert routes
    for route in routes:
        path = re.sub(r"\{(\w+)(:path)?\}", lambda found: _PATH[found[1]], route.path)
        about = MODEL if "namespace" in route.path else ""
        body = {"model": MODEL, "version": 1} if name == "start_export" else None
        form = {"ref": "prod", "version": "1"} if name.endswith("_form") else None
        about = MODEL if name == "start_export" else about
        ref = "prod" if "{ref}" in route.path or name == "new_ref_form" else ""
        method = min(route.methods)
        for scope in (*doors.tokens, ""):
            headers = {"authorization": f"Bearer {doors.tokens[scope]}"} if scope else {}
            own = {"origin": "http://testserver"} if method == "POST" else {}  # as a page of the service
            code = doors.web.request(
                method,
                path,
                json=body,
                data=form,
                headers=headers | own,
                params={"confirm": "nothing", "tensor": "nothing"},
                follow_redirects=False,
            ).status_code
            if scope in UNKNOWN:
                assert (code == 401) == (verb is not Verb.PROBE), (scope, path, code)
            elif scope == "right":
                assert code not in (401, 403), (scope, path, code)
            elif name in ("get_export", "cancel_export", "follow_export", "cancel_export_form"):
                assert code == 404, "there is no such export, whoever asks"
            else:
                assert (code == 403) == (not may(scope, verb, about, ref)), (scope, path, code)


def _leaves(routes: Any) -> Iterator[APIRoute]:
    for route in routes:
        included = getattr(route, "original_router", None)
        if included is not None:
            yield from _leaves(included.routes)
        elif isinstance(route, APIRoute):
            yield route
