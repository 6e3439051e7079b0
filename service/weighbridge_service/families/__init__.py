"""The families of models that have a weight map: one file for each, found by entry points."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from importlib import metadata
from typing import Any

from weighbridge.errors import FailedPrecondition, InvalidArgument
from weighbridge_service.families.family import Family
from weighbridge_service.families.rules import Rule

GROUP = "weighbridge.families"
"""Entry points of this group name a `Family` for a ``model_type``."""

__all__ = ["GROUP", "Family", "Rule", "family_of", "model_types"]


@functools.cache
def _registered() -> Mapping[str, metadata.EntryPoint]:
    found: dict[str, metadata.EntryPoint] = {}
    for entry in metadata.entry_points(group=GROUP):
        there = found.setdefault(entry.name, entry)
        if there.value != entry.value:  # an editable installation may be listed twice
            raise FailedPrecondition(
                f"two packages bring a family for the model type {entry.name!r}: {there.value} and {entry.value}",
                fix="uninstall one of them",
            )
    return found


def model_types() -> list[str]:
    """The model types that have a weight map."""
    return sorted(_registered())


def family_of(config: Mapping[str, Any]) -> type[Family]:
    """The family of a config.

    Raises:
        InvalidArgument: there is none for its model type; lists those that have one.
        FailedPrecondition: the package that brings it is broken, or two bring it.
    """
    model_type = config.get("model_type")
    entry = _registered().get(model_type) if isinstance(model_type, str) else None
    if entry is None:
        raise InvalidArgument(
            f"there is no weight map for the model type {str(model_type)[:80]!r}",
            fix=f"model types that have one: {', '.join(model_types())}; a package can bring more, see docs/families.md",
        )
    try:
        found = entry.load()
    except Exception as error:
        raise FailedPrecondition(
            f"the family for {model_type}, {entry.value}, cannot be imported: {type(error).__name__}: {error}"[
                :500
            ],
            fix="mend or uninstall the package that brings it",
        ) from error
    if not (isinstance(found, type) and issubclass(found, Family)):
        raise FailedPrecondition(
            f"the family for {model_type}, {entry.value}, is no class derived from Family"
        )
    return found
