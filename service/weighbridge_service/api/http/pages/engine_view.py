"""View of the engines that serve a model, or a version of it. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from weighbridge._core.engines.facts import (
    FAILED,
    NOT_PROVED,
    STANDING_BEHIND,
    STANDING_CURRENT,
    STANDING_GONE,
    STANDING_PINNED,
    STANDING_STALE,
    Engine,
)
from weighbridge._core.engines.step_parts import (
    BEFORE_READY,
    PARTS,
    READY,
    Parts,
    chosen,
    offsets,
    readable_seconds,
    step_seconds,
)
from weighbridge_service.api.http.pages.version_summary import UNITS, Span

_SHOWN = 200
"""Engines of which each has a line; those that need a look come first."""
_NAMED = 8
"""Engines that are named where a version is said to be served by them."""
_ORDER = (STANDING_STALE, STANDING_BEHIND, STANDING_CURRENT, STANDING_PINNED)


_LEAST = 2
"""Width of a part in a picture at least."""


@dataclass(frozen=True, slots=True)
class EngineStep:
    """A step of training as one engine took it.

    Attributes:
        engine: which one, in words.
        parts: name of each part that is known, how long it took, and what it lasts, all in words.
        moments: each moment, in words, from the one at which the version was ready.
        total: how long all took until the engine went on (`step_seconds`); empty if that is not known.
        spans: the parts as those of a bar: while the version is received, while the engine serves, and while it stands still.
    """

    engine: str
    parts: tuple[tuple[str, str, str], ...]
    moments: str
    total: str
    spans: tuple[Span, ...]
    clipped: bool = False

    @property
    def times(self) -> str:
        """Its parts in words."""
        return ", ".join(f"{name} {took}" for name, took, _ in self.parts)


@dataclass(frozen=True, slots=True)
class EngineRow:
    """An engine, and the step that its last update has ended; None if no part of it is known."""

    engine: Engine
    step: EngineStep | None


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
    rows = tuple(EngineRow(_shown(each), _step(each)) for each in there[:_SHOWN])
    return Engines(model, rows, max(0, len(there) - _SHOWN), summary(there))


def steps_to(engines: Sequence[Engine], number: int) -> tuple[EngineStep, ...]:
    """Steps of those engines whose last update brought a version, as far as their agents have measured them."""
    found = (_step(each) for each in sorted(engines, key=_urgency) if each.update_version == number)
    return tuple(step for step in found if step is not None)[:_SHOWN]


def _step(engine: Engine) -> EngineStep | None:
    parts = chosen(engine.update_parts)
    if not parts:
        return None
    whole, moments = step_seconds(parts), offsets(parts)
    said = {each.name: each for each in PARTS}
    return EngineStep(
        engine=engine.label,
        parts=tuple((name, readable_seconds(parts[name]), said[name].text) for name in parts),
        moments=", ".join(
            f"{moment} {'+' if seconds > 0 else ''}{readable_seconds(seconds)}"
            for moment, seconds in moments.items()
            if moment != READY
        )
        if len(moments) > 1
        else "",
        total="" if whole is None else readable_seconds(whole),
        spans=_spans(parts, moments) if whole is not None and whole > 0 else (),
    )


def _spans(parts: Parts, moments: Mapping[str, float]) -> tuple[Span, ...]:
    """Parts as those of a bar that begins with the first moment, whichever it is, and ends with the last. Where an engine has begun before the version
    was ready, its own parts lie over the one in which that was received."""
    first, last = min(moments.values()), max(moments.values())
    unit = UNITS / (last - first)
    found, begin = list[Span](), next(iter(moments.values()))
    for each in PARTS:
        if each.name not in parts or each.end not in moments:
            continue
        end = moments[each.end]
        kind = "stored" if each.still else "received" if each in BEFORE_READY else "verified"
        if end > begin:
            start = min(round((begin - first) * unit), UNITS - _LEAST)
            length = min(max(_LEAST, round((end - first) * unit) - start), UNITS - start)
            found.append(Span(kind, start, length, f"{each.name} {readable_seconds(parts[each.name])}"))
        begin = end
    return tuple(found)


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
    suspect = each.error or each.proof in (FAILED, NOT_PROVED)
    return not suspect, _place(each.standing), each.label, each.engine_id


def _place(standing: str) -> int:
    return _ORDER.index(standing) if standing in _ORDER else len(_ORDER)


def _shown(each: Engine) -> Engine:
    """An engine without the time of its last report, which would be news with each, unless that is long ago."""
    return each if each.silent else replace(each, heard_time_ms=0)
