"""Parts of a step of training as one engine takes it: from the trainer's first call to the service until the engine computes with the new weights.

`PARTS` is the only table of them: reports, the status page, metrics and the command line take names, order and meaning from it. A part is a
duration in seconds, measured by the clock of one machine. Each begins where the one before has ended, so that parts add up, and clocks of two
machines are never compared. A part that was not measured is missing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from weighbridge._core.text.durations import readable_duration


@dataclass(frozen=True, slots=True)
class StepPart:
    """One part.

    Attributes:
        name: as in reports, in labels of metrics, and of the span if there is one.
        end: the moment at which it ends.
        text: between which moments it lies, for people.
        still: whether the engine stands still meanwhile.
    """

    name: str
    end: str
    text: str
    still: bool = False


OF_SERVICE = (
    StepPart(
        "receive", "ready", "from the opening of the version, before its first byte, until it was ready"
    ),
    StepPart("hear", "heard", "until the engine's agent had heard that its ref names the version"),
)
"""Parts that the service knows."""
OF_AGENT = (
    StepPart(
        "wait",
        "begun",
        "until the engine began to prepare the version: missing signatures, and tries that failed; below zero for an engine that had begun before",
    ),
    StepPart("stage", "staged", "until the slowest rank of the engine had the version"),
    StepPart("agree", "agreed", "until the agent knew that of all ranks"),
    StepPart("pause", "paused", "until the engine stood still", still=True),
    StepPart("apply", "applied", "until its parameters were those of the version", still=True),
    StepPart("resume", "resumed", "until the engine went on", still=True),
    StepPart("confirm", "confirmed", "until all ranks had answered that they serve the version"),
)
"""Parts that an agent measures of the engine beside it."""
PARTS = (*OF_SERVICE, *OF_AGENT)
OPENED, READY = "opened", "ready"
"""The first moment of a step, and the one from which others are counted."""
_LAST = "resume"
"""The part after which the engine goes on."""

Parts: TypeAlias = Mapping[str, float]
"""Seconds of parts, by name. ``wait`` is below zero for an engine that stages a version while it arrives: ``begun`` then comes before ``ready``."""


def chosen(parts: Parts, table: Iterable[StepPart] = PARTS) -> dict[str, float]:
    """Those parts that a table names, in its order."""
    return {each.name: parts[each.name] for each in table if each.name in parts}


def offsets(parts: Parts) -> dict[str, float]:
    """Moments of a step in seconds from `READY`, in the order of the table, up to the first that is not known. Those before `READY` are below
    zero, and so are later ones of an engine that began early."""
    found = {OPENED: -parts["receive"]} if "receive" in parts else {}
    found[READY] = at = 0.0
    for each in PARTS[1:]:
        if each.name not in parts:
            break
        found[each.end] = at = at + parts[each.name]
    return found


def step_seconds(parts: Parts) -> float | None:
    """From the opening of the version until the engine goes on; None if a part of it is not known."""
    names = [each.name for each in PARTS]
    needed = names[: names.index(_LAST) + 1]
    return sum(parts[name] for name in needed) if all(name in parts for name in needed) else None


def step_text(parts: Parts) -> str:
    """Parts in their order, and how long all took until the engine went on, for people; empty if there are none."""
    said = ", ".join(f"{name} {readable_seconds(seconds)}" for name, seconds in chosen(parts).items())
    whole = step_seconds(parts)
    return said if whole is None else f"{said}; {readable_seconds(whole)} in all"


def readable_seconds(seconds: float) -> str:
    """A duration that may be below zero, for people."""
    sign = "-" if round(seconds, 3) < 0 else ""
    return f"{sign}{readable_duration(abs(seconds))}"
