"""Does every replica know the engines that report to any of them, and keep what they serve while one of them is
away?
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.killable_service import KillableService
from tests.support.raw_clients import TinyModel, tiny_folder
from tests.support.waiting import eventually
from weighbridge import Engine, EngineClient, EngineReporter, Retention, TrainerClient
from weighbridge._clients.calls.engine_calls import report_engine
from weighbridge._core.engines.facts import EngineReport
from weighbridge_service.engines.entries import Owner, after_report
from weighbridge_service.engines.exchange import due

MODEL = "acme/tiny"
REPORT = EngineReport("e1", MODEL, "vllm", "http://node7:8000", "latest", 1, state="serving", beat=1)


@pytest.fixture
def source(tmp_path: Path) -> TinyModel:
    return tiny_folder(tmp_path / "hf")


@pytest.fixture
def pair(tmp_path: Path, source: TinyModel) -> Iterator[tuple[KillableService, KillableService]]:
    """Two replicas that know each other, over a store with three versions of which the rules keep one."""
    found = tuple(KillableService(tmp_path / "store", advertise="127.0.0.1:0", report_every=0.5) for _ in range(2))
    for each in found:
        each.start()
    with TrainerClient(found[0].address) as trainer:
        trainer.import_folder(MODEL, source.folder).wait(timeout=60)
        for step in (2, 3):
            trainer.push_folder(MODEL, source.folder, step=step).wait(timeout=60)
        trainer.set_retention(MODEL, Retention(keep_last=1))
    yield found[0], found[1]
    for each in found:
        each.kill()


def listed(client: EngineClient) -> list[Engine]:
    return client.engines(MODEL)


def test_what_is_reported_to_one_all_list_and_keep_though_it_is_killed(
    pair: tuple[KillableService, KillableService],
) -> None:
    one, two = pair
    with EngineClient(one.address) as at_one, EngineClient(two.address) as at_two:
        reporter = EngineReporter(at_one, MODEL, kind="vllm", address="http://node7:8000", ref="latest", version=1)
        with closing(reporter):
            eventually(lambda: listed(at_two))
            reporter.say(state="serving", version=2)
            eventually(lambda: listed(at_two)[0].version == 2)
            (here,), (there,) = listed(at_one), listed(at_two)
            assert replace(there, heard_time_ms=0, since_ms=0) == replace(here, heard_time_ms=0, since_ms=0)
            assert abs(there.since_ms - here.since_ms) < 2000
            one.kill()
            eventually(lambda: listed(at_two)[0].standing == "stale")
            eventually(lambda: listed(at_two)[0].standing == "gone")
            assert at_two.collect(MODEL).retired == (1,), "its replica may only be cut off"


def test_an_engine_whose_replica_is_killed_reports_to_the_next_and_is_one_engine(
    pair: tuple[KillableService, KillableService],
) -> None:
    one, two = pair
    with EngineClient(f"{one.address},{two.address}") as both, EngineClient(two.address) as at_two:
        with closing(EngineReporter(both, MODEL, kind="vllm", ref="latest", version=3)) as reporter:
            eventually(lambda: listed(at_two))
            one.kill()
            reporter.say(state="serving")
            eventually(lambda: listed(at_two)[0].state == "serving")
            one.start()
            with EngineClient(one.address) as at_one:
                eventually(lambda: [each.standing for each in listed(at_one)] == ["current"])
                assert len(listed(at_two)) == 1
        eventually(lambda: listed(at_two)[0].standing == "gone")


def test_a_replica_tells_of_many_engines_in_several_calls(
    pair: tuple[KillableService, KillableService],
) -> None:
    one, two = pair
    with EngineClient(one.address) as at_one, EngineClient(two.address) as at_two:
        for number in range(300):
            said = replace(REPORT, engine_id=f"e{number}", address=f"http://node{number}:8000", error="x" * 1000)
            at_one._connection.run(report_engine(said))
        eventually(lambda: len(listed(at_two)) == 300)


def test_only_what_reports_here_and_has_changed_is_told() -> None:
    owner = Owner("agent")
    here = after_report(None, owner, REPORT, 100.0, 100_000)
    elsewhere = after_report(None, owner, replace(REPORT, engine_id="e2"), 100.0, 100_000, here=False)
    assert due([here, elsewhere], {}, everything=False) == [here]
    told = {here.key: here.facts}
    again = after_report(here, owner, replace(REPORT, beat=2, state_seconds=5.0), 105.0, 105_000)
    assert due([again, elsewhere], told, everything=False) == []
    assert due([again, elsewhere], told, everything=True) == [again]
    moved = after_report(again, owner, replace(REPORT, beat=3, version=2), 106.0, 106_000)
    assert due([moved], told, everything=False) == [moved]


def test_a_proof_that_is_reported_to_one_is_shown_by_all(
    pair: tuple[KillableService, KillableService],
) -> None:
    one, two = pair
    with EngineClient(one.address) as at_one, EngineClient(two.address) as at_two:
        reporter = EngineReporter(at_one, MODEL, kind="vllm", ref="latest", version=3)
        with closing(reporter):
            said = {"proof": "failed", "proved_version": 3, "proofs": 4, "failed_proofs": 1}
            reporter.say(**said, proof_seconds=0.5, proof_error="rank 1 has different bytes in lm_head")
            eventually(lambda: [each.proof for each in listed(at_two)] == ["failed"])
            (seen,) = listed(at_two)
    assert {name: getattr(seen, name) for name in said} == said
    assert (seen.proof_seconds, seen.proof_error) == (0.5, "rank 1 has different bytes in lm_head")
    assert seen.proof_time_ms > 0
