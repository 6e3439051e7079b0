"""Push of a rank's shards, which goes on while the rank trains."""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from weighbridge._clients.calls import push_calls, version_calls
from weighbridge._clients.calls.steps import Steps
from weighbridge._clients.connection import Connection
from weighbridge._clients.copying.copies import Copies, Copying
from weighbridge._clients.copying.delivery import Delivery, copy_out, lend, take_passing
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
from weighbridge._formats.gathered_shards import OpenPassing
from weighbridge._formats.push_counts import PlacedPart, PushCounts
from weighbridge._formats.push_sources import OpenSource, StagingPool
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
"""Most tensors with non-finite elements that are named."""
_TELL_SECONDS = 5.0
"""How long a rank that is refused tries to tell the others."""
_MOST_REASON = 400
"""Characters of a reason that the other ranks are told."""
_PUSHES_AT_ONCE = 2
"""Pushes of one client whose bytes may still be on their way; a further one waits."""
_AGREE_SECONDS = 300.0
"""Time for which a rank waits for the others to say that they push, unless `max_hold_s` is given."""
_MEET_SECONDS = 0.1
"""Time after which a rank that waits for others looks whether one of them has refused."""
_MOST_MOVES = 10
"""Most moves of a rank from one replica to another within one push."""
_MOVED_SECONDS = 5.0
"""Longest time for which a rank tries to reach the replica that it is sent to."""
_MOST_COMPARED = 0.25
"""Part of what a rank pushes that it may read besides, to compare it with other ranks, and still be said to expect what it pushes."""


@dataclass(frozen=True, slots=True)
class _Taken:
    """Shards of a rank that are copied out.

    Attributes:
        delivery: where to.
        casts: as of `ShardSource`.
        replicas: checksums of those that other ranks hold, too.
        nbytes: of all of them.
        seconds: how long that took.
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
        hold: for how long it may hold its rank, and what becomes of one that fails.
        agreement: of its ranks; None where they have no process group.
    """

    hold: Hold = FREE
    agreement: RankAgreement | None = None

    def behind(self) -> PushTerms:
        """The terms of what is pushed behind this push, in the same call."""
        return PushTerms(self.hold, None if self.agreement is None else self.agreement.behind())


ALONE = PushTerms()
"""The terms of a push without a bound, of ranks without a process group."""


