"""Is a caller with few scopes, or none, unable to read or do more than these through any entry point?"""

from __future__ import annotations

import http.client
import json
import os
import re
import stat
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import grpc
import pytest

from tests.service.api.http.web import held_at
from tests.support.identities import bearer, identity, policy_file
from tests.support.raw_clients import TinyModel, tiny_folder
from tests.support.services import RunningService, running_service
from tests.support.waiting import eventually
from weighbridge import Client, Credentials, NotFound, TrainerClient
from weighbridge._core.checks import Check, CheckStatus
from weighbridge._core.operations import table
from weighbridge._core.operations.operation import Of, Operation
from weighbridge._core.operations.verbs import Verb
from weighbridge._transport import rpc
from weighbridge._transport.wire_operations import messages_of
from weighbridge.v1 import model_service_pb2
from weighbridge_service.access.audit import Audit
from weighbridge_service.api.http import hub_reading
from weighbridge_service.api.http.app import create_app
from weighbridge_service.api.http.hub_routes import HubSizes
from weighbridge_service.exports.jobs import Exports
from weighbridge_service.server import HttpServer

MINE, SECRET, HIDDEN = "mine/smol", "mine/smollm", "s/mine"
SCOPES = {"root": ["admin"], "small": [f"pull:{MINE}"], "exporter": [f"manage:{MINE}"]}
MODELS = (MINE, SECRET, HIDDEN)
LISTS = [each for each in table.OPERATIONS if each.order and each.of is Of.NOTHING and each.verb is Verb.LOOK]
"""Lists that are asked of no model, and so by everybody who may look at any."""
READ_BYTES = 4096
"""That a download reads at a time."""


@dataclass
class Doors:
    """A service of three models, with its HTTP face at a port of its own."""

    running: RunningService
    address: str
    policy: Path

    def ask(self, method: str, path: str, name: str = "", body: Any = None, **headers: str) -> tuple[int, str]:
        """Status and text of the answer to a request whose path is sent verbatim."""
        connection = http.client.HTTPConnection(self.address, timeout=60)
        if name:
            headers["Authorization"] = f"Bearer token-of-{name}"
        if body is not None:
            headers["Content-Type"] = "application/json"
        connection.request(method, path, json.dumps(body) if body is not None else None, headers)
        answer = connection.getresponse()
        text = answer.read().decode("utf-8", "replace")
        connection.close()
        return answer.status, text

    def audited(self) -> list[dict[str, Any]]:
        audit = self.running.service.config.audit
        assert audit is not None
        return [json.loads(line) for line in audit.read_text().splitlines()]

    def take_away(self, name: str) -> None:
        """Remove an identity from the policy."""
        write_policy(self.policy.parent, {other: may for other, may in SCOPES.items() if other != name})


def write_policy(folder: Path, scopes: dict[str, list[str]]) -> Path:
    return policy_file(folder, *(identity(name, may, token=f"token-of-{name}") for name, may in scopes.items()))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return tiny_folder(tmp_path_factory.mktemp("hf") / "model")


@pytest.fixture
def doors(tmp_path: Path, source: TinyModel) -> Iterator[Doors]:
    policy = write_policy(tmp_path, SCOPES)
    settings: dict[str, Any] = {"audit": tmp_path / "audit.jsonl", "policy_look": 0.0, "standing_look": 0.0}
    with running_service(tmp_path / "store", policy=policy, **settings) as running:
        with TrainerClient(running.address, credentials=Credentials(token="token-of-root")) as trainer:
            for model in MODELS:
                trainer.register_model(model, source.folder)
                trainer.push_folder(model, source.folder, step=1).wait(timeout=60)
        exports = Exports(running.service)
        server = HttpServer("127.0.0.1:0", 64)
        sizes = HubSizes(read=READ_BYTES)
        server.start(create_app(running.service, exports, running.metrics, running.health, hub=sizes))
        yield Doors(running, server.address, policy)
        server.stop()
        exports.close()


