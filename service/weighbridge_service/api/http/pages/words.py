"""Numbers and times as text, in the form that all pages use. Pure."""

from __future__ import annotations

from datetime import UTC, datetime

from weighbridge._core.text.durations import readable_duration
from weighbridge._core.text.sizes import readable_rate

NONE = "\u2013"
"""Placeholder for an unknown value."""
_LAST_MS = 253_402_300_799_000
"""The end of the year 9999, the last that `datetime` can represent."""


def took(seconds: float | None) -> str:
    """A duration as text; `NONE` if it is unknown."""
    return NONE if seconds is None else readable_duration(seconds)


def span(start_ms: int, end_ms: int) -> str:
    """The time between two moments as text; `NONE` if one of them is unknown (0)."""
    return took(max(0, end_ms - start_ms) / 1000 if start_ms and end_ms else None)


def rate(nbytes: int, seconds: float | None) -> str:
    """A rate in bytes per second as text; `NONE` if either value is zero or unknown."""
    return readable_rate(nbytes / seconds) if nbytes and seconds else NONE


def iso(unix_ms: int) -> str:
    """A moment in ISO 8601, in UTC, with milliseconds."""
    return _utc(unix_ms).isoformat(timespec="milliseconds")


def moment(unix_ms: int) -> str:
    """A moment in a readable form, in UTC."""
    return _utc(unix_ms).strftime("%Y-%m-%d %H:%M:%S UTC")


def _utc(unix_ms: int) -> datetime:
    """A moment, clipped to the year 9999, because clocks may be wrong."""
    return datetime.fromtimestamp(min(unix_ms, _LAST_MS) / 1000, UTC)