class Pusher:
    """Makes the pushes of one client. Thread-safe.

    Args:
        connection: the client's.

    Attributes:
        staging: buffers for what goes by gRPC.
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
        """Begin to copy those of a rank's tensors that it will probably be told to push: what it was told last time.

        That is not known before the first push, nor if most of what the rank holds was others' to push, too.

        Args:
            copies: of the call.
            model: which model.
            layout: the shards that the rank holds.
            tensors: one for each.
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
        open_source: OpenSource | OpenPassing,
        *,
        hold_seal: bool = False,
        behind: pb.OpenVersionRequest | None = None,
        copying: Copying | None = None,
        terms: PushTerms = ALONE,
        registration: RegisterModelRequest | None = None,
    ) -> PushHandle:
        """Push the shards of a rank. Returns once they are copied out, or once it is known that ``copying`` copies them behind the caller.

        Args:
            opening: says which version; the same of all ranks, but for the client's id.
            rank: which rank.
            layout: the shards that it holds, as one stream.
            space: to which the names of their tensors belong.
            open_source: is called for the bytes of the shards that this rank is to push; and, for those that other ranks hold, too, before
                that to compare them. Shards that pass by are held by no other rank.
            hold_seal: leave it to `PushHandle.seal` to seal the rank.
            behind: opening of what all ranks push next. If this rank fails, they are told that it will not come.
            copying: how the shards are copied; by default in the call. Behind the caller, they do not pass by, and the seal is not held.
            terms: on which it is made. Nothing is copied before all ranks have agreed.
            registration: of the model, if the push may be its first one, or one with another config.

        Raises:
            WeighbridgeError: as `TrainerClient.push` says.
        """
        started = time.monotonic()
        connection, model = self._connection, opening.model
        copying = Copying() if copying is None else copying
        has_slot, number = False, 0
        turn = threading.Lock()  # of the caller or the thread, whichever is first to take it, to end the push
        taken: _Taken | None = None
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
            # ranks that have no trace of their own are in that of the rank which has opened the version
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
            report: Future[PushReport] = Future()
            placed = [PlacedPart(each.start, each.end, each.places) for each in declared.placed]
            counts = PushCounts(chosen, placed)
            stream = RankStream(connection, header, at, routes_of(declared, rank), counts, span)
            take = partial(self._take, stream, layout, declared, chosen, open_source, copying)
            if not copying.is_behind(needed):
                taken = take()
            kept = started, time.monotonic()
            rest = partial(
                self._go_on, turn, report, stream, kept, taken or take, copying, hold_seal, terms.hold
            )
            # not a daemon: a trainer that ends after its last push must not lose it
            threading.Thread(target=rest, name=f"push-{model}@{number}").start()
        except BaseException as error:
            if terms.agreement is not None:
                terms.agreement.refuse(error)
            if turn.acquire(blocking=False):  # an interrupt may come when the thread has begun
                if has_slot:
                    self._slots.release()
                if taken is not None:
                    taken.delivery.release()
                copying.release()
                spans.fail(span, error)
                span.end()
            # Without this rank the version cannot be completed: do not let the others wait for it. But a rank that
            # belongs to another process is that process's business.
            # A rank that stops because another one was refused does not report it again: the other ranks know.
            told = isinstance(error, VersionFailed)
            if not number and isinstance(error, InvalidArgument | FailedPrecondition) and not told:
                self._refuse(opening, rank, error)
            elif number and not isinstance(error, AlreadyExists):
                self._give_up(
                    pb.PushHeader(model=model, number=number, rank=rank, client_id=opening.client_id),
                    error,
                    terms.hold,
                )
                # others may have come so far: they wait for no rank whose shards are those of the push before
                if (
                    behind is not None
                    and isinstance(error, Exception)
                    and not isinstance(error, VersionFailed)
                ):
                    behind.at_least = number
                    self._refuse(behind, rank, error)
            raise
        with self._lock:
            self._running = [each for each in self._running if not each.done()] + [report]
        seal = partial(stream.seal, taken.replicas) if taken is not None and hold_seal else None
        return PushHandle(connection, model, number, chosen.nbytes, report, seal, copying)

    def _declare(
        self, header: pb.PushHeader, layout: Layout, space: TensorSpace, terms: PushTerms, at: str
    ) -> tuple[pb.DeclareLayoutResponse, str]:
        """Declare a rank's layout, and return the answer with the address of the replica that the rank pushes to.

        Ranks whose layouts are those of the version before begin without waiting for the others. A rank that has moved to another replica
        since is sent back for this version.
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
                at, problem = opened_at, error  # which learns what has become of the other replica
                continue
            if not declared.push_at:
                if at != opened_at:
                    self._connection.addresses.use(
                        at
                    )  # the other ranks' replica: the next version is opened there
                return declared, at
            at = declared.push_at
        raise problem or Unavailable(
            f"{opened_at} and {at} do not agree on which of them this rank pushes to",
            fix="see whether each can reach the other at its --advertise address; push again",
        )

    def _slot(self, hold: Hold) -> bool:
        """A slot for one more push, once there is one. Raises DeadlineExceeded."""
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
        """Wait until all ranks have said that they push.

        Raises:
            VersionFailed: a rank cannot, or the version was given up.
            DeadlineExceeded: not all ranks have come in time; names them.
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
                break  # the last one has come meanwhile, or another one has refused
            if (seconds := reminder.due()) is not None:
                rough = readable_duration(seconds, rough=True)
                log.warning("%s@%d: for %s, waits for %s to push", header.model, header.number, rough, absent)
                self._connection.run(declare(), at=at)  # raises if it was given up meanwhile
        _heard(header, terms)
        agreement.done()

    def meet(self, model: str, terms: PushTerms, says: bytes = b"") -> list[bytes]:
        """Wait until all ranks have come to what they do together before a push, as a collective: it would wait for one that does not come.

        Args:
            model: which model.
            terms: of the push.
            says: what the other ranks are to know of this one.

        Returns:
            What the ranks have said, each text once.

        Raises:
            VersionFailed: a rank cannot push.
            DeadlineExceeded: not all ranks have come in time; names them.
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
                break  # the last one has come meanwhile: the others begin, and would wait for this one
        if problem := ahead.problem():
            raise _not_all(model, problem)
        said = ahead.said() if says else []
        ahead.done()
        return said

    def forget(self, terms: PushTerms) -> None:
        """Take away what this rank has said when ranks met before a push that all of them have made."""
        if terms.agreement is not None:
            terms.agreement.ahead().forget()

    def _expect(self, model: str, layout: Layout, declared: pb.DeclareLayoutResponse) -> None:
        """Take note of what a rank was told to push."""
        places = layout.placements
        assigned, shared = set(declared.assigned), set(declared.shared)
        compared = sum(places[index].nbytes for index in shared - assigned)
        if compared <= _MOST_COMPARED * declared.stream_bytes:
            self._pushed[model] = frozenset(places[index].shard for index in assigned | shared)
        else:
            self._pushed.pop(model, None)

    def _take(
        self,
        stream: RankStream,
        layout: Layout,
        declared: pb.DeclareLayoutResponse,
        chosen: Layout,
        open_source: OpenSource | OpenPassing,
        copying: Copying,
    ) -> _Taken:
        """Copy out the shards of a rank.

        Args:
            stream: takes what goes by gRPC.
            layout: of all that the rank holds.
            declared: the service's answer to it.
            chosen: of the shards that the rank is to push.
            open_source, copying: as for `push`.
        """
        header, counts = stream.header, stream.counts
        replicas: Sequence[pb.ReplicaChecksum] = ()
        copy = spans.child(stream.span, "weighbridge.copy", {"weighbridge.bytes": chosen.nbytes})
        with copy, copying.made():
            begun = time.monotonic()
            if isinstance(open_source, OpenPassing):
                passing = open_source.make(chosen)
                lent = lend(self._connection.lane_at(stream.at), header, chosen)
                delivery = take_passing(
                    lent, chosen, passing, stream.send, open_source.buffer_bytes, counts, self.staging
                )
                casts = passing.casts
            else:
                visible = partial(self._is_visible, header.model)
                replicas = self._replicas.of_push(
                    header.model, header.number, layout, declared.shared, open_source, visible
                )
                source = open_source(list(declared.assigned), chosen)
                if declared.shifts:
                    source = source.shifted(dict(declared.shifts))
                casts = source.casts
                lent = lend(self._connection.lane_at(stream.at), header, chosen)
                delivery = copy_out(lent, chosen, source, counts)
            return _Taken(delivery, casts, replicas, chosen.nbytes, time.monotonic() - begun)

    def _go_on(
        self,
        turn: threading.Lock,
        report: Future[PushReport],
        stream: RankStream,
        kept: tuple[float, float],
        taken: _Taken | Callable[[], _Taken],
        copying: Copying,
        hold_seal: bool,
        hold: Hold,
    ) -> None:
        """Copy out the shards of a rank behind its back if that has not been done, and deliver them. ``kept`` is when the push began and returned."""
        if not turn.acquire(blocking=False):
            return
        try:
            if not isinstance(taken, _Taken):
                with held(hold):  # the optimizer's step may wait for this
                    try:
                        taken = taken()
                    except BaseException as error:
                        self._give_up(stream.header, error)
                        raise
            started, returned = kept
            held_seconds = copying.kept_until(returned) - started
            report.set_result(self._deliver(stream, held_seconds, taken, hold_seal))
        except BaseException as error:  # goes to whoever waits
            spans.fail(stream.span, error)
            if hold.policy.warns:
                log.error(
                    "%s@%d was not pushed; the loop goes on. %s",
                    stream.header.model,
                    stream.header.number,
                    error,
                )
            report.set_exception(error)
        finally:
            stream.span.end()
            copying.release()
            self._slots.release()

    def _give_up(self, header: pb.PushHeader, error: BaseException, hold: Hold | None = None) -> None:
        """Give up a version of which a rank cannot push its part; behind the caller, who may be held no longer."""
        reason = _in_a_line(f"rank {header.rank} gave up", error)
        if hold is not None and hold.is_bound:
            arguments = (header, reason)
            threading.Thread(
                target=self._abort, args=arguments, name=f"give-up-{header.number}", daemon=True
            ).start()
        else:
            self._abort(header, reason)

    def _abort(self, header: pb.PushHeader, reason: str) -> None:
        with contextlib.suppress(WeighbridgeError):
            self._connection.run(
                push_calls.abort(header.model, header.number, reason, refused=header.client_id)
            )

    @contextlib.contextmanager
    def telling(
        self, openings: Iterable[pb.OpenVersionRequest | None], rank: int, terms: PushTerms
    ) -> Iterator[None]:
        """Where the block refuses what a rank would push, tell the other ranks of these pushes, which would wait for it."""
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
        except (VersionFailed, AlreadyExists):  # they have been told; the rank takes part by another process
            pass
        except WeighbridgeError as untold:
            # what is refused may be the opening: each rank learns of that by itself
            if not (isinstance(error, WeighbridgeError) and untold.message == error.message):
                log.warning("%s: the other ranks could not be told: %s", opening.model, untold.message)

    def close(self) -> None:
        """Wait until what was pushed has arrived or failed."""
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
        """Open a version; with the address of the replica that takes this rank's push. Arguments are those of `push_calls.open_version`."""
        addresses = self._connection.addresses
        at = addresses.current
        opened = self._connection.run(push_calls.open_version(opening, registration, called))
        while at != addresses.current:  # another one has answered, or another thread has moved on meanwhile
            at = addresses.current
            opened = self._connection.run(push_calls.open_version(opening, called=called), at=at)
        return opened, at

    def _deliver(self, stream: RankStream, held_seconds: float, taken: _Taken, hold_seal: bool) -> PushReport:
        started, counts, delivery = time.monotonic(), stream.counts, taken.delivery
        try:
            if delivery.lent.loan is not None:
                counts.add(delivery.lent.loan.count())
                delivery.lent.loan.end(complete=True)
            if delivery.staged is not None:
                stream.send(delivery.staged, delivery.lent.streamed)
            broken = counts.by_tensor
            if broken:
                log.warning(_told(stream.header, broken))
            if not hold_seal:
                stream.seal(taken.replicas)
            stream.span.set_attribute("weighbridge.lane", delivery.lent.lane)
            stream.span.set_attribute("weighbridge.held_seconds", held_seconds)
            return PushReport(
                held_seconds=held_seconds,
                copy_seconds=taken.seconds,
                stream_bytes=taken.nbytes,
                stream_seconds=time.monotonic() - started,
                lane=delivery.lent.lane,
                lane_reason=delivery.lent.why_not_local,
                local_bytes=delivery.local_bytes,
                cast_tensors=taken.casts[0],
                widened_tensors=taken.casts[1],
                nonfinite_elements=counts.total,
                nonfinite_tensors=tuple(itertools.islice(broken.items(), _NAMED_IN_REPORT)),
            )
        finally:
            delivery.release()


