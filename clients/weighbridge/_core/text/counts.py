"""Counts as text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

MOST_LINES = 20
"""Maximum number of lines that an error lists."""
_MORE = re.compile(r"and (\d+) more")


def counted(number: int, thing: str, things: str = "") -> str:
    """Return a count with its noun: ``1 version``, ``2 versions``. ``things`` is an irregular plural."""
    return f"{number} {thing if number == 1 else things or f'{thing}s'}"


def readable_count(number: int) -> str:
    """Return a large number with separators for thousands: ``1,234``."""
    return f"{number:,}"


def percent(part: int, whole: int) -> int:
    """Return a percentage, rounded down, so that it is 100 only for the whole; 0 if the whole is unknown (0)."""
    return min(100 * part // whole, 100) if whole else 0


def named(names: Sequence[str], most: int = 10) -> str:
    """Return names separated by commas.

    If there are more than ``most``, the first ones and the number of the others: ``a, b and 31 more``.
    """
    if len(names) <= most:
        return ", ".join(names)
    return f"{', '.join(names[:most])} and {len(names) - most} more"


def first_lines(lines: Iterable[str], most: int = MOST_LINES, left_out: int = 0) -> list[str]:
    """Return the lines of a list in an error, at most ``most``.

    If lines are omitted, the last line contains their number: ``and 31 more``.

    Args:
        lines: the list; its last line may already contain a number of omitted lines.
        most: maximum number of lines to return.
        left_out: number of lines after these that the caller has already omitted.
    """
    found = list(lines)
    if found and (already := _MORE.fullmatch(found[-1])):
        left_out += int(already[1])
        found.pop()
    if len(found) + bool(left_out) > most:
        left_out += len(found) - (most - 1)
        found = found[: most - 1]
    return [*found, f"and {left_out} more"] if left_out else found
