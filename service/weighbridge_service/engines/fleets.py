"""Fleets: summary figures of the engines of each model, for metrics. All functions are pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from weighbridge._core.engines.facts import (
    NOT_ANSWERED,
    NOT_ASKED,
    STANDING_BEHIND,
    STANDING_GONE,
    VERDICTS,
    EngineReport,
)
from weighbridge_service.engines.entries import EngineEntry, Leases, RefView, standing

MOST_FLEETS = 256
"""Maximum number of models with their own figures, because each adds time series to the monitoring system."""
OTHER_MODELS = OTHER = "(other)"
"""Name for the figures of all other models together."""


@dataclass(frozen=True, slots=True)
class Fleet:
    """Engines of one model. Durations are in seconds.

    Attributes:
        model: ``namespace/name``, or `OTHER_MODELS`.
        engines: number of engines, by standing and state.
        behind: largest number of versions that an engine is behind its ref.
        behind_s: longest time since the last successful update, of engines that are behind.
        silent_s: longest time since the last report, of engines that have not ended.
        prepare_s: longest time for which a last update prepared while the engine served. This and the following figures
            exclude engines that are gone.
        pause_s: longest time for which a last update paused the engine.
        proofs: number of engines, by the verdict of their last proof.
        proof_age_s: longest time since the last proof, of engines with proofs enabled.
        proof_s: duration of the longest last proof.
        drift: largest drift on golden prompts; None if no engine has answered any.
    """

    model: str
    engines: Counter[tuple[str, str]]
    behind: int = 0
    behind_s: float = 0.0
    silent_s: float = 0.0
    prepare_s: float = 0.0
    pause_s: float = 0.0
    proofs: Counter[str] = field(default_factory=Counter)
    proof_age_s: float = 0.0
    proof_s: float = 0.0
    drift: float | None = None


def fleets(
    entries: Iterable[EngineEntry], view: Callable[[EngineEntry], RefView], now_s: float, now_ms: int, leases: Leases
) -> list[Fleet]:
    """The fleets of at most `MOST_FLEETS` models, the largest first, then one fleet of all other models.

    Args:
        entries: entries of the engines.
        view: returns the state of the ref that an engine follows.
        now_s: current time in seconds of the monotonic clock.
        now_ms: current time in milliseconds since 1970 UTC.
        leases: durations for which reports are valid.
    """
    of_model: dict[str, list[EngineEntry]] = defaultdict(list)
    for entry in entries:
        of_model[entry.report.model].append(entry)
    named = sorted(of_model, key=lambda model: (-len(of_model[model]), model))
    groups = [(model, of_model[model]) for model in named[:MOST_FLEETS]]
    if len(named) > MOST_FLEETS:
        groups.append((OTHER_MODELS, [entry for model in named[MOST_FLEETS:] for entry in of_model[model]]))
    return [_fleet(model, group, view, now_s, now_ms, leases) for model, group in groups]


def _fleet(
    model: str,
    entries: list[EngineEntry],
    view: Callable[[EngineEntry], RefView],
    now_s: float,
    now_ms: int,
    leases: Leases,
) -> Fleet:
    views = [view(entry) for entry in entries]
    stands = [standing(entry, ref.named, now_s, leases) for entry, ref in zip(entries, views, strict=True)]
    behind = [n for n, stand in enumerate(stands) if stand == STANDING_BEHIND]
    present = [entry for entry, stand in zip(entries, stands, strict=True) if stand != STANDING_GONE]
    there = [entry.report for entry in present]
    return Fleet(
        model,
        Counter((stand, entry.report.state) for entry, stand in zip(entries, stands, strict=True)),
        behind=max((views[n].behind for n in behind), default=0),
        behind_s=max((max(now_ms - entries[n].updated_ms, 0) / 1000 for n in behind), default=0.0),
        silent_s=max((now_s - entry.heard_s for entry in entries if not entry.report.ended), default=0.0),
        prepare_s=max((report.update_prepare_seconds for report in there), default=0.0),
        pause_s=max((report.update_pause_seconds for report in there), default=0.0),
        proofs=Counter(_verdict(report) for report in there),
        proof_age_s=max(
            (max(now_ms - entry.proved_ms, 0) / 1000 for entry in present if entry.report.proof), default=0.0
        ),
        proof_s=max((report.proof_seconds for report in there), default=0.0),
        drift=max((report.golden_drift for report in there if report.golden not in ("", NOT_ANSWERED)), default=None),
    )


def _verdict(report: EngineReport) -> str:
    """Verdict of an engine's last proof.

    A verdict that this release does not know, from an agent of another release, is `OTHER`.
    """
    return report.proof if report.proof in VERDICTS else OTHER if report.proof else NOT_ASKED
