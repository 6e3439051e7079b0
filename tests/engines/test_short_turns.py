"""Do threads take short turns exactly as long as a version is prepared, however preparations overlap?"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from weighbridge.integrations.engine_rank.turns import ShortTurns


@pytest.fixture
def usual() -> Iterator[float]:
    before = sys.getswitchinterval()
    yield before
    sys.setswitchinterval(before)


def test_turns_are_short_until_the_last_preparation_ends(usual: float) -> None:
    turns = ShortTurns()
    turns.__enter__()
    short = sys.getswitchinterval()
    assert short < usual
    turns.__enter__()
    turns.__exit__()
    assert sys.getswitchinterval() == short
    turns.__exit__()
    assert sys.getswitchinterval() == usual


def test_turns_are_never_made_longer(usual: float) -> None:
    sys.setswitchinterval(0.0001)
    with ShortTurns():
        assert sys.getswitchinterval() <= 0.0001
    assert sys.getswitchinterval() <= 0.0001
