"""Logger that frameworks import, without code: its own dependencies are many."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    """A function that does nothing."""
    if name.startswith("__"):
        raise AttributeError(name)
    return lambda *_, **__: None
