"""Does a protected ref move only when two identities agree, through every entry point?"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from click.testing import CliRunner
from starlette.testclient import TestClient

from tests.support.identities import identity, policy_file
from tests.support.raw_clients import TinyModel, tiny_folder
from tests.support.services import RunningService, running_service
from weighbridge import (
    Client,
    Credentials,
    FailedPrecondition,
    Gate,
    NotFound,
    PermissionDenied,
    Protection,
    RefRequest,
    TrainerClient,
    Unavailable,
)
from weighbridge._cli import commands
from weighbridge._transport import rpc
from weighbridge.v1 import model_service_pb2
from weighbridge_service.api.http.app import create_app
from weighbridge_service.exports.jobs import Exports
from weighbridge_storage.head.head import REMEMBERED_REQUESTS

MODEL = "acme/smol"
URL = f"/v1/models/{MODEL}/refs"
SCOPES = {
    "root": ["admin"],
    "ann": [f"tag:{MODEL}@prod", f"approve:{MODEL}@prod"],
    "bob": ["approve:acme/*@prod"],
    "cid": [f"approve:{MODEL}@prod"],
    "wide": [f"tag:{MODEL}", f"tag:{MODEL}@pr*", f"approve:{MODEL}"],
    "boss": [f"manage:{MODEL}", f"tag:{MODEL}@prod"],
    "puller": [f"pull:{MODEL}"],
}


def token(name: str) -> str:
    return f"token-of-{name}"


def client(running: RunningService, name: str) -> Client:
    return Client(running.address, credentials=Credentials(token=token(name) if name else None))


@dataclass
class Fleet:
    """Two replicas over one store of one model with three versions, and the HTTP face of the first."""

    one: RunningService
    two: RunningService
    web: TestClient
    audit: Path
    policy: Path

    def http(self, name: str, method: str, path: str, body: Any = None) -> Any:
        headers = {"authorization": f"Bearer {token(name)}"}
        return self.web.request(method, URL + path, json=body, headers=headers)

    def page(self, name: str, path: str, form: dict[str, str]) -> None:
        """Send a form of the page in the session of an identity."""
        self.web.cookies.clear()
        origin = {"origin": str(self.web.base_url)}
        signed = self.web.post("/login", data={"token": token(name)}, headers=origin, follow_redirects=False)
        assert signed.status_code == 303, signed.text
        done = self.web.post(path, data=form, headers=origin, follow_redirects=False)
        assert done.status_code == 303, done.text

    def cli(self, name: str, *args: str) -> Any:
        line = [*args, "--server", self.two.address]
        return CliRunner().invoke(commands, line, env={"WEIGHBRIDGE_TOKEN": token(name)})

    def refs(self) -> dict[str, int]:
        with client(self.two, "root") as there:
            return there.refs(MODEL)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return tiny_folder(tmp_path_factory.mktemp("hf") / "model")


@pytest.fixture
def fleet(tmp_path: Path, source: TinyModel) -> Iterator[Fleet]:
    policy = policy_file(
        tmp_path,
        *(identity(name, scopes, token=token(name)) for name, scopes in SCOPES.items()),
        identity("guest", [f"tag:{MODEL}@prod", f"approve:{MODEL}@prod"], anybody=True),
    )
    audit = tmp_path / "audit.jsonl"
    with (
        running_service(tmp_path / "store", policy=policy, policy_look=0.0, audit=audit) as one,
        running_service(tmp_path / "store", policy=policy, policy_look=0.0) as two,
    ):
        with TrainerClient(one.address, credentials=Credentials(token=token("root"))) as trainer:
            trainer.register_model(MODEL, source.folder)
            for step in (1, 2, 3):
                trainer.push_folder(MODEL, source.folder, step=step).wait(timeout=60)
            trainer.set_ref(MODEL, "prod", 1)
            trainer.protect_ref(MODEL, "prod", approvals=1)
        exports = Exports(one.service)
        app = create_app(one.service, exports, one.metrics, one.health)
        yield Fleet(one, two, TestClient(app, raise_server_exceptions=False), audit, policy)
        exports.close()


def asked(fleet: Fleet, version: int = 2, by: str = "ann", **said: Any) -> RefRequest:
    with client(fleet.one, by) as there:
        found = there.request_ref(MODEL, "prod", version, **said)
    assert found.pending
    return found


def approve(fleet: Fleet, by: str, request: RefRequest) -> RefRequest:
    with client(fleet.two, by) as there:
        return there.approve_ref(MODEL, "prod", request.request_id)


@pytest.mark.smoke
def test_a_ref_moves_when_another_identity_approves_at_any_replica(fleet: Fleet) -> None:
    request = asked(fleet, note="the eval is fine")
    assert fleet.refs()["prod"] == 1
    with client(fleet.two, "puller") as there:
        assert there.protections(MODEL) == [Protection("prod", 1)]
        assert there.ref_requests(MODEL)[-1] == request, "whoever may look sees it"
    assert (request.by, request.note, request.missing) == ("ann", "the eval is fine", 1)
    done = approve(fleet, "bob", request)
    assert (done.state, done.previous, [each.by for each in done.approvals]) == ("done", 1, ["bob"])
    assert fleet.refs()["prod"] == 2
    with client(fleet.one, "root") as there:
        assert there.ref_requests(MODEL)[-1] == done, "it is remembered who asked and who approved"


@pytest.mark.parametrize("face", ["grpc", "http", "page"])
def test_the_audit_log_says_what_each_call_has_changed(fleet: Fleet, face: str) -> None:
    def lines(number: int) -> list[dict[str, Any]]:
        """The fields of the newest lines that describe the change."""
        wanted = ("identity", "result", "version", "before", "after", "state")
        found = [json.loads(line) for line in fleet.audit.read_text().splitlines()]
        return [{key: line[key] for key in wanted if key in line} for line in found[-number:]]

    if face == "grpc":
        request = asked(fleet, 2)
        with client(fleet.one, "bob") as there:
            there.approve_ref(MODEL, "prod", request.request_id)
    elif face == "http":
        request = fleet.http("ann", "POST", "/prod/requests", {"version": "2"}).json()
        fleet.http("bob", "POST", f"/prod/requests/{request['request_id']}/approve", {})
    else:
        for name, path, form in (("ann", "move", {"version": "2"}), ("bob", "requests/{}/approve", {})):
            with client(fleet.one, "root") as there:
                pending = there.ref_requests(MODEL)[-1:]
            path = path.format(pending[0].request_id if pending else "")
            fleet.page(name, f"/models/{MODEL}/refs/prod/{path}", form)
    assert lines(2) == [
        {"identity": "ann", "result": "OK", "version": 2, "before": 1, "after": 1, "state": "pending"},
        {"identity": "bob", "result": "OK", "version": 2, "before": 1, "after": 2, "state": "done"},
    ]
    if face != "grpc":
        fleet.http("boss", "PUT", "/prod", {"version": "3"})
        assert lines(1) == [{"identity": "boss", "result": "HTTP 409", "version": 3, "state": "refused"}]
        return
    with client(fleet.one, "puller") as there, pytest.raises(PermissionDenied):
        there.set_ref(MODEL, "prod", "latest")
    with client(fleet.one, "boss") as there:
        there.set_gate(MODEL, Gate(approval_required=True))
        there.protect_ref(MODEL, "prod", approvals=2)
    no, yes = {"approval_required": False}, {"approval_required": True}
    alike = {"allow_nonfinite": False}
    assert lines(3) == [
        {"identity": "puller", "result": "PERMISSION_DENIED", "version": "latest", "state": "refused"},
        {"identity": "boss", "result": "OK", "before": no | alike, "after": yes | alike, "state": "done"},
        {
            "identity": "boss",
            "result": "OK",
            "before": {"approvals": 1},
            "after": {"approvals": 2},
            "state": "done",
        },
    ]


def test_moving_back_and_deleting_take_the_same(fleet: Fleet) -> None:
    approve(fleet, "bob", asked(fleet, 2))
    back = asked(fleet, 1)
    assert fleet.refs()["prod"] == 2
    approve(fleet, "bob", back)
    with client(fleet.one, "ann") as there:
        gone = there.request_ref_deletion(MODEL, "prod")
    assert fleet.refs()["prod"] == 1
    approve(fleet, "bob", gone)
    assert "prod" not in fleet.refs()
    assert asked(fleet, 3).pending, "protection is of the name"


def test_nobody_approves_their_own_request(fleet: Fleet) -> None:
    request = asked(fleet)
    with pytest.raises(PermissionDenied, match="ann made this request"):
        approve(fleet, "ann", request)
    answer = fleet.http("ann", "POST", f"/prod/requests/{request.request_id}/approve", {})
    assert answer.status_code == 403
    assert fleet.refs()["prod"] == 1


@pytest.mark.parametrize("name", ["wide", "root", "puller", "bob"])
def test_only_a_scope_that_names_the_ref_moves_it(fleet: Fleet, name: str) -> None:
    with client(fleet.one, name) as there:
        for act in (
            lambda: there.set_ref(MODEL, "prod", 2),
            lambda: there.request_ref(MODEL, "prod", 2),
            lambda: there.delete_ref(MODEL, "prod"),
            lambda: there.request_ref_deletion(MODEL, "prod"),
            lambda: there.unprotect_ref(MODEL, "prod"),
        ):
            with pytest.raises(PermissionDenied):
                act()
    assert fleet.http(name, "PUT", "/prod", {"version": 2}).status_code == 403
    assert fleet.http(name, "DELETE", "/prod").status_code == 403
    assert fleet.http(name, "POST", "/prod/requests", {"version": 2}).status_code == 403
    assert fleet.http(name, "DELETE", "/prod/protection").status_code == 403


@pytest.mark.parametrize("name", ["wide", "root", "puller"])
def test_only_a_scope_that_names_the_ref_approves(fleet: Fleet, name: str) -> None:
    request = asked(fleet)
    with pytest.raises(PermissionDenied) as refused:
        approve(fleet, name, request)
    assert f"approve:{MODEL}@prod" in refused.value.fix
    path = f"/prod/requests/{request.request_id}/approve"
    assert fleet.http(name, "POST", path, {}).status_code == 403
    assert fleet.http(name, "DELETE", f"/prod/requests/{request.request_id}").status_code == 403
    assert fleet.refs()["prod"] == 1


def test_an_approval_counts_no_longer_than_its_giver_may_approve(fleet: Fleet) -> None:
    fleet.http("boss", "PUT", "/prod/protection", {"approvals": 2})
    request = asked(fleet)
    assert approve(fleet, "bob", request).missing == 1
    policy = fleet.policy.read_text()

    def missing() -> int:
        (there,) = [each for each in fleet.http("ann", "GET", "").json()["requests"] if each["state"] == "pending"]
        return int(there["missing"])

    fleet.policy.write_text(policy.replace('"approve:acme/*@prod"', f'"pull:{MODEL}"'))
    assert missing() == 2
    assert approve(fleet, "cid", request).missing == 1
    assert fleet.refs()["prod"] == 1
    # a request has no effect once its requester has lost the scope for it
    fleet.policy.write_text(policy.replace(f'"tag:{MODEL}@prod", "approve:{MODEL}@prod"', f'"look:{MODEL}"', 1))
    with pytest.raises(FailedPrecondition, match="ann made this request, and no longer has a scope"):
        approve(fleet, "cid", request)
    fleet.policy.write_text(policy)
    assert approve(fleet, "cid", request).state == "done", "each counts again"
    assert fleet.refs()["prod"] == 2


def test_whoever_shows_nothing_is_nobodys_second_identity(fleet: Fleet) -> None:
    request = asked(fleet)
    with (
        client(fleet.two, "") as guest,
        pytest.raises(FailedPrecondition, match="the caller is not identified"),
    ):
        guest.approve_ref(MODEL, "prod", request.request_id)
    with (
        client(fleet.one, "") as guest,
        pytest.raises(FailedPrecondition, match="the caller is not identified"),
    ):
        guest.request_ref(MODEL, "prod", 3)
    assert fleet.refs()["prod"] == 1


def test_without_a_policy_nothing_is_protected_and_what_is_stays_so(tmp_path: Path, fleet: Fleet) -> None:
    store = fleet.one.service.config.store
    with running_service(Path(str(store))) as open_to_all, Client(open_to_all.address) as anybody:
        with pytest.raises(FailedPrecondition, match="the caller is not identified") as refused:
            anybody.protect_ref(MODEL, "other", approvals=1)
        assert "--policy" in refused.value.fix
        for act in (
            lambda: anybody.set_ref(MODEL, "prod", 2),
            lambda: anybody.delete_ref(MODEL, "prod"),
            lambda: anybody.unprotect_ref(MODEL, "prod"),
        ):
            with pytest.raises(PermissionDenied):
                act()
        with pytest.raises(FailedPrecondition, match="protected: prod"):
            anybody.delete_model(MODEL)
        with pytest.raises(FailedPrecondition, match="is the target of prod"):
            anybody.delete_version(MODEL, 1)
        anybody.set_ref(MODEL, "other", 2)


def test_an_approval_approves_what_was_looked_at_and_nothing_that_came_later(fleet: Fleet) -> None:
    first = asked(fleet, 2)
    second = asked(fleet, 3)
    with pytest.raises(FailedPrecondition, match="was superseded by ann"):
        approve(fleet, "bob", first)
    approve(fleet, "bob", second)
    assert fleet.refs()["prod"] == 3
    withdrawn = asked(fleet, 1)
    with client(fleet.one, "boss") as there:
        assert there.withdraw_ref(MODEL, "prod", withdrawn.request_id).state == "withdrawn"
    with pytest.raises(FailedPrecondition, match="was withdrawn by boss"):
        approve(fleet, "bob", withdrawn)
    assert fleet.refs()["prod"] == 3


def test_approvals_that_race_at_two_replicas_carry_a_request_out_once(fleet: Fleet) -> None:
    with client(fleet.one, "root") as there:
        there.protect_ref(MODEL, "prod", approvals=2)
    together = threading.Barrier(4)
    found: list[Any] = []

    def give(running: RunningService, by: str, request: RefRequest) -> None:
        with client(running, by) as there:
            together.wait(30)
            found.append(there.approve_ref(MODEL, "prod", request.request_id))

    for version in (2, 3, 1, 2):
        request = asked(fleet, version)
        threads = [
            threading.Thread(target=give, args=(running, by, request))
            for running in (fleet.one, fleet.two)
            for by in ("bob", "cid")
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        with client(fleet.one, "root") as there:
            last = there.ref_requests(MODEL)[-1]
        assert (last.request_id, last.state) == (request.request_id, "done")
        assert sorted(each.by for each in last.approvals) == ["bob", "cid"]
        assert fleet.refs()["prod"] == version
    assert len(found) == 16, "each was answered"


def test_a_request_and_an_approval_whose_answers_are_lost_are_made_once(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost: list[str] = []

    def losing(name: str) -> None:
        carry_out = getattr(fleet.one.service.gates, name)

        def answer(*args: Any, **said: Any) -> None:
            carry_out(*args, **said)
            lost.append(name)
            raise Unavailable("the answer is lost")

        monkeypatch.setattr(fleet.one.service.gates, name, answer)

    losing("move")
    losing("approve_ref")
    addresses = f"{fleet.one.address},{fleet.two.address}"
    with Client(addresses, credentials=Credentials(token=token("ann"))) as there:
        request = there.request_ref(MODEL, "prod", 2)
    with Client(addresses, credentials=Credentials(token=token("bob"))) as there:
        done = there.approve_ref(MODEL, "prod", request.request_id)
    assert (done.state, lost) == ("done", ["move", "approve_ref"])
    assert fleet.refs()["prod"] == 2
    with client(fleet.two, "root") as there:
        assert [(each.action, each.state) for each in there.ref_requests(MODEL)] == [
            ("protect", "done"),
            ("move", "done"),
        ]
        assert [each.by for each in there.ref_requests(MODEL)[-1].approvals] == ["bob"]


def test_who_asks_for_nothing_by_name_is_refused_instead_of_made_to_wait(fleet: Fleet) -> None:
    with client(fleet.one, "ann") as there, pytest.raises(FailedPrecondition, match="another identity") as no:
        there.set_ref(MODEL, "prod", 2)
    assert "request_ref" in no.value.fix
    old = model_service_pb2.SetRefRequest(model=MODEL, ref="prod", version="2").SerializeToString()
    with rpc.open_channel(fleet.one.address) as channel:
        call: Any = channel.unary_unary("/weighbridge.v1.ModelService/SetRef", None, None)
        with pytest.raises(grpc.RpcError) as told:
            call(old, metadata=(("authorization", f"Bearer {token('ann')}"),), timeout=20)
    assert told.value.code() is grpc.StatusCode.FAILED_PRECONDITION  # type: ignore[attr-defined]
    assert fleet.http("ann", "PUT", "/prod", {"version": 2}).status_code == 409
    assert fleet.http("ann", "DELETE", "/prod").status_code == 409
    assert not [each for each in fleet.http("ann", "GET", "").json()["requests"] if each["action"] == "move"]


def test_it_is_so_over_http(fleet: Fleet) -> None:
    pending = fleet.http("ann", "POST", "/prod/requests", {"version": 2, "note": "fine"})
    assert (pending.status_code, pending.json()["state"], pending.json()["missing"]) == (202, "pending", 1)
    request_id = pending.json()["request_id"]
    again = fleet.http("ann", "POST", "/prod/requests", {"version": 2})
    assert (again.status_code, again.json()["request_id"]) == (202, request_id)
    shown = fleet.http("puller", "GET", "").json()
    assert (shown["refs"]["prod"], shown["protections"]) == (1, [{"ref": "prod", "approvals": 1}])
    assert shown["requests"][-1] == pending.json()
    done = fleet.http("bob", "POST", f"/prod/requests/{request_id}/approve", {"note": "yes"})
    assert (done.status_code, done.json()["state"], done.json()["approvals"][0]["note"]) == (
        200,
        "done",
        "yes",
    )
    assert fleet.refs()["prod"] == 2
    gone = fleet.http("ann", "POST", "/prod/requests", {"action": "delete"}).json()
    assert fleet.http("ann", "DELETE", f"/prod/requests/{gone['request_id']}").json()["state"] == "withdrawn"
    raised = fleet.http("boss", "PUT", "/prod/protection", {"approvals": 2}).json()
    assert raised == {"protections": [{"ref": "prod", "approvals": 2}]}
    assert fleet.http("boss", "PUT", "/prod/protection", {"approvals": 1}).status_code == 409
    assert fleet.http("boss", "PUT", "/latest/protection", {"approvals": 1}).status_code == 400
    for body in ({"approvals": 17}, {"approvals": True}, {"approval": 1}):
        assert fleet.http("boss", "PUT", "/prod/protection", body).status_code == 400, body
    free = fleet.http("boss", "DELETE", "/prod/protection")
    assert free.status_code == 202
    for by in ("bob", "cid"):
        last = fleet.http(by, "POST", f"/prod/requests/{free.json()['request_id']}/approve", {})
    assert (last.status_code, last.json()["state"]) == (200, "done")
    assert fleet.http("wide", "PUT", "/prod", {"version": 3}).status_code == 200


def test_the_command_line_says_what_to_do_and_does_it(fleet: Fleet) -> None:
    told = fleet.cli("ann", "tag", f"{MODEL}@2", "prod", "--note", "fine")
    assert told.exit_code == 0, told.output
    assert "asked for prod to name version 2; it needs the approval of another identity" in told.stdout
    line = told.stdout.splitlines()[-1].split()
    assert line[:4] == ["weighbridge", "approve", f"{MODEL}@2", "prod"]
    assert "prod, whose changes need a scope that names it and 1 approval" in fleet.cli("bob", "show", MODEL).stdout
    shown = fleet.cli("bob", "show", MODEL).stdout
    assert "prod to name version 2, by ann (fine), until" in shown
    assert " ".join(line) in shown
    wrong = fleet.cli("bob", "approve", f"{MODEL}@3", "prod")
    assert wrong.exit_code == 1
    assert "ann has requested prod to name version 2" in wrong.stderr
    unsaid = fleet.cli("bob", "approve", MODEL, "prod")
    assert (unsaid.exit_code, "to approve it: weighbridge approve" in unsaid.stderr) == (1, True)
    done = fleet.cli("bob", *line[1:])
    assert (done.exit_code, done.stdout) == (0, f"{MODEL}: prod names version 2\n")
    assert json.loads(fleet.cli("bob", *line[1:], "--json").stdout)["state"] == "done", "once more"
    pending = json.loads(fleet.cli("ann", "tag", MODEL, "prod", "--delete", "--json").stdout)
    assert (pending["state"], pending["number"], pending["request"]["action"]) == ("pending", None, "delete")
    assert "delete of prod is withdrawn" in fleet.cli("ann", "tag", MODEL, "prod", "--withdraw").stdout
    nothing = fleet.cli("bob", "approve", f"{MODEL}@2", "prod")
    assert (nothing.exit_code, "there is no pending request for the ref prod" in nothing.stderr) == (1, True)
    gate = fleet.cli("boss", "gate", MODEL, "--unprotect", "prod")
    assert "asked for unprotect of prod" in gate.stdout
    assert fleet.cli("bob", *gate.stdout.splitlines()[-1].split()[1:]).exit_code == 0
    assert json.loads(fleet.cli("boss", "gate", MODEL, "--json").stdout)["protections"] == []
    moved = json.loads(fleet.cli("ann", "tag", f"{MODEL}@3", "prod", "--json").stdout)
    assert (moved["state"], moved["number"]) == ("done", 3)


def test_everybody_who_had_a_part_in_it_is_in_the_audit_log(fleet: Fleet) -> None:
    request = asked(fleet)
    with client(fleet.one, "wide") as there, pytest.raises(PermissionDenied):
        there.approve_ref(MODEL, "prod", request.request_id)
    with client(fleet.one, "ann") as there, pytest.raises(PermissionDenied):
        there.approve_ref(MODEL, "prod", request.request_id)
    with client(fleet.one, "bob") as there:
        there.approve_ref(MODEL, "prod", request.request_id)
    lines = [json.loads(line) for line in fleet.audit.read_text().splitlines()]
    found = [(each["identity"], each["action"], each["result"]) for each in lines if each["ref"] == "prod"]
    assert found[-4:] == [
        ("ann", "SetRef", "OK"),
        ("wide", "ApproveRef", "PERMISSION_DENIED"),
        ("ann", "ApproveRef", "PERMISSION_DENIED"),
        ("bob", "ApproveRef", "OK"),
    ]
    assert all(each["model"] == MODEL for each in lines if each["ref"] == "prod")


def test_a_late_approval_approves_nothing_that_was_given_the_name_of_a_forgotten_request(
    fleet: Fleet,
) -> None:
    looked_at = asked(fleet, 2, request_id="release")
    with client(fleet.one, "ann") as there:
        for _ in range(REMEMBERED_REQUESTS + 1):
            there.withdraw_ref(MODEL, "prod", there.request_ref(MODEL, "prod", 3).request_id)
        again = there.request_ref(MODEL, "prod", 3, request_id="release")
        assert again.pending
    with pytest.raises(NotFound):
        approve(fleet, "bob", looked_at)
    assert fleet.refs()["prod"] == 1
