"""Does the benchmark of watches count everybody who watches, and judge by those who have heard?"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import processes
from benchmarks.control import Settings, compare
from benchmarks.control_verdicts import Case, Figures, Idle, Move, latencies, table, verdicts
from benchmarks.watching import CLIENTS
from tests.support.forked import forked_python


def quiet(case: Case) -> Figures:
    moves = [Move(0.01, [0.1] * case.watches, 0)]
    idle = Idle(0.001, 1.0, 10)
    return Figures("service", case, case.watches, {}, 1.0, 10**8, 10**8, 10**8, idle, idle, moves, moves)


@pytest.mark.parametrize("client", CLIENTS)
def test_every_watch_hears_of_every_move_through_both_replicas(
    client: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "python", forked_python)
    settings = Settings(moves=2, idle=0.2, watchers=2, client=client)
    ours, bare = compare(Case(3, 2), settings, tmp_path, False)
    for figures in (ours, bare):
        assert (figures.watching, figures.refused) == (6, {})
        for move in (*figures.moves, *figures.moves_of_other):
            assert (len(move.latencies), move.missing) == (6, 0)
            assert all(0 < latency < settings.patience for latency in move.latencies)
    assert (len(ours.moves), len(ours.moves_of_other), len(bare.moves_of_other)) == (2, 2, 0)
    assert ours.idle.requests is not None
    assert bare.idle.requests is None
    assert json.loads(json.dumps(ours.to_json()))["case"] == {"connections": 3, "streams": 2}
    assert table(ours, bare).startswith("3x2")


def test_who_has_not_heard_is_never_as_good_as_somebody_who_has() -> None:
    moves = [Move(0.1, [1.0, 2.0], 1), Move(0.1, [3.0], 2)]
    assert latencies(moves) == [1.0, 2.0, math.inf, 3.0, math.inf, math.inf]


@pytest.mark.parametrize(
    ("change", "missed"),
    [
        ({}, []),
        ({"watching": 999}, ["watches"]),
        ({"moves": [Move(0.01, [0.1] * 989 + [0.6] * 11, 0)]}, ["heard p99 ms"]),
        ({"moves": [Move(0.01, [0.1] * 990 + [0.6] * 10, 0)]}, []),
        ({"moves": [Move(0.01, [0.1] * 989, 11)]}, ["heard p99 ms"]),
        ({"moves_of_other": [Move(0.01, [0.6] * 1000, 0)]}, ["heard of another replica's p99 ms"]),
        ({"after": 10**8 + 61_000_000}, ["memory kB a connection"]),
        ({"after_moves": 10**8 + 61_000_000}, ["memory kB a connection"]),
        ({"idle": Idle(0.011, 1.0, 10)}, ["idle, % of a core"]),
        ({"idle": Idle(0.001, 5.0, 10)}, ["store requests/s with all"]),
    ],
)
def test_each_goal_is_judged_by_its_own_figure(change: dict[str, object], missed: list[str]) -> None:
    case = Case(1000, 1)
    found = verdicts(replace(quiet(case), **change), quiet(case))
    assert [each.name for each in found if each.ok is False] == missed
