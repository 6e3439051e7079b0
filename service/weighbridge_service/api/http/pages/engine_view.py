"""View of the engines that serve a model: what each serves, how far behind it is, and what its last update cost. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from weighbridge._core.engines.facts import (
    MOST_BEHIND,
    STANDING_BEHIND,
    STANDING_CURRENT,
    STANDING_GONE,
    STANDING_PINNED,
    STANDING_STALE,
    Engine,
)
from weighbridge._core.text.counts import counted
from weighbridge._core.text.durations import readable_duration
from weighbridge._core.text.sizes import readable_size

_SHOWN = 200
"""Engines of which each has a line; those that need a look come first."""
_NAMED = 8
"""Engines that are named where a version is said to be served by them."""
_ORDER = (STANDING_STALE, STANDING_BEHIND, STANDING_CURRENT, STANDING_PINNED)
_SILENT = (STANDING_STALE, STANDING_GONE)


@dataclass(frozen=True, slots=True)
class EngineRow:
    """An engine.

    Attributes:
        label: what it is and where.
        host: machine and process of its agent.
        follows: the ref that it follows; empty if it follows none.
        named: the version that this ref names now; 0 if none, or nobody knows.
        version, target: that it serves, and is being taken to; 0 if none.
        state: as its agent says.
        standing: as the service sees it.
        standing_text: the same in words, with how far behind it is.
        since_ms: since when it is in its state.
        silent_ms: when it was heard last, if that is long ago; 0 otherwise.
        error: why it could not be updated, or what it waits for.
        update: what its last update brought and took; empty if there was none.
    """

    label: str
    host: str
    follows: str
    named: int
    version: int
    target: int
    state: str
    standing: str
    standing_text: str
    since_ms: int
    silent_ms: int
    error: str
    update: str


@dataclass(frozen=True, slots=True)
class Engines:
    """The engines of a model, and how many there are of each standing, in words."""

    model: str
    rows: tuple[EngineRow, ...]
    more: int
    summary: tuple[str, ...]


def engines_view(model: str, engines: Sequence[Engine]) -> Engines:
    """The engines of a model; those whose agents have ended are left out."""
    there = sorted((each for each in engines if not each.ended), key=_urgency)
    return Engines(model, tuple(map(_row, there[:_SHOWN])), max(0, len(there) - _SHOWN), summary(there))


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


def _row(each: Engine) -> EngineRow:
    return EngineRow(
        label=each.label,
        host=f"{each.host}, process {each.pid}" if each.pid else each.host,
        follows=each.ref,
        named=each.named,
        version=each.version,
        target=each.target,
        state=each.state,
        standing=each.standing,
        standing_text=_standing_text(each),
        since_ms=each.since_ms,
        silent_ms=each.heard_time_ms if each.standing in _SILENT else 0,
        error=each.error,
        update=_update_text(each),
    )


def _standing_text(each: Engine) -> str:
    if each.standing != STANDING_BEHIND:
        return each.standing
    if not each.version:
        return "serves none yet"
    if not each.behind:  # it serves a newer one than its ref names now
        return f"{each.ref} names {each.named}"
    more = " or more" if each.behind >= MOST_BEHIND else ""
    return f"behind by {counted(each.behind, 'version')}{more}"


def _update_text(each: Engine) -> str:
    if not each.update_version:
        return ""
    seconds = each.update_prepare_seconds + each.update_pause_seconds
    lane = f" by {each.update_lane}" if each.update_lane else ""
    brought = f"{readable_size(each.update_bytes)}{lane} in " if each.update_bytes else "in "
    return (
        f"{brought}{readable_duration(seconds)}, {readable_duration(each.update_pause_seconds)} of it paused"
    )
