"""Push of a rank's shards, which continues while the rank trains."""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from weighbridge._clients.calls import push_calls, version_calls
from weighbridge._clients.calls.steps import Steps
from weighbridge._clients.connection import Connection
from weighbridge._clients.copying.copies import Copies, Copying
from weighbridge._clients.copying.delivery import Delivery, ask_memory, copy_out, take_passing
from weighbridge._clients.holding.agreement import RankAgreement
from weighbridge._clients.holding.policy import FREE, Hold, held
from weighbridge._clients.push_handle import PushHandle, PushReport
from weighbridge._clients.push_routes import routes_of
from weighbridge._clients.rank_stream import RankStream
from weighbridge._core.layouts import Layout, Shard
from weighbridge._core.resources import Version
from weighbridge._core.tensor_spaces import TensorSpace
from weighbridge._core.text.counts import counted
from weighbridge._core.text.durations import readable_duration
from weighbridge._core.text.shortening import shortened
from weighbridge._core.text.waits import REMIND_SECONDS, Reminder, ranks_text
from weighbridge._formats.gathered_shards import ArrivingWeights
from weighbridge._formats.push_counts import PlacedPart, PushCounts
from weighbridge._formats.push_sources import HeldShards, StagingPool
from weighbridge._formats.replica_checksums import ReplicaChecksums
from weighbridge._tracing import spans
from weighbridge.errors import (
    AlreadyExists,
    FailedPrecondition,
    InvalidArgument,
    Unavailable,
    VersionFailed,
    WeighbridgeError,
)
from weighbridge.v1 import checkpoint_service_pb2 as pb
from weighbridge.v1.model_service_pb2 import RegisterModelRequest

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

_NAMED_IN_REPORT, _NAMED_IN_LOG = 20, 5
"""Maximum number of tensors with non-finite elements that a report and a log message name."""
_TELL_SECONDS = 5.0
"""Maximum time for which a refused rank tries to notify the other ranks."""
_MOST_REASON = 400
"""Maximum number of characters of a reason that the other ranks receive."""
_PUSHES_AT_ONCE = 2
"""Maximum number of pushes that one client delivers at the same time. Another push waits."""
_AGREE_SECONDS = 300.0
"""Maximum time for which a rank waits for the other ranks to agree to the push, unless `max_hold_s` is given."""
_MEET_SECONDS = 0.1
"""Interval at which a rank that waits for others checks whether one of them has refused."""
_MOST_MOVES = 10
"""Maximum number of moves of a rank from one replica to another within one push."""
_MOVED_SECONDS = 5.0
"""Maximum time for which a rank tries to reach the replica to which another replica has sent it."""
_MOST_COMPARED = 0.25
"""Maximum size of the shards that a rank reads only to compare them with other ranks, as a share of the bytes that it
pushes. If the size is larger, the rank's next push does not copy ahead.
"""


@dataclass(frozen=True, slots=True)
class _Taken:
    """Shards of a rank that have been copied.

    Attributes:
        delivery: delivery of the shards.
        casts: see `ShardSource.casts`.
        replicas: checksums of the shards that other ranks hold too.
        nbytes: bytes of all shards.
        seconds: duration of the copy.
    """

    delivery: Delivery
    casts: tuple[int, int]
    replicas: Sequence[pb.ReplicaChecksum]
    nbytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class PushTerms:
    """Terms of one push.

    Attributes:
        hold: limit of the time for which the push may block its rank, and handling of its failure.
        agreement: agreement of the ranks on the push; None if they do not have a process group.
    """

    hold: Hold = FREE
    agreement: RankAgreement | None = None

    def behind(self) -> PushTerms:
        """The terms of the push that follows this one in the same call, such as that of a training state."""
        return PushTerms(self.hold, None if self.agreement is None else self.agreement.behind())


ALONE = PushTerms()
"""Terms of a push without a time limit, made by ranks without a process group."""


