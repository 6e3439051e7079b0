"""Engines that serve versions: the report of an agent about its engine, and the service's view of an engine."""

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
"""States of an engine, as its agent reports them. The engine waits for a version that it may use; is being updated;
serves the version that it should serve; or could not be updated to it. ``ended``: the agent has ended and sends no
further reports.
"""
ENGINE_STATES = (ENGINE_WAITING, ENGINE_UPDATING, ENGINE_SERVING, ENGINE_FAILING, ENGINE_ENDED)

STANDING_CURRENT, STANDING_BEHIND = "current", "behind"
"""Status of an engine, relative to its ref. ``current``: it serves the version that its ref names. ``behind``: it
serves another version, or none.
"""
STANDING_PINNED, STANDING_UNKNOWN = "pinned", "unknown"
"""``pinned``: the engine does not follow a ref.

``unknown``: its ref does not name a version, or the version is unknown.
"""
STANDING_STALE, STANDING_GONE = "stale", "gone"
"""Status of an engine without recent reports. ``stale``: agent and service have not had contact for a while, so the
last report may be out of date. ``gone``: they have not had contact for longer, or the agent has ended; the service no
longer counts the engine.
"""
NOT_ANSWERED = "not answered"
"""Result if the agent could not send the golden prompts to the engine."""
MOST_BEHIND = 1000
"""Maximum for the number of versions that an engine is behind."""
PROVED, IN_PART, FAILED, NOT_PROVED = "proved", "proved in part", "failed", "not proved"
"""Verdicts of a proof that an engine computes with a version's bytes: the engine does; it does as far as its parameters
can be compared; it does not; or a proof was due but could not be made.
"""
VERDICTS = (PROVED, IN_PART, FAILED, NOT_PROVED)
NOT_ASKED = "not asked"
"""Text in place of the verdict if no proof of the engine was requested."""


@dataclass(frozen=True, slots=True)
class EngineFacts(JsonValue):
    """State of an engine, as its agent knows it."""

    engine_id: str
    """ID of the engine. It stays the same as long as the agent runs."""
    model: str
    """`namespace/name`."""
    kind: str = ""
    """`vllm`, `sglang`, `transformers`, or any other word."""
    address: str = ""
    """Address of the engine; may be empty."""
    ref: str = ""
    """The ref that the engine follows; empty if it does not follow one."""
    version: int = 0
    """The version that the engine serves; 0 if it does not serve a version of this model."""
    target: int = 0
    """The version to which the engine is being updated; 0 if it is not being updated."""
    state: str = ENGINE_WAITING
    """`waiting`, `updating`, `serving`, `failing`, `ended`, or a state that a later release adds."""
    error: str = ""
    """Reason why the last update failed, or what the engine waits for; empty if neither."""
    host: str = ""
    """Machine of the agent."""
    pid: int = 0
    """Process ID of the agent."""
    update_version: int = 0
    """Version of the engine's last update; 0 if there was none."""
    update_bytes: int = 0
    """Bytes that the engine's ranks fetched for the last update."""
    update_prepare_seconds: float = 0.0
    """Seconds of the last update during which the engine still served."""
    update_pause_seconds: float = 0.0
    """Seconds of the last update during which the engine was paused."""
    update_lane: str = ""
    """Lane of the last update, `local` or `grpc`; empty if unknown."""
    traceparent: str = ""
    """Trace of the current update, otherwise of the last one (W3C Trace Context); may be empty."""
    proved_version: int = 0
    """Version of the last proof that the engine computes with a version's bytes; 0 if there was none."""
    proof: str = ""
    """Verdict of the last proof: `proved`, `proved in part` if some parameters could not be compared, `failed`,
    `not proved` if a proof was due but could not be made, or a verdict that a later release adds; empty if no proof was
    ever requested.
    """
    proof_seconds: float = 0.0
    """Duration of the last proof in seconds."""
    proofs: int = 0
    """Number of proofs that the agent has made."""
    failed_proofs: int = 0
    """Number of proofs that have failed."""
    proof_error: str = ""
    """Finding of the last failed proof, with the parameters' names; or the reason why a due proof cannot be made."""
    golden_version: int = 0
    """Version of the golden prompts that the engine answered last; 0 if it was never sent any."""
    golden: str = ""
    """Result of these golden prompts: `within bound`, `above bound`, `no bound` if the version has no bound,
    `not answered`, or a result that a later release adds; empty if the engine was not sent any.
    """
    golden_drift: float = 0.0
    """Largest difference between the engine's log probabilities of the tokens of these prompts and those in the
    version's metadata.
    """
    golden_mean_drift: float = 0.0
    """Mean of these differences."""
    drafter: str = ""
    """Version of the engine's drafter, if the drafter is a separate model from the service; empty otherwise."""
    update_parts: dict[str, float] = field(default_factory=dict, hash=False)
    """Seconds of each part of the last update by name, such as `stage`, `agree`, `pause`, `apply` and `resume`. Parts
    that were not measured are missing.
    """

    @property
    def ended(self) -> bool:
        """Whether the engine's agent has ended."""
        return self.state == ENGINE_ENDED

    @property
    def label(self) -> str:
        """The engine's kind and address as text: ``vllm at http://node7:8000``."""
        place = self.address or self.host
        return f"{self.kind or 'engine'} at {place}" if place else f"{self.kind or 'engine'} {self.engine_id}"

    @property
    def state_text(self) -> str:
        """The state as text, with the version to which the engine is being updated."""
        return f"{self.state} to {self.target}" if self.target else self.state

    @property
    def update_text(self) -> str:
        """Size and duration of the last update as text; empty if there was none."""
        if not self.update_version:
            return ""
        lane = f" by {self.update_lane}" if self.update_lane else ""
        brought = f"{readable_size(self.update_bytes)}{lane} " if self.update_bytes else ""
        took, paused = map(readable_duration, (self.update_prepare_seconds, self.update_pause_seconds))
        return f"{brought}in {took}, paused for {paused}"

    @property
    def proof_text(self) -> str:
        """The last proof as text, with the number of failed proofs."""
        if not self.proof:
            return NOT_ASKED
        took = f" in {readable_duration(self.proof_seconds)}" if self.proof != NOT_PROVED else ""
        failed = f", {self.failed_proofs} of {self.proofs} have failed" if self.failed_proofs else ""
        return f"{self.proved_version} {self.proof}{took}{failed}"

    @property
    def proof_when(self) -> str:
        """Text before the time of the last proof.

        The verdict is newer than that proof if another proof is due and cannot be made.
        """
        return "last proof " if self.proof == NOT_PROVED else ""

    @property
    def golden_text(self) -> str:
        """Result of the last golden prompts as text; empty if the engine was not sent any."""
        if not self.golden:
            return ""
        drift = "" if self.golden == NOT_ANSWERED else f" (drift {self.golden_drift:.2g})"
        return f"{self.golden_version} {self.golden}{drift}"

    @property
    def step_text(self) -> str:
        """Parts of the training step that ended with the last update, as text; empty if none was measured."""
        return step_text(self.update_parts)


