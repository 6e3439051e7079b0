"""Versions of one engine rank: the served one, the prepared one, and the transition between them.

Methods are called in the engine's own thread. All ranks must call methods marked as collective, in the same order.
"""

from __future__ import annotations

import logging
import secrets
import time
import weakref
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any, cast

from weighbridge import _lazy as lazy
from weighbridge._clients.engine import EngineClient
from weighbridge._core.engines.facts import ENGINE_FAILING, ENGINE_SERVING, ENGINE_UPDATING, ENGINE_WAITING
from weighbridge._core.resources import REF_LATEST
from weighbridge._reporting.reporter import EngineReporter
from weighbridge._tracing import spans
from weighbridge.errors import FailedPrecondition, NotFound, WeighbridgeError
from weighbridge.follow.engines import ALLOW, REFUSE, WAIT, StaleDrafter, WhenAsleep
from weighbridge.follow.evidence import Evidence, RankProof
from weighbridge.follow.status import Status, drafter_in
from weighbridge.follow.updates import Laps
from weighbridge.integrations.engine_rank.agreement import RanksFailed, agree, exchange
from weighbridge.integrations.engine_rank.drafting import ALLOWING, WITHOUT, DrafterLeft
from weighbridge.integrations.engine_rank.model import EngineAsleep, EngineModel
from weighbridge.integrations.engine_rank.preparation import (
    Preparation,
    Recorded,
    RecordingStale,
    check_model,
)
from weighbridge.integrations.engine_rank.source import Held, ModelSource

log = logging.getLogger(__name__)

_ATTRIBUTE = "_weighbridge_rank"
_AGENT_SECONDS = 30.0
"""Time that the engine waits for a reporting agent before it reports to the service itself."""


