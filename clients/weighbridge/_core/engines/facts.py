"""Engines that serve versions: what an agent reports of one, and what the service knows of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from weighbridge._core.engines.step_parts import step_text
from weighbridge._core.json_values import JsonValue
from weighbridge._core.text.counts import counted
from weighbridge._core.text.durations import readable_duration
from weighbridge._core.text.sizes import readable_size

__all__ = ["Engine"]

ENGINE_WAITING, ENGINE_UPDATING, ENGINE_SERVING = "waiting", "updating", "serving"
ENGINE_FAILING, ENGINE_ENDED = "failing", "ended"
"""States of an engine, as its agent says: it waits for a version that it may take, is being taken to one, serves the one that it was to have,
or could not be taken to it; or its agent has ended, and says nothing more of it."""
ENGINE_STATES = (ENGINE_WAITING, ENGINE_UPDATING, ENGINE_SERVING, ENGINE_FAILING, ENGINE_ENDED)

STANDING_CURRENT, STANDING_BEHIND = "current", "behind"
"""How an engine stands: it serves what its ref names; or another version, or none."""
STANDING_PINNED, STANDING_UNKNOWN = "pinned", "unknown"
"""It follows no ref; or what its ref names is not known, or nothing."""
STANDING_STALE, STANDING_GONE = "stale", "gone"
"""Agent and service have not heard of each other for a while, so that what is known may be out of date; or for so long, or since the agent has
ended, that nobody counts on it."""
NOT_ANSWERED = "not answered"
"""Result of golden prompts that an engine could not be asked."""
MOST_BEHIND = 1000
"""Up to which it is counted how many versions an engine is behind."""
PROVED, IN_PART, FAILED, NOT_PROVED = "proved", "proved in part", "failed", "not proved"
"""Verdicts of a proof that an engine computes with a version's bytes: it does; it does as far as its parameters can be compared; it does not; or a proof was due
and could not be made."""
VERDICTS = (PROVED, IN_PART, FAILED, NOT_PROVED)
NOT_ASKED = "not asked"
"""Said in place of a verdict of an engine of which no proof was asked for."""


@dataclass(frozen=True, slots=True)
class EngineFacts(JsonValue):
    """What an agent knows of its engine."""

    engine_id: str
    """Names it for the life of its agent."""
    model: str
    """`namespace/name`."""
    kind: str = ""
    """`vllm`, `sglang`, `transformers`, or any other word."""
    address: str = ""
    """Where it is reached; may be empty."""
    ref: str = ""
    """The ref that it follows; empty if it follows none."""
    version: int = 0
    """The version that it serves; 0 if none of this model."""
    target: int = 0
    """The version that it is being taken to; 0 if none."""
    state: str = ENGINE_WAITING
    """`waiting`, `updating`, `serving`, `failing`, `ended`, or what a later release adds."""
    error: str = ""
    """Why the last update failed, or what is waited for; empty if all is well."""
    host: str = ""
    """Machine of the agent."""
    pid: int = 0
    """Its process there."""
    update_version: int = 0
    """To which its last update took it; 0 if there was none."""
    update_bytes: int = 0
    """Bytes that its ranks fetched for that."""
    update_prepare_seconds: float = 0.0
    """Of that update, while it served."""
    update_pause_seconds: float = 0.0
    """Of that update, while it stood still."""
    update_lane: str = ""
    """`local` or `grpc`; empty if that is not known."""
    traceparent: str = ""
    """Trace of the update that is under way, or was last (W3C Trace Context); may be empty."""
    proved_version: int = 0
    """Version of the last proof that it computes with a version's bytes; 0 if there was none."""
    proof: str = ""
    """What came of that: `proved`, `proved in part` if parameters could not be compared, `failed`, `not proved` if it was due and could not be made, or what a later release adds; empty if no proof was ever asked for."""
    proof_seconds: float = 0.0
    """How long that proof took."""
    proofs: int = 0
    """Proofs that its agent has made."""
    failed_proofs: int = 0
    """Those of them that have failed."""
    proof_error: str = ""
    """What the last proof that has failed has found, with the parameters' names; or why one that is due cannot be made."""
    golden_version: int = 0
    """Version whose golden prompts it was asked last; 0 if there were none."""
    golden: str = ""
    """What came of that: `within bound`, `above bound`, `no bound` if there is none, `not answered`, or what a later release adds; empty if it was asked none."""
    golden_drift: float = 0.0
    """Largest difference between the log probabilities that it gives the tokens of these prompts and those that the version has."""
    golden_mean_drift: float = 0.0
    """Mean of these differences."""
    drafter: str = ""
    """The version of its drafter, if that is a model of its own which it has from the service; empty without."""
    update_parts: dict[str, float] = field(default_factory=dict, hash=False)
    """Seconds of that update's parts, by name, such as `stage`, `agree`, `pause`, `apply` and `resume`; one that was not measured is missing."""

    @property
    def ended(self) -> bool:
        """Whether its agent has ended."""
        return self.state == ENGINE_ENDED

    @property
    def label(self) -> str:
        """What it is and where, for people: ``vllm at http://node7:8000``."""
        place = self.address or self.host
        return f"{self.kind or 'engine'} at {place}" if place else f"{self.kind or 'engine'} {self.engine_id}"

    @property
    def state_text(self) -> str:
        """Its state, for people, with the version to which it is being taken."""
        return f"{self.state} to {self.target}" if self.target else self.state

    @property
    def update_text(self) -> str:
        """What its last update brought and took, for people; empty if there was none."""
        if not self.update_version:
            return ""
        lane = f" by {self.update_lane}" if self.update_lane else ""
        brought = f"{readable_size(self.update_bytes)}{lane} " if self.update_bytes else ""
        took, paused = map(readable_duration, (self.update_prepare_seconds, self.update_pause_seconds))
        return f"{brought}in {took}, paused for {paused}"

    @property
    def proof_text(self) -> str:
        """Its last proof, for people, and how many have failed."""
        if not self.proof:
            return NOT_ASKED
        took = f" in {readable_duration(self.proof_seconds)}" if self.proof != NOT_PROVED else ""
        failed = f", {self.failed_proofs} of {self.proofs} have failed" if self.failed_proofs else ""
        return f"{self.proved_version} {self.proof}{took}{failed}"

    @property
    def proof_when(self) -> str:
        """Text for people before the time of its last proof: the verdict may be younger, if one that is due cannot be made."""
        return "last proof " if self.proof == NOT_PROVED else ""

    @property
    def golden_text(self) -> str:
        """What came of the golden prompts that it was asked last, for people; empty if it was asked none."""
        if not self.golden:
            return ""
        drift = "" if self.golden == NOT_ANSWERED else f" (drift {self.golden_drift:.2g})"
        return f"{self.golden_version} {self.golden}{drift}"

    @property
    def step_text(self) -> str:
        """Parts of the step that its last update ended, for people; empty if none was measured."""
        return step_text(self.update_parts)