@dataclass(slots=True)
class _RankPush:
    """The push of one rank that has declared its layout.

    Attributes:
        stream: stream of the bytes that are sent over gRPC.
        layout: layout of the shards that the rank holds.
        declared: response of the service to that layout.
        chosen: layout of the shards that the rank must push.
        shards: the shards that the rank holds; None once those that it pushes are copied, so that their tensors can be
            freed.
        copying: copies of the shards.
        hold_seal: see `Pusher.push`.
        hold: limit of the time for which the push may block its rank.
        began, returned: times at which the call began and returned, by the monotonic clock.
        turn: the caller or the thread acquires it, and then releases slot, copies and span.
        report: result of the push.
        taken: the copied shards; None before they are copied.
    """

    stream: RankStream
    layout: Layout
    declared: pb.DeclareLayoutResponse
    chosen: Layout
    shards: HeldShards | ArrivingWeights | None
    copying: Copying
    hold_seal: bool
    hold: Hold
    began: float
    returned: float = 0.0
    turn: threading.Lock = field(default_factory=threading.Lock)
    report: Future[PushReport] = field(default_factory=Future)
    taken: _Taken | None = None


class Pusher:
    """Makes the pushes of one client. Thread-safe.

    Args:
        connection: connection of the client.

    Attributes:
        staging: buffers for the shards that are sent over gRPC.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._running: list[Future[PushReport]] = []
        self._slots = threading.BoundedSemaphore(_PUSHES_AT_ONCE)
        self._replicas = ReplicaChecksums()
        self.staging = StagingPool()
        self._ahead = StagingPool()
        self._pushed: dict[str, frozenset[Shard]] = {}

    def begin(self, copies: Copies, model: str, layout: Layout, tensors: Sequence[torch.Tensor]) -> None:
        """Begin to copy the tensors that the service will probably assign to the rank, which are those of its last push
        of this model.

        Does nothing before the first push, or if the rank had to read many shards only to compare them with other
        ranks.

        Args:
            copies: copies of the call.
            model: the model.
            layout: shards that the rank holds.
            tensors: the tensor of each shard.
        """
        before = self._pushed.get(model, frozenset())
        each = zip(layout.placements, tensors, strict=True)
        copies.begin([tensor for placement, tensor in each if placement.shard in before], self._ahead)

    def push(
        self,
        opening: pb.OpenVersionRequest,
        rank: int,
        layout: Layout,
        space: TensorSpace,
        shards: HeldShards | ArrivingWeights,
        *,
        hold_seal: bool = False,
        behind: pb.OpenVersionRequest | None = None,
        copying: Copying | None = None,
        terms: PushTerms = ALONE,
        registration: RegisterModelRequest | None = None,
    ) -> PushHandle:
        """Push the shards of a rank.

        Returns once they have been copied, or once it is known that ``copying`` copies them in a thread.

        Args:
            opening: request that identifies the push; the same on all ranks, apart from the client's ID.
            rank: number of the rank.
            layout: shards that the rank holds, as one stream.
            space: space of the tensors' names.
            shards: these shards. Shards that other ranks hold too are compared with theirs; other ranks do not hold
                shards of `ArrivingWeights`.
            hold_seal: whether only `PushHandle.seal` seals the rank.
            behind: opening of the push that follows on all ranks. If this rank fails, the other ranks are notified that
                the rank will not take part in it.
            copying: copies of the shards; by default they are made in the call. If a thread makes them, ``shards`` are
                not `ArrivingWeights`, and ``hold_seal`` is false.
            terms: terms of the push. Nothing is copied before all ranks have agreed.
            registration: registration of the model, if the push may be the model's first one or have another config.

        Raises:
            WeighbridgeError: see `TrainerClient.push`.
        """
        started = time.monotonic()
        connection, model = self._connection, opening.model
        copying = Copying() if copying is None else copying
        has_slot, number = False, 0
        push: _RankPush | None = None
        said: dict[str, str | int] = {
            "weighbridge.model": model,
            "weighbridge.step": opening.step,
            "weighbridge.rank": rank,
            "weighbridge.ranks": opening.ranks,
        }
        span = spans.begin("weighbridge.push", said)
        opening.traceparent = spans.traceparent(span)
        try:
            has_slot = self._slot(terms.hold)
            opened, at = self._open(opening, registration, terms.hold.began)
            # ranks that do not have their own trace join the trace of the rank that opened the version
            span = spans.moved(span, "weighbridge.push", said, opened.traceparent)
            spans.within(span, "weighbridge.open", start_time=spans.began(span)).end()
            number = opened.number
            span.set_attribute("weighbridge.version", number)
            header = pb.PushHeader(model=model, number=number, rank=rank, client_id=opening.client_id)
            with spans.child(span, "weighbridge.declare"):
                declared, at = self._declare(header, layout, space, terms, at)
                self._agree(header, terms, partial(push_calls.declare, header, layout, space), at)
            needed = [*declared.assigned, *declared.shared]
            chosen = layout.select(list(declared.assigned))
            self._expect(model, layout, declared)
            placed = [PlacedPart(each.start, each.end, each.places) for each in declared.placed]
            counts = PushCounts(chosen, placed)
            stream = RankStream(connection, header, at, routes_of(declared, rank), counts, span)
            push = _RankPush(
                stream, layout, declared, chosen, shards, copying, hold_seal=hold_seal, hold=terms.hold, began=started
            )
            if not copying.is_behind(needed):
                push.taken = self._take(push)
            seal = partial(stream.seal, push.taken.replicas) if push.taken is not None and hold_seal else None
            push.returned = time.monotonic()
            # not a daemon: a trainer that ends after its last push must not lose it
            threading.Thread(target=self._go_on, args=(push,), name=f"push-{model}@{number}").start()
        except BaseException as error:
            if terms.agreement is not None:
                terms.agreement.refuse(error)
            if push is None or push.turn.acquire(blocking=False):  # an interrupt may come when the thread has begun
                if has_slot:
                    self._slots.release()
                if push is not None and push.taken is not None:
                    push.taken.delivery.release()
                copying.release()
                spans.fail(span, error)
                span.end()
            # The version cannot be completed without this rank, so the others must not wait for it. But if the rank
            # belongs to another process, that process decides.
            # A rank that stops because another rank was refused does not report that again: the other ranks know.
            told = isinstance(error, VersionFailed)
            if not number and isinstance(error, InvalidArgument | FailedPrecondition) and not told:
                self._refuse(opening, rank, error)
            elif number and not isinstance(error, AlreadyExists):
                self._give_up(
                    pb.PushHeader(model=model, number=number, rank=rank, client_id=opening.client_id),
                    error,
                    terms.hold,
                )
                # other ranks may already be at the next push: they do not wait there for a rank whose layout is
                # unchanged
                if behind is not None and isinstance(error, Exception) and not isinstance(error, VersionFailed):
                    behind.at_least = number
                    self._refuse(behind, rank, error)
            raise
        with self._lock:
            self._running = [each for each in self._running if not each.done()] + [push.report]
        return PushHandle(connection, model, number, chosen.nbytes, push.report, seal, copying)

    def _declare(
        self, header: pb.PushHeader, layout: Layout, space: TensorSpace, terms: PushTerms, at: str
    ) -> tuple[pb.DeclareLayoutResponse, str]:
        """Declare a rank's layout, and return the response with the address of the replica to which the rank pushes.

        Ranks that have the same layouts as for the previous version begin without waiting for the others. If such a
        rank has since moved to another replica, the service sends it back for this version.
        """
        opened_at, problem = at, None
        heard = partial(_heard, header, terms)
        for _ in range(_MOST_MOVES):
            seconds = None if at == opened_at else _MOVED_SECONDS
            declaring = push_calls.declare(header, layout, space, within=terms.hold.left, meanwhile=heard)
            try:
                declared = self._connection.run(declaring, at=at, retry_seconds=seconds)
            except Unavailable as error:
                if at == opened_at:
                    raise
                at, problem = opened_at, error  # this replica learns whether the other one has ended
                continue
            if not declared.push_at:
                if at != opened_at:
                    self._connection.addresses.use(
                        at
                    )  # the replica of the other ranks: the next version is opened there
                return declared, at
            at = declared.push_at
        raise problem or Unavailable(
            f"{opened_at} and {at} do not agree on which of them this rank pushes to",
            fix="check whether each can reach the other at its --advertise address; push again",
        )

    def _slot(self, hold: Hold) -> bool:
        """Wait until one more push may be delivered, and take its slot. Raises DeadlineExceeded."""
        if self._slots.acquire(timeout=hold.left) if hold.is_bound else self._slots.acquire():
            return True
        raise hold.exceeded("the bytes of earlier pushes were still on their way")

    def _agree(
        self,
        header: pb.PushHeader,
        terms: PushTerms,
        declare: Callable[[], Steps[pb.DeclareLayoutResponse]],
        at: str,
    ) -> None:
        """Wait until all ranks have agreed to the push.

        Raises:
            VersionFailed: a rank cannot push, or the version failed or was aborted.
            DeadlineExceeded: not all ranks have agreed in time (names the absent ones).
        """
        agreement, hold = terms.agreement, terms.hold
        if agreement is None:
            return
        agreement.come()
        give_up, reminder = time.monotonic() + min(hold.left, _AGREE_SECONDS), Reminder()
        while not agreement.decided(min(max(give_up - time.monotonic(), 0.0), REMIND_SECONDS)):
            absent = ranks_text(agreement.absent())
            if time.monotonic() >= give_up:
                late = hold.exceeded(f"{header.model}@{header.number} was still waiting for {absent}")
                if agreement.refuse(late):
                    raise late
                break  # the last rank has agreed in the meantime, or another one has refused
            if (seconds := reminder.due()) is not None:
                rough = readable_duration(seconds, rough=True)
                log.warning("%s@%d: for %s, waits for %s to push", header.model, header.number, rough, absent)
                self._connection.run(declare(), at=at)  # raises if the version has failed in the meantime
        _heard(header, terms)
        agreement.done()

    def meet(self, model: str, terms: PushTerms, says: bytes = b"") -> list[bytes]:
        """Wait until all ranks are about to run a collective before a push.

        The collective would hang if a rank were absent.

        Args:
            model: the model.
            terms: terms of the push.
            says: message of this rank to the others.

        Returns:
            The distinct messages of the ranks.

        Raises:
            VersionFailed: a rank cannot push.
            DeadlineExceeded: not all ranks have called in time (names the absent ones).
        """
        if terms.agreement is None:
            return [says]
        ahead, give_up = terms.agreement.ahead(), time.monotonic() + min(terms.hold.left, _AGREE_SECONDS)
        if says:
            ahead.say(says)
        ahead.come()
        while not ahead.decided(_MEET_SECONDS):
            if problem := terms.agreement.problem():
                raise _not_all(model, problem)
            if time.monotonic() >= give_up:
                late = terms.hold.exceeded(f"{model} was still waiting for {ranks_text(ahead.absent())}")
                if ahead.refuse(late):
                    raise late
                break  # the last rank has called in the meantime: the others begin, and would wait for this one
        if problem := ahead.problem():
            raise _not_all(model, problem)
        said = ahead.said() if says else []
        ahead.done()
        return said

    def forget(self, terms: PushTerms) -> None:
        """Delete this rank's message of `meet`, after all ranks have made the push."""
        if terms.agreement is not None:
            terms.agreement.ahead().forget()

    def _expect(self, model: str, layout: Layout, declared: pb.DeclareLayoutResponse) -> None:
        """Record the shards that the service has assigned to the rank, for `begin`."""
        places = layout.placements
        assigned, shared = set(declared.assigned), set(declared.shared)
        compared = sum(places[index].nbytes for index in shared - assigned)
        if compared <= _MOST_COMPARED * declared.stream_bytes:
            self._pushed[model] = frozenset(places[index].shard for index in assigned | shared)
        else:
            self._pushed.pop(model, None)

    def _take(self, push: _RankPush) -> _Taken:
        """Copy the shards of a rank."""
        stream, chosen, declared = push.stream, push.chosen, push.declared
        shards, push.shards = push.shards, None
        assert shards is not None  # noqa: S101 - copied once
        header, counts = stream.header, stream.counts
        replicas: Sequence[pb.ReplicaChecksum] = ()
        copy = spans.child(stream.span, "weighbridge.copy", {"weighbridge.bytes": chosen.nbytes})
        with copy, push.copying.made():
            begun = time.monotonic()
            if isinstance(shards, ArrivingWeights):
                passing = shards.passing(chosen)
                granted = ask_memory(self._connection.lane_at(stream.at), header, chosen)
                delivery = take_passing(
                    granted, chosen, passing, stream.send, shards.buffer_bytes, counts, self.staging
                )
                casts = passing.casts
            else:
                visible = partial(self._is_visible, header.model)
                replicas = self._replicas.of_push(
                    header.model, header.number, push.layout, declared.shared, shards, visible
                )
                source = shards.select(list(declared.assigned), chosen)
                if declared.shifts:
                    source = source.shifted(dict(declared.shifts))
                casts = source.casts
                granted = ask_memory(self._connection.lane_at(stream.at), header, chosen)
                delivery = copy_out(granted, chosen, source, counts)
            return _Taken(delivery, casts, replicas, chosen.nbytes, time.monotonic() - begun)

    def _go_on(self, push: _RankPush) -> None:
        """Copy the shards of a rank, if that has not been done, and deliver them. Runs in a thread."""
        if not push.turn.acquire(blocking=False):
            return
        stream = push.stream
        try:
            if push.taken is None:
                with held(push.hold):  # the optimizer's step may wait for the copy
                    try:
                        push.taken = self._take(push)
                    except BaseException as error:
                        self._give_up(stream.header, error)
                        raise
            push.report.set_result(self._deliver(push, push.taken))
        except BaseException as error:  # the handle's `report` and `wait` raise it
            spans.fail(stream.span, error)
            if push.hold.policy.warns:
                log.error(
                    "%s@%d was not pushed; the loop goes on. %s",
                    stream.header.model,
                    stream.header.number,
                    error,
                )
            push.report.set_exception(error)
        finally:
            stream.span.end()
            push.copying.release()
            self._slots.release()

    def _give_up(self, header: pb.PushHeader, error: BaseException, hold: Hold | None = None) -> None:
        """Abort a version because a rank cannot push its part. If the time for which the caller may be blocked is
        limited, this is done in a thread.
        """
        reason = _in_a_line(f"rank {header.rank} gave up", error)
        if hold is not None and hold.is_bound:
            arguments = (header, reason)
            threading.Thread(target=self._abort, args=arguments, name=f"give-up-{header.number}", daemon=True).start()
        else:
            self._abort(header, reason)

    def _abort(self, header: pb.PushHeader, reason: str) -> None:
        with contextlib.suppress(WeighbridgeError):
            self._connection.run(push_calls.abort(header.model, header.number, reason, refused=header.client_id))

    @contextlib.contextmanager
    def telling(self, openings: Iterable[pb.OpenVersionRequest | None], rank: int, terms: PushTerms) -> Iterator[None]:
        """Context that notifies the other ranks of these pushes if its block raises; otherwise they would wait for this
        rank.
        """
        try:
            yield
        except Exception as error:
            if terms.agreement is not None:
                terms.agreement.refuse(error)
            for opening in openings:
                if opening is not None:
                    self._refuse(opening, rank, error)
            raise

    def _refuse(self, opening: pb.OpenVersionRequest, rank: int, error: Exception) -> None:
        if opening.ranks < 2:
            return
        reason = _in_a_line(f"rank {rank} was refused", error)
        try:
            self._connection.run(push_calls.refuse(opening, rank, reason), retry_seconds=_TELL_SECONDS)
        except (VersionFailed, AlreadyExists):  # known already; or another process is this rank
            pass
        except WeighbridgeError as untold:
            # the service may refuse the opening itself: then each rank gets that error from its own call
            if not (isinstance(error, WeighbridgeError) and untold.message == error.message):
                log.warning("%s: the other ranks could not be notified: %s", opening.model, untold.message)

    def close(self) -> None:
        """Wait until all pushes have been delivered or have failed."""
        with self._lock:
            running, self._running = self._running, []
        for report in running:
            report.exception()

    def _is_visible(self, model: str, number: int) -> bool:
        with contextlib.suppress(WeighbridgeError):
            return self._connection.run(version_calls.get_version(model, number)).state.visible
        return False

    def _open(
        self,
        opening: pb.OpenVersionRequest,
        registration: RegisterModelRequest | None,
        called: float | None,
    ) -> tuple[Version, str]:
        """Open a version, and return it with the address of the replica that receives this rank's push. For the
        arguments see `push_calls.open_version`.
        """
        addresses = self._connection.addresses
        at = addresses.current
        opened = self._connection.run(push_calls.open_version(opening, registration, called))
        while at != addresses.current:  # another replica responded, or another thread changed the address
            at = addresses.current
            opened = self._connection.run(push_calls.open_version(opening, called=called), at=at)
        return opened, at

    def _deliver(self, push: _RankPush, taken: _Taken) -> PushReport:
        stream, delivery = push.stream, taken.delivery
        started, counts = time.monotonic(), stream.counts
        held_seconds = push.copying.kept_until(push.returned) - push.began
        try:
            if delivery.granted.loan is not None:
                counts.add(delivery.granted.loan.count())
                delivery.granted.loan.end(complete=True)
            if delivery.staged is not None:
                stream.send(delivery.staged, delivery.granted.streamed)
            broken = counts.by_tensor
            if broken:
                log.warning(_told(stream.header, broken))
            if not push.hold_seal:
                stream.seal(taken.replicas)
            stream.span.set_attribute("weighbridge.lane", delivery.granted.lane)
            stream.span.set_attribute("weighbridge.held_seconds", held_seconds)
            return PushReport(
                held_seconds=held_seconds,
                copy_seconds=taken.seconds,
                stream_bytes=taken.nbytes,
                stream_seconds=time.monotonic() - started,
                lane=delivery.granted.lane,
                lane_reason=delivery.granted.why_not_local,
                local_bytes=delivery.local_bytes,
                cast_tensors=taken.casts[0],
                widened_tensors=taken.casts[1],
                nonfinite_elements=counts.total,
                nonfinite_tensors=tuple(itertools.islice(broken.items(), _NAMED_IN_REPORT)),
            )
        finally:
            delivery.release()


