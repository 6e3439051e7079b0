"""Values as JSON: frozen dataclasses become objects with the names of their fields."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from enum import Enum
from typing import Any, ClassVar


class JsonValue:
    """Base class of dataclasses that are shown as JSON."""

    __slots__ = ()
    ALSO_IN_JSON: ClassVar[tuple[str, ...]] = ()
    """Properties that are shown in addition to the fields."""

    def to_json(self) -> dict[str, Any]:
        """Return the fields, and the properties of `ALSO_IN_JSON`, as JSON values by name."""
        kind: Any = type(self)
        return {name: json_value(getattr(self, name)) for name in (*names_of(kind), *self.ALSO_IN_JSON)}


@functools.cache
def names_of(kind: Any) -> tuple[str, ...]:
    """Return the names of a dataclass's fields."""
    return tuple(each.name for each in dataclasses.fields(kind))


def json_value(value: Any) -> Any:
    """Return the value in a form that `json` can write.

    It may contain `JsonValue` dataclasses and enums at any depth.
    """
    if type(value) in (int, str, bool, float):  # nearly all values
        return value
    match value:
        case JsonValue():
            return value.to_json()
        case Enum():
            return value.value
        case tuple() | list():
            return [json_value(each) for each in value]
        case Mapping():
            return {key: json_value(each) for key, each in value.items()}
    return value
