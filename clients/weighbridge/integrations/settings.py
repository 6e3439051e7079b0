"""Reader of settings that users write by name.

The fields of a dataclass are the settings, and their types are the allowed types. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_type_hints

from weighbridge._core.text.suggestions import did_you_mean
from weighbridge.errors import InvalidArgument


def checked(kind: type, given: Mapping[str, Any], of: str) -> dict[str, Any]:
    """Settings, checked for existence and type. Null counts as not given; an int is accepted for a float.

    Args:
        kind: the dataclass.
        given: values by name.
        of: owner of the settings, for errors.

    Raises:
        InvalidArgument: a setting does not exist, or a value has the wrong type.
    """
    kinds = get_type_hints(kind)
    given = {name: value for name, value in given.items() if value is not None or name not in kinds}
    for name, value in given.items():
        if name not in kinds:
            raise InvalidArgument(
                f"{of} has no {name!r}{did_you_mean(str(name), kinds)}", fix=f"it has {', '.join(kinds)}"
            )
        wanted = kinds[name] | int if isinstance(0.5, kinds[name]) else kinds[name]
        if isinstance(value, bool) or not isinstance(value, wanted):
            raise InvalidArgument(f"{name} of {of} is {value!r}")
    return given
