"""Versions of one engine rank: the one that it serves, the one that it prepares, and the way from one to the other.

Called in the engine's own thread. What is called collective has to be called by all ranks, in the same order.
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
"""Time for which the engine waits for an agent that reports, before it reports to the service itself."""


class EngineRank:
    """Takes one model of one process from version to version.

    All that can be wrong is found, and all bytes of all ranks are on their machines, before a rank touches a parameter. If one fails
    after that, all go back to the version that they had.

    Args:
        engine: the model, as the engine's adapter describes it.

    Attributes:
        engine: the same.
        source: where versions come from; None if that is not known.
        held: the version in the parameters; None if they are of none, or did not come from the service.
        clients: of the services that versions came from. They stay open until `close`.
        when_asleep: policy for an update while the parameters have no memory: ``refuse`` it, or let it ``wait`` for `wake`, which then also brings
            back what sleep has discarded.
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
        """Whether a recording said where the bytes in the parameters belong, and not the engine's own loader."""
        self._tested: Recorded | None = None
        """Recording by which came what the engine's own loader loads, too."""
        self._before: Held | None = None
        self._waiting: tuple[ModelSource, int] | None = None
        """Version that `wake` applies."""
        self._lost: Held | None = None
        """Version that was in the parameters before sleep discarded them."""
        self._first = ""
        """Version that was loaded first: a drafter that versions leave alone belongs to it. Empty when that drafter has received a version of its own."""
        self._drafter_lost = False
        self._back_to: Held | None = None
        """Version that the engine goes back to, while it does."""
        self._left_behind = False
        """Whether the last update has named no version of a drafter that has versions of its own."""
        self._instance = secrets.token_hex(8)
        self._brought = 0
        self._reported = bool(engine.kind)
        self._reporter: EngineReporter | None = None

    def client(self, source: ModelSource | None = None) -> EngineClient:
        """A client of the service that a model's versions come from; None for the source that is known.

        Raises:
            FailedPrecondition: none is known.
        """
        source = self._known(source).with_draft("")
        if source not in self.clients:
            self.clients[source] = source.connect()
        return self.clients[source]

    def load(self, source: ModelSource, version: str | int) -> tuple[lazy.Source, lazy.Recording | None]:
        """Load a version into a model that has no weights yet: straight into its parameters, as the bytes come. Not collective.

        Args:
            source: where it comes from.
            version: a number or a ref; a ref may name another version to another rank, so resolve it before.

        Returns:
            The version, and what has been put in place: the model's own loader still has to run for what is ``unrecorded``, or for
            everything if there is no recording.

        Raises:
            NotFound: no such model, version or ref.
            FailedPrecondition: the version does not fit the model; says what differs.
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
        """Have the version in the drafter's parameters beside that in the model's, if it is of a model of its own and was loaded from the service. Not
        collective.

        Args:
            loaded: the rank that the drafter was loaded by; None if it came from elsewhere.
        """
        if self.held is None or loaded is None or loaded.held is None:
            return
        self.engine.join(self.engine.aside, self.engine.apart)
        self.held = replace(self.held, source=self.held.source.with_draft(loaded.held.label))
        self._first = self.held.label

    def connect(self, source: ModelSource | None = None, version: str | int = REF_LATEST) -> None:
        """Find out what this rank takes of a model's versions. Runs the model's loader if that is not known: not while it computes.

        If the model has no version that the store has, this is found out with the first one that is prepared.

        Args:
            source: where versions come from; None keeps the source that is known.
            version: any of the model, to record the loader with.

        Raises:
            NotFound: no such model or version.
            FailedPrecondition: no source is known, the version does not fit the engine, or another one is being prepared.
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
            # a drafter's own version is taken or refused: its label says which one the drafter has
            if self.stale_drafter != ALLOW or isinstance(found, lazy.Pair):
                raise
            self.engine.part()
            log.warning("%s keeps its weights: %s", self.engine.apart, error.message)
            return self.engine.record(found)

    def prepare(self, number: int, source: ModelSource | None = None) -> None:
        """Begin to bring a version to this machine while the engine serves; `status` tells when it is there. Not collective.

        Args:
            number: of the version.
            source: where it comes from; None for the source that is known.

        Raises:
            FailedPrecondition: another one is being prepared, or the engine cannot take versions of this model.
            NotFound: no such model.
        """
        if self._ready(number, source):
            self.discard()
            source, recorded = self._known(source), cast("Recorded", self._recorded)
            self._preparation = Preparation(self.engine, self.client(source), source, number, recorded)

    def prepare_early(self, number: int, source: ModelSource | None = None) -> None:
        """Begin to bring a version that is still being received, as its parts arrive. Not collective.

        `prepare` goes on with it. Until that is called it gives way to another version.

        Args:
            number: of the version.
            source: where it comes from; None for the source that is known.

        Raises:
            FailedPrecondition: another one is being or has been prepared, or what this rank takes of a version is not known yet.
        """
        asked, source = source, self._known(source)
        known, there = self._recorded, self._preparation
        if there is not None and there.error is None:
            if (there.source, there.number) == (source, number):
                return
            if there.asked:
                raise FailedPrecondition(f"{there.label} is here, or on its way")
        self._check_drafter(number, asked)
        if source.draft:
            raise FailedPrecondition(
                f"{source.label(number)} are brought when they are ready: a drafter has versions of its own"
            )
        if known is None or not known.is_of(source, self.engine.configuration()):
            raise FailedPrecondition("what this rank takes of a version is not known yet")
        self.engine.check(known.recording)
        self.discard()
        if self._recorded is known:
            self._preparation = Preparation(
                self.engine, self.client(source), source, number, known, early=True
            )

    def prepare_all(self, number: int, source: ModelSource | None = None) -> None:
        """`prepare` on all ranks, or on none. Collective.

        Raises:
            RanksFailed: says which ranks cannot, and why.
        """
        refusal = f"version {number} is not being prepared"
        agree(self.engine.ranks, refusal, partial(self._ready, number, source))
        self.prepare(number, source)

    def stage(self, number: int, source: ModelSource | None = None) -> None:
        """Have all bytes of a version on all ranks' machines: what `apply` begins with. Collective.

        Raises:
            RanksFailed: says which ranks have not got them, and why; or that ranks were asked for different versions.
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
        """Give back the memory of what was prepared. What is on its way is given back when it has come."""
        there, self._preparation = self._preparation, None
        if there is not None:
            if isinstance(there.error, RecordingStale):
                self._recorded = None
            there.close()

    def apply(self, number: int, source: ModelSource | None = None) -> None:
        """Bring a version into the parameters while nothing is computed. Prepares it, if that was not done. Collective.

        While the engine sleeps and `when_asleep` is ``wait``, it only has all bytes on the ranks' machines when it returns; `wake` does the rest.

        Args:
            number: of the version, the same on all ranks.
            source: where it comes from; None for the source that is known.

        Raises:
            RanksFailed: says what went wrong on which ranks, and which version the engine has. `errors` is there if nothing was touched.
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
                # without a drafter's version that was not named: that one is left behind, now or then
                self._waiting = source or known.with_draft(""), number
                self._say(
                    state=ENGINE_WAITING,
                    target=number,
                    error=f"the engine sleeps: its wake-up brings version {number}",
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
        """Digests of this rank's parameters, to be compared with those that its version makes. Not collective.

        Args:
            known: `Recording.digest` of recordings that the caller has, and that need not be sent.

        Raises:
            FailedPrecondition: the loader was not recorded, or the engine sleeps.
        """
        recorded = self._recorded
        if recorded is None:
            raise FailedPrecondition(
                "what this rank takes of a version is not known", fix="connect the engine to the model first"
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
        """Load the version that this rank has again, by the engine's own loader, and say which tensors that has changed. Collective.

        Nothing is computed meanwhile. Afterwards all tensors are those of a fresh load.

        Raises:
            RanksFailed: a rank has no version, sleeps, or could not load it; says which version the engine has.
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
        """A drafter that no version says anything of."""
        if not self.engine.apart or (self.held is not None and self.held.source.draft):
            return {}
        return {self.engine.apart: "updates leave it alone"}

    def _held_awake(self) -> Held:
        self.engine.check_awake()
        if self.held is None:
            raise FailedPrecondition("this rank has no version of the service")
        if self._recorded is not None:  # an engine that could not be brought back is not touched
            self.engine.check(self._recorded.recording)
        return self.held

    def _digests_around_load(self, held: Held) -> tuple[dict[str, int], dict[str, int]]:
        source = held.source.open(self.client(held.source), held.version.number)
        before = lazy.whole_digests(self.engine.computed_with())
        self.engine.load_again(source)
        return before, lazy.whole_digests(self.engine.computed_with())

    def undo(self, number: int, source: ModelSource | None = None) -> None:
        """Go back from a version to the one that was there before it, and with it the drafter. Nothing happens if the engine does not have that
        version, or another one of the drafter. Collective.

        For engines that take a version together, of which another one could not.

        Args:
            number: of the version.
            source: where it has come from, with the drafter's version; None for the source that is known.

        Raises:
            RanksFailed: it cannot go back; says which version it has.
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
        """Bring the version that waits into parameters that have memory again. To be called before anything is computed. Collective.

        Args:
            lost: whether sleep has discarded what was in them.
            last: whether the engine will compute after this; what was discarded is then brought back, if `when_asleep` is ``wait`` and no other version
                has come meanwhile.

        Raises:
            RanksFailed: says what could not be brought, and why; `held` is the version that the engine has.
        """
        self._drafter_lost |= lost
        if lost and self.held is not None:
            self._lost, self.held = self.held, None
            self._broken = f"{self._lost.label} was discarded while the engine slept"
        refusal = "the wake-up brings no version"
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
        """Whether `wake` has to bring one before the engine may compute."""
        return self.when_asleep == WAIT and self.held is None and bool(self._broken)

    def status(self) -> Status:
        """Status of this rank: what it serves, and what it prepares."""
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
        """Report no more to the service what the engine serves: it ends, or an agent reports it."""
        self._reported = False
        if self._reporter is not None:
            self._reporter.stop()

    def _say(self, *, state: str, target: int = 0, error: str = "", **update: Any) -> None:
        """Have the first rank report the engine's state, if it is of a kind that is reported."""
        source = self.source if self.held is None else self.held.source
        if not self._reported or source is None or self.engine.ranks.rank:
            return
        if self._reporter is None:
            try:
                client = self.client(source)
            except WeighbridgeError:  # there is no client of that service: the update itself says so
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
        """Close the clients, and give memory back."""
        self.discard()
        for client in self.clients.values():
            client.close()
        self.clients.clear()

    def _known(self, source: ModelSource | None) -> ModelSource:
        """The source that is given, or that is known, with the drafter's version that the engine has if it names none."""
        source = source or self.source
        if source is None:
            raise FailedPrecondition(
                "this engine was not loaded from weighbridge, and does not know which model it serves",
                fix="name server and model",
            )
        had = self.held or self._lost
        return source.with_draft(source.draft or (had.source.draft if had is not None else ""))

    def _ready(self, number: int, source: ModelSource | None) -> bool:
        """Whether a version has still to be prepared; raises if it cannot be."""
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
        """Weights of the engine that are not of the version that it serves; empty if there are none."""
        drafter = self.engine.apart
        if not drafter or self.held is None:
            return ""
        if draft := self.held.source.draft:
            kept = f"{drafter} is stale: it has kept {draft} in an update that named no version of it"
            return kept if self._left_behind and self.held.label != self._first else ""
        if self._drafter_lost:
            return f"{drafter} lost its weights while the engine slept, and nothing brings them back: start the engine again"
        if self.held.label == self._first:
            return ""
        return f"{drafter} is stale: it has the weights that it was started with, so that fewer of its tokens are accepted"

    def _check_drafter(self, number: int, source: ModelSource | None) -> None:
        """Refuse to leave a drafter behind, unless that is allowed or a version of it is named. Versions that the engine has or has lost, or goes back
        to, may come, and the one that was loaded first, which the drafter belongs to.

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
        """`apply`, even if another version is being prepared; that preparation begins anew afterwards. Collective."""
        there = self._preparation
        if there is None or (there.source, there.number) == (self._known(source), number):
            self.apply(number, source)
            return
        self.discard()
        self.apply(number, source)
        if there.asked and there.error is None:
            with suppress(WeighbridgeError):  # an agent that waits for it sees that it is missing
                self.prepare(there.number, there.source)

    def _due(self) -> str:
        """Facts by which `wake` decides; all ranks have the same."""
        found = self.status()
        return f"{found.waiting or 'no version'} waits, {found.served or 'none'} is there, when_asleep={self.when_asleep}"

    def _sleeps(self, number: int, source: ModelSource | None) -> bool:
        """Whether a version has to wait for the wake-up. Collective.

        Raises:
            RanksFailed: it sleeps, and versions do not wait for that.
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
        """Bring what was prepared into the parameters of all ranks. Collective."""
        there = cast("Preparation", self._preparation)
        if there.source.draft and not drafter_in(self._first):  # the drafter that it had is gone
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
        """Bring back the version that the engine had, and raise. Collective.

        Args:
            had: that version; None if it is not known.
            number: of the one that could not be applied.
            error: why not.
            draft: the drafter's version that came with it.
        """
        try:
            there = agree(self.engine.ranks, "there is no way back", partial(_way_back, had, draft))
            with self._going_back(there):
                self.stage(there.version.number, there.source)
            self._fill(f"version {there.version.number} could not be brought back")
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
    """The rank of a model of this process; made with this description of it when it is first asked for. It ends with the model."""
    if not hasattr(model, _ATTRIBUTE):
        setattr(model, _ATTRIBUTE, EngineRank(engine))
    return cast("EngineRank", getattr(model, _ATTRIBUTE))


def known_rank(model: Any) -> EngineRank | None:
    """The rank that `rank_of` has made of a model; None if it was not asked for it."""
    return getattr(model, _ATTRIBUTE, None)


def _way_back(had: Held | None, draft: str = "") -> Held:
    """The version to go back to. A drafter whose weights before it were of no version gets those of the version that has come with it."""
    if had is None:
        raise FailedPrecondition("which version it had is not known")
    return had if had.source.draft else replace(had, source=had.source.with_draft(draft))
