"""Mappings of values that a trainer gives and gets back: plain values, and objects that have a ``state_dict()``, such as schedulers."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

from weighbridge.errors import InvalidArgument


def values_of(named: Any, argument: str) -> dict[str, Any]:
    """What is to be kept of each value: of an object with ``state_dict()`` and ``load_state_dict()`` what the former gives.

    Args:
        named: values by name; None if there are none.
        argument: what the caller calls the mapping.

    Raises:
        InvalidArgument: that is no mapping by names.
    """
    if named is None:
        return {}
    if not isinstance(named, Mapping) or not all(isinstance(name, str) for name in named):
        raise InvalidArgument(
            f"{argument}= is a {type(named).__name__}, and no mapping by names",
            fix=f'give a dict, like {argument}={{"scheduler": scheduler}}',
        )
    return {name: value.state_dict() if _is_stateful(value) else value for name, value in named.items()}


def check_kept(
    named: MutableMapping[str, Any] | None, kept: Mapping[str, Any], argument: str, version: object
) -> None:
    """Refuse names of which nothing was kept, before anything is given back.

    Args:
        named: what is to be given back; None if nothing is.
        kept: what was kept.
        argument: what the caller calls the mapping.
        version: in which it was kept, for errors.

    Raises:
        InvalidArgument: there are such names, or that is no mapping that can be changed.
    """
    if named is None:
        return
    if not isinstance(named, MutableMapping):
        raise InvalidArgument(
            f"{argument}= is a {type(named).__name__}, and no dict that values come back in"
        )
    missing = [str(name) for name in named if name not in kept]
    if missing:
        raise InvalidArgument(
            f"{version} was pushed without {', '.join(missing)} in {argument}=",
            details=[f"it has {name}" for name in kept],
            fix="ask for what it was pushed with",
        )


def left_out(named: Mapping[str, Any] | None, kept: Mapping[str, Any], argument: str) -> list[str]:
    """Entries that were kept and are not asked for, as ``scheduler in state=``; none if nothing is to be given back."""
    return [] if named is None else [f"{name} in {argument}=" for name in kept if name not in named]


def give_back(named: MutableMapping[str, Any] | None, kept: Mapping[str, Any]) -> None:
    """Give values back, all of which were kept: objects load theirs, others are replaced in the mapping."""
    for name, value in list((named or {}).items()):
        if _is_stateful(value):
            value.load_state_dict(kept[name])
        elif named is not None:
            named[name] = kept[name]


def _is_stateful(value: Any) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))
