"""Session of one push: the owner of its state.

Events go into a queue. The posting thread drains the queue unless another thread already does. So the session processes
one event at a time, and needs no thread for each version, rank or waiting call. For each event it runs the state
machine, shows the next state to the catalog as an immutable snapshot, starts the effects, and answers the waiting calls
for which the state has an answer.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from weighbridge._core.resources import why_held
from weighbridge._tracing import spans
from weighbridge.errors import (
    FailedPrecondition,
    LayoutError,
    NotFound,
    Unavailable,
    WeighbridgeError,
)
from weighbridge_service.catalog.snapshots import VersionSnapshot
from weighbridge_service.models.registered_model import RegisteredModel
from weighbridge_service.plan.declarations import Agreement
from weighbridge_service.push.declared_layouts import DeclaredLayouts
from weighbridge_service.push.effect_pools import EffectPools
from weighbridge_service.push.effect_runner import EffectRunner, Surroundings
from weighbridge_service.push.filling.arrivals import ArrivingVersion
from weighbridge_service.push.filling.image_writer import ImageWriter, MemoryGrant
from weighbridge_service.push.machine import effects as do
from weighbridge_service.push.machine import events as on
from weighbridge_service.push.machine.answers import (
    answer_abort,
    answer_declare,
    answer_seal,
    answer_whole,
    check_incomplete,
    check_not_failed,
)
from weighbridge_service.push.machine.phases import BEFORE_SEALED, FINAL, INCOMPLETE, VISIBLE, Phase
from weighbridge_service.push.machine.rank_progress import PushProgress, Received, progress_of
from weighbridge_service.push.machine.shown import version_of, waits_for
from weighbridge_service.push.machine.state import Moment, PushState
from weighbridge_service.push.machine.transitions import step
from weighbridge_service.push.observing.observer import PushObserver
from weighbridge_service.push.pending import WaitingCalls, uncancelled
from weighbridge_service.push.replica_checksums import ReplicaChecksum, VersionChecksums
from weighbridge_service.push.timers import Timers
from weighbridge_service.runtime.clock import unix_ms
from weighbridge_storage.memory.images import ImageHold
from weighbridge_storage.stores.objects import ByteArray
from weighbridge_storage.versions.writing import Written

log = logging.getLogger(__name__)

T = TypeVar("T")
_READABLE = VISIBLE | {Phase.PUBLISHED, Phase.HANDED_OVER}


class PushSession:
    """Session of one version, from its opening to its end. Thread-safe.

    Args:
        state: initial state of the push.
        client_id: id of the process that opened the version.
        runner: carries its effects out, and holds its resources.
        pools: the threads of effects.
        timers: wake the session.
        surroundings: the other pushes of the process.
        observer: reports each step to metrics and traces.

    Attributes:
        client_id: as given.
        request_id: id of the request that opened the version.
        by: name of the identity that opened it; empty if it has none.
        surroundings: as given.
    """

    def __init__(
        self,
        state: PushState,
        client_id: str,
        runner: EffectRunner,
        pools: EffectPools,
        timers: Timers,
        surroundings: Surroundings,
        observer: PushObserver,
    ) -> None:
        self.client_id = client_id
        self.request_id = runner.entry.request_id
        self.by = runner.entry.by
        self._runner = runner
        self._pools = pools
        self._timers = timers
        self.surroundings = surroundings
        self._observer = observer
        self._replicas = VersionChecksums()
        self._lock = threading.Lock()
        self._state = state
        self._events: deque[on.Event] = deque()
        self._draining = False
        self._waiting: WaitingCalls[PushState] = WaitingCalls()
        self._received: Mapping[int, Received] = {}
        self._shown = self._snapshot(state)

    @property
    def state(self) -> PushState:
        """Current state of the push."""
        return self._state

    @property
    def model(self) -> RegisteredModel:
        """Registration under which the version was opened (`EffectRunner.model`)."""
        return self._runner.model

    @property
    def number(self) -> int:
        """The version's number."""
        return self._state.opened.number

    @property
    def snapshot(self) -> VersionSnapshot:
        """Snapshot of the version, as readers see it."""
        return self._shown

    @property
    def has_image(self) -> bool:
        """Whether the session holds an image."""
        return self._runner.image is not None

    @property
    def image_used_at(self) -> float:
        """When the image was last read, in seconds of the monotonic clock; 0 without one."""
        image = self._runner.image
        return 0.0 if image is None else image.used_at

    @property
    def share_number(self) -> int | None:
        """Number of this session's share of the version; None before there is a plan."""
        return self._state.share_number

    @property
    def progress(self) -> PushProgress:
        """Progress of the push and of each of its ranks."""
        return progress_of(self._state, self._received_of_ranks, now())

    @property
    def _received_of_ranks(self) -> Mapping[int, Received]:
        """Received part of each rank's stream; after the end of the push, as it was then."""
        writer = self._runner.writer
        return self._received if writer is None else writer.received_of_ranks

    @property
    def layouts(self) -> DeclaredLayouts:
        """Layouts that its ranks have declared (`EffectRunner.layouts`)."""
        return self._runner.layouts

    @property
    def clients(self) -> frozenset[str]:
        """Ids of the processes that have declared a rank of the version here."""
        return frozenset(each.client_id for each in self._state.declarations.here.values())

    def takes_part(self, client_id: str) -> bool:
        """Whether this client has declared a rank of the version."""
        return client_id in self.clients

    # --- the queue

    def post(self, event: on.Event) -> None:
        """Post an event. See `post_all`."""
        self.post_all((event,))

    def post_all(self, events: Sequence[on.Event]) -> None:
        """Queue events in this order, and process the queue unless another thread already does."""
        if not events:
            return
        with self._lock:
            self._events.extend(events)
            if self._draining:
                return
            self._draining = True
        while True:
            with self._lock:
                if not self._events:
                    self._draining = False
                    return
                event = self._events.popleft()
            try:
                self._take(event)
            except Exception as error:  # the event is lost: end the push, so that no call waits forever
                log.exception("%s: %s could not be handled", self._state.name, type(event).__name__)
                if not isinstance(event, on.Broken):
                    self._events.append(on.Broken(WeighbridgeError(f"the push failed: {error!r}")))

    def tick(self) -> None:
        """Post that time has passed, with the received bytes."""
        writer = self._runner.writer
        self.post(on.Tick() if writer is None else on.Tick(*writer.progress))

    def _take(self, event: on.Event) -> None:
        if self._pools.stopping:
            return
        before = self._state
        moment = now()
        after, effects = step(before, event, moment)
        if after is before and not effects:
            return
        self._log(before, after)
        self._observer.stepped(before, after, event, moment)
        if do.Forget() not in effects:
            self._show(after)
        with self._lock:
            self._state = after
        self._start_all((effect for effect in effects if not isinstance(effect, do.Awaited)), after)
        if after.agreed is not None:
            self._runner.planned(after)
        if after.phase in FINAL and (after.agreed is None or after.agreed.alone):
            self._received = self._received_of_ranks
            self._runner.forget()  # other replicas may still ask for their part
        self._waiting.give(after)  # first: threads of effects would compete with the answered callers
        self._start_all((effect for effect in effects if isinstance(effect, do.Awaited)), after)
        if after.wake_at is not None:
            self._timers.wake(self, after.wake_at)
        elif after.phase in FINAL:
            self._timers.forget(self)

    def _log(self, before: PushState, after: PushState) -> None:
        shown = after.phase in VISIBLE or after.phase is Phase.PUBLISHED
        if shown and after.holding.reasons and (not before.holding.reasons or before.phase in INCOMPLETE):
            log.warning("%s", why_held(version_of(after)))
        if after.phase is before.phase:
            return
        if after.phase in (Phase.FAILED, Phase.ABORTED):
            log.warning("%s: %s", version_of(after), after.error and after.error.message)
        elif after.phase is Phase.HANDED_OVER:
            log.warning("%s: handed over to %s", version_of(after), after.handed_to)
        elif after.phase in _READABLE:
            log.info("%s", version_of(after))

    def _snapshot(self, state: PushState) -> VersionSnapshot:
        readable = state.phase in _READABLE and state.image
        return VersionSnapshot(
            version_of(state),
            image=self._runner.image if readable else None,
            files=self.model.files if readable else None,
            unfinished=state.unfinished,
            abandoned=state.gave_up,
            waits=self._waits if state.phase in INCOMPLETE else None,
            beginning=state.beginning,
        )

    def _waits(self) -> Iterable[str]:
        """Names of the things that the version waits for now.

        This is a function, because they change more often than the rest of the snapshot.
        """
        return waits_for(self._state)

    def _show(self, state: PushState) -> None:
        before, after = self._shown, self._snapshot(state)
        if after == before:
            return
        self._shown = after
        self.surroundings.show(self, after, changed=after.differs_from(before))

    # --- effects

    def _start_all(self, effects: Iterable[do.Effect], state: PushState) -> None:
        for effect in effects:
            try:
                self._start(effect, state)
            except Exception as error:  # start the other effects nevertheless
                log.exception("%s: %s could not be started", state.name, effect)
                if isinstance(effect, do.Awaited):
                    self.post(on.EffectFailed(effect, Unavailable(f"{effect} could not be started: {error!r}")))

    def _start(self, effect: do.Effect, state: PushState) -> None:
        if effect.POOL is None:
            self._runner.carry_out(effect, state, self)
        else:
            self._pools.submit(effect, partial(self._carry_out, effect))

    def _carry_out(self, effect: do.Effect) -> None:
        if isinstance(effect, do.Awaited) and self._state.phase in FINAL:
            return  # the push has ended while the effect waited for a thread
        with self._observer.carrying_out(effect) as span:
            answer = self._runner.run(effect, self._state, self)
            if isinstance(answer, on.EffectFailed):
                spans.fail(span, answer.error)
        if answer is not None:
            self.post(answer)
        try:
            self._runner.follow_up(effect, answer, self._state)
        except Exception:
            log.exception("%s: the follow-up of %s failed", self._state.name, effect)

    def go_on(self) -> None:
        """Raise if a running effect is no longer needed, as the service stops or the push has failed."""
        if self._pools.stopping:
            raise _shutting_down()
        check_not_failed(self._state)

    # --- answers

    def asked(self, answer: Callable[[PushState], T | None], *events: on.Event) -> Future[T]:
        """Future of an answer, done as soon as a state has one.

        Args:
            answer: returns the answer that a state has, or raises; None while there is none.
            events: events to post first.

        Returns:
            The future. It cannot be cancelled; a caller that stops waiting calls `leave`.
        """
        found: Future[T] = uncancelled()
        self._wait_for(found, answer, *events)
        return found

    def _wait_for(self, found: Future[T], answer: Callable[[PushState], T | None], *events: on.Event) -> None:
        self._waiting.enter(found, answer)  # first, so that it sees each state that the events lead to
        self.post_all(events)
        self._waiting.give(self._state)
        if self._pools.stopping:
            self.stop()

    def leave(self, found: Future[Any]) -> None:
        """End the wait for an answer."""
        self._waiting.leave(found)

    def forget(self) -> None:
        """Drop the data of the runner, which refers back to the session, so that all is freed with the last reference
        to the session.
        """
        self._runner.forget()

    def stop(self) -> None:
        """End all waiting calls with Unavailable: the service stops, and events are no longer processed."""
        self._waiting.end(_shutting_down)

    # --- calls of ranks

    def declare(self, rank: int, client_id: str, digest: str) -> Future[Agreement]:
        """Declare the layout of a rank. The future gets the agreement once all ranks have declared.

        Raises the same errors as `answer_declare`.
        """
        check_incomplete(self._state)
        self._state.declarations.check_rank(rank)
        event = on.RankDeclared(rank, client_id, digest)
        return self.asked(lambda state: answer_declare(state, rank, client_id, digest), event)

    def writer_for(self, rank: int, client_id: str) -> ImageWriter:
        """Writer for the bytes of a rank that this client has declared.

        Raises:
            FailedPrecondition: the version is sealed, or this rank or another one has not declared.
            AlreadyExists: the rank belongs to another process.
            WeighbridgeError: the version has failed; raises the error that ended it.
        """
        state = self._state
        check_incomplete(state)
        state.declarations.check_client(rank, client_id)
        return self._begun(state)

    def writer_for_other(self, rank: int, claim: str) -> ImageWriter:
        """Writer for the bytes of a rank that has declared at another replica.

        Args:
            rank: the rank.
            claim: the agreement of that replica.

        Raises:
            InvalidArgument: the rank does not exist.
            FailedPrecondition: the replicas have not agreed on the same plan.
            Unavailable: this replica has no image yet; retry.
            WeighbridgeError: the version has failed; raises the error that ended it.
        """
        state = self._state
        check_not_failed(state)
        state.declarations.check_rank(rank)
        if state.agreed is not None:
            state.agreed.check_claim(claim)
        writer = self._runner.writer
        if writer is None:
            raise Unavailable(f"not all ranks of {state.name} have declared here yet", fix="try again")
        return writer

    def _begun(self, state: PushState) -> ImageWriter:
        writer = self._runner.writer
        if writer is None:
            raise FailedPrecondition(f"not all ranks of {state.name} have declared their layouts")
        return writer

    def grant(self, rank: int, client_id: str) -> MemoryGrant:
        """Grant the image to a rank's process. See `ImageWriter.grant`."""
        return self.writer_for(rank, client_id).grant(rank)

    def arriving(self) -> ArrivingVersion:
        """The version while it arrives, for a process that reads it before it is ready. The caller releases its hold.

        Raises:
            FailedPrecondition: there is no image yet, other replicas receive a part of the version, or arrived bytes
                may be written again.
            WeighbridgeError: the version has failed; raises the error that ended it.
        """
        state, image, files = self._state, self._runner.image, self.model.files
        check_incomplete(state)
        writer = self._begun(state)
        if image is None or not image.region.in_memory or image.sizes.keys() != files.file_sizes.keys():
            raise FailedPrecondition(f"not all of {state.name} arrives in memory of this replica")
        hold = image.hold()
        try:
            return ArrivingVersion(self.model, image, hold, writer.arrivals())
        except BaseException:
            hold.release()
            raise

    def push_state(self, rank: int) -> tuple[list[tuple[int, int]], int, bool]:
        """Received ranges of a rank's stream, its length in bytes, and whether the rank is sealed.

        Raises:
            FailedPrecondition: there is no stream yet: not all ranks have declared.
        """
        state = self._state
        check_not_failed(state)
        state.declarations.check_rank(rank)
        writer = self._runner.writer
        if writer is None and state.agreed is not None and state.phase not in INCOMPLETE:
            meant = state.agreed.routes(rank).get(state.declarations.home, ())
            return list(meant), state.agreed.prepared.streams[rank].nbytes, True
        ranges, length = self._begun(state).received(rank)
        return ranges, length, rank in state.sealed

    def seal(
        self, rank: int, client_id: str, replicas: Iterable[ReplicaChecksum] = (), nonfinite: int = 0
    ) -> Future[bool]:
        """Seal a rank, which has pushed everything. The future is done once the rank is sealed.

        Repeated calls are harmless.

        ``nonfinite`` is the number of pushed elements that are NaN or infinite; 0 if the rank has not counted them.

        Raises:
            FailedPrecondition: bytes are missing. The error names the tensors and boxes.
            LayoutError: another rank holds different bytes under the same box; the version is aborted.
            WeighbridgeError: the version has failed; raises the error that ended it. The future may get it, too.
        """

        def sealed(state: PushState) -> bool | None:
            return answer_seal(state, rank)

        state = self._state
        whole = answer_whole(state, rank, client_id)
        if state.agreed is not None and state.phase in INCOMPLETE and rank not in state.sealed:
            try:
                self._replicas.compare(rank, state.agreed.prepared.shared.get(rank, {}), replicas)
            except LayoutError as error:
                self.post(on.Aborted(f"{error.message}: {error.details[0]}"))
                raise
        if whole is not None:
            return self.asked(sealed, on.SealAsked(rank, nonfinite))
        self._begun(state).check_whole(rank)
        found: Future[bool] = uncancelled()

        def go_on(whole: Future[bool]) -> None:
            if (error := whole.exception()) is not None:
                found.set_exception(error)
            else:
                self._wait_for(found, sealed, on.SealAsked(rank, nonfinite))

        # all bytes were claimed, but another thread may still be copying some of them
        self.asked(lambda state: answer_whole(state, rank, client_id)).add_done_callback(go_on)
        return found

    # --- calls of other replicas

    @property
    def handed_in(self) -> Written | None:
        """Files that this replica has handed in; None before that."""
        return self._runner.written if self._state.handed_in_here else None

    def take_progress(self, replica: int, written: Written | None, *, handed_in: bool, nonfinite: int = 0) -> None:
        """Record that another replica's part is complete.

        Args:
            replica: number of that replica.
            written: the files that it has uploaded; None if it does not name them.
            handed_in: whether it has uploaded its files.
            nonfinite: number of elements that it knows to be NaN or infinite.
        """
        if written is not None:
            self._runner.take_hand_in(replica, written)
        self.post(on.ReplicaSaid(replica, handed_in, nonfinite))

    def holds(self, file: str) -> bool:
        """Whether a file is in this replica's image."""
        image = self._runner.image
        return image is not None and file in image.sizes

    def own_file(self, file: str) -> tuple[ByteArray, ImageHold]:
        """Bytes of a file of this replica, for other replicas, and the hold that keeps them in memory.

        Raises:
            FailedPrecondition: not all of its bytes have arrived, or a process could still change them.
            NotFound: the file is not in an image of this replica, or no longer.
            WeighbridgeError: the version has failed; raises the error that ended it.
        """
        state, image = self._state, self._runner.image
        check_not_failed(state)
        if state.phase in BEFORE_SEALED:
            raise FailedPrecondition(f"{file} of {state.name} is not complete yet", fix="try again")
        try:
            if image is not None and file in image.sizes:
                hold = image.hold()
                return image.read_only_buffers[file], hold
        except FailedPrecondition:  # the image was released just now
            pass
        raise NotFound(f"{file} of {state.name} is not in an image of this replica")

    def abort(self, reason: str) -> Future[bool]:
        """Abort the version. The future is done once it is given up. See `Intake.abort_version`."""
        return self.asked(answer_abort, on.Aborted(reason))

    def wait_finished(self, seconds: float) -> bool:
        """Wait up to ``seconds`` for the push to have no work left. Returns whether it has none."""
        found = self.asked(lambda state: None if state.unfinished else True)
        try:
            return found.result(seconds)
        except TimeoutError:
            self.leave(found)
            return False

    def name_waits(self) -> str:
        """The version, and a list of what it waits for, for messages."""
        return f"{version_of(self._state)}: waits for {', '.join(waits_for(self._state)) or 'nothing'}"


def now() -> Moment:
    """The current time."""
    return Moment(time.monotonic(), unix_ms())


def _shutting_down() -> Unavailable:
    return Unavailable("the service is shutting down", fix="try again when it is back")
