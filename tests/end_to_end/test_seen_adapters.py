"""Do HTTP and the page show adapters and their bases, and does each tenant see its own adapters alone, at each door?"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from click.testing import CliRunner

from tests.end_to_end.test_adapters import ALICE, BASE, CONFIG, adapted, peft
from tests.support.identities import identity, policy_file
from tests.support.reference import tiny_model
from tests.support.services import RunningService, running_service
from weighbridge import Credentials, FailedPrecondition, NotFound, PermissionDenied, TrainerClient
from weighbridge._cli import commands
from weighbridge._core.metadata import BASE as BASE_KEY
from weighbridge._core.metadata import BaseVersion
from weighbridge_service.api.http.app import create_app
from weighbridge_service.exports.jobs import Exports
from weighbridge_service.server import HttpServer

BOB = "acme/bob-one"
SECRET = (BOB, "bob-one")
assert peft


@dataclass
class Tenants:
    """A service with a base of two versions, on which alice and bob have an adapter each; the base's owner may look at
    none of them.
    """

    running: RunningService
    url: str

    def client(self, name: str) -> TrainerClient:
        return TrainerClient(self.running.address, credentials=Credentials(token=name))

    def get(self, name: str, path: str, code: int = 200) -> Any:
        answer = self.ask(name, "GET", path)
        assert answer.status_code == code, answer.text
        return answer.json() if "json" in answer.headers["content-type"] else answer.text

    def ask(self, name: str, method: str, path: str) -> Any:
        headers = {"Authorization": f"Bearer {name}"}
        return httpx.request(method, self.url + path, headers=headers, timeout=30)


@contextmanager
def tenants_of(folder: Path) -> Iterator[Tenants]:
    policy = policy_file(
        folder,
        identity("root", ["admin"], token="root"),
        identity("owner", [f"push:{BASE}", f"pull:{BASE}", f"manage:{BASE}", "observe"], token="owner"),
        identity("alice", ["push:acme/alice*", "pull:acme/alice*", f"pull:{BASE}"], token="alice"),
        identity("bob", ["push:acme/bob*", "pull:acme/bob*", f"pull:{BASE}"], token="bob"),
    )
    base = folder / "base"
    tiny_model(CONFIG, seed=1).save_pretrained(base)
    with running_service(folder / "store", policy=policy) as running:
        exports = Exports(running.service)
        server = HttpServer("127.0.0.1:0", 1024)
        server.start(create_app(running.service, exports, running.metrics, running.health))
        tenants = Tenants(running, f"http://{server.address}")
        with tenants.client("owner") as owner:
            for step in (1, 2):
                owner.import_folder(BASE, base, step=step).wait(timeout=60)
        for name, model, number in (("alice", ALICE, 1), ("alice", ALICE, 2), ("bob", BOB, 1)):
            with tenants.client(name) as client:
                client.push_adapter(model, adapted(), base=f"{BASE}@{number}", step=number).wait(timeout=60)
        yield tenants
        running.service.catalog.stopping.set()
        server.stop()
        exports.close()


@pytest.fixture(scope="module")
def tenants(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tenants]:
    with tenants_of(tmp_path_factory.mktemp("tenants")) as found:
        yield found


def test_http_says_the_base_of_a_version_and_the_adapters_of_a_model(tenants: Tenants) -> None:
    with tenants.client("root") as root:
        digest = BaseVersion.of(root.version(ALICE, 1).metadata)
    assert digest is not None
    version = tenants.get("root", f"/v1/models/{ALICE}/versions/1")
    assert version["base"] == {"model": BASE, "number": 1, "digest": digest.digest}
    assert tenants.get("root", f"/v1/models/{BASE}/versions/1")["base"] is None
    assert tenants.get("root", f"/v1/models/{BASE}")["adapters"] == [ALICE, BOB]
    assert tenants.get("root", f"/v1/models/{ALICE}")["base"] == f"{BASE}@2"
    listed = f"/v1/models/{BASE}/adapters"
    assert tenants.get("root", listed) == {
        "adapters": [{"model": ALICE, "versions": [1, 2]}, {"model": BOB, "versions": [1]}]
    }
    assert tenants.get("root", f"{listed}?version=2") == {"adapters": [{"model": ALICE, "versions": [2]}]}
    assert tenants.get("root", f"{listed}?version=latest") == tenants.get("root", f"{listed}?version=2")
    assert [each["model"] for each in tenants.get("root", f"{listed}?limit=1")["adapters"]] == [ALICE]
    assert [each["model"] for each in tenants.get("root", f"{listed}?after={ALICE}")["adapters"]] == [BOB]
    tenants.get("root", f"{listed}?version=9", code=404)
    assert tenants.get("root", f"/v1/models/{ALICE}/adapters") == {"adapters": []}
    described = tenants.get("root", "/openapi.json")
    assert "/v1/models/{namespace}/{name}/adapters" in described["paths"]
    assert "base" in described["components"]["schemas"]["VersionOut"]["properties"]


def test_the_page_links_an_adapter_with_its_base_both_ways(tenants: Tenants) -> None:
    link = f'href="/models/{BASE}/versions/2"'
    index = tenants.get("root", "/")
    assert "2 adapters" in index
    assert f"adapter on <a {link}" in index
    model = tenants.get("root", f"/models/{BASE}")
    assert f'href="/models/{ALICE}"' in model
    assert f'href="/models/{BOB}"' in model
    assert link in tenants.get("root", f"/models/{ALICE}")
    assert f'href="/models/{BASE}/versions/1"' in tenants.get("root", f"/models/{ALICE}/versions/1")


def test_a_tenant_pushes_pulls_and_lists_adapters_of_its_own_alone(tenants: Tenants) -> None:
    with tenants.client("alice") as alice:
        assert {each.name for each in alice.models()} == {BASE, ALICE}
        assert alice.model(BASE).adapters == (ALICE,)
        with pytest.raises((PermissionDenied, NotFound)):
            alice.push_adapter("acme/bob-two", adapted(), base=f"{BASE}@1", step=1)
        for refused in (
            lambda: alice.version(BOB, 1),
            lambda: alice.versions(BOB),
            lambda: alice.model(BOB),
            lambda: alice.model_files(BOB, 1),
            lambda: alice.delete_version(BOB, 1, force=True),
        ):
            with pytest.raises((PermissionDenied, NotFound)):
                refused()
        with pytest.raises(NotFound) as unknown:  # what was perhaps meant are models that it may look at
            alice.model("acme/alice-bob-one")
        assert BOB not in f"{unknown.value}{unknown.value.fix}"


def test_no_door_names_another_tenants_adapter(tenants: Tenants) -> None:
    for name in ("alice", "owner"):
        for path in (
            "/",
            f"/models/{BASE}",
            f"/models/{BASE}/versions/1",
            "/v1/models?limit=100",
            f"/v1/models/{BASE}",
            f"/v1/models/{BASE}/adapters",
            f"/v1/models/{BASE}/adapters?version=1",
            f"/v1/models/{BASE}/versions",
            f"/v1/models/{BASE}/versions/1",
            f"/v1/models/{BASE}/refs",
            "/v1/engines",
            "/v1/exports",
            "/v1/usage",
            f"/api/models/{BASE}",
        ):
            answer = tenants.ask(name, "GET", path)
            assert answer.status_code == 200, (path, answer.text)
            assert not any(each in answer.text for each in SECRET), (name, path)
    for path in (
        f"/v1/models/{BOB}",
        f"/v1/models/{BOB}/versions/1",
        f"/v1/models/{BOB}/adapters",
        f"/models/{BOB}",
    ):
        answer = tenants.ask("alice", "GET", path)
        assert answer.status_code in (403, 404), (path, answer.text)
    for word in ("models", "models --json"):
        done = CliRunner().invoke(
            commands,
            [*word.split(), "--server", tenants.running.address],
            env={"WEIGHBRIDGE_TOKEN": "alice"},
        )
        assert done.exit_code == 0, done.output
        assert ALICE in done.output
        assert BOB not in done.output
    done = CliRunner().invoke(
        commands,
        ["versions", ALICE, "--where", f"{BASE_KEY}={BASE}@1", "--json", "--server", tenants.running.address],
        env={"WEIGHBRIDGE_TOKEN": "alice"},
    )
    assert [each["number"] for each in json.loads(done.output)] == [1], done.output
    for name in ("alice", "bob"):  # names of models are labels there: it takes a scope of its own
        assert tenants.ask(name, "GET", "/metrics").status_code == 403


def test_what_a_base_cannot_be_deleted_for_is_counted_and_not_named(tmp_path: Path) -> None:
    with tenants_of(tmp_path) as tenants:
        refused = tenants.ask("owner", "DELETE", f"/v1/models/{BASE}/versions/1")
        assert refused.status_code == 409
        assert "2 adapters that you may not see" in refused.text
        refused = tenants.ask("owner", "DELETE", f"/v1/models/{BASE}?confirm={BASE}")
        assert "adapters that you may not see" in refused.text
        assert not any(each in refused.text for each in (ALICE, BOB))
        with tenants.client("owner") as owner, pytest.raises(FailedPrecondition) as error:
            owner.delete_version(BASE, 1)
        assert BOB not in str(error.value)
        report = tenants.ask("owner", "POST", f"/v1/models/{BASE}/collect")
        assert BOB not in report.text
        deleted = tenants.ask("owner", "DELETE", f"/v1/models/{BASE}/versions/1?force=true")
        assert deleted.status_code == 200, deleted.text
        gone = tenants.get("alice", f"/v1/models/{ALICE}/versions/1")
        assert gone["error"] == f"its base {BASE}@1 was deleted"
        assert gone["base"]["number"] == 1
        assert "was deleted" in tenants.get("alice", f"/models/{ALICE}/versions/1")
