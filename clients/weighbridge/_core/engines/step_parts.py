"""Parts of a training step on its way to one engine: from the trainer's call of push until the engine computes with the
new weights.

`PARTS` is the only table of the parts: reports, the status page, metrics and the command line use its names, order and
meanings. A part is a duration in seconds, measured by the clock of one host. Each part begins where the previous one
ends, so that the sum of parts does not depend on a comparison of two hosts' clocks. A part that was not measured is
missing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from weighbridge._core.text.durations import readable_duration


@dataclass(frozen=True, slots=True)
class StepPart:
    """One part of a step.

    Attributes:
        name: name of the part in reports and labels of metrics, and of its span if it has one.
        end: the moment at which the part ends.
        text: description of the two moments between which the part lies.
        still: whether the engine is paused during the part.
        optional: whether the duration of the step is known without the part. If an optional part is missing, the next
            part begins where the missing one would have begun.
    """

    name: str
    end: str
    text: str
    still: bool = False
    optional: bool = False


OFFERED, OPENED, READY = "offered", "opened", "ready"
"""The first two moments of a step, and the moment from which others are counted. The first may be unknown."""
BEFORE_READY = (
    StepPart("offer", OPENED, "from the trainer's call of push until the version was opened", optional=True),
    StepPart("open", "arriving", "until the service had the first byte of it", optional=True),
    StepPart("receive", READY, "until it was ready; from its opening, if the first byte is not known"),
)
"""Parts before `READY`, which the service knows."""
OF_SERVICE = (
    *BEFORE_READY,
    StepPart("hear", "heard", "until the engine's agent had heard that its ref names the version"),
)
"""Parts that the service knows."""
OF_AGENT = (
    StepPart(
        "wait",
        "begun",
        (
            "until the engine began to prepare the version: missing signatures, and tries that "
            "failed; below zero for an engine that had begun before"
        ),
    ),
    StepPart("stage", "staged", "until the slowest rank of the engine had the version"),
    StepPart("agree", "agreed", "until the agent knew that of all ranks"),
    StepPart("pause", "paused", "until the engine stood still", still=True),
    StepPart("apply", "applied", "until its parameters were those of the version", still=True),
    StepPart("resume", "resumed", "until the engine went on", still=True),
    StepPart("confirm", "confirmed", "until all ranks had answered that they serve the version"),
    StepPart(
        "answer",
        "answered",
        "until each engine behind the agent had answered one token by the new weights, if it was asked",
        optional=True,
    ),
)
"""Parts that an agent measures for its engine."""
PARTS = (*OF_SERVICE, *OF_AGENT)
_LAST = "resume"
"""The part after which the engine continues."""

Parts: TypeAlias = Mapping[str, float]
"""Seconds of parts, by name. ``wait`` is negative for an engine that stages a version while the version arrives:
``begun`` is then before ``ready``.
"""


def chosen(parts: Parts, table: Iterable[StepPart] = PARTS) -> dict[str, float]:
    """Return the parts that a table names, in its order."""
    return {each.name: parts[each.name] for each in table if each.name in parts}


def offsets(parts: Parts) -> dict[str, float]:
    """Return the moments of a step in seconds from `READY`, in the order of the table, up to the first that is not
    known. Moments before `READY` are negative, and so are later ones of an engine that began early.
    """
    found = dict[str, float]()
    if has_all(parts, BEFORE_READY):
        found[OFFERED if "offer" in parts else OPENED] = first = -sum(chosen(parts, BEFORE_READY).values())
        found |= _ends(BEFORE_READY, parts, first)
    found[READY] = 0.0
    return found | _ends(PARTS[len(BEFORE_READY) :], parts, 0.0)


def _ends(table: Iterable[StepPart], parts: Parts, begun: float) -> dict[str, float]:
    """Return the ends of consecutive parts, up to the first that is not known. The first part begins at ``begun``."""
    found, at = dict[str, float](), begun
    for each in table:
        if each.name in parts:
            found[each.end] = at = at + parts[each.name]
        elif not each.optional:
            break
    return found


def step_seconds(parts: Parts) -> float | None:
    """Return the seconds from the trainer's call of push until the engine continues; from the opening of the version if
    the time of the call is not known; None if another part is not known.
    """
    names = [each.name for each in PARTS]
    table = PARTS[: names.index(_LAST) + 1]
    return sum(chosen(parts, table).values()) if has_all(parts, table) else None


def has_all(parts: Parts, table: Iterable[StepPart]) -> bool:
    """Whether all parts of a table that are not optional are known."""
    return all(each.name in parts or each.optional for each in table)


def step_text(parts: Parts) -> str:
    """Return a text with the parts in order, and the total time until the engine continued; empty if no part is
    known.
    """
    said = ", ".join(f"{name} {readable_seconds(seconds)}" for name, seconds in chosen(parts).items())
    whole = step_seconds(parts)
    return said if whole is None else f"{said}; {readable_seconds(whole)} in all"


def readable_seconds(seconds: float) -> str:
    """Return a duration that may be negative as text."""
    sign = "-" if round(seconds, 3) < 0 else ""
    return f"{sign}{readable_duration(abs(seconds))}"