def _told(header: pb.PushHeader, broken: Mapping[str, int]) -> str:
    """Return the text of a warning about the non-finite elements of a push."""
    named = [f"{name} ({count})" for name, count in itertools.islice(broken.items(), _NAMED_IN_LOG)]
    more = f" and {len(broken) - len(named)} more" if len(broken) > len(named) else ""
    return (
        f"{header.model}@{header.number}: rank {header.rank} pushes "
        f"{counted(sum(broken.values()), 'element that is', 'elements that are')} NaN or "
        "infinite, "
        f"in {', '.join(named)}{more}"
    )


def _heard(header: pb.PushHeader, terms: PushTerms) -> None:
    """Raise VersionFailed if a rank has refused the push."""
    problem = "" if terms.agreement is None else terms.agreement.problem()
    if problem:
        raise _not_all(f"{header.model}@{header.number}", problem)


def _not_all(what: str, problem: str) -> VersionFailed:
    """Return the error of a push that one rank has refused, with the reason that the rank gave."""
    unregistered = "there is no model" in problem
    fix = "call register_model on every rank before the push: repeating it is harmless" if unregistered else ""
    return VersionFailed(f"{what}: not all ranks can push", details=[problem], fix=fix)


def _in_a_line(what: str, error: BaseException) -> str:
    """Return the reason of a failure for the other ranks, in one line."""
    said = (error.message, *error.details) if isinstance(error, WeighbridgeError) else (repr(error),)
    return shortened(" ".join(f"{what}: {'; '.join(said)}".split()), _MOST_REASON)
