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
"""Maximum number of engines that the page lists. Engines that need attention come first."""
_NAMED = 8
"""Maximum number of engines that the list of engines of a version names."""
_ORDER = (STANDING_STALE, STANDING_BEHIND, STANDING_CURRENT, STANDING_PINNED)


_LEAST = 2
"""Minimum width of a part in a picture."""


@dataclass(frozen=True, slots=True)
class EngineStep:
    """A training step, as one engine loaded its version.

    Attributes:
        engine: label of the engine.
        parts: name, duration and description of each known part, as text.
        moments: each moment as text, relative to the moment at which the version was ready.
        total: duration of the whole step until the engine continued (`step_seconds`), as text; empty if unknown.
        spans: the parts as spans of a bar: receiving the version, receiving while the engine still serves, and pausing
            the engine.
    """

    engine: str
    parts: tuple[tuple[str, str, str], ...]
    moments: str
    total: str
    spans: tuple[Span, ...]
    clipped: bool = False

    @property
    def times(self) -> str:
        """Names and durations of the parts, as text."""
        return ", ".join(f"{name} {took}" for name, took, _ in self.parts)


@dataclass(frozen=True, slots=True)
class EngineRow:
    """An engine, and the step that its last update completed; None if no part of that step is known."""

    engine: Engine
    step: EngineStep | None


@dataclass(frozen=True, slots=True)
class Engines:
    """The engines of a model, and the number of engines with each status, as text."""

    model: str
    rows: tuple[EngineRow, ...]
    more: int
    summary: tuple[str, ...]


def engines_view(model: str, engines: Sequence[Engine]) -> Engines:
    """The engines of a model, without those whose agents have ended."""
    there = sorted((each for each in engines if not each.ended), key=_urgency)
    rows = tuple(EngineRow(_shown(each), _step(each)) for each in there[:_SHOWN])
    return Engines(model, rows, max(0, len(there) - _SHOWN), summary(there))


def steps_to(engines: Sequence[Engine], number: int) -> tuple[EngineStep, ...]:
    """Steps of the engines whose last update loaded this version, as far as their agents have measured them."""
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
    """Parts as spans of a bar from the earliest moment to the latest. If an engine began before the version was ready,
    its parts overlap the span in which the service received the version."""
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
    """Number of engines with each status, as text, such as ``2 current``.

    Engines whose agents have ended are not counted.
    """
    found = Counter(each.standing for each in engines if not each.ended)
    return tuple(f"{found[standing]} {standing}" for standing in sorted(found, key=_place))


def serving(engines: Sequence[Engine]) -> dict[int, int]:
    """Number of engines that serve each version, by its number. Engines that are gone are not counted."""
    return dict(Counter(each.version for each in engines if each.version and each.standing != STANDING_GONE))


def serving_it(engines: Sequence[Engine], number: int) -> tuple[str, ...]:
    """Labels of the first `_NAMED` engines that serve a version, and the number of the others.

    Engines that are gone are left out.
    """
    found = sorted(each.label for each in engines if each.version == number and each.standing != STANDING_GONE)
    more = len(found) - _NAMED
    return (*found[:_NAMED], f"{more} more") if more > 0 else tuple(found)


def _urgency(each: Engine) -> tuple[bool, int, str, str]:
    suspect = each.error or each.proof in (FAILED, NOT_PROVED)
    return not suspect, _place(each.standing), each.label, each.engine_id


def _place(standing: str) -> int:
    return _ORDER.index(standing) if standing in _ORDER else len(_ORDER)


def _shown(each: Engine) -> Engine:
    """An engine without the time of its last report, because that time would change the page with every report.

    A silent engine keeps it.
    """
    return each if each.silent else replace(each, heard_time_ms=0)