class EngineRank:
    """Updates one model of one process from version to version.

    All checks have passed, and all bytes are on the machines of all ranks, before any rank changes a parameter. If a
    rank fails after that, all ranks roll back to their previous version.

    Args:
        engine: the model, as the engine's adapter describes it.

    Attributes:
        engine: the model.
        source: where versions come from; None if not known.
        held: the version in the parameters; None if they belong to no version, or did not come from the service.
        clients: clients of the services that versions came from. They stay open until `close`.
        when_asleep: policy for an update while the parameters have no memory: ``refuse`` it, or let it ``wait`` for
            `wake`, which then also restores what sleep has discarded.
        stale_drafter: policy for an update that leaves the engine's drafter behind: ``refuse`` it, or ``allow`` it.
    """

    def __init__(self, engine: EngineModel) -> None:
        self.engine = engine
        self.source: ModelSource | None = None
        self.held: Held | None = None
        self.clients: dict[ModelSource, EngineClient] = {}
        self.when_asleep: WhenAsleep = REFUSE
        self.stale_drafter: StaleDrafter = REFUSE
        self._recorded: Recorded | None = None
        self._preparation: Preparation | None = None
        self._broken = ""
        self._by_recording = False
        """Whether the bytes in the parameters were placed by a recording instead of the engine's own loader."""
        self._tested: Recorded | None = None
        """Recording whose result was compared with a load by the engine's own loader and was equal."""
        self._before: Held | None = None
        self._waiting: tuple[ModelSource, int] | None = None
        """Version that `wake` applies."""
        self._lost: Held | None = None
        """Version that was in the parameters before sleep discarded them."""
        self._first = ""
        """Version that was loaded first: a drafter that versions do not fill belongs to it.

        Empty once that drafter has received its own version.
        """
        self._drafter_lost = False
        self._back_to: Held | None = None
        """Version that the engine rolls back to, during a rollback."""
        self._left_behind = False
        """Whether the last update named no version of a drafter that has its own versions."""
        self._instance = secrets.token_hex(8)
        self._brought = 0
        self._reported = bool(engine.kind)
        self._reporter: EngineReporter | None = None

    def client(self, source: ModelSource | None = None) -> EngineClient:
        """A client of the service that a model's versions come from; None for the known source.

        Raises:
            FailedPrecondition: no source is known.
        """
        source = self._known(source).with_draft("")
        if source not in self.clients:
            self.clients[source] = source.connect()
        return self.clients[source]

    def load(self, source: ModelSource, version: str | int) -> tuple[lazy.Source, lazy.Recording | None]:
        """Load a version into a model that has no weights yet: directly into its parameters as the bytes arrive.

        Not collective.

        Args:
            source: where it comes from.
            version: a number or a ref. A ref may resolve to a different version on another rank, so resolve it
                beforehand.

        Returns:
            The version, and the recording that was applied: the model's own loader must still run for ``unrecorded``
            tensors, or for everything if there is no recording.

        Raises:
            NotFound: the model, version or ref does not exist.
            FailedPrecondition: the version does not fit the model; states what differs.
        """
        client = self.client(source)
        found = lazy.Source(client, source.model, version)
        check_model(self.engine.config, client, found.version)
        recording = self.engine.record_first(found)
        nbytes = 0
        if recording is not None:
            pull = client.pull(source.model, found.version.number, recording.request)
            update = lazy.Update(recording, pull)
            update.fill_all(self.engine.targets())
            update.close()
            nbytes = update.nbytes
            self._recorded = Recorded.of(found, self.engine.configuration(), recording)
            self._by_recording = True
        self.source, self.held = source, Held(source, found.version, nbytes)
        self._first = self.held.label
        self._say(state=ENGINE_SERVING)
        return found, recording

    def take_over_drafter(self, loaded: EngineRank | None) -> None:
        """Record the version in the drafter's parameters next to the model's version, if the drafter is a separate
        model and was loaded from the service. Not collective.

        Args:
            loaded: the rank that loaded the drafter; None if the drafter came from another source.
        """
        if self.held is None or loaded is None or loaded.held is None:
            return
        self.engine.join(self.engine.aside, self.engine.apart)
        self.held = replace(self.held, source=self.held.source.with_draft(loaded.held.label))
        self._first = self.held.label

    def connect(self, source: ModelSource | None = None, version: str | int = REF_LATEST) -> None:
        """Determine which slices this rank needs of a model's versions. Runs the model's loader if that is not known
        yet, so the model must not compute.

        If the store contains no version of the model, the slices are determined with the first version that is
        prepared.

        Args:
            source: where versions come from; None keeps the known source.
            version: any existing version of the model, to record the loader with.

        Raises:
            NotFound: the model or version does not exist.
            FailedPrecondition: no source is known, the version does not fit the engine, or another version is being
                prepared.
        """
        source = self._known(source)
        if source.draft:
            self.engine.join_aside(source.draft)
        known, configuration = self._recorded, self.engine.configuration()
        if known is not None and known.is_of(source, configuration):
            self.source = source.with_draft("")
            return
        self._refuse_while_preparing()
        client = self.client(source)
        try:
            found = source.open(client, version)
        except NotFound:
            if version != REF_LATEST:
                raise
            client.model(source.model)
            self.source = source.with_draft("")
            return
        check_model(self.engine.config, client, found.version)
        if known is not None:
            known.check(found)
        recording = self._record(found)
        self.discard()
        self._recorded = Recorded.of(found, self.engine.configuration(), recording)
        self.source = source.with_draft("")

    def _record(self, found: lazy.Source) -> lazy.Recording:
        """Record the loader; without the drafter, if the version does not fill it and may leave it behind."""
        try:
            return self.engine.record(found)
        except DrafterLeft as error:
            # a drafter's own version is accepted or refused: its label names the one that the drafter has
            if self.stale_drafter != ALLOW or isinstance(found, lazy.Pair):
                raise
            self.engine.part()
            log.warning("%s keeps its weights: %s", self.engine.apart, error.message)
            return self.engine.record(found)

    def prepare(self, number: int, source: ModelSource | None = None) -> None:
        """Begin to fetch a version to this machine while the engine serves; `status` shows when it has arrived.

        Not collective.

        Args:
            number: number of the version.
            source: where it comes from; None for the known source.

        Raises:
            FailedPrecondition: another version is being prepared, or the engine cannot load versions of this model.
            NotFound: the model does not exist.
        """
        if self._ready(number, source):
            self.discard()
            source, recorded = self._known(source), cast("Recorded", self._recorded)
            self._preparation = Preparation(self.engine, self.client(source), source, number, recorded)

    def prepare_early(self, number: int, source: ModelSource | None = None) -> None:
        """Begin to fetch a version that the service is still receiving, as its parts arrive. Not collective.

        `prepare` continues with it. Until `prepare` is called, this preparation yields to another version.

        Args:
            number: number of the version.
            source: where it comes from; None for the known source.

        Raises:
            FailedPrecondition: another version is being or has been prepared, or it is not known yet which slices this
                rank needs.
        """
        asked, source = source, self._known(source)
        known, there = self._recorded, self._preparation
        if there is not None and there.error is None:
            if (there.source, there.number) == (source, number):
                return
            if there.asked:
                raise FailedPrecondition(f"{there.label} is here, or is being fetched")
        self._check_drafter(number, asked)
        if source.draft:
            raise FailedPrecondition(
                f"{source.label(number)} are fetched only when they are ready: a drafter has versions of its own"
            )
        if known is None or not known.is_of(source, self.engine.configuration()):
            raise FailedPrecondition("the part of a version that this rank takes is not known yet")
        self.engine.check(known.recording)
        self.discard()
        if self._recorded is known:
            self._preparation = Preparation(self.engine, self.client(source), source, number, known, early=True)

    def prepare_all(self, number: int, source: ModelSource | None = None) -> None:
        """`prepare` on all ranks, or on none. Collective.

        Raises:
            RanksFailed: states which ranks cannot, and why.
        """
        refusal = f"version {number} is not being prepared"
        agree(self.engine.ranks, refusal, partial(self._ready, number, source))
        self.prepare(number, source)

    def stage(self, number: int, source: ModelSource | None = None) -> None:
        """Wait until all bytes of a version are on all ranks' machines: the first step of `apply`. Collective.

        Raises:
            RanksFailed: states which ranks did not get them, and why; or that ranks were called with different
                versions.
        """
        refusal = f"version {number} was not prepared, and the engine keeps {self._kept(source)}"
        try:
            asked = exchange(self.engine.ranks, refusal, partial(self._prepared, number, source))
            if len(set(asked)) > 1:
                raise RanksFailed(
                    refusal, details=[f"rank {rank} was asked for {each}" for rank, each in enumerate(asked)]
                )
        except RanksFailed:
            if self._preparation is not None and self._preparation.number == number:
                self.discard()
            raise

    def discard(self) -> None:
        """Release the memory of a prepared version. Memory of a running fetch is released when the fetch has ended."""
        there, self._preparation = self._preparation, None
        if there is not None:
            if isinstance(there.error, RecordingStale):
                self._recorded = None
            there.close()

    def apply(self, number: int, source: ModelSource | None = None) -> None:
        """Write a version into the parameters while the model does not compute.

        Prepares the version first if necessary. Collective.

        While the engine sleeps and `when_asleep` is ``wait``, this only fetches all bytes to the ranks' machines;
        `wake` does the rest.

        Args:
            number: number of the version, the same on all ranks.
            source: where it comes from; None for the known source.

        Raises:
            RanksFailed: states what failed on which ranks, and which version the engine has. `errors` is set if nothing
                was changed.
        """
        name = "weighbridge.rank_update"
        said = {"weighbridge.version": number, "weighbridge.rank": self.engine.ranks.rank}
        span = spans.begin(name, said)
        had, laps = self.held or self._lost, Laps()
        self._say(state=ENGINE_UPDATING, target=number, traceparent="")
        try:
            self.stage(number, source)
            known = self._known(source)
            if self._sleeps(number, source):
                # without a drafter's version that was not named: the drafter is left behind, now or then
                self._waiting = source or known.with_draft(""), number
                self._say(
                    state=ENGINE_WAITING,
                    target=number,
                    error=f"the engine sleeps: its next wake-up loads version {number}",
                )
                return
            self._waiting = None
            version = cast("Preparation", self._preparation).update.version
            span = spans.moved(span, name, said, version.traceparent)
            span.set_attribute("weighbridge.model", version.model)
            spans.within(span, "weighbridge.agree", start_time=spans.began(span)).end()
            laps.end("agree")
            self._say(state=ENGINE_UPDATING, target=number, traceparent=spans.traceparent(span))
            try:
                with spans.child(span, "weighbridge.fill"):
                    self._fill(f"version {number} could not be applied")
            except RanksFailed as error:
                self._go_back(had, number, error, known.draft)
        except WeighbridgeError as error:
            spans.fail(span, error)
            self._say(state=ENGINE_FAILING, error=str(error), traceparent=spans.traceparent(span))
            raise
        finally:
            span.end()
        self._before, self._left_behind = had, source is None or not source.draft
        laps.end("apply")
        self._say(
            state=ENGINE_SERVING,
            update_parts=laps.parts,
            update_version=number,
            update_bytes=0 if self.held is None else self.held.nbytes,
        )

    def evidence(self, known: Collection[str] = ()) -> Evidence:
        """Digests of this rank's parameters, to compare with the digests that its version implies. Not collective.

        Args:
            known: `Recording.digest` of recordings that the caller already has; they are not sent.

        Raises:
            FailedPrecondition: the loader was not recorded, or the engine sleeps.
        """
        recorded = self._recorded
        if recorded is None:
            raise FailedPrecondition(
                "the part of a version that this rank takes is not known",
                fix="connect the engine to the model first",
            )
        self.engine.check_awake()
        begun = time.monotonic()
        recording = recorded.recording
        seen, unseen = self.engine.live(recording)
        digests = lazy.digests_of(recording, seen)
        return Evidence(
            served="" if self.held is None else self.held.label,
            recording=recording.digest,
            recorded="" if recording.digest in known else recording.to_json(),
            digests=digests,
            unseen={**unseen, **self._unknown},
            seconds=time.monotonic() - begun,
            untested=self._by_recording
            and self._tested is not recorded
            and not lazy.is_tested(recording, recorded.configuration),
        )

    def compare_with_load(self) -> RankProof:
        """Load this rank's version again with the engine's own loader, and report which tensors changed. Collective.

        The model must not compute meanwhile. Afterwards all tensors are those of a fresh load.

        Raises:
            RanksFailed: a rank has no version, sleeps, or could not load it; states which version the engine has.
        """
        begun = time.monotonic()
        refusal = f"{self._kept(None)} was not loaded again"
        held = agree(self.engine.ranks, refusal, self._held_awake)
        self.held, self._broken = None, f"{held.label} was loaded again in part"
        try:
            before, after = agree(
                self.engine.ranks,
                f"version {held.version.number} could not be loaded again",
                partial(self._digests_around_load, held),
            )
        except RanksFailed as error:
            self._go_back(held, held.version.number, error)
        self.held, self._broken = held, ""
        wrong = [name for name, digest in before.items() if after.get(name) != digest]
        if self._by_recording and self._recorded is not None and not wrong:
            self._tested = self._recorded
            lazy.note_tested(self._recorded.recording, self._recorded.configuration)
        self._by_recording = False
        return RankProof(
            held.label,
            len(before),
            tuple(wrong),
            {**self.engine.hidden(), **self._unknown},
            time.monotonic() - begun,
        )

    @property
    def _unknown(self) -> dict[str, str]:
        """A drafter that no version describes."""
        if not self.engine.apart or (self.held is not None and self.held.source.draft):
            return {}
        return {self.engine.apart: "updates do not change it"}

    def _held_awake(self) -> Held:
        self.engine.check_awake()
        if self.held is None:
            raise FailedPrecondition("this rank has no version of the service")
        if self._recorded is not None:  # an engine that could not be rolled back is not changed
            self.engine.check(self._recorded.recording)
        return self.held

    def _digests_around_load(self, held: Held) -> tuple[dict[str, int], dict[str, int]]:
        source = held.source.open(self.client(held.source), held.version.number)
        before = lazy.whole_digests(self.engine.computed_with())
        self.engine.load_again(source)
        return before, lazy.whole_digests(self.engine.computed_with())

    def undo(self, number: int, source: ModelSource | None = None) -> None:
        """Roll back from a version to the previous one, and the drafter with it. Does nothing if the engine does not
        have that version, or has a different version of the drafter. Collective.

        For several engines that update together, if another one of them failed.

        Args:
            number: number of the version.
            source: where it came from, with the drafter's version; None for the known source.

        Raises:
            RanksFailed: the rollback failed; states which version the engine has.
        """
        if self._waiting is not None and self._waits_for(number, source):
            self._waiting = None
        if self.held is None or self.held.version.number != number:
            return
        if source is not None and source.draft not in ("", self.held.source.draft):
            return
        refusal = f"the engine keeps version {number}"
        before = agree(self.engine.ranks, refusal, partial(_way_back, self._before, self.held.source.draft))
        with self._going_back(before):
            self.apply(before.version.number, before.source)

    def _waits_for(self, number: int, source: ModelSource | None) -> bool:
        if self._waiting is None or self._waiting[1] != number:
            return False
        return source is None or source.draft in ("", self._waiting[0].draft)

    def wake(self, *, lost: bool, last: bool) -> None:
        """Write the waiting version into the parameters, which have memory again.

        Must be called before the model computes. Collective.

        Args:
            lost: whether sleep has discarded their values.
            last: whether the engine will compute after this; discarded values are then restored, if `when_asleep` is
                ``wait`` and no other version has arrived meanwhile.

        Raises:
            RanksFailed: states what could not be restored, and why; `held` is the version that the engine has.
        """
        self._drafter_lost |= lost
        if lost and self.held is not None:
            self._lost, self.held = self.held, None
            self._broken = f"{self._lost.label} was discarded while the engine slept"
        refusal = "the wake-up applies no version"
        due = exchange(self.engine.ranks, refusal, self._due)
        if len(set(due)) > 1:
            raise RanksFailed(refusal, details=[f"rank {rank}: {each}" for rank, each in enumerate(due)])
        problem: RanksFailed | None = None
        if self._waiting is not None:
            source, number = self._waiting
            try:
                if self.held is None or self.held.label != self._known(source).label(number):
                    self._bring(source, number)
                elif self._preparation is not None and self._preparation.number == number:
                    self.discard()
            except RanksFailed as error:
                problem = error
            if last or problem is None:
                self._waiting = None
        if last and self.held is None and self._lost is not None:
            self._say(state=ENGINE_FAILING, error=self._broken)
            if self.when_asleep == WAIT:
                self._bring(self._lost.source, self._lost.version.number)
        if problem is not None:
            raise problem

    @property
    def owes_a_version(self) -> bool:
        """Whether `wake` must write a version before the engine may compute."""
        return self.when_asleep == WAIT and self.held is None and bool(self._broken)

    def status(self) -> Status:
        """Status of this rank: the version that it serves, and the one that it prepares."""
        served = self.held.label if self.held is not None else ""
        waiting = self._waiting[0].label(self._waiting[1]) if self._waiting is not None else ""
        found = Status(
            served=served,
            broken=self._broken,
            instance=self._instance,
            waiting=waiting,
            stale=self._stale,
            brought=self._brought,
        )
        there = self._preparation
        if there is None:
            return found
        if there.running:
            return replace(found, preparing=there.label, nbytes=there.nbytes)
        if there.error is not None:
            return replace(found, error=str(there.error), nbytes=there.nbytes, seconds=there.seconds)
        return replace(
            found,
            prepared=there.label,
            nbytes=there.nbytes,
            seconds=there.seconds,
            early_seconds=there.early_seconds,
        )

    def end_reports(self) -> None:
        """Stop reporting the served version to the service: the engine ends, or an agent reports it."""
        self._reported = False
        if self._reporter is not None:
            self._reporter.stop()

    def _say(self, *, state: str, target: int = 0, error: str = "", **update: Any) -> None:
        """Make the first rank report the engine's state, if engines of its kind are reported."""
        source = self.source if self.held is None else self.held.source
        if not self._reported or source is None or self.engine.ranks.rank:
            return
        if self._reporter is None:
            try:
                client = self.client(source)
            except WeighbridgeError:  # no client of that service exists: the update itself reports it
                return
            self._reporter = EngineReporter(client, source.model, kind=self.engine.kind, delay=_AGENT_SECONDS)
            weakref.finalize(self, self._reporter.stop)
        version = 0 if self.held is None else self.held.version.number
        error = error or (self._stale if state == ENGINE_SERVING else "")
        self._reporter.say(
            model=source.model,
            state=state,
            version=version,
            target=target,
            error=error,
            drafter=source.draft,
            **update,
        )

    def close(self) -> None:
        """Close the clients, and release memory."""
        self.discard()
        for client in self.clients.values():
            client.close()
        self.clients.clear()

    def _known(self, source: ModelSource | None) -> ModelSource:
        """The given source, or the known one. If it names no drafter's version, the engine's current one is added."""
        source = source or self.source
        if source is None:
            raise FailedPrecondition(
                "this engine was not loaded from weighbridge, and does not know which model it serves",
                fix="name server and model",
            )
        had = self.held or self._lost
        return source.with_draft(source.draft or (had.source.draft if had is not None else ""))

    def _ready(self, number: int, source: ModelSource | None) -> bool:
        """Whether a version must still be prepared; raises if it cannot be."""
        asked, source = source, self._known(source)
        there = self._preparation
        if (
            there is not None
            and (there.source, there.number, there.error) == (source, number, None)
            and there.recorded.configuration == self.engine.configuration()
        ):
            there.ask()
            return False
        self._refuse_while_preparing()
        self._check_drafter(number, asked)
        if there is not None and isinstance(there.error, RecordingStale):
            self._recorded = None
        self.connect(source, number)
        self.engine.check(cast("Recorded", self._recorded).recording)
        return True

    @property
    def _stale(self) -> str:
        """Weights of the engine that do not belong to the served version; empty if there are none."""
        drafter = self.engine.apart
        if not drafter or self.held is None:
            return ""
        if draft := self.held.source.draft:
            kept = f"{drafter} is stale: it has kept {draft} in an update that named no version of it"
            return kept if self._left_behind and self.held.label != self._first else ""
        if self._drafter_lost:
            return (
                f"{drafter} lost its weights while the engine slept, and nothing restores them: start the engine again"
            )
        if self.held.label == self._first:
            return ""
        return (
            f"{drafter} is stale: it has the weights that it was started with, so that fewer of its tokens are accepted"
        )

    def _check_drafter(self, number: int, source: ModelSource | None) -> None:
        """Refuse to leave a drafter behind, unless that is allowed or a version of it is named. Accepted are versions
        that the engine has, has lost, or rolls back to, and the version that was loaded first, to which the drafter
        belongs.

        Raises:
            FailedPrecondition: names the drafter.
        """
        wanted = self._known(source).label(number)
        had = {each.label for each in (self.held, self._lost, self._back_to) if each is not None}
        had.add(self._first)
        named = source is not None and source.draft
        if not self.engine.apart or self.stale_drafter == ALLOW or named or wanted in had:
            return
        takes = self.engine.aside is not None
        first = "name a version of it, as `weighbridge follow --draft` does; " if takes else ""
        raise FailedPrecondition(
            f"{self.engine.apart} would keep its weights when the engine takes {wanted}",
            fix=f"{first}{WITHOUT}; or {ALLOWING}",
        )

    def _refuse_while_preparing(self) -> None:
        there = self._preparation
        if there is not None and there.running and there.asked:
            raise FailedPrecondition(
                f"version {there.number} is being prepared",
                fix="wait for it, or let one agent update this engine",
            )

    def _prepared(self, number: int, source: ModelSource | None) -> str:
        for _ in range(2):  # the second time only if the loader has to be recorded again
            self.prepare(number, source)
            there = cast("Preparation", self._preparation)
            with suppress(RecordingStale):
                there.wait()
        there.wait()
        self.engine.check(there.recorded.recording)
        return there.label

    def _bring(self, source: ModelSource, number: int) -> None:
        """`apply`, even if another version is being prepared; that preparation restarts afterwards. Collective."""
        there = self._preparation
        if there is None or (there.source, there.number) == (self._known(source), number):
            self.apply(number, source)
            return
        self.discard()
        self.apply(number, source)
        if there.asked and there.error is None:
            with suppress(WeighbridgeError):  # an agent that waits for it notices that it is missing
                self.prepare(there.number, there.source)

    def _due(self) -> str:
        """Facts on which `wake` bases its decision; they are equal on all ranks."""
        found = self.status()
        return (
            f"{found.waiting or 'no version'} waits, {found.served or 'none'} is served, when_asleep={self.when_asleep}"
        )

    def _sleeps(self, number: int, source: ModelSource | None) -> bool:
        """Whether a version must wait for the wake-up. Collective.

        Raises:
            RanksFailed: the engine sleeps, and the policy is not to wait.
        """
        refusal = f"version {number} was not applied, and the engine keeps {self._kept(source)}"
        try:
            agree(self.engine.ranks, refusal, self.engine.check_awake)
        except RanksFailed as error:
            if self.when_asleep == WAIT and any(isinstance(each, EngineAsleep) for each in error.errors):
                return True
            raise
        return False

    def _fill(self, refusal: str) -> None:
        """Write the prepared version into the parameters of all ranks. Collective."""
        there = cast("Preparation", self._preparation)
        if there.source.draft and not drafter_in(self._first):  # the drafter's first weights are being replaced
            self._first = ""
        self.held, self._broken = None, f"{there.label} was applied in part"
        try:
            held = agree(self.engine.ranks, refusal, partial(self._filled, there))
        finally:
            self.discard()
        self.held, self._broken, self._lost = held, "", None
        self._brought += 1
        self._drafter_lost &= not held.source.draft

    def _filled(self, there: Preparation) -> Held:
        self.engine.fill(there.update, there.recorded.recording, there.rest)
        self._by_recording = True
        return Held(there.source, there.update.version, there.nbytes)

    def _go_back(self, had: Held | None, number: int, error: RanksFailed, draft: str = "") -> None:
        """Roll back to the version that the engine had, and raise. Collective.

        Args:
            had: that version; None if not known.
            number: number of the version that could not be applied.
            error: the reason.
            draft: the drafter's version that came with it.
        """
        try:
            there = agree(self.engine.ranks, "a rollback is not possible", partial(_way_back, had, draft))
            with self._going_back(there):
                self.stage(there.version.number, there.source)
            self._fill(f"version {there.version.number} could not be restored")
        except RanksFailed as second:
            self._broken = f"{error}\n{second}"
            raise RanksFailed(
                f"version {number} was applied in part, and the engine serves no version",
                details=[*error.details, second.message, *second.details],
                fix="update it to any version, or start it again",
            ) from error
        raise RanksFailed(
            f"{error.message}; the engine is back at version {there.version.number}", details=error.details
        ) from error

    @contextmanager
    def _going_back(self, to: Held) -> Iterator[None]:
        self._back_to = to
        try:
            yield
        finally:
            self._back_to = None

    def _kept(self, source: ModelSource | None) -> str:
        if self.held is None:
            return "no version" if self._lost is not None else "the weights it has"
        asked = source or self.source
        same = asked is not None and asked.model == self.held.version.model
        return f"version {self.held.version.number}" if same else self.held.label


def rank_of(model: Any, engine: EngineModel) -> EngineRank:
    """The rank of a model of this process.

    It is created from this description on the first call, and is removed with the model.
    """
    if not hasattr(model, _ATTRIBUTE):
        setattr(model, _ATTRIBUTE, EngineRank(engine))
    return cast("EngineRank", getattr(model, _ATTRIBUTE))


def known_rank(model: Any) -> EngineRank | None:
    """The rank that `rank_of` created for a model; None if it was not called."""
    return getattr(model, _ATTRIBUTE, None)


def _way_back(had: Held | None, draft: str = "") -> Held:
    """The version to roll back to.

    If the drafter's previous weights belonged to no version, it gets the version that came with the update.
    """
    if had is None:
        raise FailedPrecondition("the version that it had is not known")
    return had if had.source.draft else replace(had, source=had.source.with_draft(draft))
