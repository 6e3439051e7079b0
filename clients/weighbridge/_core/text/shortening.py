"""Shortening of long text."""

from __future__ import annotations

_READABLE = 200


def shortened(text: str, most: int) -> str:
    """Return a text of at most ``most`` characters. A longer text is cut after a word, and ends with an ellipsis."""
    if len(text) <= most:
        return text
    room = text[: most - 1]
    return (room.rpartition(" ")[0] or room) + "…"


def shown(value: object) -> str:
    """Return a short representation of an untrusted value, for an error message."""
    text = repr(value[:80]) if isinstance(value, str) else repr(value)
    return text if len(text) <= 82 else text[:80] + "..."


def readable(name: str) -> str:
    """Return an untrusted name as text: unchanged if it is short and printable, otherwise as `shown` does."""
    return name if len(name) <= _READABLE and name.isprintable() else shown(name)
