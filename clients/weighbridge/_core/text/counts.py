"""Counts for people."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

MOST_LINES = 20
"""Lines that an error lists at most."""
_MORE = re.compile(r"and (\d+) more")


def counted(number: int, thing: str, things: str = "") -> str:
    """A number of things: ``1 version``, ``2 versions``; ``things`` is the plural if it is not made with an s."""
    return f"{number} {thing if number == 1 else things or f'{thing}s'}"


def readable_count(number: int) -> str:
    """A large number for people, its thousands apart: ``1,234``."""
    return f"{number:,}"


def percent(part: int, whole: int) -> int:
    """How much there is of a whole, in percent, rounded down: 100 only if it is all; 0 of a whole that is not known."""
    return min(100 * part // whole, 100) if whole else 0


def named(names: Sequence[str], most: int = 10) -> str:
    """Names with commas between them; of more than ``most`` the first ones, and how many more there are: ``a, b and 31 more``."""
    if len(names) <= most:
        return ", ".join(names)
    return f"{', '.join(names[:most])} and {len(names) - most} more"


def first_lines(lines: Iterable[str], most: int = MOST_LINES, left_out: int = 0) -> list[str]:
    """Lines of a list in an error: at most so many, the last of which says how many more there are, ``and 31 more``.

    Args:
        lines: the list; its last line may say so already.
        most: how many.
        left_out: how many lines were left out behind these.
    """
    found = list(lines)
    if found and (already := _MORE.fullmatch(found[-1])):
        left_out += int(already[1])
        found.pop()
    if len(found) + bool(left_out) > most:
        left_out += len(found) - (most - 1)
        found = found[: most - 1]
    return [*found, f"and {left_out} more"] if left_out else found
