"""Untrusted text without characters that control a terminal."""

from __future__ import annotations


def plain(text: str, *, lines: bool = False) -> str:
    """Return a text in which control characters, and characters that change the direction of text, are replaced by
    spaces.

    Args:
        text: the text.
        lines: whether it may have several lines.
    """
    return "".join(each if each.isprintable() or (lines and each == "\n") else " " for each in text)
