"""View of which versions of a model are kept, and which are held. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weighbridge._core.resources import Gate, Retention
from weighbridge._core.text.counts import counted, readable_count
from weighbridge._core.text.durations import readable_duration
from weighbridge_service.access.scopes import Verb
from weighbridge_service.api.http.pages.viewer import Viewer


@dataclass(frozen=True, slots=True)
class RetentionPart:
    """What is kept and held, in words, and whether who looks may see what a collection would do."""

    model: str
    rules: tuple[str, ...]
    gate: tuple[str, ...]
    may_dry_run: bool


def retention_view(model: str, retention: Retention, gate: Gate, viewer: Viewer) -> RetentionPart:
    """Which versions of a model are kept and held.

    Args:
        model: which one.
        retention: what is kept.
        gate: what is held.
        viewer: who looks.
    """
    return RetentionPart(model, _rules(retention), _gate(gate), viewer.may(Verb.MANAGE, model))


def _rules(retention: Retention) -> tuple[str, ...]:
    if retention.keeps_everything:
        return ("every version is kept",)
    rules: Sequence[tuple[int, str]] = (
        (retention.keep_last, f"the newest {counted(retention.keep_last, 'version')} are kept"),
        (retention.keep_every, f"of each {readable_count(retention.keep_every)} numbers the first is kept"),
        (
            retention.keep_every_steps,
            f"of each {readable_count(retention.keep_every_steps)} steps of a run the first version is kept",
        ),
        (retention.keep_younger_s, f"younger than {readable_duration(retention.keep_younger_s)}: kept"),
    )
    return (*(text for value, text in rules if value), "whatever a ref names or an engine serves is kept")


def _gate(gate: Gate) -> tuple[str, ...]:
    return (
        "every version is held until it is approved"
        if gate.approval_required
        else "candidates are held until they are approved",
        "NaN and infinity hold no version"
        if gate.allow_nonfinite
        else "a version with NaN or infinity is held",
    )
