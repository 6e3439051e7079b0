"""Figures as text, as all pages write them. Pure."""

from __future__ import annotations

from datetime import UTC, datetime

from weighbridge._core.text.durations import readable_duration
from weighbridge._core.text.sizes import readable_rate

NONE = "\u2013"
"""Where there is no figure."""
_LAST_MS = 253_402_300_799_000
"""The end of the year 9999, behind which calendars of programs know nothing."""


def took(seconds: float | None) -> str:
    """How long something took; `NONE` if that is not known."""
    return NONE if seconds is None else readable_duration(seconds)


def span(start_ms: int, end_ms: int) -> str:
    """The time between two moments; `NONE` if one of them is not known."""
    return took(max(0, end_ms - start_ms) / 1000 if start_ms and end_ms else None)


def rate(nbytes: int, seconds: float | None) -> str:
    """Bytes in so many seconds, per second; `NONE` if either is nothing."""
    return readable_rate(nbytes / seconds) if nbytes and seconds else NONE


def iso(unix_ms: int) -> str:
    """A moment for programs: ISO 8601 in UTC, to the millisecond."""
    return _utc(unix_ms).isoformat(timespec="milliseconds")


def moment(unix_ms: int) -> str:
    """A moment for people, in UTC."""
    return _utc(unix_ms).strftime("%Y-%m-%d %H:%M:%S UTC")


def _utc(unix_ms: int) -> datetime:
    """A moment, whatever clock has said so."""
    return datetime.fromtimestamp(min(unix_ms, _LAST_MS) / 1000, UTC)
