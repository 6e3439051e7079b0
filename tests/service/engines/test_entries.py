"""Is it decided by an engine's reports alone, and by no clock of another machine, how it stands?"""

from __future__ import annotations

from dataclasses import replace

import pytest

from weighbridge._core.engines.facts import EngineReport
from weighbridge_service.engines.entries import (
    MOST_KEPT,
    EngineEntry,
    Leases,
    Owner,
    RefView,
    VersionTimes,
    after_report,
    parts_of_step,
    served,
    shown,
    standing,
)

LEASES = Leases(5.0)
OWNER = Owner("agent", "10.0.0.7")
REPORT = EngineReport(
    "e1", "acme/smol", "vllm", "http://node7:8000", "live", 16, state="serving", beat=3, state_seconds=40.0
)


def ms(now_s: float) -> int:
    """The time at a moment of the monotonic clock."""
    return round((now_s + 49_000) * 1000)


def heard(now_s: float = 1000.0, **changes: object) -> EngineEntry:
    return after_report(None, OWNER, replace(REPORT, **changes), now_s, ms(now_s))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("ref", "version", "named", "silent_s", "expected"),
    [
        ("live", 16, 16, 0.0, "current"),
        ("live", 16, 16, 14.9, "current"),
        ("live", 16, 18, 0.0, "behind"),
        ("live", 16, 12, 0.0, "behind"),
        ("live", 0, 16, 0.0, "behind"),
        ("live", 16, 0, 0.0, "unknown"),
        ("", 16, 0, 0.0, "pinned"),
        ("live", 16, 16, 15.0, "stale"),
        ("live", 16, 18, 59.9, "stale"),
        ("", 16, 0, 15.0, "stale"),
        ("live", 16, 16, 60.0, "gone"),
    ],
)
def test_an_engine_stands_by_what_its_ref_names_and_when_it_was_heard(
    ref: str, version: int, named: int, silent_s: float, expected: str
) -> None:
    entry = heard(1000.0, ref=ref, version=version)
    assert standing(entry, named, 1000.0 + silent_s, LEASES) == expected


def test_an_engine_whose_agent_has_ended_is_gone_at_once() -> None:
    assert standing(heard(state="ended"), 16, 1000.0, LEASES) == "gone"


def test_a_report_that_comes_late_changes_nothing() -> None:
    later = after_report(heard(1000.0), OWNER, replace(REPORT, version=17, beat=5), 1001.0, ms(1001))
    assert after_report(later, OWNER, replace(REPORT, beat=4), 1002.0, ms(1002)) is later


def test_a_report_that_comes_again_is_heard_again() -> None:
    again = after_report(heard(1000.0), OWNER, REPORT, 1004.0, ms(1004))
    assert again.heard_s == 1004.0
    assert again.facts == heard().facts


def test_what_another_replica_has_heard_counts_from_when_it_has_heard_it() -> None:
    told = after_report(None, OWNER, REPORT, 1000.0, ms(1000), age_s=14.0, here=False)
    assert standing(told, 16, 1002.0, LEASES) == "stale"
    here = heard(1000.0)
    assert after_report(here, OWNER, REPORT, 1001.0, ms(1001), age_s=3.0, here=False) is here, "it is not newer"


def test_a_state_begins_when_it_began_and_reports_that_are_late_do_not_move_that() -> None:
    first = heard(1000.0, state_seconds=40.0)
    second = after_report(first, OWNER, replace(REPORT, beat=4, state_seconds=45.0), 1006.2, ms(1006.2))
    assert first.since_ms == second.since_ms == ms(960)
    updating = replace(REPORT, beat=5, state="updating", target=17, state_seconds=0.1)
    assert after_report(second, OWNER, updating, 1007.0, ms(1007)).since_ms == ms(1006.9)


def test_times_are_those_of_the_service_whatever_clock_the_agent_has() -> None:
    entry = heard(1000.0, update_version=16, update_age_seconds=40.0)
    engine = shown(entry, RefView(18, 2), 1003.0, LEASES)
    assert (engine.heard_time_ms, engine.since_ms, engine.update_time_ms) == (ms(1000), ms(960), ms(960))
    assert (engine.standing, engine.named, engine.behind) == ("behind", 18, 2)
    never = shown(heard(), RefView(), 1000.0, LEASES)
    assert never.update_time_ms == 0


def test_what_engines_serve_or_are_taken_to_is_named_until_they_are_gone() -> None:
    one = heard(1000.0)
    two = heard(1000.0, engine_id="e2", address="http://node8:8000", target=17, state="updating")
    none = heard(1000.0, engine_id="e3", version=0)
    first, second = "vllm at http://node7:8000", "vllm at http://node8:8000"
    assert served([one, two, none], REPORT.model, 1059.0, LEASES) == {16: (first, second), 17: (second,)}
    assert served([one, two, none], REPORT.model, 1060.0, LEASES) == {}
    assert served([heard(state="ended")], REPORT.model, 1000.0, LEASES) == {}


