"""Verdict of the benchmark of traces: does it tell 2 % from the noise of a busy machine, and say so where it cannot?"""

from __future__ import annotations

import random

import pytest

from benchmarks.tracing import compared


@pytest.mark.parametrize(
    ("more", "noise", "said"),
    [
        (1.005, 0.03, "met"),
        (1.05, 0.03, "missed"),
        (1.005, 0.6, "not told from noise"),
        (1.05, 0.6, "not told from noise"),
    ],
)
def test_two_percent_are_told_from_noise_that_allows_it(more: float, noise: float, said: str) -> None:
    lots = random.Random(1)
    machine = [lots.choice((1.0, 2.0, 5.0)) for _ in range(60)]  # how busy it was, the same for a pair
    plain, traced = ([busy * each * lots.lognormvariate(0, noise) for busy in machine] for each in (0.1, 0.1 * more))
    found = compared(plain, traced)
    assert found.said == said
    assert found.low < found.ratio < found.high
    if noise < 0.1:
        assert found.ratio == pytest.approx(more, abs=0.015)


def test_what_happens_to_a_few_pairs_alone_changes_nothing() -> None:
    plain, traced = [0.1] * 60, [0.101] * 50 + [3.0] * 10
    found = compared(plain, traced)
    assert found.ratio == pytest.approx(1.01)
    assert found.more_seconds == pytest.approx(0.001)
