"""Status of an engine, as its agent knows it: what it serves, how it stands by what the service has said last, and since when that is silent."""

from __future__ import annotations

from dataclasses import dataclass

from weighbridge._core.engines.facts import STANDING_UNKNOWN, EngineFacts

__all__ = ["AgentStatus"]


@dataclass(frozen=True, slots=True)
class AgentStatus(EngineFacts):
    """How an engine stands, as its agent knows it. Times are Unix times in milliseconds, by the clock of the agent's machine.

    Attributes:
        standing: as the service has said last; `STANDING_STALE` if it has not for three reports, and `STANDING_UNKNOWN` if it never has.
        named: the version that its ref named by then; 0 if none, or that is not known.
        behind: versions behind the one that it serves, up to that one.
        since_ms: since when it is in its state.
        proof_time_ms: when its last proof ended; 0 if there was none.
        heard_time_ms: when the service answered last; 0 if it never has.
        unreachable_since_ms: since when the service cannot be reached; 0 if it can.
        unreachable: why not; or why it takes no reports.
    """

    standing: str = STANDING_UNKNOWN
    named: int = 0
    behind: int = 0
    since_ms: int = 0
    proof_time_ms: int = 0
    heard_time_ms: int = 0
    unreachable_since_ms: int = 0
    unreachable: str = ""
