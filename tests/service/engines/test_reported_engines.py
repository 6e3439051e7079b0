"""Does a running service know its engines by what their agents report, and show each to those alone who may look at its
model?
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.service.api.http.web import Web
from tests.support.identities import identity, policy_file
from tests.support.killable_service import KillableService
from tests.support.raw_clients import TinyModel, tiny_folder
from tests.support.services import RunningService, running_service
from tests.support.waiting import eventually
from weighbridge import Client, Credentials, Engine, EngineClient, EngineReporter, Retention, TrainerClient
from weighbridge._cli import commands
from weighbridge._clients.calls.engine_calls import report_engine
from weighbridge._core.engines.facts import EngineReport, Reported
from weighbridge.errors import InvalidArgument, NotFound, PermissionDenied, WeighbridgeError
from weighbridge_service.access import tokens

MODEL = "acme/tiny"
REPORT = EngineReport("e1", MODEL, "vllm", "http://node7:8000", "latest", 1, state="serving", beat=1)


@pytest.fixture
def source(tmp_path: Path) -> TinyModel:
    return tiny_folder(tmp_path / "hf")


@pytest.fixture
def running(tmp_path: Path, source: TinyModel) -> Iterator[RunningService]:
    """A service with two versions."""
    with running_service(tmp_path / "store", report_every=0.2) as service:
        with TrainerClient(service.address) as trainer:
            trainer.import_folder(MODEL, source.folder).wait(timeout=60)
            trainer.push_folder(MODEL, source.folder, step=2).wait(timeout=60)
        yield service


@pytest.fixture
def client(running: RunningService) -> Iterator[EngineClient]:
    with EngineClient(running.address) as found:
        yield found


def report(client: Client, said: EngineReport) -> Reported:
    return client._connection.run(report_engine(said))


def only(client: Client, model: str | None = MODEL) -> Engine:
    (found,) = client.engines(model)
    return found


def test_an_engine_is_listed_as_it_was_reported_beside_what_its_ref_names(client: EngineClient) -> None:
    answer = report(client, replace(REPORT, update_version=1, update_bytes=5, error="a\nb"))
    assert answer.report_seconds == 0.2
    found = only(client)
    assert (found.version, found.named, found.behind, found.standing) == (1, 2, 1, "behind")
    assert (found.label, found.error, found.update_bytes) == ("vllm at http://node7:8000", "a b", 5)
    assert answer.engine.standing == "behind"
    assert report(client, replace(REPORT, version=2, beat=2)).engine.standing == "current"
    assert only(client, None).standing == "current"
    assert report(client, replace(REPORT, version=2, beat=3, ref="nightly")).engine.standing == "unknown"


def test_versions_between_are_counted_whether_they_are_durable_or_only_ready(
    client: EngineClient, running: RunningService, source: TinyModel
) -> None:
    with TrainerClient(running.address) as trainer:
        for step in range(3, 6):
            trainer.push_folder(MODEL, source.folder, step=step).wait(timeout=60)
        trainer.delete_version(MODEL, 3)
    live = report(client, replace(REPORT, ref="live"))
    assert (live.engine.named, live.engine.behind) == (5, 3)
    client.set_ref(MODEL, "prod", 1)
    back = report(client, replace(REPORT, engine_id="e2", ref="prod", version=5)).engine
    assert (back.standing, back.named, back.behind) == ("behind", 1, 0)


def test_an_engine_that_vanishes_is_stale_then_gone(client: EngineClient) -> None:
    report(client, replace(REPORT, version=2))
    eventually(lambda: only(client).standing == "stale")
    eventually(lambda: only(client).standing == "gone")


@pytest.mark.parametrize(
    ("said", "error"),
    [
        (replace(REPORT, model="acme/none"), NotFound),
        (replace(REPORT, address="x" * 10_000), InvalidArgument),
        (replace(REPORT, kind="a\x07"), InvalidArgument),
        (replace(REPORT, state_seconds=float("nan")), InvalidArgument),
        (replace(REPORT, golden="<b>"), InvalidArgument),
        (replace(REPORT, golden_drift=float("nan")), InvalidArgument),
        (replace(REPORT, golden_mean_drift=-1.0), InvalidArgument),
    ],
)
def test_a_hostile_report_is_refused_and_changes_nothing(
    client: EngineClient, said: EngineReport, error: type[WeighbridgeError]
) -> None:
    with pytest.raises(error):
        report(client, said)
    assert client.engines() == []


def test_engines_of_a_model_that_is_not_there_are_not_found(client: EngineClient) -> None:
    with pytest.raises(NotFound):
        client.engines("acme/none")


def test_many_engines_come_page_by_page(client: EngineClient) -> None:
    for number in range(1005):
        report(client, replace(REPORT, engine_id=f"e{number}", address=f"http://node{number:04}:8000"))
    found = client.engines(MODEL)
    assert [each.engine_id for each in found] == [f"e{number}" for number in range(1005)]


def test_pages_leave_no_engine_out_while_others_come_and_go(running: RunningService, client: EngineClient) -> None:
    def come(number: int, **more: object) -> None:
        report(client, replace(REPORT, engine_id=f"e{number}", address=f"http://node{number}:8000", **more))

    for number in range(1, 9):
        come(number)
    web = Web(running, None, Path())  # type: ignore[arg-type]
    with closing(web.exports):
        seen, asked = [], {"limit": 3, "after": ""}
        while True:
            page = web.http.get("/v1/engines", params=asked).json()
            assert len(page["engines"]) <= 3
            seen += [each["engine_id"] for each in page["engines"]]
            if not page["next"]:
                break
            asked["after"] = page["next"]
            come(0)  # before all pages that are still to come
            running.service.engines.registry._forget(
                running.service.engines.registry._entries["", seen[-1]]
            )  # where the next page begins
        assert seen == [f"e{number}" for number in range(1, 9)]
        of_model = f"/v1/models/{MODEL}/engines"
        assert [len(web.http.get(of_model, params={"limit": n}).json()["engines"]) for n in (1, 2)] == [1, 2]
        for bad in ("x", "é", "e30=", "WyJhIiwxLDIsM10=", "W10=", "W251bGxd"):
            assert web.http.get("/v1/engines", params={"after": bad}).status_code == 400, bad


def test_http_lists_what_the_contract_lists(running: RunningService, client: EngineClient) -> None:
    report(client, REPORT)
    web = Web(running, None, Path())  # type: ignore[arg-type]
    with closing(web.exports):
        for path in ("/v1/engines", f"/v1/models/{MODEL}/engines"):
            (shown,) = web.http.get(path).json()["engines"]
            expected = only(client).to_json()
            times = {"heard_time_ms", "since_ms", "update_time_ms", "standing"}
            assert {k: v for k, v in shown.items() if k not in times} == {
                k: v for k, v in expected.items() if k not in times
            }
            assert shown.keys() == expected.keys()
        assert web.http.get("/v1/models/acme/none/engines").status_code == 404


def test_who_may_pull_reports_and_who_may_look_sees(tmp_path: Path, source: TinyModel) -> None:
    given = {name: tokens.new_token() for name in ("owner", "agent", "looker", "other")}
    policy = policy_file(
        tmp_path,
        identity("owner", ["admin"], token=given["owner"]),
        identity("agent", [f"pull:{MODEL}"], token=given["agent"]),
        identity("looker", [f"look:{MODEL}"], token=given["looker"]),
        identity("other", ["pull:acme/else"], token=given["other"]),
    )
    log = tmp_path / "audit.log"
    with running_service(tmp_path / "store", policy=policy, audit=log) as running:

        def as_(name: str) -> EngineClient:
            return EngineClient(running.address, credentials=Credentials(token=given[name], insecure=True))

        with TrainerClient(running.address, credentials=Credentials(token=given["owner"], insecure=True)) as trainer:
            trainer.import_folder(MODEL, source.folder).wait(timeout=60)
        with as_("agent") as agent, as_("looker") as looker, as_("other") as other:
            report(agent, REPORT)
            assert only(looker).identity == "agent"
            assert other.engines() == []
            with pytest.raises(PermissionDenied):
                other.engines(MODEL)
            for refused in (looker, other):
                with pytest.raises(PermissionDenied):
                    report(refused, REPORT)
    lines = log.read_text().splitlines()
    assert [line for line in lines if "ReportEngine" in line and '"OK"' in line] == [], "one every 5 s says nothing"
    assert len([line for line in lines if "ReportEngine" in line and "PERMISSION_DENIED" in line]) == 2


def reporting(client: EngineClient, version: int = 0) -> EngineReporter:
    return EngineReporter(
        client,
        MODEL,
        kind="mine",
        address="http://me:secret@127.0.0.1:9000/x?key=1",
        ref="latest",
        version=version,
    )


def test_a_reporter_tells_what_changes_at_once_and_that_it_ends(client: EngineClient) -> None:
    reporter = reporting(client)
    eventually(lambda: client.engines(MODEL))
    found = only(client)
    assert (found.state, found.version, found.standing) == ("waiting", 0, "behind")
    assert found.address.endswith(":9000")
    assert "secret" not in found.address
    assert "127.0.0.1" not in found.address
    reporter.say(state="updating", target=2)
    eventually(lambda: only(client).target == 2)
    reporter.say(state="serving", target=0, version=2, update_version=2, update_bytes=7)
    eventually(lambda: only(client).standing == "current")
    eventually(lambda: reporter.status.standing == "current")
    assert only(client).update_bytes == 7
    reporter.close()
    assert (only(client).state, only(client).standing) == ("ended", "gone")


def test_a_service_that_was_killed_and_started_again_knows_its_engines_again(tmp_path: Path, source: TinyModel) -> None:
    service = KillableService(tmp_path / "store", report_every=0.5)
    service.start()
    with EngineClient(service.address) as client:
        with TrainerClient(service.address) as trainer:
            trainer.import_folder(MODEL, source.folder).wait(timeout=60)
        with closing(reporting(client, version=1)) as reporter:
            eventually(lambda: reporter.status.standing == "current")
            service.kill()
            eventually(lambda: reporter.status.standing == "stale")
            away = reporter.status
            assert away.unreachable_since_ms > away.heard_time_ms - 1000
            assert service.address in away.unreachable
            service.start()
            eventually(lambda: client.engines(MODEL))
            assert only(client).version == 1
            eventually(lambda: reporter.status.standing == "current")
            assert (reporter.status.unreachable_since_ms, reporter.status.unreachable) == (0, "")
    service.kill()


def test_a_reporter_of_a_service_that_never_was_there_holds_nobody_up() -> None:
    with EngineClient("127.0.0.1:1", retry_seconds=60) as client:
        begun = time.monotonic()
        reporter = reporting(client)
        for version in range(1000):
            reporter.say(state="serving", version=version)
        assert time.monotonic() - begun < 40, "not the minute for which calls are tried again"
        eventually(lambda: reporter.status.unreachable_since_ms)
        assert reporter.status.standing == "unknown"
        reporter.close()
    assert time.monotonic() - begun < 50


def test_a_service_that_takes_no_reports_is_told_of_once(
    client: EngineClient, caplog: pytest.LogCaptureFixture
) -> None:
    reporter = EngineReporter(client, "acme/none", kind="mine")
    eventually(lambda: reporter.status.unreachable)
    reporter.say(state="failing")
    reporter.close()
    [said] = [each for each in caplog.messages if "does not accept reports" in each]
    assert said.startswith("the service does not accept reports of this engine yet: there is no model acme/none")
    assert "What to do" not in said, "its trainer registers it"


def test_what_a_live_engine_serves_is_kept_until_it_is_gone(
    client: EngineClient, running: RunningService, source: TinyModel
) -> None:
    with TrainerClient(running.address) as trainer:
        for step in (3, 4):
            trainer.push_folder(MODEL, source.folder, step=step).wait(timeout=60)
        trainer.set_retention(MODEL, Retention(keep_last=1))
    said = replace(REPORT, version=1, target=2, state="updating")
    report(client, said)
    dry = client.collect(MODEL, dry_run=True)
    assert {kept.number: kept.engines for kept in dry.kept} == {1: (said.label,), 2: (said.label,), 4: ()}
    shown = CliRunner().invoke(commands, ["collect", MODEL, "--dry-run", "--server", running.address]).output
    assert f"served by {said.label}" in shown
    report(client, replace(said, beat=2))
    assert client.collect(MODEL).retired == (3,)
    assert [each.number for each in client.versions(MODEL)] == [4, 2, 1]
    report(client, replace(said, beat=3, state="ended"))
    assert client.collect(MODEL).retired == (1, 2)


def test_what_a_live_engine_drafts_by_is_kept_for_agents_that_may_pull_it(tmp_path: Path, source: TinyModel) -> None:
    given = {name: tokens.new_token() for name in ("owner", "both", "policy")}
    drafter = "acme/eagle"
    policy = policy_file(
        tmp_path,
        identity("owner", ["admin"], token=given["owner"]),
        identity("both", [f"pull:{MODEL}", f"pull:{drafter}"], token=given["both"]),
        identity("policy", [f"pull:{MODEL}"], token=given["policy"]),
    )
    with running_service(tmp_path / "store", policy=policy) as running:
        credentials = {name: Credentials(token=token, insecure=True) for name, token in given.items()}
        with TrainerClient(running.address, credentials=credentials["owner"]) as owner:
            for model in (MODEL, drafter):
                owner.import_folder(model, source.folder).wait(timeout=60)
            for step in (2, 3):
                owner.push_folder(drafter, source.folder, step=step).wait(timeout=60)
            owner.set_retention(drafter, Retention(keep_last=1))
            with EngineClient(running.address, credentials=credentials["policy"]) as agent:
                report(agent, replace(REPORT, drafter=f"{drafter}@2"))
                assert only(agent).drafter == "", "an agent that may not pull it keeps nothing of it"
            with EngineClient(running.address, credentials=credentials["both"]) as agent:
                report(agent, replace(REPORT, drafter=f"{drafter}@1"))
                assert {each.drafter for each in agent.engines(MODEL)} == {"", f"{drafter}@1"}
            kept = owner.collect(drafter, dry_run=True).kept
            assert {each.number: each.engines for each in kept} == {1: (REPORT.label,), 3: ()}


def test_engines_of_a_model_that_was_deleted_are_shown_until_they_are_gone(client: EngineClient) -> None:
    report(client, REPORT)
    client.delete_model(MODEL)
    assert only(client, None).standing in ("unknown", "stale")
    with pytest.raises(NotFound):
        report(client, replace(REPORT, beat=2))
