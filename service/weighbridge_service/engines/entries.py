"""Entry of an engine: what its agent has told last, and how it stands. Everything here is pure.

Agents tell ages and not times, so no clocks of two machines are ever compared; and what counts for how long goes by the monotonic clock, which
nobody sets.
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
"""By how much the beginning of a state may differ from report to report: they take different times on their way."""
_SOON_S = 60.0
"""Age from which an update is not news to a process that hears of its engine for the first time."""
_MOST_NAMED = 16
"""Engines that are named where a version is kept for them."""
Order: TypeAlias = tuple[str, str, str, str]
"""Model, address and id of an engine, and the identity of its agent."""
MOST_KEPT = 64
"""Versions of a model that are kept for the engines of one owner: who may only pull does not decide how much is stored."""


@dataclass(frozen=True, slots=True)
class Leases:
    """How long what an agent has told counts.

    Attributes:
        report_s: seconds between two reports of an engine of which nothing changes.
    """

    report_s: float

    @property
    def stale_s(self) -> float:
        """Seconds of silence after which an engine is stale."""
        return 3 * self.report_s

    @property
    def gone_s(self) -> float:
        """Seconds of silence after which an engine is gone: what it serves is not kept for it any more."""
        return 12 * self.report_s

    @property
    def forgotten_s(self) -> float:
        """Seconds of silence after which nobody is told of an engine any more."""
        return 120 * self.report_s


@dataclass(frozen=True, slots=True)
class Owner:
    """Whose agent reports.

    Attributes:
        identity: in the policy; empty if there is none.
        host: from where, as the connection says.
    """

    identity: str = ""
    host: str = ""

    @property
    def quota(self) -> str:
        """Whose engines are counted together."""
        return self.identity or self.host


@dataclass(frozen=True, slots=True)
class Entry:
    """An engine as its agent has told.

    Attributes:
        owner: whose agent that was.
        report: what it said last.
        heard_s: when, in seconds of the process's monotonic clock.
        heard_ms: when, in milliseconds since 1970 UTC.
        since_ms: since when the engine is in its state, likewise.
        updated_ms: when its last update ended, likewise.
        proved_ms: when its last proof ended, or else since when one is asked for, likewise.
        here: whether this process was told, and not another replica.
        updated: whether this report was the first to tell of its last update.
        proofs: how many proofs this report was the first to tell of, and how many of them have failed.
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
        """Which engine: nobody speaks for engines of another identity."""
        return self.owner.identity, self.report.engine_id

    @property
    def order(self) -> Order:
        """Where it stands in lists."""
        return self.report.model, self.report.address, self.report.engine_id, self.owner.identity

    @property
    def facts(self) -> EngineFacts:
        """What it said, but for what differs in each report."""
        return EngineFacts(*(getattr(self.report, name) for name in _FACTS))

    @property
    def place(self) -> tuple[str, str, str, str]:
        """Which engine it is if its agent was started again."""
        return self.owner.identity, self.report.kind, self.report.address, self.report.host

    def is_gone(self, now_s: float, leases: Leases) -> bool:
        """Whether nobody counts on it any more."""
        return self.report.ended or now_s - self.heard_s >= leases.gone_s


