"""Texts that are longer than there is room."""

from __future__ import annotations

_READABLE = 200


def shortened(text: str, most: int) -> str:
    """A text of at most so many characters; one that is longer ends after a word, with an ellipsis."""
    if len(text) <= most:
        return text
    room = text[: most - 1]
    return (room.rpartition(" ")[0] or room) + "…"


def shown(value: object) -> str:
    """A short representation of something untrusted, for an error message."""
    text = repr(value[:80]) if isinstance(value, str) else repr(value)
    return text if len(text) <= 82 else text[:80] + "..."


def readable(name: str) -> str:
    """A name that may be anything, for people: as it is if it is short and can be printed, or else as `shown`."""
    return name if len(name) <= _READABLE and name.isprintable() else shown(name)
