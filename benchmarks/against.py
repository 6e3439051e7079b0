"""Ratios of times between two checkouts, measured in turn in the same rounds: ``make bench ARGS="--against DIR"``.

A ratio is that of one round, ours over the other's. Machines are shared, so what counts is the median of the rounds'
ratios, and how certain it is: between the two ends of its interval the median lies with a probability of 95%, whatever
the times are distributed like. The yardsticks, which do the same in both checkouts, show how well that works.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks import report
from benchmarks.cases import Figures

PUSHES = ("held", "ready", "stream", "durable", "push_processor", "copy", "raw_push")
PULLS = ("pull", "view", "pull_processor", "slice_copy", "raw_pull")
"""Times that are compared, of pushes and of pulls. The last two of each are yardsticks."""
_CONFIDENCE = 0.95


@dataclass(frozen=True)
class Ratio:
    """Ratio of two times over several rounds.

    Attributes:
        median: median of the rounds' ratios.
        low, high: ends of the interval of the median.
        rounds: number of rounds.
    """

    median: float
    low: float
    high: float
    rounds: int

    @staticmethod
    def of(ratios: Sequence[float]) -> Ratio:
        """The ratio of one or more rounds; fewer than six are too few for the interval, which is then all of them."""
        ordered = sorted(ratios)
        left_out = _left_out(len(ordered))
        return Ratio(statistics.median(ordered), ordered[left_out], ordered[len(ordered) - 1 - left_out], len(ordered))

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f}-{self.high:.2f})"


def _left_out(count: int) -> int:
    """Number of values at each end that lie outside the interval of the median.

    Each value is above or below the median with equal probability.
    """
    outside, found = 0.0, 0
    for number in range((count - 1) // 2):
        outside += 2 * math.comb(count, number) / 2**count
        if outside > 1 - _CONFIDENCE:
            break
        found = number
    return found


@dataclass(frozen=True)
class Compared:
    """One case, measured with two checkouts in turn.

    Attributes:
        ours: figures of this checkout.
        theirs: figures of the other one.
        rounds: ratios of the rounds, by what was measured.
    """

    ours: Figures
    theirs: Figures
    rounds: dict[str, list[float]] = field(init=False)

    def __post_init__(self) -> None:
        pairs = {
            name: zip(self.ours.seconds[name], self.theirs.seconds[name], strict=True)
            for name in PUSHES + PULLS
            if name in self.ours.seconds and name in self.theirs.seconds
        }
        found = {name: [ours / theirs for ours, theirs in each] for name, each in pairs.items()}
        object.__setattr__(self, "rounds", found)

    def to_json(self) -> dict[str, Any]:
        """Everything as JSON values."""
        return {
            **asdict(self.ours.case),
            "theirs": self.theirs.to_json(),
            "ratios": {name: asdict(Ratio.of(each)) for name, each in self.rounds.items()},
        }


def tables(found: Sequence[Compared]) -> str:
    """The ratios of pushes, and those of pulls: a row for each case, and one for all rounds of all cases."""
    return "\n\n".join(_table(found, names) for names in (PUSHES, PULLS))


def _table(found: Sequence[Compared], names: Sequence[str]) -> str:
    rows = [
        [
            report.name_of(each.ours),
            *(str(Ratio.of(each.rounds[name])) if name in each.rounds else "-" for name in names),
        ]
        for each in found
    ]
    pooled = ([ratio for each in found for ratio in each.rounds.get(name, [])] for name in names)
    rows.append(["all rounds", *(str(Ratio.of(ratios)) if ratios else "-" for ratios in pooled)])
    return report.table(["ours/theirs: GB, clients, cut, lane", *names], rows)
