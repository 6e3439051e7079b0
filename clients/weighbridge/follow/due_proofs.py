"""Due proofs of one engine: at the start, after every N-th update, and retries until a due proof is made."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from weighbridge._clients.engine import EngineClient
from weighbridge._core.engines.facts import FAILED, IN_PART, NOT_PROVED
from weighbridge.errors import InvalidArgument, WeighbridgeError
from weighbridge.follow.engines import EngineDriver, GivesEvidence, attempt
from weighbridge.follow.proving import ByLoad, Proof, prove, prove_by_load
from weighbridge.follow.updates import quietly

if TYPE_CHECKING:
    from weighbridge import _lazy as lazy

log = logging.getLogger(__name__)

_FIRST_PAUSE_SECONDS, _LAST_PAUSE_SECONDS = 10.0, 600.0
"""Wait before a failed attempt at a proof is retried, doubled each time, because each attempt makes the engine compute
digests.
"""
_NOT_COMPARED = "the engine was never compared with a load by its own loader"


@dataclass(frozen=True, slots=True)
class Proved:
    """Result of a due proof, or an empty result.

    Attributes:
        verdict: ``Proof.verdict``; empty if none was made.
        problem: the engine's problem; empty if there is none.
    """

    verdict: str = ""
    problem: str = ""


class DueProofs:
    """Makes the proofs of one engine that are due.

    An update and its proof use the same recording to locate bytes, so an error in the recording would stay undetected.
    Therefore the first proof of parameters that were placed by an untested recording pauses the engine for a load with
    the engine's own loader, and compares the results. The engine's machine remembers the comparison. If an engine does
    not support this comparison, it is proved in part.

    Args:
        client: of the service.
        model: ``namespace/name``.
        engine: its driver.
        every: prove at the start and after so many updates; 0 never does.
        say: called with the changed fields of `EngineFacts` when a proof has ended.

    Raises:
        InvalidArgument: proofs are enabled, but the engine's driver provides no evidence (`GivesEvidence`).
    """

    def __init__(
        self, client: EngineClient, model: str, engine: EngineDriver, every: int, say: Callable[..., None]
    ) -> None:
        self._evidence = engine.evidence if isinstance(engine, GivesEvidence) else None
        if every and self._evidence is None:
            raise InvalidArgument(
                f"{type(engine).__name__} does not provide evidence of the weights that its engine uses"
            )
        self._client = client
        self._model = model
        self._engine = engine
        self._every = every
        self._say = say
        self._until = min(every, 1)
        self._recordings: dict[str, lazy.Recording] = {}
        self._made = self._failed = 0
        self._not_loaded = self._last_failure = ""
        self._owed: int | None = None
        self._pause_s, self._again_s = _FIRST_PAUSE_SECONDS, 0.0

    @property
    def owed(self) -> int | None:
        """Version whose due proof could not be made, if it is time to retry."""
        return self._owed if time.monotonic() >= self._again_s else None

    def expect_start(self) -> None:
        """Record a restart of the engine: the next proof is due when it has a version."""
        self._until = min(self._every, 1)
        self._not_loaded = ""

    def after_update(self, number: int, *, later: str = "") -> Proved:
        """Prove that the engine computes with the bytes of a version, if that is due after this update or start.

        Args:
            number: number of the version.
            later: why the proof must be postponed; empty if it can be made now.
        """
        self._owed = None
        self._until -= 1
        if self._until > 0 or not self._every:
            return Proved()
        self._pause_s = _FIRST_PAUSE_SECONDS
        return self._owe(number, later) if later else self.make(number)

    def make(self, number: int) -> Proved:
        """Make a due proof, or postpone it."""
        begun = time.monotonic()
        try:
            proof = self._proof(number)
        except WeighbridgeError as error:
            log.warning("version %d could not be proved: %s", number, error)
            return self._owe(number, str(error))
        if proof.verdict == NOT_PROVED:
            self._until, self._owed = self._every, None  # a retry would not change that
            return self._say_not_proved(number, "none of its parameters can be compared")
        failed = proof.verdict == FAILED
        self._made += 1
        self._failed += failed
        self._until, self._owed = (
            1 if failed else self._every,
            None,
        )  # a version that is applied again is proved again
        wrong = proof.wrong_text or self._not_loaded
        problem = f"the proof of version {number} has failed: {wrong}" if failed else ""
        self._last_failure = problem or self._last_failure
        self._say(
            proved_version=number,
            proof=proof.verdict,
            proof_seconds=time.monotonic() - begun,
            proofs=self._made,
            failed_proofs=self._failed,
            proof_error=self._last_failure or self._not_loaded,
        )
        return Proved(proof.verdict, problem)

    def _owe(self, number: int, why: str) -> Proved:
        self._until, self._owed = 1, number
        self._again_s = time.monotonic() + self._pause_s
        self._pause_s = min(2 * self._pause_s, _LAST_PAUSE_SECONDS)
        return self._say_not_proved(number, why)

    def _say_not_proved(self, number: int, why: str) -> Proved:
        self._say(proved_version=number, proof=NOT_PROVED, proof_error=f"version {number} is not proved: {why}")
        return Proved(NOT_PROVED)

    def _proof(self, number: int) -> Proof:
        engine = self._engine
        if self._evidence is None:
            raise InvalidArgument("the engine's driver does not provide evidence")
        proof = prove(self._client, self._evidence, self._model, number, self._recordings)
        if proof.verdict in (FAILED, NOT_PROVED):
            return proof
        if not proof.untested:
            self._not_loaded = ""
            return proof
        if not isinstance(engine, ByLoad):
            self._not_loaded = f"{_NOT_COMPARED}: its driver does not support this"
        elif not self._not_loaded:
            log.info("the engine is paused while its own loader loads version %d for a comparison", number)
            try:
                return prove_by_load(engine, self._model, number)
            except WeighbridgeError as error:
                log.warning("version %d: %s: %s", number, _NOT_COMPARED, error)
                # this agent does not retry it: each attempt pauses the engine
                self._not_loaded = f"{_NOT_COMPARED}: {error}"
                serving = quietly(engine.serving)
                if serving is None or serving.broken or serving.version != number:
                    return proof.with_verdict(FAILED)  # the load has left it without a version
                if attempt(engine.resume)[1] is not None:  # the engine may be paused for this proof
                    return proof.with_verdict(FAILED)
        return proof.with_verdict(IN_PART)
