"""Waits as text: the ranks that a call waits for, and reminders while it waits."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator

REMIND_SECONDS = 10.0
"""Interval of reminders during a wait."""
_EARLY = 0.05
"""Share of the interval by which a reminder may come early, because a call that waits for the interval may end some
milliseconds before it."""
_NAMED = 10
"""Maximum number of runs of consecutive ranks in a text."""


def ranks_text(ranks: Iterable[int]) -> str:
    """Return ascending ranks as text: ``rank 3``, ``ranks 3 and 5``, ``ranks 0-6, 9 and 11``. If there are many, the
    first ones and the number of the others.
    """
    found = list(ranks)
    runs = list(itertools.islice(_runs(found), _NAMED + 1))
    texts = [str(first) if first == last else f"{first}-{last}" for first, last in runs[:_NAMED]]
    if len(runs) > _NAMED:
        named = sum(last - first + 1 for first, last in runs[:_NAMED])
        texts.append(f"{len(found) - named} more")
    *others, end = texts or ["none"]
    return f"rank{'' if len(found) == 1 else 's'} {', '.join(others)}{' and ' if others else ''}{end}"


def ranks_have(ranks: Iterable[int]) -> str:
    """Return ranks as `ranks_text` does, followed by the verb: ``rank 3 has``, ``ranks 3 and 5 have``."""
    found = list(ranks)
    return f"{ranks_text(found)} {'has' if len(found) == 1 else 'have'}"


def _runs(ranks: list[int]) -> Iterator[tuple[int, int]]:
    for _, run in itertools.groupby(enumerate(ranks), lambda each: each[1] - each[0]):
        members = [rank for _, rank in run]
        yield members[0], members[-1]


class Reminder:
    """Timer of reminders during a wait, one every `REMIND_SECONDS`.

    Args:
        first: seconds until the first reminder, if not `REMIND_SECONDS`.
    """

    def __init__(self, first: float | None = None) -> None:
        self._begun = time.monotonic()
        self._next = self._begun + (REMIND_SECONDS if first is None else first)

    def due(self) -> float | None:
        """Return the seconds since the wait began, if a reminder is due; None otherwise."""
        now = time.monotonic()
        if now < self._next - _EARLY * REMIND_SECONDS:
            return None
        self._next = now + REMIND_SECONDS
        return now - self._begun
