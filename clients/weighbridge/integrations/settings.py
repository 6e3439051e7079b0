"""Reader of settings as users write them, by name: for dataclasses whose fields are the settings, and whose types say what each may be. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_type_hints

from weighbridge._core.text.suggestions import did_you_mean
from weighbridge.errors import InvalidArgument


def checked(kind: type, given: Mapping[str, Any], of: str) -> dict[str, Any]:
    """Settings that exist and have the right types. Those that are null count as not given; a float may be written as an int.

    Args:
        kind: the dataclass.
        given: by name.
        of: what has them, for errors.

    Raises:
        InvalidArgument: there is no such setting, or a value is of another type.
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