@dataclass(frozen=True, slots=True)
class EngineReport(EngineFacts):
    """What an agent reports of its engine: all of it, each time."""

    beat: int = 0
    """Counts up from report to report."""
    state_seconds: float = 0.0
    """For how long it has been in its state. Ages are told and not times, as clocks of machines differ."""
    update_age_seconds: float = 0.0
    """How long ago its last update ended."""
    proof_age_seconds: float = 0.0
    """How long ago its last proof ended, or for how long one has been asked for if none was made."""


@dataclass(frozen=True, slots=True)
class Engine(EngineFacts):
    """An engine as the service knows it. Times are Unix times in milliseconds, by the clock of the service."""

    identity: str = ""
    """Of its agent, in the policy; empty if there is none."""
    standing: str = STANDING_UNKNOWN
    """`current`; `behind`: it serves another version than its ref names, or none; `pinned`: it follows no ref; `unknown`: so is what its ref names; `stale`: its agent was not heard for three reports; `gone`: for twelve, or it has ended. Or what a later release adds."""
    named: int = 0
    """The version that its ref names; 0 if none, or that is not known."""
    behind: int = 0
    """Versions behind the one that it serves, up to the one that its ref names; 1000 for as many or more."""
    heard_time_ms: int = 0
    """When its agent was heard last."""
    since_ms: int = 0
    """Since when it is in its state."""
    update_time_ms: int = 0
    """When its last update ended; 0 if there was none."""
    proof_time_ms: int = 0
    """When its last proof ended; 0 if there was none."""

    @property
    def silent(self) -> bool:
        """Whether its agent was not heard for a while."""
        return self.standing in (STANDING_STALE, STANDING_GONE)

    @property
    def standing_text(self) -> str:
        """How it stands, for people, with how far behind it is."""
        if self.standing != STANDING_BEHIND:
            return self.standing
        if not self.version:
            return "serves no version"
        if not self.behind:
            return "serves a newer one"
        return f"{counted(self.behind, 'version')}{' or more' if self.behind >= MOST_BEHIND else ''} behind"

    @property
    def ref_text(self) -> str:
        """The ref that it follows and what that names; empty if it follows none."""
        return f"{self.ref}={self.named or '?'}" if self.ref else ""


@dataclass(frozen=True, slots=True)
class Reported:
    """Answer to a report.

    Attributes:
        engine: as all see it now.
        report_seconds: after which the next report is due, if nothing changes before.
    """

    engine: Engine
    report_seconds: float
