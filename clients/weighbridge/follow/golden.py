"""Drift of an engine on a version's golden prompts: the difference between its log probabilities and those of the
trainer's model.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from weighbridge._clients.client import Client, manifest_of
from weighbridge._core.engines.facts import NOT_ANSWERED
from weighbridge._core.engines.golden import GoldenPrompt, GoldenPrompts, check_bound
from weighbridge._core.json_values import JsonValue
from weighbridge._core.metadata import Metadata
from weighbridge._core.resources import HELD_CANDIDATE, Version
from weighbridge._core.text.counts import named
from weighbridge._signing.checking import check_signed
from weighbridge._signing.trust import Trusted
from weighbridge.errors import InvalidArgument, WeighbridgeError

log = logging.getLogger(__name__)

WITHIN, ABOVE, NO_BOUND = "within bound", "above bound", "no bound"
MOST_DRIFT = 9999.0
"""Drift if an engine returns no finite log probability."""
_NAMED = 5
"""Maximum number of prompts that a message names."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Log probabilities that one engine assigns to the tokens of a prompt.

    Attributes:
        logprobs: log probability of each token after the first, computed by the engine for the whole prompt without its
            cache.
        last: log probability of the last token, from an ordinary request with the preceding tokens, for which an engine
            uses its prefix cache.
    """

    logprobs: tuple[float, ...]
    last: float


@runtime_checkable
class AnswersPrompts(Protocol):
    """Driver of an engine that returns log probabilities."""

    def answer(self, tokens: Sequence[int]) -> Mapping[str, Answer]:
        """Answers of each engine behind the driver, by its name in errors; the name is empty if there is only one.

        Raises:
            WeighbridgeError: an engine does not respond, or sleeps.
        """


@dataclass(frozen=True, slots=True)
class PromptDrift(JsonValue):
    """Drift of one engine on one prompt.

    Attributes:
        prompt: its place among the version's golden prompts, from 0.
        engine: the engine's name in errors; empty if there is only one.
        largest: largest difference of log probabilities of any token.
        mean: mean difference over all tokens.
        cached: difference for the last token, from the request that uses the prefix cache.
    """

    prompt: int
    engine: str
    largest: float
    mean: float
    cached: float

    @property
    def worst(self) -> float:
        """Larger of both differences."""
        return max(self.largest, self.cached)

    @property
    def text(self) -> str:
        """Prompt and drift in readable form."""
        where = f"prompt {self.prompt}{' of ' + self.engine if self.engine else ''}"
        stale = ", with cached prefixes" if self.cached > self.largest else ""
        return f"{where} ({self.worst:.4g}{stale})"


@dataclass(frozen=True, slots=True)
class Drift(JsonValue):
    """Drift of an engine on the golden prompts of a version.

    Attributes:
        model: ``namespace/name``.
        version: number of the version with the prompts.
        verdict: ``within bound``, ``above bound``, or ``no bound``.
        max_drift: the bound; None if there is none.
        prompts: drift for each prompt and engine.
    """

    model: str
    version: int
    verdict: str
    max_drift: float | None
    prompts: tuple[PromptDrift, ...]

    @property
    def largest(self) -> float:
        """Largest difference of all."""
        return max(each.worst for each in self.prompts)

    @property
    def mean(self) -> float:
        """Mean of the prompts' means."""
        return math.fsum(each.mean for each in self.prompts) / len(self.prompts)

    @property
    def wrong_text(self) -> str:
        """Prompts above the bound, with their drift; empty if there are none."""
        bound = math.inf if self.max_drift is None else self.max_drift
        return named([each.text for each in self.prompts if each.worst > bound], _NAMED)


def drift_of(prompts: GoldenPrompts, answers: Sequence[Mapping[str, Answer]]) -> tuple[PromptDrift, ...]:
    """Drift on each prompt. Pure.

    Args:
        prompts: prompts of the version.
        answers: answers of the engines, for each prompt.

    Raises:
        InvalidArgument: an engine's answer has a different number of tokens.
    """
    return tuple(
        _compared(at, prompt, engine, answer)
        for at, (prompt, found) in enumerate(zip(prompts.prompts, answers, strict=True))
        for engine, answer in found.items()
    )


def _compared(at: int, prompt: GoldenPrompt, engine: str, answer: Answer) -> PromptDrift:
    if len(answer.logprobs) != len(prompt.logprobs):
        raise InvalidArgument(
            f"the engine returned log probabilities of {len(answer.logprobs)} tokens of prompt "
            f"{at}, which has {len(prompt.logprobs)}"
        )
    apart = [_apart(*each) for each in zip(answer.logprobs, prompt.logprobs, strict=True)]
    return PromptDrift(at, engine, max(apart), math.fsum(apart) / len(apart), _apart(answer.last, prompt.logprobs[-1]))


