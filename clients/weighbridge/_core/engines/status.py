"""Status of an engine, as its agent knows it: the version that it serves, the standing that the service reported last,
and since when the service has been unreachable."""

from __future__ import annotations

from dataclasses import dataclass

from weighbridge._core.engines.facts import STANDING_UNKNOWN, EngineFacts

__all__ = ["AgentStatus"]


@dataclass(frozen=True, slots=True)
class AgentStatus(EngineFacts):
    """Status of an engine, as its agent knows it.

    Times are Unix times in milliseconds, by the clock of the agent's machine.

    Attributes:
        standing: the standing that the service reported last; `STANDING_STALE` if the service has not responded for the
            time of three reports, and `STANDING_UNKNOWN` if it has never responded.
        named: the version that the ref named according to the service's last response; 0 if it did not name one, or if
            that is unknown.
        behind: number of versions after the one that the engine serves, up to ``named``.
        since_ms: time at which the engine entered its state.
        proof_time_ms: time at which the last proof ended; 0 if there was none.
        heard_time_ms: time of the service's last response; 0 if it has never responded.
        unreachable_since_ms: time since which the service has been unreachable; 0 if it is reachable.
        unreachable: reason why the service is unreachable, or refuses reports.
    """

    standing: str = STANDING_UNKNOWN
    named: int = 0
    behind: int = 0
    since_ms: int = 0
    proof_time_ms: int = 0
    heard_time_ms: int = 0
    unreachable_since_ms: int = 0
    unreachable: str = ""
