"""Agent of an engine: takes it to another version when a ref moves, and keeps it where it is when that fails."""

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
    Engine,
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
"""Pause between two checks whether a refused version is signed by now."""
LOOK_SECONDS = 15.0
"""Pause between two looks at what the engine serves, while the ref does not move."""


@dataclass(frozen=True, slots=True)
class Followed(JsonValue):
    """One update, or an attempt at one.

    Attributes:
        model: ``namespace/name``.
        version: to which the engine was to be taken.
        serves: what it says it serves now; None if it serves no version, or could not be asked.
        nbytes: bytes that its ranks have fetched.
        prepare_seconds: while it served.
        pause_seconds: from asking it to pause until it went on; waiting for requests under way is a part of it.
        error: why it failed; empty if it did not.
        behind: how many versions there are behind the one that it serves, up to the one that the ref names, if the service has said so.
        waits: whether the engine sleeps, and its wake-up will bring the version.
        parts: of an update that succeeded, in seconds, by the names of `step_parts.OF_AGENT`.
        proof: ``proved``, ``proved in part``, ``failed``, or ``not proved`` if one was due and could not be made; empty if none was due.
        golden: ``within bound``, ``above bound``, ``no bound`` or ``not answered``; empty if the version has no golden prompts, or they were not due.
        drift: largest difference of log probabilities in golden prompts; None if there is none.
        drafter: the drafter's version, if that is a model of its own which the engine has from the service, as ``acme/smol-eagle@5``; empty without.
        stale: weights of the engine that are not of the version that it serves, as a drafter's; empty if there are none.
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
    """Takes one engine along with one ref.

    Args:
        client: of the service.
        model: ``namespace/name``.
        engine: the engine.
        ref: which ref to follow.
        force: whether the engine may be serving another model.
        retry_seconds: pause before a version is tried again, twice as long each time.
        required: signers, each of whom must have signed a version before anything of it is fetched. A version that is not signed is
            refused, and taken once it is signed, as long as the ref names it.
        signed_seconds: pause between two looks whether it is.
        look_seconds: pause between two looks whether the engine still serves what it was taken to. One that was started again with another
            version, or has a new engine behind it, is taken there again.
        reporter: receives the engine's state; None to report it to no service.
        prove_every: prove at the start and after so many updates that the engine computes with the version's bytes; 0 never does. A version
            that fails its proof counts as one that the engine has not taken: it is brought again. See `DueProofs`.
        golden: checks with the golden prompts of a version, at the start and after each update. Drift above the bound counts as a proof that fails.
        draft: model and ref of the engine's drafter, if that is a model of its own. The engine is to have the versions that both refs name: when
            either moves, both are prepared, and taken in one pause or not at all.
        leaves_draft: whether the engine takes a version also if that of the drafter cannot be taken, and keeps the drafter that it has.
        ask_token: ask the engine for one token after each update, and measure until it has answered: the part ``answer`` of a step.

    Raises:
        InvalidArgument: it is to be proved, and its driver gives no evidence (`GivesEvidence`); it has a drafter, and its driver takes none
            (`TakesDrafter`); or it is to be asked for a token, and its driver asks for none (`AnswersToken`).

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
        engine: Engine,
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
            raise InvalidArgument(f"{type(engine).__name__} takes no drafter that is a model of its own")
        self._draft_ref, self._draft, self._leaves_draft = draft, "", leaves_draft
        self._draft_problem = ""
        if ask_token and not isinstance(engine, AnswersToken):
            raise InvalidArgument(f"{type(engine).__name__} asks its engine for no token")
        self._ask_token = ask_token
        self._proofs = DueProofs(client, model, engine, prove_every, self._say)
        self._golden = golden or GoldenChecks()
        self._unanswered = 0, ""
        self._news: Version | None = None

    def run(self) -> Iterator[Followed]:
        """Follow for ever. Gives the version that the engine has at the start, if that is the ref's, and then each update or failure. A
        version that the engine has although it is not signed as required stays, and is reported. An engine that was started again is
        taken to the version again.

        Raises:
            NotFound: the model was deleted. One that is not registered yet is waited for.
            FailedPrecondition: the engine says that it serves another model.
            WeighbridgeError: the engine cannot be reached, or takes no updates.
        """
        self._begin()
        self._engine.connect()
        newest: Version | None = None
        for news in with_looks(self._client.watch_refs(self._watched()), self._look_seconds):
            if news is not None and news[0] == RECEIVING:
                self._prepare_early(news[1].number)
                continue
            if (
                news is not None
                and self._draft_ref is not None
                and self._draft_ref == (news[1].model, news[0])
            ):
                self._draft = label(news[1].model, news[1].number)
            elif news is not None:
                newest = news[1]
            if self._draft_ref is not None and not (self._draft or self._leaves_draft):
                continue  # neither version is taken without the other
            if newest is not None and (news is not None or self._has_started_again()):
                yield from self._take_news(newest)
            elif newest is not None:
                if newest.number == self._unanswered[0]:
                    yield from self._ask_again(newest)
                for done in self._prove_what_is_owed():
                    yield done
                    if done.error and (yield from self._wait_signed(newest.number)):
                        yield from self._insist(newest)  # which may be another one than what was proved

    def _watched(self) -> list[tuple[str, str]]:
        """The refs; and what is being received, if that will be its version as soon as it is ready, and the engine can begin with it."""
        if self._draft_ref is not None:  # two versions are not staged while they arrive
            return [self._draft_ref, (self._model, self._ref)]
        early = isinstance(self._engine, PreparesEarly) and self._ref == REF_LIVE and not self._required
        return [(self._model, self._ref), *([(self._model, RECEIVING)] if early else [])]

    def _prepare_early(self, number: int) -> None:
        """Let the engine bring a version as it arrives. Where it cannot, it brings the version when that is ready."""
        if isinstance(self._engine, PreparesEarly):
            quietly(partial(self._engine.prepare_early, number))

    def _take_news(self, version: Version) -> Iterator[Followed]:
        number = version.number
        self._heard_s, self._news = time.monotonic(), version
        if self._engine_has(number):
            # an agent before this one may have ended while the engine was paused
            self._engine.label(label(self._model, number, self._drafter))
            self._engine.resume()
            problem = self._unsigned(number)
            # of a version that is not signed as required nothing is fetched, not to compare it either
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
        """Look at the engine: whether ranks of it were started since the last one, and take updates. A version that this agent has not brought is
        reported."""
        before = self._seen
        serving = quietly(self._serving)
        if before is None or serving is None:  # it is starting, or away
            return False
        if before.waiting is not None and serving.version == before.waiting:
            self._say(state=ENGINE_SERVING, version=serving.version, target=0, error=serving.stale)
            self._unanswered = serving.version, ""
        elif serving.version is not None and _has_got_it_again(before, serving):
            self._proofs.after_update(serving.version, later="a wake-up has brought it again")
            self._unanswered = serving.version, ""
        elif serving.version != before.version:
            had = "no version" if before.version is None else f"version {before.version}"
            problem = (
                serving.broken or f"the engine has served {had}, and this agent has not updated it since"
            )
            self._say(state=ENGINE_FAILING, version=serving.version or 0, target=0, error=problem)
        if serving.instances == before.instances:
            # a wake-up has not brought the version that it was to bring, or has lost even the one that the engine had
            missed = before.waiting is not None and before.waiting not in (serving.waiting, serving.version)
            return missed or bool(serving.broken and not before.broken)
        self._proofs.expect_start()
        try:
            self._engine.connect()
        except WeighbridgeError as error:
            log.warning("the engine was started again, and takes no updates yet: %s", error)
            self._seen = before
            return False
        return True

    def _serving(self) -> Serving:
        """Answer of the engine about what it serves, which is kept."""
        self._seen = self._engine.serving()
        return self._seen

    def _wait_signed(self, number: int) -> Generator[Followed, None, bool]:
        """Wait until a version is signed as required. Returns whether it is; if not, the ref names another version. Gives each reason to wait once."""
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
        """Reason why a version, or that of the drafter, does not count as signed; empty if both do, or need not be."""
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
        """Refuse an engine of another model: its clients would get answers by the other model's weights, or no weights would fit. An
        engine of this model receives the label of its version at once, whether the service can be reached or not.
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
        """Try a version until the engine has it, it is no longer the one to have, or it has failed too often. An engine that does not answer is
        waited for: it gets the version when it is back."""
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
        """Wait for an engine that does not answer, as long as the ref names this version. Returns whether it answers."""
        while True:
            time.sleep(self._retry_seconds)
            if named(self._client, self._model, self._ref) not in (number, None):
                return False
            if quietly(self._engine.serving) is not None:
                return True

    def take_to(self, number: int, traceparent: str = "") -> Followed:
        """Take the engine to a version. It keeps the one that it has, or gets it back, if that fails.

        Args:
            number: of the version.
            traceparent: of its push, whose trace the update continues: the push has led to it, however much later.
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
        proof = (
            Proved()
            if problem
            else self._proofs.after_update(number, later="the engine sleeps" if waits else "")
        )
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
        """Measure until the engine has answered a token by a version that it has, if it is to be asked for one. An engine that does not answer has taken the
        version anyway."""
        if not (self._ask_token and isinstance(self._engine, AnswersToken)):
            return
        try:
            self._engine.answer_token()
        except WeighbridgeError as error:
            log.warning("the engine has answered no token by version %d: %s", number, error)
        else:
            laps.end("answer")

    def _prepare(self, number: int) -> Prepared:
        """Have a version prepared, and with it the drafter's, or without that one if it cannot be and may be left behind."""
        self._draft_problem = ""
        if self._draft_ref is None or not isinstance(self._engine, TakesDrafter):
            return self._engine.prepare(number)
        self._engine.draft = self._draft
        try:
            return self._engine.prepare(number)
        except WeighbridgeError as error:
            if not (self._draft and self._leaves_draft):
                raise
            self._draft_problem = f"{self._draft} was not taken: {error}"
        self._engine.draft = ""
        return self._engine.prepare(number)

    def _ask_golden(self, number: int) -> Asked:
        """Ask the engine the golden prompts of a version that it has, if the ref has named it. One that does not answer is asked again with the next
        looks."""
        if self._news is None or self._news.number != number:
            return Asked()
        asked = self._golden.check(self._client, self._engine, self._news, self._required)
        unanswered = (number, asked.unanswered) if asked.unanswered else (0, "")
        if asked.unanswered and unanswered != self._unanswered:
            log.warning(
                "the engine has not answered the golden prompts of version %d: %s", number, asked.unanswered
            )
        self._unanswered = unanswered
        self._say(golden_version=number if asked.verdict else 0, **asked.facts)
        return asked

    def _ask_again(self, version: Version) -> Iterator[Followed]:
        """Ask golden prompts that were due when the engine did not answer, or slept."""
        number = version.number
        if not self._engine_has(number):
            return
        asked = self._ask_golden(number)
        if asked.problem:
            yield from self._insist(version)
        elif asked.drift is not None:
            yield Followed(self._model, number, number, drafter=self._drafter, **_golden_of(asked))

    def _prove_what_is_owed(self) -> Iterator[Followed]:
        """Make a proof that was due and could not be made, if the engine still has that version. Gives its result, if it is made now."""
        number, seen = self._proofs.owed, self._seen
        if number is None or seen is None or seen.version != number or seen.waiting is not None:
            return
        proved = self._proofs.make(number)
        if proved.verdict == NOT_PROVED:
            return
        if proved.problem:
            self._say(state=ENGINE_FAILING, version=number, target=0, error=proved.problem)
        yield Followed(
            self._model, number, number, error=proved.problem, proof=proved.verdict, drafter=self._drafter
        )

    def _say_done(self, done: Followed, ended_s: float) -> None:
        """Report an update, or an attempt at one, whose last part has ended at a moment of the monotonic clock: proofs and golden prompts come after it."""
        if done.error:
            self._say(state=ENGINE_FAILING, version=done.serves or 0, target=0, error=done.error)
            return
        if done.waits:
            text = f"the engine sleeps: its wake-up brings version {done.version}"
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
        """Weights of the engine that are not of the version that it serves, as it has said last; and why its drafter was left behind."""
        said = "" if self._seen is None else self._seen.stale
        return "; ".join(filter(None, (said, self._draft_problem)))

    @property
    def _drafter(self) -> str:
        """Version of the engine's drafter, as the engine has said last; empty without."""
        return "" if self._seen is None else self._seen.draft

    @property
    def _behind(self) -> int:
        return 0 if self._reporter is None else self._reporter.status.behind

    def _say(self, **changes: Any) -> None:
        if self._reporter is not None:
            drafted: dict[str, Any] = (
                {}
                if self._seen is None or not (self._seen.draft or self._draft_ref)
                else {"drafter": self._seen.draft}
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
    """Test whether the engine has received the version that it had again, and not from an agent: a wake-up brings what sleep has discarded."""
    same = now.version == before.version and now.instances == before.instances
    return same and now.brought != before.brought


def _golden_of(asked: Asked) -> dict[str, Any]:
    """Fields of `Followed`."""
    return {"golden": asked.verdict, "drift": asked.drift.largest if asked.drift else None}


def _with_what_is_served(problem: str, number: int, serving: Serving) -> str:
    """Reason why an engine does not serve the version that it was to have: the failure, and what the engine itself says."""
    found = serving.broken or (
        ""
        if problem
        else f"the engine serves version {serving.version} and not {number}, after both were taken"
    )
    return problem if found in problem else "\n".join(filter(None, (problem, found)))