def after_report(
    before: Entry | None,
    owner: Owner,
    report: EngineReport,
    now_s: float,
    now_ms: int,
    *,
    age_s: float = 0.0,
    here: bool = True,
) -> Entry:
    """The entry of an engine after a report; the one before, if that was a later one.

    Args:
        before: what was known of it; None if nothing was.
        owner: whose agent reports.
        report: what it says.
        now_s: seconds of the monotonic clock.
        now_ms: the same moment, in milliseconds since 1970 UTC.
        age_s: how long ago it was said, if another replica has heard it.
        here: whether this process has heard it.
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
    return Entry(owner, report, heard_s, heard_ms, since_ms, updated_ms, proved_ms, here, updated, proofs)


def _proofs_told(before: Entry | None, report: EngineReport) -> tuple[int, int]:
    """How many proofs a report is the first to tell of, and how many of them have failed. Of an engine that was not known, the last one if it is young."""
    if before is None:
        young = bool(report.proofs) and report.proof_age_seconds < _SOON_S
        return int(young), int(young and report.proof == FAILED)
    said = before.report
    return max(report.proofs - said.proofs, 0), max(report.failed_proofs - said.failed_proofs, 0)


def _tells_of_update(before: Entry | None, report: EngineReport, heard_s: float) -> bool:
    """Whether a report is the first to tell of its engine's last update. Of an engine that was not known, the update has to be young: this process may
    have been started since."""
    if before is None or not report.update_version:
        return bool(report.update_version) and report.update_age_seconds < _SOON_S
    said = before.report
    moved_s = (heard_s - report.update_age_seconds) - (before.heard_s - said.update_age_seconds)
    return said.update_version != report.update_version or abs(moved_s) * 1000 >= _SLACK_MS


def _steady(before_ms: int, now_ms: int) -> int:
    """A time that two reports tell of, as the first one has it if they agree."""
    return before_ms if abs(before_ms - now_ms) < _SLACK_MS else now_ms


@dataclass(frozen=True, slots=True)
class RefView:
    """What is known of the ref that an engine follows.

    Attributes:
        named: the version that it names; 0 if none, or that is not known.
        behind: how many versions there are behind the one that the engine serves, up to that one.
    """

    named: int = 0
    behind: int = 0


class VersionTimes(NamedTuple):
    """Times of a version, in milliseconds since 1970 UTC; 0 for what is not known.

    Attributes:
        create_ms: when it was opened.
        ready_ms: when it was ready.
        here: whether this process saw that it was.
        first_byte_ms: when this process had the first byte of it; known only to the process that has opened it, whose clock is that of all three.
        offer_s: seconds from the trainer's call of push to the opening, by the trainer's clock; None if that is not known.
    """

    create_ms: int = 0
    ready_ms: int = 0
    here: bool = False
    first_byte_ms: int = 0
    offer_s: float | None = None


_UNKNOWN = VersionTimes()


def parts_of_step(entry: Entry, times: VersionTimes) -> dict[str, float]:
    """Parts of the step that an engine's last update has ended: what the agent has measured, behind what the service knows.

    When the agent heard of the version is counted back from the end of its update, of which it has told how long ago that was: a moment of the clock of
    the replica that was told. Another one may have received the version, by another clock; then it is not known.

    Args:
        entry: what the agent has told.
        times: of the version of that update.
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


def shown(entry: Entry, ref: RefView, now_s: float, leases: Leases, times: VersionTimes = _UNKNOWN) -> Engine:
    """An engine as everybody sees it.

    Args:
        entry: what its agent has told.
        ref: what its ref names.
        now_s: seconds of the monotonic clock.
        leases: how long that counts.
        times: of the version to which its last update has taken it.
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


def standing(entry: Entry, named: int, now_s: float, leases: Leases) -> str:
    """How an engine stands, while its ref names a version; 0 if that is not known."""
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


def served(entries: Iterable[Entry], model: str, now_s: float, leases: Leases) -> dict[int, tuple[str, ...]]:
    """The versions of one model that engines serve, or are being taken to, or draft by, by number, and which engines these are, for people.

    Of each owner's those that most engines serve, and of those the newest, `MOST_KEPT` at most. What another replica has told counts until
    it would be forgotten: if that one is cut off, its engines serve all the same.
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
    """The versions of a model that an engine serves, is being taken to, or drafts by."""
    found = {report.version, report.target} if report.model == model else set()
    of, _, number = report.drafter.rpartition("@")
    if of == model and number.isdecimal():
        found.add(int(number))
    return found - {0}


def _named(labels: list[str]) -> tuple[str, ...]:
    named, more = sorted(labels)[:_MOST_NAMED], len(labels) - _MOST_NAMED
    return (*named, f"{more} more") if more > 0 else tuple(named)
