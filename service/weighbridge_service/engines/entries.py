"""Entry of an engine: the last report of its agent, and its standing. All functions are pure.

Agents report ages instead of timestamps, so the clocks of two machines are never compared. Expiry uses the monotonic
clock, which is never adjusted.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import NamedTuple, TypeAlias

from weighbridge._core.engines.facts import (
    FAILED,
    STANDING_BEHIND,
    STANDING_CURRENT,
    STANDING_GONE,
    STANDING_PINNED,
    STANDING_STALE,
    STANDING_UNKNOWN,
    Engine,
    EngineFacts,
    EngineReport,
)
from weighbridge._core.engines.step_parts import OF_AGENT, has_all

_FACTS = [field.name for field in fields(EngineFacts)]
_SLACK_MS = 2000
"""Maximum difference between start times in two reports that are treated as equal, because reports arrive with
different delays.
"""
_SOON_S = 60.0
"""A process that receives the first report of an engine counts the engine's update only if it is younger than this."""
_MOST_NAMED = 16
"""Maximum number of engines that a message names as the reason why a version is kept."""
Order: TypeAlias = tuple[str, str, str, str]
"""Model, address and id of an engine, and the identity of its agent."""
MOST_KEPT = 64
"""Maximum number of versions of a model that are kept for the engines of one owner, so that a caller with permission
only to pull cannot keep all versions in the store."""


@dataclass(frozen=True, slots=True)
class Leases:
    """Durations for which reports are valid.

    Attributes:
        report_s: seconds between two reports of an engine that does not change.
    """

    report_s: float

    @property
    def stale_s(self) -> float:
        """Seconds of silence after which an engine is stale."""
        return 3 * self.report_s

    @property
    def gone_s(self) -> float:
        """Seconds of silence after which an engine is gone: its version is no longer kept for it."""
        return 12 * self.report_s

    @property
    def forgotten_s(self) -> float:
        """Seconds of silence after which an engine is no longer listed."""
        return 120 * self.report_s


@dataclass(frozen=True, slots=True)
class Owner:
    """Owner of an engine: the caller that reports it.

    Attributes:
        identity: name of the caller's identity in the policy; empty without a policy.
        host: host of the caller, from its connection.
    """

    identity: str = ""
    host: str = ""

    @property
    def quota(self) -> str:
        """Key by which engines are counted against a quota."""
        return self.identity or self.host


@dataclass(frozen=True, slots=True)
class EngineEntry:
    """State of an engine from its agent's reports. Times in ms are milliseconds since 1970 UTC.

    Attributes:
        owner: owner of the engine.
        report: the last report.
        heard_s: time of the report, in seconds of the process's monotonic clock.
        heard_ms: time of the report.
        since_ms: start of the engine's current state.
        updated_ms: end of its last update.
        proved_ms: end of its last proof; before the first proof, the time at which proofs were enabled.
        here: whether the agent reported to this process instead of to another replica.
        updated: whether this report was the first one with the engine's last update.
        proofs: number of proofs that are new in this report, and how many of them have failed.
    """

    owner: Owner
    report: EngineReport
    heard_s: float
    heard_ms: int
    since_ms: int
    updated_ms: int
    proved_ms: int
    here: bool = True
    updated: bool = False
    proofs: tuple[int, int] = (0, 0)

    @property
    def key(self) -> tuple[str, str]:
        """Key of the engine. It includes the identity, so that callers cannot report for each other's engines."""
        return self.owner.identity, self.report.engine_id

    @property
    def order(self) -> Order:
        """Sort key of lists."""
        return self.report.model, self.report.address, self.report.engine_id, self.owner.identity

    @property
    def facts(self) -> EngineFacts:
        """The reported facts, without the fields that change with each report."""
        return EngineFacts(*(getattr(self.report, name) for name in _FACTS))

    @property
    def place(self) -> tuple[str, str, str, str]:
        """Key that stays the same when the agent is restarted, which changes the engine's id."""
        return self.owner.identity, self.report.kind, self.report.address, self.report.host

    def is_gone(self, now_s: float, leases: Leases) -> bool:
        """Whether the engine has ended, or has been silent for `Leases.gone_s`."""
        return self.report.ended or now_s - self.heard_s >= leases.gone_s


