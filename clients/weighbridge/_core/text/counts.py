"""Counts in words."""

from __future__ import annotations


def counted(number: int, thing: str, things: str = "") -> str:
    """A number of things: ``1 version``, ``2 versions``; ``things`` is the plural if it is not made with an s."""
    return f"{number} {thing if number == 1 else things or f'{thing}s'}"