def test_a_name_that_nobody_has_is_not_answered_with_one_that_the_caller_may_not_know(doors: Doors) -> None:
    write_policy(doors.policy.parent, {**SCOPES, "small": [f"pull:{MINE}", "look:mine/smoll"]})
    small = Credentials(token="token-of-small")
    with Client(doors.running.address, credentials=small) as client, pytest.raises(NotFound) as told:
        client.model("mine/smoll")
    status, text = doors.ask("GET", "/v1/models/mine/smoll", "small")
    assert status == 404
    for said in (str(told.value), text):
        assert f"did you mean {MINE}" in said
        assert SECRET not in said


def _asked(doors: Doors, operation: Operation[Any], name: str, after: str) -> tuple[str, str]:
    messages = messages_of(operation)
    request = messages.request({"page_size": 1, "page_token": after} if operation.pages else {})
    with rpc.open_channel(doors.running.address) as channel:
        call: Any = channel.unary_unary(messages.path, None, None)
        told = call(request.SerializeToString(), metadata=bearer(f"token-of-{name}"), timeout=60)
    page = messages.read(told)
    return repr(page), page.next_page_token if operation.pages else ""


def _got(doors: Doors, operation: Operation[Any], name: str, after: str) -> tuple[str, str]:
    method, _, path = operation.http.partition(" ")
    query = urlencode({"limit": 1, "after": after}) if operation.pages else ""
    status, text = doors.ask(method, f"{path}?{query}", name)
    assert status == 200, text
    items = json.loads(text)[operation.within]
    return text, items[-1][operation.order] if operation.pages and items else ""


@pytest.mark.parametrize("ask", [_asked, _got], ids=["gRPC", "HTTP"])
@pytest.mark.parametrize("operation", LISTS, ids=lambda each: each.rpc)
def test_a_list_over_models_has_what_is_of_models_that_the_caller_may_look_at(
    doors: Doors, operation: Operation[Any], ask: Callable[..., tuple[str, str]]
) -> None:
    """Page by page; no page token reveals a model that the caller may not look at."""
    if ask is _got and not operation.http:
        pytest.skip("HTTP has no such route")
    for name, seen in (("root", MODELS), ("small", (MINE,))):
        told, after = ask(doors, operation, name, "")
        while after:
            page, after = ask(doors, operation, name, after)
            told += page
        found = {model for model in MODELS if re.search(rf"\b{model}\b", told)}
        assert found == {*seen}, "of a new list: let `doors` give each model something that it lists"


def test_an_export_of_what_the_caller_may_not_know_is_as_if_there_were_none(doors: Doors) -> None:
    _, started = doors.ask("POST", "/v1/exports", "root", {"model": SECRET, "version": "1"})
    job = json.loads(started)["id"]
    for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/events")):
        status, text = doors.ask(method, f"/v1/exports/{job}{path}", "exporter")
        unknown = doors.ask(method, f"/v1/exports/{'0' * 32}{path}", "exporter")
        assert (status, text.replace(job, "0" * 32)) == unknown
    assert doors.ask("GET", f"/v1/exports/{job}", "root")[0] == 200


@pytest.mark.parametrize(
    "path",
    [
        "/%61pi/models/mine/smol",
        "/%61pi/models/mine/smol/revision/1",
        "/%61pi/models/mine/smol/tree/1",
        "/api%2Fmodels/mine/smol",
        "/%61%70i/models/mine/smol/refs",
        "/mine%2Fsmol/resolve/resolve/1/config.json",
        "/s/mine/resolve/1/config.json",
        "/v1/models/s%2Fmine",
        "/v1/models/mine%2F..%2Fs/mine",
        "//s/mine/resolve/1/config.json",
        "/api/models/./s/mine",
    ],
)
def test_no_spelling_of_a_path_leads_to_another_model_than_the_one_that_was_asked_for(doors: Doors, path: str) -> None:
    status, text = doors.ask("GET", path, "small")
    assert status in (403, 404), text
    assert text.startswith('{"type": "urn:weighbridge:error:'), "and no document of a model"


