"""Verdicts on watches next to a bare server: latency and cost. Values and decisions, nothing that measures."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks import report
from benchmarks.siege_verdicts import percentile

MOST_P99_SECONDS = 0.5
"""Limit with one watch on each connection. With several watches, the bare server next to it shows what is possible."""
MOST_CONNECTION_BYTES = 60_000
"""Limit for one connection with one watch."""
MOST_IDLE_CORES = 0.01
MOST_MORE_REQUESTS = 0.2
"""Most additional requests a second to the store for all watches, compared with one watch.

Other requests to it have their own schedule.
"""


@dataclass(frozen=True)
class Case:
    """Number of watches and connections.

    Attributes:
        connections: TCP connections.
        streams: watches on each.
    """

    connections: int
    streams: int

    @property
    def watches(self) -> int:
        """Watches in all."""
        return self.connections * self.streams

    def __str__(self) -> str:
        return f"{self.connections}x{self.streams}"


@dataclass(frozen=True)
class Idle:
    """Cost of a server while nothing happens.

    Attributes:
        cores: processors that it keeps busy.
        requests: requests a second to its store; None if it has none.
        threads: number of its threads.
    """

    cores: float
    requests: float | None
    threads: int


@dataclass(frozen=True)
class Move:
    """A tag that has moved.

    Attributes:
        call: seconds that the call took that moved it.
        latencies: seconds from the beginning of that call until each watch had the version.
        missing: watches that have not heard of it in time, or are none.
    """

    call: float
    latencies: list[float]
    missing: int


@dataclass(frozen=True)
class Figures:
    """Measurements of one server.

    Attributes:
        name: name of the server.
        case: number of watches and connections.
        watching: watches that have begun.
        refused: watches that have not, by status code.
        begin_seconds: seconds until all had begun.
        before, after, after_moves: the server's resident bytes with one watch, with all, and after the last move.
        idle_with_one, idle: cost with one watch, and with all.
        moves: moves of the tag through this server.
        moves_of_other: moves of the tag through another server over the same store.
    """

    name: str
    case: Case
    watching: int
    refused: dict[str, int]
    begin_seconds: float
    before: int
    after: int
    after_moves: int
    idle_with_one: Idle
    idle: Idle
    moves: list[Move]
    moves_of_other: list[Move]

    @property
    def connection_bytes(self) -> float:
        """Resident bytes that a connection with its watches has cost, after the last move; of watches that were let
        in.
        """
        let_in = max(self.watching / self.case.streams, 1.0)
        return (max(self.after, self.after_moves) - self.before) / let_in

    def to_json(self) -> dict[str, Any]:
        """Everything as JSON values."""
        return asdict(self)


@dataclass(frozen=True)
class Verdict:
    """One figure next to that of the bare server.

    Attributes:
        name: name of the figure.
        ours, bare: as people read them.
        ratio: ratio of the two; empty if there is none.
        goal: empty if there is none.
        ok: whether the goal was met; None if there is none.
    """

    name: str
    ours: str
    bare: str
    ratio: str = ""
    goal: str = ""
    ok: bool | None = None


def latencies(moves: Iterable[Move]) -> list[float]:
    """Latencies of all watches; infinite for a watch that has not received a move."""
    return [each for move in moves for each in (*move.latencies, *[math.inf] * move.missing)]


def verdicts(ours: Figures, bare: Figures) -> list[Verdict]:
    """All figures of a case."""
    case = ours.case
    found = [
        Verdict("watches", _watches(ours), _watches(bare), "", str(case.watches), ours.watching == case.watches),
        _compared("begin s", ours.begin_seconds, bare.begin_seconds),
        _compared("the call that moves, median ms", _call(ours.moves), _call(bare.moves), 1e3),
    ]  # fmt: skip
    goal = MOST_P99_SECONDS if case.streams == 1 else None
    mine, theirs = latencies(ours.moves), latencies(bare.moves)
    for name, part in (("p50", 0.5), ("p99", 0.99), ("max", 1.0)):
        most = goal if name == "p99" else None
        values = percentile(mine, part), percentile(theirs, part)
        found.append(_compared(f"heard {name} ms", *values, 1e3, most))
    heard = [[each for each in values if math.isfinite(each)] for values in (mine, theirs)]
    if heard != [mine, theirs]:
        told, bare_told = (percentile(each, 0.99) for each in heard)
        found.append(_compared("heard p99 ms, of those who have", told, bare_told, 1e3))
    if ours.moves_of_other:
        others = latencies(ours.moves_of_other)
        for name, part in (("p50", 0.5), ("p99", 0.99)):
            most = goal if name == "p99" else None
            values = percentile(others, part), percentile(theirs, part)
            found.append(_compared(f"heard of another replica's {name} ms", *values, 1e3, most))
    most = MOST_CONNECTION_BYTES if case.streams == 1 else None
    found.append(_compared("memory kB a connection", ours.connection_bytes, bare.connection_bytes, 1e-3, most))  # fmt: skip
    found.append(_compared("idle, % of a core", ours.idle.cores, bare.idle.cores, 100.0, MOST_IDLE_CORES))
    found.append(
        _compared("idle with one watch, % of a core", ours.idle_with_one.cores, bare.idle_with_one.cores, 100.0)
    )  # fmt: skip
    found.append(Verdict("threads", str(ours.idle.threads), str(bare.idle.threads)))
    one, every = ours.idle_with_one.requests, ours.idle.requests
    if one is not None and every is not None:
        found.append(Verdict("store requests/s with one watch", f"{one:.1f}", "-"))
        most_requests = one + MOST_MORE_REQUESTS
        found.append(
            Verdict(
                "store requests/s with all", f"{every:.1f}", "-", "", f"<= {most_requests:.1f}", every <= most_requests
            )
        )  # fmt: skip
    return found


def table(ours: Figures, bare: Figures) -> str:
    """All figures of a case."""
    said = {None: "", True: "ok", False: "MISSED"}
    rows = ([each.name, each.ours, each.bare, each.ratio, each.goal, said[each.ok]] for each in verdicts(ours, bare))
    return report.table([str(ours.case), ours.name, bare.name, "ratio", "goal", ""], rows)


def _watches(figures: Figures) -> str:
    refused = ", ".join(f"{count} {code}" for code, count in figures.refused.items())
    return f"{figures.watching} ({refused})" if refused else str(figures.watching)


def _call(moves: Sequence[Move]) -> float:
    return percentile([move.call for move in moves], 0.5)


def _compared(name: str, ours: float, bare: float, unit: float = 1.0, most: float | None = None) -> Verdict:
    ratio = f"{ours / bare:.2f}" if bare > 0 and math.isfinite(ours / bare) else "-"
    values = f"{ours * unit:.1f}", f"{bare * unit:.1f}"
    if most is None:
        return Verdict(name, *values, ratio)
    return Verdict(name, *values, ratio, f"<= {most * unit:g}", ours <= most)
