"""Waits in words: which ranks are waited for, and when that is to be said again."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator

REMIND_SECONDS = 10.0
"""How often it is said what is waited for."""
_EARLY = 0.05
"""By how much of that time a look may come too early: a call that waits as long may end some milliseconds before."""
_NAMED = 10
"""How many runs of ranks are named."""


def ranks_text(ranks: Iterable[int]) -> str:
    """Ranks, ascending, as text: ``rank 3``, ``ranks 3 and 5``, ``ranks 0-6, 9 and 11``; of many the first, and how many more."""
    found = list(ranks)
    runs = list(itertools.islice(_runs(found), _NAMED + 1))
    texts = [str(first) if first == last else f"{first}-{last}" for first, last in runs[:_NAMED]]
    if len(runs) > _NAMED:
        named = sum(last - first + 1 for first, last in runs[:_NAMED])
        texts.append(f"{len(found) - named} more")
    *others, end = texts or ["none"]
    return f"rank{'' if len(found) == 1 else 's'} {', '.join(others)}{' and ' if others else ''}{end}"


def ranks_have(ranks: Iterable[int]) -> str:
    """Ranks as `ranks_text` names them, with the verb that goes with them: ``rank 3 has``, ``ranks 3 and 5 have``."""
    found = list(ranks)
    return f"{ranks_text(found)} {'has' if len(found) == 1 else 'have'}"


def _runs(ranks: list[int]) -> Iterator[tuple[int, int]]:
    for _, run in itertools.groupby(enumerate(ranks), lambda each: each[1] - each[0]):
        members = [rank for _, rank in run]
        yield members[0], members[-1]


class Reminder:
    """Whether it is time to say what is waited for: every `REMIND_SECONDS`.

    Args:
        first: seconds until it is time first, if that is another time.
    """

    def __init__(self, first: float | None = None) -> None:
        self._begun = time.monotonic()
        self._next = self._begun + (REMIND_SECONDS if first is None else first)

    def due(self) -> float | None:
        """How long it has been waited for, in seconds, if it is time to say so; None if it is not."""
        now = time.monotonic()
        if now < self._next - _EARLY * REMIND_SECONDS:
            return None
        self._next = now + REMIND_SECONDS
        return now - self._begun
