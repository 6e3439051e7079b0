"""Texts that others have written, without what a terminal would obey."""

from __future__ import annotations


def plain(text: str, *, lines: bool = False) -> str:
    """A text whose control characters, and those that turn the direction of others, are spaces.

    Args:
        text: which one.
        lines: whether it may have several lines.
    """
    return "".join(each if each.isprintable() or (lines and each == "\n") else " " for each in text)
