"""Do the figures of fleets say of each model what its engines are, and stay few, whatever reports?"""

from __future__ import annotations

from dataclasses import replace

from weighbridge._core.engines.facts import EngineReport
from weighbridge_service.engines.entries import EngineEntry, Leases, Owner, RefView, after_report
from weighbridge_service.engines.fleets import MOST_FLEETS, OTHER_MODELS, Fleet, fleets

MODEL = "acme/smol"
NAMED = 18
NOW_S, NOW_MS = 10_000.0, 1_800_000_000_000
REPORT = EngineReport("e", MODEL, "vllm", ref="latest", version=NAMED, state="serving", beat=1)


def entry(number: int, age_s: float = 0.0, **changes: object) -> EngineEntry:
    report = replace(REPORT, engine_id=f"e{number}", **changes)  # type: ignore[arg-type]
    return after_report(None, Owner(), report, NOW_S, NOW_MS, age_s=age_s)


def view(each: EngineEntry) -> RefView:
    return RefView(NAMED, max(NAMED - each.report.version, 0))


def told(*entries: EngineEntry) -> list[Fleet]:
    return fleets(entries, view, NOW_S, NOW_MS, Leases(5.0))


def test_engines_are_counted_by_standing_and_state_and_the_worst_of_them_is_told() -> None:
    (fleet,) = told(
        entry(1, update_age_seconds=80_000.0, update_prepare_seconds=2.0, update_pause_seconds=0.5),
        entry(2, version=16, state="failing", update_age_seconds=300.0, update_prepare_seconds=1.0, update_pause_seconds=1.5),
        entry(3, age_s=2.0, version=17, target=18, state="updating", update_age_seconds=30.0),
        entry(4, age_s=20.0, version=3),
        entry(5, age_s=400.0, version=2, update_prepare_seconds=99.0),
        entry(6, age_s=500.0, state="ended"),
    )  # fmt: skip
    assert fleet.engines == {
        ("current", "serving"): 1,
        ("behind", "failing"): 1,
        ("behind", "updating"): 1,
        ("stale", "serving"): 1,
        ("gone", "serving"): 1,
        ("gone", "ended"): 1,
    }
    assert (fleet.behind, fleet.behind_s, fleet.silent_s) == (2, 300.0, 400.0)
    assert (fleet.prepare_s, fleet.pause_s) == (2.0, 1.5)


def test_a_fleet_that_is_current_is_behind_for_no_time_however_long_ago_it_was_updated() -> None:
    (fleet,) = told(entry(1, update_age_seconds=1e6), entry(2, ref="", version=1, update_age_seconds=1e6))
    assert (fleet.behind, fleet.behind_s) == (0, 0.0)


def test_models_beyond_the_most_are_told_together_and_no_engine_is_left_out() -> None:
    many = [entry(number, model=f"acme/m{number}") for number in range(2000)]
    found = told(*many, entry(5000), entry(5001))
    assert len(found) == MOST_FLEETS + 1
    assert found[0].model == MODEL
    assert found[-1].model == OTHER_MODELS
    assert sum(fleet.engines.total() for fleet in found) == 2002


def test_an_engine_that_failed_its_proof_is_told_apart_from_one_that_was_never_asked() -> None:
    (fleet,) = told(
        entry(1, proof="proved", proofs=3, proof_seconds=0.5, proof_age_seconds=20.0),
        entry(2, proof="failed", proofs=1, failed_proofs=1, proof_seconds=2.0, proof_age_seconds=90.0),
        entry(3, proof="not proved", proof_age_seconds=5.0),
        entry(4),
        entry(5, proof="proved to the moon"),
        entry(6, age_s=500.0, state="ended", proof="failed", proofs=1, proof_age_seconds=1e6),
    )
    assert fleet.proofs == {"proved": 1, "failed": 1, "not proved": 1, "not asked": 1, "(other)": 1}
    assert (fleet.proof_age_s, fleet.proof_s) == (90.0, 2.0)