def test_probes_tell_those_who_may_not_observe_no_more_than_how_it_stands(
    doors: Doors, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [Check("versions-durable", CheckStatus.WARN, f"{SECRET}@1 is not durable", "look at /secret/store")]
    monkeypatch.setattr(doors.running.health, "findings", lambda: found)
    for path in ("/readyz", "/readyz/versions-durable"):
        for name in ("", "small"):
            status, text = doors.ask("GET", path, name)
            assert (status, "versions-durable" in text, '"warn"' in text) == (200, True, True)
            assert "secret" not in text
            assert SECRET not in text
        assert SECRET in doors.ask("GET", path, "root")[1]
    found[0] = Check("versions-durable", CheckStatus.FAIL, f"{SECRET}@1 is lost", "look at /secret/store")
    status, text = doors.ask("GET", "/readyz")
    assert (status, SECRET in text, "/secret" in text) == (503, False, False)


def test_the_audit_log_says_from_where_a_request_came_and_not_from_where_it_says(doors: Doors) -> None:
    doors.ask("GET", f"/v1/models/{MINE}", **{"X-Forwarded-For": "10.9.8.7", "Forwarded": "for=10.9.8.7"})

    def found() -> list[tuple[str, str]]:
        return [(each["result"], each["host"]) for each in doors.audited() if each["action"] == "get_model"]

    eventually(found)  # it is written down once the answer is sent
    assert found() == [("UNAUTHENTICATED", "127.0.0.1")]


def _refused(doors: Doors, method: str, request: Any) -> Any:
    with rpc.open_channel(doors.running.address) as channel:
        call: Any = channel.stream_stream(f"/weighbridge.v1.ModelService/{method}", None, None)
        with pytest.raises(grpc.RpcError) as told:
            next(call(iter([request.SerializeToString()]), metadata=bearer("nobody's"), timeout=60))
    return told.value.code()  # type: ignore[attr-defined]


def test_a_refused_call_fills_no_audit_log_however_much_it_names(doors: Doors) -> None:
    before = len(doors.audited())
    refs = [model_service_pb2.WatchedRef(model=f"a/{i}", ref="live") for i in range(50_000)]
    assert _refused(doors, "WatchRefs", model_service_pb2.WatchRefsRequest(refs=refs)).name == "UNAUTHENTICATED"
    long = model_service_pb2.GetModelRequest(model="x" * 1_000_000)
    assert _refused(doors, "GetModel", long).name == "UNAUTHENTICATED"
    lines = doors.audited()[before:]
    assert [(each["action"], each["model"][:3]) for each in lines] == [
        ("WatchRefs", "a/0"),
        ("GetModel", "xxx"),
    ]
    assert len(json.dumps(lines)) < 1000


def test_of_a_request_in_parts_nobody_is_refused_at_the_first_part(doors: Doors) -> None:
    part = model_service_pb2.RegisterModelRequest(model=MINE).SerializeToString()
    go_on = threading.Event()

    def parts() -> Iterator[bytes]:
        yield part
        go_on.wait(60)

    with rpc.open_channel(doors.running.address) as channel:
        call: Any = channel.stream_stream("/weighbridge.v1.ModelService/RegisterModel", None, None)
        with pytest.raises(grpc.RpcError) as told:
            next(call(parts(), metadata=bearer("nobody's"), timeout=60))
        go_on.set()
    assert told.value.code() is grpc.StatusCode.UNAUTHENTICATED  # type: ignore[attr-defined]
    last = [each for each in doors.audited() if each["action"] == "RegisterModel"][-1]
    assert (last["model"], last["result"]) == (MINE, "UNAUTHENTICATED")


def test_a_watch_of_nothing_is_for_those_who_may_look(doors: Doors) -> None:
    assert _refused(doors, "WatchRefs", model_service_pb2.WatchRefsRequest()).name == "UNAUTHENTICATED"


def test_the_audit_log_is_not_for_everybody(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        audit = Audit(tmp_path / "audit.jsonl")
    finally:
        os.umask(before)
    audit.record(face="grpc", host="h", identity="i", action="Pull", verb=Verb.PULL, model="m", ref="1", result="OK")
    audit.close()
    assert stat.S_IMODE((tmp_path / "audit.jsonl").stat().st_mode) == 0o640
    assert json.loads((tmp_path / "audit.jsonl").read_text())["identity"] == "i"


def test_a_download_ends_when_its_caller_may_not_go_on(doors: Doors, monkeypatch: pytest.MonkeyPatch) -> None:
    read, begun, go_on = hub_reading.Hub.read, threading.Event(), threading.Event()

    def slowly(hub: Any, version: Any, path: str, start: int, length: int) -> bytes:
        if start:
            begun.set()
            assert go_on.wait(60)
        return read(hub, version, path, start, length)

    monkeypatch.setattr(hub_reading.Hub, "read", slowly)
    connection = http.client.HTTPConnection(doors.address, timeout=60)
    headers = {"Authorization": "Bearer token-of-small"}
    connection.request("GET", f"/{MINE}/resolve/1/model.safetensors", headers=headers)
    moved = connection.getresponse()
    moved.read()
    connection.request("GET", str(moved.headers["Location"]), headers=headers)
    answer = connection.getresponse()
    assert answer.status == 200
    assert begun.wait(60)
    doors.take_away("small")
    go_on.set()
    with pytest.raises(http.client.IncompleteRead) as broken:
        answer.read()
    assert len(broken.value.partial) == READ_BYTES
    connection.close()


def test_events_end_when_their_caller_may_not_go_on(doors: Doors, monkeypatch: pytest.MonkeyPatch) -> None:
    with held_at(monkeypatch, 0.1) as go_on:
        _, started = doors.ask("POST", "/v1/exports", "exporter", {"model": MINE, "version": "1"})
        job = json.loads(started)["id"]
        connection = http.client.HTTPConnection(doors.address, timeout=60)
        headers = {"Authorization": "Bearer token-of-exporter"}
        connection.request("GET", f"/v1/exports/{job}/events", headers=headers)
        answer = connection.getresponse()
        assert answer.readline() == b"event: progress\r\n"
        doors.take_away("exporter")
        go_on.set()
        assert b"event: end" not in answer.read()
        connection.close()
    assert doors.ask("GET", f"/v1/exports/{job}", "exporter")[0] == 401


def test_events_end_when_their_caller_may_not_go_on_although_nothing_happens(
    doors: Doors, monkeypatch: pytest.MonkeyPatch
) -> None:
    with held_at(monkeypatch, 0.1):
        _, started = doors.ask("POST", "/v1/exports", "exporter", {"model": MINE, "version": "1"})
        job = json.loads(started)["id"]
        connection = http.client.HTTPConnection(doors.address, timeout=15)
        headers = {"Authorization": "Bearer token-of-exporter"}
        connection.request("GET", f"/v1/exports/{job}/events", headers=headers)
        answer = connection.getresponse()
        assert answer.readline() == b"event: progress\r\n"
        doors.take_away("exporter")
        answer.read()
        connection.close()
        assert json.loads(doors.ask("GET", f"/v1/exports/{job}", "root")[1])["state"] == "running"


def test_folders_do_not_tell_whether_another_model_was_exported_and_are_not_changed(doors: Doors) -> None:
    exported, other = "mine--smollm--1", "mine--nothing--1"
    _, started = doors.ask("POST", "/v1/exports", "root", {"model": SECRET, "version": "1"})
    job = json.loads(started)["id"]
    eventually(lambda: json.loads(doors.ask("GET", f"/v1/exports/{job}", "root")[1])["state"] == "done")
    folder = doors.running.service.config.exports_folder / exported
    before = sorted(folder.iterdir())
    for within in ("", "/inside"):
        told = [
            doors.ask("POST", "/v1/exports", "exporter", {"model": MINE, "version": "1", "folder": name + within})
            for name in (exported, other)
        ]
        assert told[0][0] == 400
        assert told[0][1].replace(exported, other) == told[1][1]
    assert sorted(folder.iterdir()) == before
