"""Mappings of a trainer's values that are pushed and restored: plain values, and objects with a ``state_dict()``, such
as schedulers.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

from weighbridge.errors import InvalidArgument


def values_of(named: Any, argument: str) -> dict[str, Any]:
    """Return the values to store.

    An object with ``state_dict()`` and ``load_state_dict()`` is replaced by its state dict.

    Args:
        named: values by name; None if the caller does not give any.
        argument: name of the caller's argument, for errors.

    Raises:
        InvalidArgument: ``named`` is not a mapping by names.
    """
    if named is None:
        return {}
    if not isinstance(named, Mapping) or not all(isinstance(name, str) for name in named):
        raise InvalidArgument(
            f"{argument}= is a {type(named).__name__}, not a mapping with strings as keys",
            fix=f'give a dict, like {argument}={{"scheduler": scheduler}}',
        )
    return {name: value.state_dict() if _is_stateful(value) else value for name, value in named.items()}


def check_kept(named: MutableMapping[str, Any] | None, kept: Mapping[str, Any], argument: str, version: object) -> None:
    """Refuse names for which no value was stored, before any value is restored.

    Args:
        named: mapping to restore; None if the caller does not give one.
        kept: the stored values.
        argument: name of the caller's argument, for errors.
        version: version that contains the values, for errors.

    Raises:
        InvalidArgument: values are missing (names them), or ``named`` is not a mutable mapping.
    """
    if named is None:
        return
    if not isinstance(named, MutableMapping):
        raise InvalidArgument(f"{argument}= is a {type(named).__name__}, not a dict into which values can be restored")
    missing = [str(name) for name in named if name not in kept]
    if missing:
        raise InvalidArgument(
            f"{version} was pushed without {', '.join(missing)} in {argument}=",
            details=[f"it has {name}" for name in kept],
            fix="ask only for values that it was pushed with",
        )


def left_out(named: Mapping[str, Any] | None, kept: Mapping[str, Any], argument: str) -> list[str]:
    """Return the stored entries that the caller does not restore, such as ``scheduler in state=``; empty if the caller
    does not give a mapping.
    """
    return [] if named is None else [f"{name} in {argument}=" for name in kept if name not in named]


def give_back(named: MutableMapping[str, Any] | None, kept: Mapping[str, Any]) -> None:
    """Restore values, all of which were stored. Objects load their state; plain values are replaced in the mapping."""
    for name, value in list((named or {}).items()):
        if _is_stateful(value):
            value.load_state_dict(kept[name])
        elif named is not None:
            named[name] = kept[name]


def _is_stateful(value: Any) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))
