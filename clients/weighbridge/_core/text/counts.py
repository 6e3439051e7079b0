"""Counts for people."""

from __future__ import annotations

from collections.abc import Sequence


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
