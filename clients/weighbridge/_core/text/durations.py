"""Durations as text."""

from __future__ import annotations

_PARTS = ((86_400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s"))
"""Units with their seconds, each with the unit of its remainder."""


def readable_age(since_ms: int, now_ms: float) -> str:
    """Return the time since a moment as text. Both arguments are Unix times in milliseconds."""
    return readable_duration(max(now_ms - since_ms, 0) / 1000, rough=True)


def readable_duration(seconds: float, *, rough: bool = False) -> str:
    """Return a duration in at most two units: ``840 ms``, ``4.20 s``, ``12.3 s``, ``2 min 05 s``, ``1 h 07 min``,
    ``3 d``.

    Args:
        seconds: the duration.
        rough: whether to return only a whole number of the largest unit, for example for an age, which changes while
            the user reads it: ``12 s``, ``119 s``, ``5 min``, ``3 h``.
    """
    if rough:
        scale, unit = next(((each[0], each[1]) for each in _PARTS if seconds >= 2 * each[0]), (1, "s"))
        return f"{seconds // scale:.0f} {unit}"
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 59.95:
        return f"{seconds:.{2 if seconds < 9.995 else 1}f} s"
    whole = int(seconds + 0.5)
    scale, unit, rest_scale, rest_unit = next(each for each in _PARTS if whole >= each[0])
    rest = whole % scale // rest_scale
    return f"{whole // scale} {unit}" + (f" {rest:02d} {rest_unit}" if rest else "")