def after_report(
    before: EngineEntry | None,
    owner: Owner,
    report: EngineReport,
    now_s: float,
    now_ms: int,
    *,
    age_s: float = 0.0,
    here: bool = True,
) -> EngineEntry:
    """The entry of an engine after a report; the previous entry if its report is newer.

    Args:
        before: previous entry; None for a new engine.
        owner: owner of the engine.
        report: the report.
        now_s: current time in seconds of the monotonic clock.
        now_ms: current time in milliseconds since 1970 UTC.
        age_s: age of the report in seconds, if another replica received it.
        here: whether this process received it from the agent.
    """
    heard_s, heard_ms = now_s - age_s, now_ms - round(age_s * 1000)
    if before is not None and (report.beat, heard_s) < (before.report.beat, before.heard_s):
        return before
    since_ms = heard_ms - round(report.state_seconds * 1000)
    updated_ms = heard_ms - round(report.update_age_seconds * 1000)
    proved_ms = heard_ms - round(report.proof_age_seconds * 1000)
    if before is not None:
        said = before.report
        if (said.state, said.version, said.target) == (report.state, report.version, report.target):
            since_ms = _steady(before.since_ms, since_ms)
        if said.update_version == report.update_version:
            updated_ms = _steady(before.updated_ms, updated_ms)
        if said.proofs == report.proofs:
            proved_ms = _steady(before.proved_ms, proved_ms)
    updated = _tells_of_update(before, report, heard_s)
    proofs = _proofs_told(before, report)
    return EngineEntry(owner, report, heard_s, heard_ms, since_ms, updated_ms, proved_ms, here, updated, proofs)


def _proofs_told(before: EngineEntry | None, report: EngineReport) -> tuple[int, int]:
    """Number of proofs that are new in a report, and how many of them have failed.

    In the first report of an engine, only its last proof counts, and only if it is younger than `_SOON_S`.
    """
    if before is None:
        young = bool(report.proofs) and report.proof_age_seconds < _SOON_S
        return int(young), int(young and report.proof == FAILED)
    said = before.report
    return max(report.proofs - said.proofs, 0), max(report.failed_proofs - said.failed_proofs, 0)


def _tells_of_update(before: EngineEntry | None, report: EngineReport, heard_s: float) -> bool:
    """Whether a report is the first one with its engine's last update.

    In the first report of an engine, the update must also be younger than `_SOON_S`, because this process may have been
    restarted after it.
    """
    if before is None or not report.update_version:
        return bool(report.update_version) and report.update_age_seconds < _SOON_S
    said = before.report
    moved_s = (heard_s - report.update_age_seconds) - (before.heard_s - said.update_age_seconds)
    return said.update_version != report.update_version or abs(moved_s) * 1000 >= _SLACK_MS


def _steady(before_ms: int, now_ms: int) -> int:
    """The time from the earlier of two reports if the two times agree within `_SLACK_MS`, otherwise from the later
    report.
    """
    return before_ms if abs(before_ms - now_ms) < _SLACK_MS else now_ms


@dataclass(frozen=True, slots=True)
class RefView:
    """State of the ref that an engine follows.

    Attributes:
        named: version that the ref names; 0 if it does not name a version, or if the version is unknown.
        behind: number of versions after the one that the engine serves, up to the named one.
    """

    named: int = 0
    behind: int = 0


class VersionTimes(NamedTuple):
    """Times of a version, in milliseconds since 1970 UTC; 0 if unknown.

    Attributes:
        create_ms: time at which it was opened.
        ready_ms: time at which it became ready.
        here: whether this process saw it become ready.
        first_byte_ms: time at which its first byte arrived. Only the process that opened the version knows it; all
            three times are then measured by that process's clock.
        offer_s: seconds from the trainer's call of push to the opening, by the trainer's clock; None if unknown.
    """

    create_ms: int = 0
    ready_ms: int = 0
    here: bool = False
    first_byte_ms: int = 0
    offer_s: float | None = None


_UNKNOWN = VersionTimes()


