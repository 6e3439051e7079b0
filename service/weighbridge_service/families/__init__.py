"""The families of models that have a weight map: one file for each, found by entry points."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from importlib import metadata
from typing import Any

from weighbridge.errors import InvalidArgument
from weighbridge_service.families.family import Family
from weighbridge_service.families.rules import Rule

GROUP = "weighbridge.families"
"""Entry points of this group name a `Family` for a ``model_type``."""

__all__ = ["GROUP", "Family", "Rule", "family_of", "model_types"]


@functools.cache
def _registered() -> Mapping[str, metadata.EntryPoint]:
    return {entry.name: entry for entry in metadata.entry_points(group=GROUP)}


def model_types() -> list[str]:
    """The model types that have a weight map."""
    return sorted(_registered())


def family_of(config: Mapping[str, Any]) -> type[Family]:
    """The family of a config.

    Raises:
        InvalidArgument: there is none for its model type; lists those that have one.
    """
    model_type = config.get("model_type")
    entry = _registered().get(model_type) if isinstance(model_type, str) else None
    if entry is None:
        raise InvalidArgument(
            f"there is no weight map for the model type {str(model_type)[:80]!r}",
            fix=f"model types that have one: {', '.join(model_types())}; a package can bring more, see docs/families.md",
        )
    found: type[Family] = entry.load()
    return found