def test_what_an_engine_drafts_by_is_kept_of_the_drafters_model_and_of_no_other() -> None:
    drafted = heard(drafter="acme/smol-eagle@5")
    label = "vllm at http://node7:8000"
    assert served([drafted], "acme/smol-eagle", 1000.0, LEASES) == {5: (label,)}
    assert served([drafted], REPORT.model, 1000.0, LEASES) == {16: (label,)}
    for odd in ("acme/smol-eagle", "acme/smol-eagle@latest", "@5", "acme/smol-eagle@0"):
        assert served([heard(drafter=odd)], "acme/smol-eagle", 1000.0, LEASES) == {}
    of_many = [heard(engine_id=f"e{n}", drafter=f"acme/smol-eagle@{n}") for n in range(1, 1001)]
    assert len(served(of_many, "acme/smol-eagle", 1000.0, LEASES)) == MOST_KEPT


def test_a_clock_that_is_set_back_ends_no_lease_and_is_followed() -> None:
    before = heard(1000.0)
    after = after_report(before, OWNER, replace(REPORT, beat=4, state_seconds=45.0), 1005.0, ms(1005) - 3_600_000)
    assert standing(after, 16, 1006.0, LEASES) == "current"
    assert after.since_ms == ms(960) - 3_600_000


def test_what_another_replica_told_is_kept_while_that_one_may_be_cut_off() -> None:
    told = after_report(None, OWNER, REPORT, 1000.0, ms(1000), here=False)
    assert standing(told, 16, 1060.0, LEASES) == "gone"
    assert served([told], REPORT.model, 1599.0, LEASES) == {16: ("vllm at http://node7:8000",)}
    assert served([told], REPORT.model, 1600.0, LEASES) == {}


def test_of_a_fleet_some_are_named_and_the_others_counted() -> None:
    fleet = [heard(engine_id=f"e{n}", address=f"http://node{n:03}:8000") for n in range(1000)]
    named = served(fleet, REPORT.model, 1000.0, LEASES)[16]
    assert len(named) == 17
    assert (named[0], named[-1]) == ("vllm at http://node000:8000", "984 more")


def test_who_may_only_pull_does_not_keep_ever_more_versions() -> None:
    greedy = [heard(engine_id=f"g{number}", version=number) for number in range(1, 1001)]
    fleet = [heard(engine_id=f"f{n}", version=3) for n in range(2)]
    assert list(served([*greedy, *fleet], REPORT.model, 1000.0, LEASES)) == [
        3,
        *range(1002 - MOST_KEPT, 1001),
    ]
    other = after_report(None, Owner("other", "10.0.0.8"), replace(REPORT, version=5), 1000.0, ms(1000))
    assert 5 in served([*greedy, other], REPORT.model, 1000.0, LEASES), "each owner's engines count by themselves"


PARTS = {"wait": 0.1, "stage": 2.0, "agree": 0.2, "pause": 0.3, "apply": 0.4, "resume": 0.5, "confirm": 0.5}


def test_a_step_has_parts_of_the_service_before_those_of_the_agent_which_end_when_the_update_did() -> None:
    entry = heard(1000.0, update_version=16, update_age_seconds=40.0, update_parts=PARTS)  # it began at 956
    times = VersionTimes(ms(950), ms(955), here=True)
    parts = parts_of_step(entry, times)
    assert parts == {"receive": 5.0, "hear": pytest.approx(1.0), **PARTS}
    assert ms(950) + 1000 * sum(parts.values()) == pytest.approx(entry.updated_ms)
    assert shown(entry, RefView(), 1000.0, LEASES, times).update_parts == parts


def test_a_step_begins_with_the_call_of_push_and_receiving_with_the_first_byte_where_they_are_known() -> None:
    entry = heard(1000.0, update_version=16, update_age_seconds=40.0, update_parts=PARTS)
    parts = parts_of_step(entry, VersionTimes(ms(950), ms(955), True, ms(952), 0.7))
    assert parts == {"offer": 0.7, "open": 2.0, "receive": 3.0, "hear": pytest.approx(1.0), **PARTS}
    assert ms(950) + 1000 * (sum(parts.values()) - 0.7) == pytest.approx(entry.updated_ms)
    without = parts_of_step(entry, VersionTimes(ms(950), ms(955), True, offer_s=0.0))
    assert without == {"offer": 0.0, "receive": 5.0, "hear": pytest.approx(1.0), **PARTS}


def test_an_engine_that_was_asked_for_a_token_had_heard_of_the_version_so_much_earlier() -> None:
    asked = {**PARTS, "answer": 0.25}
    entry = heard(1000.0, update_version=16, update_age_seconds=40.0, update_parts=asked)
    parts = parts_of_step(entry, VersionTimes(ms(950), ms(955), True))
    assert parts == {"receive": 5.0, "hear": pytest.approx(0.75), **asked}
    assert ms(950) + 1000 * sum(parts.values()) == pytest.approx(entry.updated_ms)


