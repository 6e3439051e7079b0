"""Figures as text, as all pages write them. Pure."""

from __future__ import annotations

from datetime import UTC, datetime

from weighbridge._core.text.sizes import readable_size

NONE = "\u2013"
"""Where there is no figure."""
_LAST_MS = 253_402_300_799_000
"""The end of the year 9999, behind which calendars of programs know nothing."""
_SECOND, _MINUTE, _HOUR = 1000, 60_000, 3_600_000


def duration(ms: int) -> str:
    """Milliseconds as ``840 ms``, ``4.20 s``, ``2 min 05 s`` or ``1 h 07 min``."""
    if ms < _SECOND:
        return f"{ms} ms"
    if ms < _MINUTE:
        return f"{ms / _SECOND:.2f} s" if ms < 10 * _SECOND else f"{ms / _SECOND:.1f} s"
    if ms < _HOUR:
        return f"{ms // _MINUTE} min {ms % _MINUTE // _SECOND:02d} s"
    return f"{ms // _HOUR} h {ms % _HOUR // _MINUTE:02d} min"


def span(start_ms: int, end_ms: int) -> str:
    """The time between two moments; `NONE` if one of them is not known."""
    return duration(max(0, end_ms - start_ms)) if start_ms and end_ms else NONE


def rate(nbytes: int, ms: int) -> str:
    """Bytes in so many milliseconds, per second; `NONE` if either is nothing."""
    return f"{readable_size(round(nbytes * 1000 / ms))}/s" if nbytes and ms > 0 else NONE


def iso(unix_ms: int) -> str:
    """A moment for programs: ISO 8601 in UTC, to the millisecond."""
    return _utc(unix_ms).isoformat(timespec="milliseconds")


def moment(unix_ms: int) -> str:
    """A moment for people, in UTC."""
    return _utc(unix_ms).strftime("%Y-%m-%d %H:%M:%S UTC")


def _utc(unix_ms: int) -> datetime:
    """A moment, whatever clock has said so."""
    return datetime.fromtimestamp(min(unix_ms, _LAST_MS) / 1000, UTC)


def count(number: int) -> str:
    """A number with its thousands apart, by narrow spaces."""
    return f"{number:,}".replace(",", "\u202f")


def percent(part: int, whole: int) -> int:
    """How much of a whole there is: 100 only if it is all."""
    return min(99, 100 * part // whole) if part < whole else 100
