"""Does a service serve other clients while an attacker takes all the resources it can, and recover afterwards?

Attacks of `make bench-siege`, shorter and some of them smaller, each on a service process of its own. Attackers come
from another address than the clients whose calls, probes and pulls are measured. The time limits leave room for a busy
machine.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from benchmarks import processes
from benchmarks.attacks import ATTACKS
from benchmarks.bystander_process import CALLS, NEW_CLIENTS, PROBES, Window
from benchmarks.http2_frames import FrameReader, call, frame, preface
from benchmarks.siege import Settings, besiege
from benchmarks.siege_verdicts import MOST_LOG, MOST_MEMORY, PULLS, Outcome, percentile, verdicts
from benchmarks.vital_signs import VitalSigns
from tests.support.forked import forked_python
from tests.support.rounds import rounds

SETTINGS = Settings(hold=3.0, baseline=1.0, patience=10.0, gigabytes=0.02)
SCALES = {
    "all": 0.25,
    "silent": 1.0,
    "half-requests": 1.0,
    "half-open": 1.0,
    "unread": 0.4,
    "unread-known": 0.4,
    "withheld": 0.42,
    "withheld-push": 0.42,
    "withheld-lane": 0.42,
}
"""`make test` tries the first: all attacks at once.

Ten messages of 60 MiB are more than twice of what a service may take for them.
"""
MEMORY = MOST_MEMORY
ANSWERED_SECONDS = 5.0
"""`make bench-siege` measures against the promised second; here a service that does not hold answers after 10 s, or
never.
"""


@pytest.fixture(scope="module", params=list(SCALES)[: rounds("SIEGES")])
def outcome(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes, "python", forked_python)
        settings = replace(SETTINGS, scale=SCALES[request.param])
        return besiege(request.param, settings, tmp_path_factory.mktemp("siege"))


def test_the_attack_was_what_it_says(outcome: Outcome) -> None:
    assert len(outcome.counts) == len(outcome.said)
    for said, counts in zip(outcome.said, outcome.counts, strict=True):
        assert counts.standing >= 0
        assert counts.ended <= counts.calls
        wanted = int(said.split()[0])
        assert wanted == (counts.calls or counts.connected) or counts.failed


def test_calls_of_others_are_answered(outcome: Outcome) -> None:
    for name in (CALLS, NEW_CLIENTS):
        window = outcome.during[name]
        assert not window.errors
        assert max(window.seconds, default=math.inf) <= ANSWERED_SECONDS


def test_probes_are_answered_and_stay_green(outcome: Outcome) -> None:
    for path in PROBES:
        window = outcome.during[path]
        assert not window.errors
        assert max(window.seconds, default=math.inf) <= ANSWERED_SECONDS


def test_pulls_of_others_go_on(outcome: Outcome) -> None:
    assert not outcome.during[PULLS].errors
    assert outcome.during[PULLS].nbytes > 2 * SETTINGS.gigabytes * 1e9


def test_memory_stays_within_its_budget(outcome: Outcome) -> None:
    assert outcome.peak.most_resident - outcome.start.resident <= MEMORY


def test_threads_descriptors_and_memory_are_given_back(outcome: Outcome) -> None:
    assert not [name for name, seconds in outcome.given_back.items() if seconds is None]


def test_the_service_survives_and_its_log_stays_small(outcome: Outcome) -> None:
    assert not outcome.died
    assert outcome.log_bytes <= MOST_LOG


def test_frames_are_cut_where_they_end_however_they_come() -> None:
    sent = [frame(6, 0, 0, b"12345678"), call(5, "/a/B", "host:1", [("name", "v" * 300)]), frame(4, 1, 0)]
    stream = b"".join(sent)
    for size in (1, 7, 9, 64, len(stream)):
        reader = FrameReader()
        found = [each for i in range(0, len(stream), size) for each in reader.feed(stream[i : i + size])]
        assert [frame(each.kind, each.flags, each.stream, each.payload) for each in found] == sent
    [settings] = [each for each in FrameReader().feed(preface(0)[24:]) if each.kind == 4]
    assert settings.settings == {4: 0}


@pytest.mark.parametrize(("part", "expected"), [(0.0, 1.0), (0.5, 2.0), (0.99, 4.0), (1.0, 4.0)])
def test_percentiles_are_values_that_were_measured(part: float, expected: float) -> None:
    assert percentile([3.0, 1.0, 4.0, 2.0], part) == expected


def test_who_was_never_answered_is_not_taken_for_served() -> None:
    signs = VitalSigns(1 << 30, 1 << 30, 30, 20, 1.0)
    window = Window(seconds=[0.01], nbytes=1000, length=1.0)
    windows = dict.fromkeys((CALLS, NEW_CLIENTS, *PROBES, PULLS), window)
    back = dict.fromkeys(("memory", "threads", "descriptors"), 0.5)
    quiet = Outcome("none", [], [], windows, windows, windows, signs, signs, 0.1, 0, back, died=False)
    assert all(verdict.ok for verdict in verdicts(quiet))
    for name in (CALLS, *PROBES, PULLS):
        unanswered = replace(quiet, during={**quiet.during, name: Window(length=5.0)})
        missed = [verdict.name for verdict in verdicts(unanswered) if not verdict.ok]
        assert len(missed) == 1
        assert missed[0].startswith(name)


def test_every_attack_that_all_at_once_does_not_contain_is_tried() -> None:
    assert (
        SCALES.keys() | {"silent-spread", "half-open-again", "withheld-declare", "all-few-descriptors", "more-than-all"}
        == ATTACKS.keys()
    )