def _apart(found: float, wanted: float) -> float:
    apart = abs(found - wanted)
    return min(apart, MOST_DRIFT) if math.isfinite(apart) else MOST_DRIFT


def ask(
    engine: AnswersPrompts, model: str, number: int, prompts: GoldenPrompts, max_drift: float | None = None
) -> Drift:
    """Send golden prompts to an engine, one after the other.

    Args:
        engine: its driver.
        model: ``namespace/name``.
        number: number of the version that it should serve.
        prompts: prompts of that version.
        max_drift: bound that replaces the version's, for example for an engine that quantises the weights.

    Raises:
        WeighbridgeError: the engine does not respond.
        InvalidArgument: ``max_drift`` is not a valid bound.
    """
    check_bound(max_drift)
    bound = prompts.max_drift if max_drift is None else max_drift
    found = drift_of(prompts, [engine.answer(each.tokens) for each in prompts.prompts])
    return Drift(model, number, _verdict(found, bound), bound, found)


def _verdict(found: Iterable[PromptDrift], bound: float | None) -> str:
    if bound is None:
        return NO_BOUND
    return ABOVE if any(each.worst > bound for each in found) else WITHIN


@dataclass(frozen=True, slots=True)
class Asked:
    """Result of sending golden prompts to an engine.

    Attributes:
        verdict: as in `Drift`; ``not answered``; or empty if the version has no golden prompts.
        drift: drift of the engine; None if it did not respond.
        problem: the engine's problem; empty if there is none.
        unanswered: why it did not respond; empty if it did, or if nothing was sent.
    """

    verdict: str = ""
    drift: Drift | None = None
    problem: str = ""
    unanswered: str = ""

    @property
    def facts(self) -> dict[str, str | float]:
        """Fields of an engine's report, except the version."""
        return {
            "golden": self.verdict,
            "golden_drift": self.drift.largest if self.drift else 0.0,
            "golden_mean_drift": self.drift.mean if self.drift else 0.0,
        }


@dataclass(frozen=True, slots=True)
class GoldenChecks:
    """Checks that an agent makes with golden prompts when its engine has a version.

    Attributes:
        asks: whether the agent sends golden prompts.
        max_drift: bound that replaces a version's own.
        approves: whether the agent approves a version that is held only as a candidate, if its engine's drift is within
            the bound.
    """

    asks: bool = True
    max_drift: float | None = None
    approves: bool = False

    def __post_init__(self) -> None:
        check_bound(self.max_drift)
        if self.approves and not self.asks:
            raise InvalidArgument(
                "versions are to be approved by golden prompts, but the engine is not to be sent any",
                fix="send the engine golden prompts, or leave the approval to others",
            )

    def check(self, client: Client, engine: object, version: Version, required: Sequence[Trusted] = ()) -> Asked:
        """Send the golden prompts of a version to an engine, if the version has any. Does not raise. If the engine does
        not respond, nothing is approved.

        Args:
            client: of the service.
            engine: driver of the engine, which has the version.
            version: the version as reported by the service.
            required: signers who must all have signed the version; its golden prompts are then taken from the signed
                manifest.
        """
        if not self.asks:
            return Asked()
        try:
            prompts = GoldenPrompts.from_metadata(_metadata(client, version, required))
            if prompts is None:
                return Asked()
            if not isinstance(engine, AnswersPrompts):
                raise InvalidArgument(f"{type(engine).__name__} cannot send prompts to its engine")
            drift = ask(engine, version.model, version.number, prompts, self.max_drift)
        except WeighbridgeError as error:
            return Asked(NOT_ANSWERED, unanswered=str(error))
        if drift.verdict == ABOVE:
            problem = (
                f"golden prompts of version {version.number} are above the bound of "
                f"{drift.max_drift:g}: {drift.wrong_text}"
            )
            return Asked(ABOVE, drift, problem)
        if drift.verdict == WITHIN and self.approves:
            _approve(client, version, drift)
        return Asked(drift.verdict, drift)


def _metadata(client: Client, version: Version, required: Sequence[Trusted]) -> Metadata:
    """Metadata of a version; the signed metadata if signatures are required.

    The service also stores metadata outside the manifest, which no signature covers.
    """
    if not required:
        return version.metadata
    manifest = manifest_of(client, version.model, version.number)
    check_signed(manifest, client.signatures(version.model, version.number), required)
    return manifest.metadata


def _approve(client: Client, version: Version, drift: Drift) -> None:
    """Approve a version if it is still held only as a candidate: non-finite elements may have been found since the ref
    named it.
    """
    note = f"golden prompts: drift {drift.largest:.4g}, bound {drift.max_drift:g}"
    try:
        if client.version(version.model, version.number).held != (HELD_CANDIDATE,):
            return
        client.approve(version.model, version.number, note=note)
    except WeighbridgeError as error:
        log.warning("version %d was not approved: %s", version.number, error)