def parts_of_step(entry: EngineEntry, times: VersionTimes) -> dict[str, float]:
    """Durations in seconds of the parts of the step that ended with an engine's last update: first the service's parts,
    then the agent's.

    The time at which the agent received the notification is computed backwards from the end of its update, by the clock
    of the replica that received the report. If a different replica received the version, the clocks differ, and the
    part ``hear`` is omitted.

    Args:
        entry: entry of the engine.
        times: times of the version of that update.
    """
    measured, found = entry.report.update_parts, dict[str, float]()
    if times.create_ms and times.ready_ms:
        if times.offer_s is not None:
            found["offer"] = times.offer_s
        begun_ms = times.first_byte_ms or times.create_ms
        if times.first_byte_ms:
            found["open"] = (begun_ms - times.create_ms) / 1000
        found["receive"] = (times.ready_ms - begun_ms) / 1000
        if times.here and entry.here and has_all(measured, OF_AGENT):
            heard_ms = entry.updated_ms - 1000 * sum(measured.values())
            found["hear"] = round((heard_ms - times.ready_ms) / 1000, 6)
    return found | dict(measured)


def shown(entry: EngineEntry, ref: RefView, now_s: float, leases: Leases, times: VersionTimes = _UNKNOWN) -> Engine:
    """An engine in its public form.

    Args:
        entry: entry of the engine.
        ref: state of its ref.
        now_s: current time in seconds of the monotonic clock.
        leases: durations for which the report is valid.
        times: times of the version of its last update.
    """
    report = entry.report
    facts = {name: getattr(report, name) for name in _FACTS}
    return Engine(
        **{**facts, "update_parts": parts_of_step(entry, times)},
        identity=entry.owner.identity,
        standing=standing(entry, ref.named, now_s, leases),
        named=ref.named,
        behind=ref.behind,
        heard_time_ms=entry.heard_ms,
        since_ms=entry.since_ms,
        update_time_ms=entry.updated_ms if report.update_version else 0,
        proof_time_ms=entry.proved_ms if report.proofs else 0,
    )


def standing(entry: EngineEntry, named: int, now_s: float, leases: Leases) -> str:
    """Standing of an engine whose ref names the version ``named``. ``named`` is 0 if unknown."""
    report, silent_s = entry.report, now_s - entry.heard_s
    if entry.is_gone(now_s, leases):
        return STANDING_GONE
    if silent_s >= leases.stale_s:
        return STANDING_STALE
    if not report.ref:
        return STANDING_PINNED
    if not named:
        return STANDING_UNKNOWN
    return STANDING_CURRENT if report.version == named else STANDING_BEHIND


def served(entries: Iterable[EngineEntry], model: str, now_s: float, leases: Leases) -> dict[int, tuple[str, ...]]:
    """The versions of one model that engines serve, update to or use as a drafter, each with labels of its engines for
    messages.

    For each owner, at most `MOST_KEPT` versions are included: those with the most engines, and the newest among equals.
    An entry from another replica counts until it is forgotten, because its engines keep serving while that replica is
    unreachable.
    """
    of_owner: dict[str, dict[int, list[str]]] = {}
    for entry in entries:
        last_s = leases.gone_s if entry.here else leases.forgotten_s
        if not entry.report.ended and now_s - entry.heard_s < last_s:
            for number in versions_had(entry.report, model):
                own = of_owner.setdefault(entry.owner.quota, {})
                own.setdefault(number, []).append(entry.report.label)
    found: dict[int, list[str]] = {}
    for own in of_owner.values():
        for number in sorted(own, key=lambda each: (len(own[each]), each), reverse=True)[:MOST_KEPT]:
            found.setdefault(number, []).extend(own[number])
    return {number: _named(labels) for number, labels in sorted(found.items())}


def versions_had(report: EngineReport, model: str) -> set[int]:
    """The versions of a model that an engine serves, updates to, or uses as its drafter."""
    found = {report.version, report.target} if report.model == model else set()
    of, _, number = report.drafter.rpartition("@")
    if of == model and number.isdecimal():
        found.add(int(number))
    return found - {0}


def _named(labels: list[str]) -> tuple[str, ...]:
    named, more = sorted(labels)[:_MOST_NAMED], len(labels) - _MOST_NAMED
    return (*named, f"{more} more") if more > 0 else tuple(named)
