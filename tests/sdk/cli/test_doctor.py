"""`weighbridge doctor` on a real service, with and without TLS, and on stores that keep conditions and that do not."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tests.sdk.cli.test_asking import answering
from tests.support.identities import Authority
from tests.support.services import running_service, service_process
from weighbridge._cli import commands
from weighbridge._core.checks import CheckStatus
from weighbridge_service.health.doctor import examine_store
from weighbridge_storage.stores.local import LocalStore
from weighbridge_storage.stores.objects import PutMode


@contextmanager
def served(folder: Path, *more: object) -> Iterator[tuple[str, str]]:
    """A service in a process of its own; its gRPC and its HTTP address."""
    with service_process(folder / "store", "--memory-budget", "256MiB", *more) as service:
        yield service.address, re.sub("https?://", "", service.url)


def doctor(*args: object, **environment: object) -> Result:
    clean = dict.fromkeys(("WEIGHBRIDGE_HTTP", "WEIGHBRIDGE_SERVER", "WEIGHBRIDGE_CA", "WEIGHBRIDGE_TOKEN"))
    env = {**clean, **{name: str(value) for name, value in environment.items()}}
    return CliRunner(env=env).invoke(commands, ["doctor", *map(str, args)])


def checks(result: Result) -> dict[str, dict[str, Any]]:
    found = json.loads(result.stdout)["checks"]
    return {each["name"]: each for each in found}


def statuses(found: dict[str, dict[str, Any]], names: Sequence[str]) -> dict[str, str]:
    return {name: found[name]["status"] if name in found else "absent" for name in names}


def test_a_service_of_this_machine_is_found_well_with_all_that_leads_to_it(tmp_path: Path) -> None:
    with served(tmp_path) as (grpc, http):
        result = doctor("--server", grpc, "--json")
        lines = doctor("--server", grpc, "--http", http).stdout.splitlines()
    assert result.exit_code == 0, result.stdout
    names = [
        *("service", "store-reachable", "store-conditions", "clock", "memory budget", "clock of the service"),
        *("port of gRPC", "port of streams of weights", "local lane", "shared memory", "version of torch"),
    ]
    assert statuses(checks(result), names) == dict.fromkeys(names, "ok")
    assert any(re.match(r"ok +local lane +\S+ answers", line) for line in lines), lines


def test_a_token_goes_where_a_service_says_that_it_answers_and_to_no_port_that_is_only_usual(
    tmp_path: Path,
) -> None:
    with (
        answering(lambda connection: connection.sendall(b"HTTP/1.1 404 Not Found\r\n\r\n")) as (
            usual,
            asked,
        ),
        running_service(tmp_path / "store", http=usual) as told,
        running_service(tmp_path / "other") as silent,
    ):
        here = {"WEIGHBRIDGE_TOKEN": "a-token"}
        found = checks(doctor("--server", silent.address, "--json", **here))
        assert (found["service"]["status"], "--http" in found["service"]["fix"]) == ("warn", True)
        assert CliRunner(env=here).invoke(commands, ["top", "--once", "--server", silent.address]).exit_code == 0
        assert asked == []
        found = checks(doctor("--server", told.address, "--json", **here))
        assert found["service"]["status"] == "fail"
        assert b"a-token" in asked[0]
        assert CliRunner(env=here).invoke(commands, ["top", "--once", "--server", told.address]).exit_code == 0
        assert b"GET /v1/memory" in asked[1]


def test_a_lane_that_a_container_does_not_see_is_warned_of(tmp_path: Path) -> None:
    lane = tmp_path / "lane" / "lane.sock"
    lane.parent.mkdir(mode=0o700)
    with served(tmp_path, "--local-socket", lane) as (grpc, http):
        lane.rename(lane.parent / "elsewhere.sock")
        found = checks(doctor("--server", grpc, "--http", http, "--json"))
    assert found["local lane"]["status"] == "warn"
    assert "mount the folder" in found["local lane"]["fix"]


def test_certificates_are_checked_at_both_ports(tmp_path: Path) -> None:
    authority, other = Authority(tmp_path / "ca"), Authority(tmp_path / "other")
    files = authority.tls()
    with served(tmp_path, "--tls-cert", files.certificate, "--tls-key", files.key) as (grpc, http):
        named = ("--server", grpc, "--http", http, "--json")
        fine = checks(doctor(*named, WEIGHBRIDGE_CA=authority.ca))
        strange = doctor(*named, WEIGHBRIDGE_CA=other.ca)
        plain = doctor(*named)
        by_name = checks(
            doctor("--server", f"localhost:{grpc.rpartition(':')[2]}", "--json", WEIGHBRIDGE_CA=authority.ca)
        )
    for address in (grpc, http):
        at = fine[f"certificate of {address}"]
        assert at["status"] == "ok"
        assert "127.0.0.1, localhost" in at["what"] or "localhost, 127.0.0.1" in at["what"]
    assert strange.exit_code == 1
    refused = checks(strange)[f"certificate of {grpc}"]
    assert (refused["status"], "WEIGHBRIDGE_CA" in refused["fix"]) == ("fail", True)
    assert plain.exit_code == 1  # it does not speak HTTP without TLS
    assert by_name[f"certificate of localhost:{grpc.rpartition(':')[2]}"]["status"] == "ok"


def test_a_certificate_for_another_name_is_refused(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "ca")
    certificate, key = authority.issue("node7.example")
    with served(tmp_path, "--tls-cert", certificate, "--tls-key", key) as (grpc, http):
        found = checks(doctor("--server", grpc, "--http", http, "--json", WEIGHBRIDGE_CA=authority.ca))
    at = found[f"certificate of {grpc}"]
    assert (at["status"], "name" in at["fix"]) == ("fail", True)


def test_an_address_at_which_nothing_listens_fails(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    result = doctor("--server", f"127.0.0.1:{port}", "--scratch", tmp_path, "--json")
    assert result.exit_code == 1
    found = checks(result)
    assert statuses(found, ["port of gRPC", "local lane"]) == {"port of gRPC": "fail", "local lane": "absent"}
    assert "memory budget" in found, "without a service, what this machine allows one"


def test_a_store_is_checked_before_a_service_is_started_and_left_as_it_was(tmp_path: Path) -> None:
    store = tmp_path / "store"
    store.mkdir()
    result = doctor("--store", store, "--scratch", tmp_path, "--json")
    names = ["store-reachable", "store-writable", "store-conditions", "clock"]
    assert statuses(checks(result), names) == dict.fromkeys(names, "ok")
    left = [path for path in store.rglob("*") if path.is_file() and ".locks" not in path.parts]
    assert left == []


def test_a_store_that_ignores_conditions_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As some S3 servers do; the real one is refused at start: tests/storage/stores."""
    put = LocalStore.put

    def careless(self: LocalStore, key: str, data: Any, *, mode: PutMode) -> str:
        return put(self, key, data, mode="overwrite")

    monkeypatch.setattr(LocalStore, "put", careless)
    found = {check.name: check for check in examine_store(tmp_path, 900.0)}
    assert found["store-conditions"].status is CheckStatus.FAIL
    assert "If-None-Match" in found["store-conditions"].fix
    assert found["clock"].status is CheckStatus.OK


def test_a_store_that_cannot_be_used_fails_with_its_location() -> None:
    (found,) = examine_store("s3://bucket-that-is-not-there/prefix?endpoint=http://127.0.0.1:1", 900.0)[-1:]
    assert found.status is CheckStatus.FAIL
    assert "s3://bucket-that-is-not-there/prefix" in found.what
