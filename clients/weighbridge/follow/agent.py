"""Agent of an engine: updates the engine when a ref moves. If an update fails, the engine keeps its version."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from weighbridge._clients.attempts import attempts, named
from weighbridge._clients.engine import EngineClient
from weighbridge._core.engines.facts import (
    ENGINE_FAILING,
    ENGINE_SERVING,
    ENGINE_UPDATING,
    ENGINE_WAITING,
    NOT_PROVED,
)
from weighbridge._core.engines.step_parts import Parts
from weighbridge._core.json_values import JsonValue
from weighbridge._core.resources import RECEIVING, REF_LIVE, Signature, Version
from weighbridge._reporting.reporter import EngineReporter
from weighbridge._signing.signatures import Signatures
from weighbridge._signing.trust import Trusted
from weighbridge._tracing import spans
from weighbridge.errors import DataLoss, FailedPrecondition, InvalidArgument, WeighbridgeError
from weighbridge.follow.due_proofs import DueProofs, Proved
from weighbridge.follow.engines import (
    AnswersToken,
    EngineDriver,
    EngineFailed,
    Prepared,
    PreparesEarly,
    Serving,
    TakesDrafter,
)
from weighbridge.follow.golden import Asked, GoldenChecks
from weighbridge.follow.news import with_looks
from weighbridge.follow.status import label
from weighbridge.follow.updates import Laps, apply_prepared, pause_seconds, quietly

log = logging.getLogger(__name__)

SIGNED_SECONDS = 5.0
"""Pause between two checks whether a refused version has been signed."""
LOOK_SECONDS = 15.0
"""Pause between two checks of the served version while the ref does not move."""


@dataclass(frozen=True, slots=True)
class Followed(JsonValue):
    """One update, or an attempt at one.

    Attributes:
        model: ``namespace/name``.
        version: target version of the engine.
        serves: version that it reports now; None if it serves no version, or did not respond.
        nbytes: bytes that its ranks have fetched.
        prepare_seconds: duration of the preparation, while it served.
        pause_seconds: time from the request to pause until it resumed, including the wait for running requests.
        error: why the update failed; empty on success.
        behind: number of versions from the served one up to the one that the ref names, if the service reported it.
        waits: whether the engine sleeps and its wake-up will apply the version.
        parts: parts of a successful update in seconds, by the names of `step_parts.OF_AGENT`.
        proof: ``proved``, ``proved in part``, ``failed``, or ``not proved`` if a due proof could not be made; empty if
            none was due.
        golden: ``within bound``, ``above bound``, ``no bound`` or ``not answered``; empty if the version has no golden
            prompts, or they were not due.
        drift: largest difference of log probabilities on golden prompts; None if there is none.
        drafter: the drafter's version, such as ``acme/smol-eagle@5``, if the drafter is a separate model from the
            service; otherwise empty.
        stale: weights of the engine that do not belong to the served version, such as a drafter's; empty if there are
            none.
    """

    model: str
    version: int
    serves: int | None
    nbytes: int = 0
    prepare_seconds: float = 0.0
    pause_seconds: float = 0.0
    error: str = ""
    behind: int = 0
    waits: bool = False
    parts: Parts = field(default_factory=dict, hash=False)
    proof: str = ""
    golden: str = ""
    drift: float | None = None
    stale: str = ""
    drafter: str = ""


class Follower:
    """Keeps one engine on the version that a ref names.

    Args:
        client: of the service.
        model: ``namespace/name``.
        engine: the engine.
        ref: which ref to follow.
        force: whether the engine may currently serve a different model.
        retry_seconds: pause before a version is retried, doubled each time.
        required: signers who must all have signed a version before any of it is fetched. An unsigned version is
            refused, and applied once it is signed, if the ref still names it.
        signed_seconds: pause between two checks of the signatures.
        look_seconds: pause between two checks whether the engine still serves the version. An engine that was restarted
            with another version, or a server with a new engine, is updated again.
        reporter: receives the engine's state; None for no reports.
        prove_every: prove at the start and after this many updates that the engine computes with the version's bytes; 0
            for never. If a version fails its proof, it counts as not applied, and is applied again. See `DueProofs`.
        golden: checks with the golden prompts of a version, at the start and after each update. Drift above the bound
            counts as a failed proof.
        draft: model and ref of the engine's drafter, if it is a separate model. The engine should have the versions
            that both refs name: when either moves, both are prepared, and applied in one pause or not at all.
        leaves_draft: whether the engine applies a version even if the drafter's version cannot be applied; the drafter
            then stays unchanged.
        ask_token: request one token from the engine after each update, and measure the time until its response: the
            part ``answer`` of a step.

    Raises:
        InvalidArgument: an option requires a capability that the engine's driver lacks: proofs require `GivesEvidence`,
            a drafter `TakesDrafter`, and a token request `AnswersToken`.

    Examples:
        >>> follower = Follower(engine, "acme/smol", driver, "latest")
        >>> followed = next(follower.run())
        >>> followed.serves, followed.error
        (1, '')
    """

    def __init__(
        self,
        client: EngineClient,
        model: str,
        engine: EngineDriver,
        ref: str = "latest",
        retry_seconds: float = 2.0,
        *,
        force: bool = False,
        required: Sequence[Trusted] = (),
        signed_seconds: float = SIGNED_SECONDS,
        look_seconds: float = LOOK_SECONDS,
        reporter: EngineReporter | None = None,
        prove_every: int = 0,
        golden: GoldenChecks | None = None,
        draft: tuple[str, str] | None = None,
        leaves_draft: bool = False,
        ask_token: bool = False,
    ) -> None:
        self._client = client
        self._model = model
        self._engine = engine
        self._ref = ref
        self._retry_seconds = retry_seconds
        self._force = force
        self._required = tuple(required)
        self._signed_seconds = signed_seconds
        self._look_seconds = look_seconds
        self._seen: Serving | None = None
        self._reporter = reporter
        self._judged: dict[str, tuple[tuple[int, tuple[Signature, ...]], str]] = {}
        self._heard_s: float | None = None
        if draft is not None and not isinstance(engine, TakesDrafter):
            raise InvalidArgument(f"{type(engine).__name__} does not accept a drafter that is a separate model")
        self._draft_ref, self._draft, self._leaves_draft = draft, "", leaves_draft
        self._draft_problem = ""
        if ask_token and not isinstance(engine, AnswersToken):
            raise InvalidArgument(f"{type(engine).__name__} cannot request a token from its engine")
        self._ask_token = ask_token
        self._proofs = DueProofs(client, model, engine, prove_every, self._say)
        self._golden = golden or GoldenChecks()
        self._unanswered = 0, ""
        self._news: Version | None = None

    def run(self) -> Iterator[Followed]:
        """Follow forever. Yields the version that the engine has at the start, if it is the ref's, and then each update
        or failure. If the engine already has a version without the required signatures, the version stays and is
        reported. A restarted engine is updated again.

        Raises:
            NotFound: the model was deleted. If it is not registered yet, the agent waits for it.
            FailedPrecondition: the engine reports that it serves a different model.
            WeighbridgeError: the engine is unreachable, or does not accept updates.
        """
        self._begin()
        self._engine.connect()
        newest: Version | None = None
        for news in with_looks(self._client.watch_refs(self._watched()), self._look_seconds):
            if news is not None and news[0] == RECEIVING:
                self._prepare_early(news[1].number)
                continue
            if news is not None and self._draft_ref is not None and self._draft_ref == (news[1].model, news[0]):
                self._draft = label(news[1].model, news[1].number)
            elif news is not None:
                newest = news[1]
            if self._draft_ref is not None and not (self._draft or self._leaves_draft):
                continue  # neither version is applied without the other
            if newest is not None and (news is not None or self._has_started_again()):
                yield from self._take_news(newest)
            elif newest is not None:
                if newest.number == self._unanswered[0]:
                    yield from self._ask_again(newest)
                for done in self._prove_what_is_owed():
                    yield done
                    if done.error and (yield from self._wait_signed(newest.number)):
                        yield from self._insist(newest)  # it may differ from the proved version

    def _watched(self) -> list[tuple[str, str]]:
        """The refs; and the version that is being received, if the ref will name it once it is ready and the engine can
        begin to fetch it.
        """
        if self._draft_ref is not None:  # two versions are not staged while they arrive
            return [self._draft_ref, (self._model, self._ref)]
        early = isinstance(self._engine, PreparesEarly) and self._ref == REF_LIVE and not self._required
        return [(self._model, self._ref), *([(self._model, RECEIVING)] if early else [])]

    def _prepare_early(self, number: int) -> None:
        """Make the engine fetch a version as it arrives. An engine that cannot do this fetches it when it is ready."""
        if isinstance(self._engine, PreparesEarly):
            quietly(partial(self._engine.prepare_early, number))

    def _take_news(self, version: Version) -> Iterator[Followed]:
        number = version.number
        self._heard_s, self._news = time.monotonic(), version
        if self._engine_has(number):
            # an earlier agent may have ended while the engine was paused
            self._engine.label(label(self._model, number, self._drafter))
            self._engine.resume()
            problem = self._unsigned(number)
            # nothing is fetched of a version without the required signatures, not even for a comparison
            proved = Proved() if problem else self._proofs.after_update(number)
            if proved.problem:
                yield from self._insist(version)
                return
            asked = self._ask_golden(number)
            if not asked.problem:
                self._say(state=ENGINE_SERVING, version=number, target=0, error=problem or self._stale)
                yield Followed(
                    self._model,
                    number,
                    number,
                    error=problem,
                    proof=proved.verdict,
                    stale=self._stale,
                    drafter=self._drafter,
                    **_golden_of(asked),
                )
                return
        if (yield from self._wait_signed(number)):
            yield from self._insist(version)

    def _has_started_again(self) -> bool:
        """Check whether ranks of the engine were started since the last check, and accept updates.

        A version that this agent did not apply is reported.
        """
        before = self._seen
        serving = quietly(self._serving)
        if before is None or serving is None:  # it is starting, or unreachable
            return False
        if before.waiting is not None and serving.version == before.waiting:
            self._say(state=ENGINE_SERVING, version=serving.version, target=0, error=serving.stale)
            self._unanswered = serving.version, ""
        elif serving.version is not None and _has_got_it_again(before, serving):
            self._proofs.after_update(serving.version, later="a wake-up loaded it again")
            self._unanswered = serving.version, ""
        elif serving.version != before.version:
            had = "no version" if before.version is None else f"version {before.version}"
            problem = serving.broken or f"the engine served {had} before, and this agent has not updated it since"
            self._say(state=ENGINE_FAILING, version=serving.version or 0, target=0, error=problem)
        if serving.instances == before.instances:
            # a wake-up failed to apply the waiting version, or even lost the engine's previous one
            missed = before.waiting is not None and before.waiting not in (serving.waiting, serving.version)
            return missed or bool(serving.broken and not before.broken)
        self._proofs.expect_start()
        try:
            self._engine.connect()
        except WeighbridgeError as error:
            log.warning("the engine was restarted and does not accept updates yet: %s", error)
            self._seen = before
            return False
        return True

    def _serving(self) -> Serving:
        """State that the engine reports; it is stored."""
        self._seen = self._engine.serving()
        return self._seen

    def _wait_signed(self, number: int) -> Generator[Followed, None, bool]:
        """Wait until a version has the required signatures.

        Returns whether it has; if not, the ref names another version. Yields each reason to wait once.
        """
        said = ""
        while problem := self._unsigned(number):
            if problem != said:
                serving = quietly(self._serving)
                version = serving.version if serving else None
                self._say(state=ENGINE_WAITING, version=version or 0, target=0, error=problem)
                yield Followed(self._model, number, version, error=problem, behind=self._behind)
                said = problem
            time.sleep(self._signed_seconds)
            if named(self._client, self._model, self._ref) not in (number, None) or self._draft_has_moved():
                return False
        return True

    def _draft_has_moved(self) -> bool:
        if self._draft_ref is None:
            return False
        now = named(self._client, *self._draft_ref)
        return now is not None and label(self._draft_ref[0], now) != self._draft

    def _unsigned(self, number: int) -> str:
        """Reason why a version, or the drafter's version, does not count as signed; empty if both are signed or need no
        signature.
        """
        if not self._required:
            return ""
        wanted = [(self._model, number)]
        if self._draft:
            wanted.append((self._draft.rpartition("@")[0], int(self._draft.rpartition("@")[2])))
        return next(filter(None, itertools.starmap(self._unsigned_one, wanted)), "")

    def _unsigned_one(self, model: str, number: int) -> str:
        try:
            there = number, self._client.signatures(model, number)
            judged = self._judged.get(model)
            if judged is None or judged[0] != there:
                judged = self._judged[model] = there, self._check_signed(model, number)
        except WeighbridgeError as error:
            return str(error)
        return judged[1]

    def _check_signed(self, model: str, number: int) -> str:
        try:
            Signatures(self._client).check(model, number, required=self._required)
        except (FailedPrecondition, DataLoss) as error:
            return str(error)
        return ""

    def _begin(self) -> None:
        """Refuse an engine of another model: its clients would get responses from this model's weights, or the weights
        would not fit. An engine of this model receives the label of its version immediately, even if the service is
        unreachable.
        """
        serving = quietly(self._serving)
        if serving is None:
            return
        if serving.version is not None:
            self._say(version=serving.version)
            with suppress(WeighbridgeError):
                self._engine.label(label(self._model, serving.version, serving.draft))
        if serving.model not in ("", self._model) and not self._force:
            raise FailedPrecondition(
                f"the engine serves {serving.model}, and not {self._model}",
                fix=f"follow {serving.model}, name another engine with --url, or use --force",
            )

    def _insist(self, version: Version) -> Iterator[Followed]:
        """Try a version until the engine has it, the ref no longer names it, or it has failed too often.

        If the engine does not respond, wait for it; it gets the version when it is reachable again.
        """
        number = version.number
        while True:
            for _ in attempts(self._client, self._model, self._ref, number, self._retry_seconds):
                done = self.take_to(number, version.traceparent)
                yield done
                if not done.error:
                    return
            if quietly(self._engine.serving) is not None or not self._wait_reached(number):
                return

    def _wait_reached(self, number: int) -> bool:
        """Wait for an engine that does not respond, as long as the ref names this version.

        Returns whether it responds.
        """
        while True:
            time.sleep(self._retry_seconds)
            if named(self._client, self._model, self._ref) not in (number, None):
                return False
            if quietly(self._engine.serving) is not None:
                return True

    def take_to(self, number: int, traceparent: str = "") -> Followed:
        """Update the engine to a version. If that fails, the engine keeps its version or returns to it.

        Args:
            number: number of the version.
            traceparent: traceparent of its push. The update continues the trace of the push that caused it.
        """
        prepared, problem = Prepared(0, 0.0), ""
        said: dict[str, str | int] = {"weighbridge.model": self._model, "weighbridge.version": number}
        with spans.span("weighbridge.update", said, origin=traceparent) as span:
            laps = Laps(span)
            if self._heard_s is not None:
                laps.heard(self._heard_s)
            self._say(state=ENGINE_UPDATING, target=number, traceparent=spans.traceparent(span))
            try:
                with spans.child(span, "weighbridge.prepare"):
                    self._engine.connect()
                    prepared = self._prepare(number)
                laps.end_preparation(prepared.seconds, prepared.early_seconds)
                (problem,) = apply_prepared([self._engine], number, label(self._model, number), laps)
            except WeighbridgeError as error:
                problem = str(error)
            for name, seconds in laps.parts.items():
                span.set_attribute(f"weighbridge.{name}_seconds", seconds)
            if problem:
                spans.fail(span, EngineFailed(problem))
        if problem:
            quietly(self._engine.discard)
        serving = quietly(self._serving)
        version = serving.version if serving else None
        waits = serving is not None and serving.waiting == number and not problem
        if serving is not None and not waits and (serving.broken or version not in (None, number)):
            problem = _with_what_is_served(problem, number, serving)
        laps.end("confirm")
        if version == number and not problem and not waits:
            self._measure_token(number, laps)
        proof = Proved() if problem else self._proofs.after_update(number, later="the engine sleeps" if waits else "")
        problem = problem or proof.problem
        asked = Asked() if problem or waits else self._ask_golden(number)
        problem = problem or asked.problem
        done = Followed(
            self._model,
            number,
            version,
            prepared.nbytes,
            round(prepared.seconds, 3),
            round(pause_seconds(laps.parts), 3),
            problem,
            self._behind if problem else 0,
            waits,
            {} if problem or waits else {name: round(seconds, 6) for name, seconds in laps.parts.items()},
            proof.verdict,
            stale="" if problem else self._stale,
            drafter=serving.draft if serving else "",
            **_golden_of(asked),
        )
        self._say_done(done, laps.ended_s)
        return done

    def _measure_token(self, number: int, laps: Laps) -> None:
        """Measure the time until the engine responds with a token from the new version, if this is enabled.

        An engine that does not respond has applied the version nevertheless.
        """
        if not (self._ask_token and isinstance(self._engine, AnswersToken)):
            return
        try:
            self._engine.answer_token()
        except WeighbridgeError as error:
            log.warning("the engine has not returned a token with version %d: %s", number, error)
        else:
            laps.end("answer")

    def _prepare(self, number: int) -> Prepared:
        """Prepare a version together with the drafter's version, or without it if that fails and the drafter may be
        left behind.
        """
        self._draft_problem = ""
        if self._draft_ref is None or not isinstance(self._engine, TakesDrafter):
            return self._engine.prepare(number)
        self._engine.draft = self._draft
        try:
            return self._engine.prepare(number)
        except WeighbridgeError as error:
            if not (self._draft and self._leaves_draft):
                raise
            self._draft_problem = f"{self._draft} was left out: {error}"
        self._engine.draft = ""
        return self._engine.prepare(number)

    def _ask_golden(self, number: int) -> Asked:
        """Send the golden prompts of the engine's version to the engine, if the ref has named that version.

        If the engine does not respond, the next checks retry.
        """
        if self._news is None or self._news.number != number:
            return Asked()
        asked = self._golden.check(self._client, self._engine, self._news, self._required)
        unanswered = (number, asked.unanswered) if asked.unanswered else (0, "")
        if asked.unanswered and unanswered != self._unanswered:
            log.warning("the engine has not answered the golden prompts of version %d: %s", number, asked.unanswered)
        self._unanswered = unanswered
        self._say(golden_version=number if asked.verdict else 0, **asked.facts)
        return asked

    def _ask_again(self, version: Version) -> Iterator[Followed]:
        """Send golden prompts that were due when the engine did not respond or slept."""
        number = version.number
        if not self._engine_has(number):
            return
        asked = self._ask_golden(number)
        if asked.problem:
            yield from self._insist(version)
        elif asked.drift is not None:
            yield Followed(self._model, number, number, drafter=self._drafter, **_golden_of(asked))

    def _prove_what_is_owed(self) -> Iterator[Followed]:
        """Make a postponed proof, if the engine still has that version. Yields its result if it is made now."""
        number, seen = self._proofs.owed, self._seen
        if number is None or seen is None or seen.version != number or seen.waiting is not None:
            return
        proved = self._proofs.make(number)
        if proved.verdict == NOT_PROVED:
            return
        if proved.problem:
            self._say(state=ENGINE_FAILING, version=number, target=0, error=proved.problem)
        yield Followed(self._model, number, number, error=proved.problem, proof=proved.verdict, drafter=self._drafter)

    def _say_done(self, done: Followed, ended_s: float) -> None:
        """Report an update or an attempted update.

        The time on the monotonic clock is the end of its last part; proofs and golden prompts follow later.
        """
        if done.error:
            self._say(state=ENGINE_FAILING, version=done.serves or 0, target=0, error=done.error)
            return
        if done.waits:
            text = f"the engine sleeps: its next wake-up loads version {done.version}"
            self._say(state=ENGINE_WAITING, version=done.serves or 0, target=done.version, error=text)
            return
        self._say(
            state=ENGINE_SERVING,
            version=done.version,
            target=0,
            error=done.stale,
            update_version=done.version,
            update_bytes=done.nbytes,
            update_prepare_seconds=done.prepare_seconds,
            update_pause_seconds=done.pause_seconds,
            update_parts=done.parts,
            updated_s=ended_s,
        )

    @property
    def _stale(self) -> str:
        """Weights that do not belong to the served version, according to the engine's last report, and why its drafter
        was left behind.
        """
        said = "" if self._seen is None else self._seen.stale
        return "; ".join(filter(None, (said, self._draft_problem)))

    @property
    def _drafter(self) -> str:
        """Version of the engine's drafter, according to the engine's last report; empty if there is none."""
        return "" if self._seen is None else self._seen.draft

    @property
    def _behind(self) -> int:
        return 0 if self._reporter is None else self._reporter.status.behind

    def _say(self, **changes: Any) -> None:
        if self._reporter is not None:
            drafted: dict[str, Any] = (
                {} if self._seen is None or not (self._seen.draft or self._draft_ref) else {"drafter": self._seen.draft}
            )
            self._reporter.say(**drafted, **changes)

    def _engine_has(self, number: int) -> bool:
        try:
            serving = self._serving()
            drafts = self._draft in ("", serving.draft)
            return serving.version == number and drafts and serving.waiting in (None, number)
        except WeighbridgeError:
            return False


def _has_got_it_again(before: Serving, now: Serving) -> bool:
    """Test whether the engine received its version again, not from an agent: a wake-up restores weights that sleep
    discarded.
    """
    same = now.version == before.version and now.instances == before.instances
    return same and now.brought != before.brought


def _golden_of(asked: Asked) -> dict[str, Any]:
    """Golden prompt results as fields of `Followed`."""
    return {"golden": asked.verdict, "drift": asked.drift.largest if asked.drift else None}


def _with_what_is_served(problem: str, number: int, serving: Serving) -> str:
    """Reason why an engine does not serve its target version: the failure, and the engine's own report."""
    found = serving.broken or (
        "" if problem else f"the engine serves version {serving.version} and not {number}, after both were applied"
    )
    return problem if found in problem else "\n".join(filter(None, (problem, found)))