@dataclass(frozen=True, slots=True)
class EngineReport(EngineFacts):
    """Report of an agent about its engine. Each report is complete.

    Reports contain ages in seconds instead of timestamps, because the clocks of hosts differ.
    """

    beat: int = 0
    """Number of the report; it increases with each report."""
    state_seconds: float = 0.0
    """Seconds since the engine entered its state."""
    update_age_seconds: float = 0.0
    """Seconds since the last update ended."""
    proof_age_seconds: float = 0.0
    """Seconds since the last proof ended; if no proof was made, seconds since proofs were first requested."""


@dataclass(frozen=True, slots=True)
class Engine(EngineFacts):
    """An engine as the service knows it. Times are Unix times in milliseconds, by the clock of the service."""

    identity: str = ""
    """Identity of the agent in the policy; empty if it does not have one."""
    standing: str = STANDING_UNKNOWN
    """`current`: the engine serves the version that its ref names; `behind`: it serves another version, or none;
    `pinned`: it does not follow a ref; `unknown`: its ref does not name a version, or the version is unknown; `stale`:
    the service has missed three reports of its agent; `gone`: it has missed twelve, or the agent has ended. Later
    releases may add values.
    """
    named: int = 0
    """The version that the ref names; 0 if it does not name one, or if that is unknown."""
    behind: int = 0
    """Number of versions after the one that the engine serves, up to the one that its ref names; 1000 for 1000 or
    more.
    """
    heard_time_ms: int = 0
    """Time of the agent's last report."""
    since_ms: int = 0
    """Time at which the engine entered its state."""
    update_time_ms: int = 0
    """Time at which the last update ended; 0 if there was none."""
    proof_time_ms: int = 0
    """Time at which the last proof ended; 0 if there was none."""

    @property
    def silent(self) -> bool:
        """Whether the service has not received a report of the agent for a while."""
        return self.standing in (STANDING_STALE, STANDING_GONE)

    @property
    def standing_text(self) -> str:
        """`standing` as text, with the number of versions that the engine is behind."""
        if self.standing != STANDING_BEHIND:
            return self.standing
        if not self.version:
            return "serves no version"
        if not self.behind:
            return "serves a newer one"
        return f"{counted(self.behind, 'version')}{' or more' if self.behind >= MOST_BEHIND else ''} behind"

    @property
    def ref_text(self) -> str:
        """The ref that the engine follows, with the version that the ref names, as text; empty if the engine does not
        follow a ref.
        """
        return f"{self.ref}={self.named or '?'}" if self.ref else ""


@dataclass(frozen=True, slots=True)
class Reported:
    """Response of the service to a report.

    Attributes:
        engine: the engine as the service now shows it.
        report_seconds: seconds until the next report is due, unless something changes before.
    """

    engine: Engine
    report_seconds: float