@pytest.mark.parametrize("times", [VersionTimes(), VersionTimes(0, ms(955)), VersionTimes(ms(950), 0)])
def test_of_a_version_whose_times_are_not_known_a_step_has_the_parts_of_the_agent_alone(
    times: VersionTimes,
) -> None:
    assert parts_of_step(heard(update_version=16, update_parts=PARTS), times) == PARTS


@pytest.mark.parametrize("missing", PARTS)
def test_when_a_version_was_heard_of_is_not_guessed_if_a_part_behind_it_is_missing(missing: str) -> None:
    measured = {name: seconds for name, seconds in PARTS.items() if name != missing}
    entry = heard(1000.0, update_version=16, update_age_seconds=40.0, update_parts=measured)
    assert parts_of_step(entry, VersionTimes(ms(950), ms(955), here=True)) == {"receive": 5.0, **measured}


@pytest.mark.parametrize(("received_here", "reported_here"), [(False, True), (True, False)])
def test_clocks_of_two_replicas_are_not_compared(received_here: bool, reported_here: bool) -> None:
    report = replace(REPORT, update_version=16, update_age_seconds=40.0, update_parts=PARTS)
    entry = after_report(None, OWNER, report, 1000.0, ms(1000), here=reported_here)
    assert parts_of_step(entry, VersionTimes(ms(950), ms(955), received_here)) == {"receive": 5.0, **PARTS}


def test_an_update_is_news_in_the_first_report_that_tells_of_it_and_in_no_other() -> None:
    before = heard(1000.0)
    assert not before.updated
    updated = replace(REPORT, beat=4, update_version=16, update_age_seconds=0.1)
    first = after_report(before, OWNER, updated, 1005.0, ms(1005))
    assert first.updated
    later = replace(updated, beat=5, update_age_seconds=5.2)
    set_back = after_report(first, OWNER, later, 1010.1, ms(1010) - 3_600_000)
    assert not set_back.updated
    again = replace(updated, beat=6, update_age_seconds=0.1)  # to the same version, as after a restart
    assert after_report(set_back, OWNER, again, 1015.0, ms(1015)).updated
    # reported late, since the service could not be reached
    late = replace(updated, beat=7, update_version=17, update_age_seconds=600.0)
    assert after_report(set_back, OWNER, late, 1700.0, ms(1700)).updated


@pytest.mark.parametrize(("age_s", "news"), [(0.5, True), (3600.0, False)])
def test_of_an_engine_that_was_not_known_an_old_update_is_no_news(age_s: float, news: bool) -> None:
    assert heard(update_version=16, update_age_seconds=age_s).updated is news


def test_each_proof_is_told_once_by_whichever_report_is_the_first_to_know_of_it() -> None:
    told = [
        {"proof": "proved", "proofs": 1},
        {"proof": "proved", "proofs": 1},
        {"proof": "failed", "proofs": 3, "failed_proofs": 1},
        {"proof": "not proved", "proofs": 3, "failed_proofs": 1},
        {"proof": "proved", "proofs": 4, "failed_proofs": 1},
    ]
    entry, found = None, []
    for beat, changes in enumerate(told):
        said = replace(REPORT, beat=beat, **changes)  # type: ignore[arg-type]
        entry = after_report(entry, OWNER, said, 1000.0 + beat, ms(1000 + beat))
        found.append(entry.proofs)
    assert found == [(1, 0), (0, 0), (2, 1), (0, 0), (1, 0)]


def test_a_process_that_is_new_counts_no_proof_of_long_ago() -> None:
    assert heard(proof="failed", proofs=9, failed_proofs=4, proof_age_seconds=61.0).proofs == (0, 0)
    assert heard(proof="failed", proofs=9, failed_proofs=4, proof_age_seconds=2.0).proofs == (1, 1)
    assert heard().proofs == (0, 0)


def test_a_proof_that_was_not_made_has_no_time() -> None:
    entry = heard(1000.0, proof="not proved", proof_age_seconds=30.0)
    assert shown(entry, RefView(16), 1004.0, LEASES).proof_time_ms == 0


def test_the_time_of_a_proof_is_steady_until_the_next_one() -> None:
    first = heard(1000.0, proof="proved", proofs=1, proof_age_seconds=30.0)
    later = replace(REPORT, beat=4, proof="proved", proofs=1, proof_age_seconds=34.5)
    again = after_report(first, OWNER, later, 1004.0, ms(1004))
    assert shown(again, RefView(16), 1004.0, LEASES).proof_time_ms == ms(970)
    assert shown(heard(), RefView(16), 1004.0, LEASES).proof_time_ms == 0
