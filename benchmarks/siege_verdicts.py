"""Verdicts on a service under attack: what it owes to others, and whether it has held.

Values and decisions, nothing that measures.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks import report
from benchmarks.bystander_process import CALLS, NEW_CLIENTS, PROBES, Window
from benchmarks.held_connections import Counts
from benchmarks.vital_signs import VitalSigns

PULLS = "pulls"
MOST_CALL_SECONDS = 1.0
MOST_PROBE_SECONDS = 0.2
LEAST_PULL = 0.5
"""Least share of the rate before the attack."""
GIVEN_BACK_SECONDS = 30.0
MOST_MEMORY = 512 << 20
"""Bytes by which the service may grow, the sum of its budgets: of weights in flight (256 MiB by default), of incomplete
messages on the local lane (128 MiB), of what callers may make it grow by before they are ended (64 MiB), and as much
again for threads and tasks.
"""
LEFT_MEMORY = 128 << 20
"""Bytes that may be kept of that: of what thousands of calls have freed, the allocator keeps pages of which a part is
in use.
"""
MOST_LOG = 1 << 20
_FEW_ERRORS = 2


@dataclass(frozen=True)
class Outcome:
    """Outcome of one attack.

    Attributes:
        name: name of the attack.
        said: description of the attack.
        counts: counts of its connections when it ended.
        before, coming, during: the windows of bystanders, by name: before the attack, until all of it had come, and
            while it stood.
        start: the service's resources before the attack.
        peak: the highest readings.
        cores: processors that the service kept busy on average.
        log_bytes: bytes that it wrote to its log.
        given_back: seconds from the end of the attack until memory, threads and descriptors were as before; None for
            those that were not in time.
        died: whether the service ended.
    """

    name: str
    said: Sequence[str]
    counts: Sequence[Counts]
    before: Mapping[str, Window]
    coming: Mapping[str, Window]
    during: Mapping[str, Window]
    start: VitalSigns
    peak: VitalSigns
    cores: float
    log_bytes: int
    given_back: Mapping[str, float | None]
    died: bool

    @property
    def pull_ratio(self) -> float:
        """The rate of pulls to what it was before."""
        before, during = (_rate(windows[PULLS]) for windows in (self.before, self.during))
        return during / before if before else 0.0

    def to_json(self) -> dict[str, Any]:
        """Everything as JSON values."""
        judged = [asdict(each) for each in verdicts(self)]
        return {**asdict(self), "pull_ratio": self.pull_ratio, "verdicts": judged}


@dataclass(frozen=True)
class Verdict:
    """One promise.

    Attributes:
        name: name of the figure.
        before: its value before the attack.
        coming: its value while the attack came; no promise is made of that.
        during: its value while the attack stood.
        goal: the limit.
        ok: whether the promise was kept.
        note: further information.
    """

    name: str
    before: str
    coming: str
    during: str
    goal: str
    ok: bool
    note: str = ""


def percentile(values: Sequence[float], part: float) -> float:
    """The smallest value that at least this part of all do not exceed; 0 if there are none."""
    return sorted(values)[max(math.ceil(part * len(values)) - 1, 0)] if values else 0.0


def verdicts(outcome: Outcome, *, call_seconds: float = MOST_CALL_SECONDS, probe_seconds: float = MOST_PROBE_SECONDS,
             memory: int = MOST_MEMORY) -> list[Verdict]:  # fmt: skip
    """Verdict on each promise."""
    limits = {CALLS: call_seconds, NEW_CLIENTS: call_seconds, **dict.fromkeys(PROBES, probe_seconds)}
    judged = [_answered(outcome, name, most) for name, most in limits.items()]
    pulls = outcome.during[PULLS]
    judged.append(
        Verdict(
            "pulls MB/s",
            f"{_rate(outcome.before[PULLS]) / 1e6:.0f}",
            f"{_rate(outcome.coming[PULLS]) / 1e6:.0f}",
            f"{_rate(pulls) / 1e6:.0f}",
            f">= {LEAST_PULL:g}x",
            outcome.pull_ratio >= LEAST_PULL,
            _errors(pulls),
        )
    )
    start, peak = outcome.start, outcome.peak
    grown = max(peak.resident, peak.most_resident) - start.resident
    judged.append(
        Verdict(
            "resident MiB",
            _mebibytes(start.resident),
            "",
            f"{grown / 2**20:+.0f}",
            f"<= +{memory >> 20}",
            grown <= memory,
        )
    )
    held = {"memory": start.resident, "threads": start.threads, "descriptors": start.descriptors}
    for name, before in held.items():
        seconds = outcome.given_back.get(name)
        most = "" if name == "memory" else f"most {getattr(peak, name)}"
        judged.append(
            Verdict(
                f"{name} given back s",
                _mebibytes(before) if name == "memory" else str(before),
                "",
                "not" if seconds is None else f"{seconds:.1f}",
                f"<= {GIVEN_BACK_SECONDS:g}",
                seconds is not None,
                most,
            )
        )
    judged.append(
        Verdict(
            "log KiB",
            "",
            "",
            f"{outcome.log_bytes / 1024:.0f}",
            f"<= {MOST_LOG >> 10}",
            outcome.log_bytes <= MOST_LOG,
            f"{outcome.cores:.2f} cores busy",
        )
    )
    judged.append(Verdict("the service lives", "", "", "no" if outcome.died else "yes", "yes", not outcome.died))
    return judged


def table(outcome: Outcome, memory: int) -> str:
    """The promises of one attack, under what stood at its end."""
    stood = [
        f"  {said}: {each.standing} connections"
        + (f" and {each.calls - each.ended} calls" if each.calls else "")
        + f" stand at the end, {each.sent >> 20} MiB taken"
        for said, each in zip(outcome.said, outcome.counts, strict=True)
    ]
    judged = verdicts(outcome, memory=memory)
    rows = (
        [each.name, each.before, each.coming, each.during, each.goal, "ok" if each.ok else "MISSED"] for each in judged
    )
    lines = report.table([outcome.name, "before", "coming", "attacked", "goal", ""], rows).splitlines()
    noted = (
        f"{line}  {note}".rstrip() for line, note in zip(lines, ["", *(each.note for each in judged)], strict=True)
    )
    return "\n".join([*stood, *noted])


def _answered(outcome: Outcome, name: str, most: float) -> Verdict:
    before, during = outcome.before[name], outcome.during[name]
    longest = max(during.seconds, default=math.inf)
    note = f"p99 {percentile(during.seconds, 0.99) * 1e3:.0f} ms of {len(during.seconds)}"
    return Verdict(
        f"{name} ms",
        f"{max(before.seconds, default=math.inf) * 1e3:.0f}",
        f"{max(outcome.coming[name].seconds, default=math.inf) * 1e3:.0f}",
        f"{longest * 1e3:.0f}",
        f"<= {most * 1e3:.0f}",
        longest <= most and not during.failed,
        "; ".join(filter(None, (note, _errors(during)))),
    )


def _errors(window: Window) -> str:
    if not window.failed:
        return ""
    return f"{window.failed} failed: {' | '.join(window.errors[:_FEW_ERRORS])}"


def _rate(window: Window) -> float:
    return window.nbytes / window.length if window.length else 0.0


def _mebibytes(nbytes: int) -> str:
    return f"{nbytes / 2**20:.0f}"