def _told(header: pb.PushHeader, broken: Mapping[str, int]) -> str:
    """What of a push is not finite."""
    named = [f"{name} ({count})" for name, count in itertools.islice(broken.items(), _NAMED_IN_LOG)]
    more = f" and {len(broken) - len(named)} more" if len(broken) > len(named) else ""
    return (
        f"{header.model}@{header.number}: rank {header.rank} pushes {counted(sum(broken.values()), 'element that is', 'elements that are')} NaN or infinite, "
        f"in {', '.join(named)}{more}"
    )


def _heard(header: pb.PushHeader, terms: PushTerms) -> None:
    """Raise VersionFailed if a rank has said that it cannot push."""
    problem = "" if terms.agreement is None else terms.agreement.problem()
    if problem:
        raise _not_all(f"{header.model}@{header.number}", problem)


def _not_all(what: str, problem: str) -> VersionFailed:
    """Failure of a push that one rank cannot make, by what that rank has said."""
    unregistered = "there is no model" in problem
    fix = (
        "call register_model on every rank before the push: repeating it is harmless" if unregistered else ""
    )
    return VersionFailed(f"{what}: not all ranks can push", details=[problem], fix=fix)


def _in_a_line(what: str, error: BaseException) -> str:
    """What is told to those who wait for a rank."""
    said = (error.message, *error.details) if isinstance(error, WeighbridgeError) else (repr(error),)
    return shortened(" ".join(f"{what}: {'; '.join(said)}".split()), _MOST_REASON)
