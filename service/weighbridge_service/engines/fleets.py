"""Fleets: the engines of each model in a few figures, for those who watch many. Pure."""

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
from weighbridge_service.engines.entries import Entry, Leases, RefView, standing

MOST_FLEETS = 256
"""Models that have figures of their own: each is some time series for whoever keeps them."""
OTHER_MODELS = OTHER = "(other)"
"""Under which the figures of all models beyond that are."""


@dataclass(frozen=True, slots=True)
class Fleet:
    """Engines of one model. Durations are in seconds.

    Attributes:
        model: ``namespace/name``, or `OTHER_MODELS`.
        engines: how many there are, by standing and state.
        behind: most versions that one is behind its ref.
        behind_s: of those that are behind, for how long the one that has waited longest has had no update that succeeded.
        silent_s: for how long the one that was not heard for longest has been silent; not of those that have ended.
        prepare_s: longest part of a last update while the engine served; not of those that are gone, as what follows.
        pause_s: likewise, while it stood still.
        proofs: how many engines there are, by the verdict of their last proof.
        proof_age_s: longest time since the last proof of one of which proofs are asked for.
        proof_s: longest last proof.
        drift: largest of golden prompts; None if none of its engines has answered any.
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
    entries: Iterable[Entry], view: Callable[[Entry], RefView], now_s: float, now_ms: int, leases: Leases
) -> list[Fleet]:
    """The fleets of models, the largest first; of at most `MOST_FLEETS` models, and of all others together.

    Args:
        entries: the engines.
        view: what is known of the ref that one follows.
        now_s: seconds of the monotonic clock.
        now_ms: the same moment, in milliseconds since 1970 UTC.
        leases: how long entries count.
    """
    of_model: dict[str, list[Entry]] = defaultdict(list)
    for entry in entries:
        of_model[entry.report.model].append(entry)
    named = sorted(of_model, key=lambda model: (-len(of_model[model]), model))
    groups = [(model, of_model[model]) for model in named[:MOST_FLEETS]]
    if len(named) > MOST_FLEETS:
        groups.append((OTHER_MODELS, [entry for model in named[MOST_FLEETS:] for entry in of_model[model]]))
    return [_fleet(model, group, view, now_s, now_ms, leases) for model, group in groups]


def _fleet(
    model: str,
    entries: list[Entry],
    view: Callable[[Entry], RefView],
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
        drift=max(
            (report.golden_drift for report in there if report.golden not in ("", NOT_ANSWERED)), default=None
        ),
    )


def _verdict(report: EngineReport) -> str:
    """Verdict of an engine's last proof, of those that this release knows; an agent of another one may say anything."""
    return report.proof if report.proof in VERDICTS else OTHER if report.proof else NOT_ASKED
