"""State of an engine to be reported, state of its reports, and the status that follows from both. Pure."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from weighbridge._core.engines.facts import (
    STANDING_BEHIND,
    STANDING_CURRENT,
    STANDING_STALE,
    STANDING_UNKNOWN,
    Engine,
    EngineFacts,
)
from weighbridge._core.engines.status import AgentStatus

_REPORT_SECONDS = 5.0
"""Interval between reports, until the service has set it."""
_MISSED = 3
"""Number of intervals without contact after which the engine counts as stale."""


@dataclass(frozen=True, slots=True)
class ReportedState:
    """State of an engine to be reported. Times are seconds of the monotonic clock.

    Attributes:
        facts: facts of the engine.
        since_s: when it entered its present state.
        updated_s: when its last update ended.
        proved_s: when its last proof ended, or else when one was first requested.
    """

    facts: EngineFacts
    since_s: float
    updated_s: float
    proved_s: float = 0.0

    def with_changes(self, changes: dict[str, Any], now_s: float, updated_s: float | None = None) -> ReportedState:
        """The state after a change.

        Args:
            changes: fields of the engine.
            now_s: present time.
            updated_s: when the update in the changes ended; by default now.
        """
        facts = replace(self.facts, **changes)
        before = self.facts
        same = (before.state, before.version, before.target) == (facts.state, facts.version, facts.target)
        updated = facts.update_version and "update_version" in changes
        proved = "proofs" in changes or bool(facts.proof) > bool(before.proof)
        return ReportedState(
            facts,
            self.since_s if same else now_s,
            (now_s if updated_s is None else updated_s) if updated else self.updated_s,
            now_s if proved else self.proved_s,
        )


@dataclass(frozen=True, slots=True)
class Contact:
    """State of the reports. Times are seconds of the monotonic clock; None for never.

    Attributes:
        engine: the service's last response.
        heard_s: when it arrived.
        report_s: seconds between reports.
        lost_s: when the service became unreachable; None if it is reachable.
        problem: error of the last report: the service is unreachable, or refuses reports.
    """

    engine: Engine | None = None
    heard_s: float | None = None
    report_s: float = _REPORT_SECONDS
    lost_s: float | None = None
    problem: str = ""


def status_of(said: ReportedState, contact: Contact, now_s: float, now_ms: int) -> AgentStatus:
    """Status of an engine, from its state and that of its reports. Pure."""

    def time_ms(then_s: float | None) -> int:
        return 0 if then_s is None else now_ms - round((now_s - then_s) * 1000)

    engine, facts = contact.engine, said.facts
    standing, named, behind = STANDING_UNKNOWN, 0, 0
    if engine is not None and contact.heard_s is not None:
        silent_s = now_s - contact.heard_s
        standing, named = engine.standing, engine.named
        if engine.version == facts.version:
            behind = engine.behind
        elif standing in (STANDING_BEHIND, STANDING_CURRENT):  # it has gone on since
            standing = STANDING_CURRENT if facts.version == named else STANDING_BEHIND
        if contact.lost_s is not None and silent_s >= _MISSED * contact.report_s:
            standing = STANDING_STALE
    return AgentStatus(
        **{field.name: getattr(facts, field.name) for field in fields(EngineFacts)},
        standing=standing,
        named=named,
        behind=behind,
        since_ms=time_ms(said.since_s),
        proof_time_ms=time_ms(said.proved_s if facts.proofs else None),
        heard_time_ms=time_ms(contact.heard_s),
        unreachable_since_ms=time_ms(contact.lost_s),
        unreachable=contact.problem,
    )
