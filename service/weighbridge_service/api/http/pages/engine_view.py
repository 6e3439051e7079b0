"""View of the engines that serve a model, or a version of it. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from weighbridge._core.engines.facts import (
    STANDING_BEHIND,
    STANDING_CURRENT,
    STANDING_GONE,
    STANDING_PINNED,
    STANDING_STALE,
    Engine,
)

_SHOWN = 200
"""Engines of which each has a line; those that need a look come first."""
_NAMED = 8
"""Engines that are named where a version is said to be served by them."""
_ORDER = (STANDING_STALE, STANDING_BEHIND, STANDING_CURRENT, STANDING_PINNED)


@dataclass(frozen=True, slots=True)
class Engines:
    """The engines of a model, and how many there are of each standing, in words."""

    model: str
    rows: tuple[Engine, ...]
    more: int
    summary: tuple[str, ...]


def engines_view(model: str, engines: Sequence[Engine]) -> Engines:
    """The engines of a model; those whose agents have ended are left out."""
    there = sorted((each for each in engines if not each.ended), key=_urgency)
    return Engines(model, tuple(map(_shown, there[:_SHOWN])), max(0, len(there) - _SHOWN), summary(there))


def summary(engines: Sequence[Engine]) -> tuple[str, ...]:
    """How many engines there are of each standing, in words, such as ``2 current``; of those that have ended nothing."""
    found = Counter(each.standing for each in engines if not each.ended)
    return tuple(f"{found[standing]} {standing}" for standing in sorted(found, key=_place))


def serving(engines: Sequence[Engine]) -> dict[int, int]:
    """How many engines serve which version, of those that somebody counts on."""
    return dict(Counter(each.version for each in engines if each.version and each.standing != STANDING_GONE))


def serving_it(engines: Sequence[Engine], number: int) -> tuple[str, ...]:
    """The engines that serve a version, of those that somebody counts on: the first of many, and how many more."""
    found = sorted(
        each.label for each in engines if each.version == number and each.standing != STANDING_GONE
    )
    more = len(found) - _NAMED
    return (*found[:_NAMED], f"{more} more") if more > 0 else tuple(found)


def _urgency(each: Engine) -> tuple[bool, int, str, str]:
    return not each.error, _place(each.standing), each.label, each.engine_id


def _place(standing: str) -> int:
    return _ORDER.index(standing) if standing in _ORDER else len(_ORDER)


def _shown(each: Engine) -> Engine:
    """An engine without the time of its last report, which would be news with each, unless that is long ago."""
    return each if each.silent else replace(each, heard_time_ms=0)
