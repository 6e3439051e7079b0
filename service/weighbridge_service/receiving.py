"""A version while it is being received: who holds what, what has arrived, and when it is complete.

The ranks of a push declare what they hold. When all have, the shards are shared out, the plan is made and coverage is
proved, before a byte moves. Then bytes arrive in any order, and each goes straight to its final place in the image.
When every rank has sealed, all bytes are there and the version is ready.

A trainer that pushes again with the layouts of last time does not wait for its other ranks: what the set of layouts
leads to is known, and each rank gets its part of it at once.

Where ranks push to several replicas of the service (`spreading`), each replica has one of these objects for the version, and an
image of the files that it writes. It knows the declarations of the other replicas' ranks, takes the bytes of its files from
them, and passes on those that belong to theirs.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from weighbridge import rpc
from weighbridge.errors import (
    DataLoss,
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    Unavailable,
    VersionFailed,
    WeighbridgeError,
)
from weighbridge.resources import Version, VersionState
from weighbridge_service.arrivals import Arrivals
from weighbridge_service.clock import unix_ms
from weighbridge_service.declaring import Agreement, Declaration, Declarations, Home, KnownSet, numbers_of
from weighbridge_service.forwarding import Forwarding
from weighbridge_service.preparing import PreparedPush
from weighbridge_service.ranges import RangeSet
from weighbridge_service.transfers import Bytes
from weighbridge_storage.images import Image, Lease
from weighbridge_storage.regions import Region

_NAMED = 20
_LET_GO_SECONDS = 5.0
"""How long processes that were asked to let go of memory may take for it: they unmap it in milliseconds."""
_LET_GO_PAUSE = 0.002


@dataclass(frozen=True, slots=True)
class LentImage:
    """An image that a rank's process writes to.

    Attributes:
        image: the image.
        lease: keeps it from being used for something else; to be released at the end.
        prepared: where the bytes of the rank's stream belong.
    """

    image: Image
    lease: Lease
    prepared: PreparedPush


@dataclass
class _Rank:
    received: RangeSet = field(default_factory=RangeSet)
    sealed: bool = False
    writers: int = 0


class Receiving:
    """One version from its opening to its being ready or failed. Safe to use from many threads.

    Args:
        opened: the version as it was opened.
        request_id: which request opened it.
        home: this process.
        prepare: makes a `PreparedPush` from the digests of all ranks and the numbers of their replicas.
        acquire_image: gives an image of these files of the version, with headers written, when the first rank is about to push; is
            told which clients have declared so far.
        forwarding: passes bytes on to other replicas.
        confirm: raises VersionFailed if the version was given up elsewhere; is asked before it becomes ready.
        known: declarations of the push before, if any.
        on_end: is called once, when the version is ready or has failed, without a lock being held.
        recall: asks processes that were lent a region, and do not write to it for this version, to let go of it.

    Attributes:
        image: where its files are put together; None before that, and when it is no longer needed.
    """

    def __init__(
        self,
        opened: Version,
        request_id: str,
        *,
        home: Home,
        prepare: Callable[[Sequence[str], Sequence[int]], PreparedPush],
        acquire_image: Callable[[Sequence[str], Collection[str]], Image],
        forwarding: Forwarding,
        confirm: Callable[[], None],
        known: KnownSet | None,
        on_end: Callable[[Receiving], None],
        recall: Callable[[Region], None] = lambda _region: None,
    ) -> None:
        self.request_id = request_id
        self.home = home
        self._opened = opened
        self._name = f"{opened.model}@{opened.number}"
        self._prepare = prepare
        self._acquire_image = acquire_image
        self._forwarding = forwarding
        self._confirm = confirm
        self._on_end = on_end
        self._recall = recall
        self._changed = threading.Condition()
        self._declarations = Declarations(opened, home, known)
        self._ranks = [_Rank() for _ in range(opened.ranks)]
        self._state = VersionState.RECEIVING
        self._complete = False
        self._error: WeighbridgeError | None = None
        self._ready_time_ms = 0
        self._last_activity = time.monotonic()
        self.image: Image | None = None
        self._buffers: Mapping[str, Bytes] = {}
        self._arrivals: Arrivals | None = None

    @property
    def version(self) -> Version:
        """The version as it stands now."""
        with self._changed:
            error = self._error
            return replace(
                self._opened,
                state=self._state,
                sealed_ranks=sum(rank.sealed for rank in self._ranks),
                received_bytes=sum(rank.received.size for rank in self._ranks),
                ready_time_ms=self._ready_time_ms,
                error=error.message if error else "",
                error_details=error.details if error else (),
            )

    @property
    def known_set(self) -> KnownSet | None:
        """What the next push can count on; None as long as not all ranks have declared."""
        with self._changed:
            return self._declarations.known_set

    @property
    def agreed(self) -> Agreement | None:
        """What all ranks have agreed on, once they have."""
        with self._changed:
            return self._declarations.agreed

    @property
    def declared_here(self) -> Mapping[int, Declaration]:
        """What the ranks that push to this replica have declared so far."""
        with self._changed:
            return self._declarations.here

    @property
    def declared_everywhere(self) -> bool:
        """Whether all ranks are known to have declared, wherever they push to."""
        with self._changed:
            return not self._declarations.absent

    @property
    def failed(self) -> bool:
        """Whether the version has failed, as far as is known here."""
        with self._changed:
            return self._state is VersionState.FAILED

    def takes_part(self, client_id: str) -> bool:
        """Whether this client has declared a rank of this version."""
        return any(declaration.client_id == client_id for declaration in self.declared_here.values())

    def declare(self, rank: int, client_id: str, digest: str, *, seconds: float) -> Agreement:
        """Say what a rank holds; its layout is known by this digest.

        Waits for the other ranks, unless the layouts are those of the push before.

        Raises:
            AlreadyExists: another client has declared this rank.
            LayoutError: the layouts contradict the model or each other; the version has failed.
            DeadlineExceeded: not all ranks came within ``seconds``; names those that did not.
        """
        deadline = time.monotonic() + seconds
        with self._changed:
            self._check_receiving()
            news = rank in self._declarations.absent
            contradiction = self._declarations.declare(rank, client_id, digest)
            if news:  # who only asks again waits for others, and would wait for ever for one that has gone
                self._touch()
            if contradiction is None and self._declarations.agree_as_before(rank):
                agreed = self._declarations.agreed
                threading.Thread(target=self._begin, args=(agreed,), daemon=True).start()
        self._go_on(contradiction)
        with self._changed:
            while self._agreed is None or (self.image is None and self._state is VersionState.RECEIVING):
                self._check_receiving()
                left = deadline - time.monotonic()
                if left <= 0:
                    absent = self._declarations.absent
                    raise DeadlineExceeded(
                        f"{self._name}: {len(absent)} of {len(self._ranks)} ranks have not declared their layout",
                        details=[f"rank {r}" for r in absent[:_NAMED]],
                        fix="every rank calls push with the same step, run and world_size; if they push to several replicas "
                        "of the service, serve each of these with --advertise",
                    )
                self._changed.wait(left)
            self._check_receiving()
            return self._agreed

    def declare_elsewhere(self, declarations: Mapping[int, Declaration]) -> None:
        """Take note of what ranks have declared at other replicas. Makes the plan if all ranks are known by that.

        Raises:
            WeighbridgeError: the layouts contradict the model or each other; the version has failed.
        """
        with self._changed:
            if self._state is not VersionState.RECEIVING:
                return
            contradiction = self._declarations.hear(declarations)
        self._go_on(contradiction)

    def _go_on(self, contradiction: WeighbridgeError | None) -> None:
        """Fail of what contradicts, or make the plan if that can be done now."""
        if contradiction is not None:
            self.fail(contradiction)
            return
        with self._changed:
            mine = self._declarations.begin_preparing()
        if mine:
            self._prepare_all()

    @property
    def _agreed(self) -> Agreement | None:
        return self._declarations.agreed

    def _prepare_all(self) -> None:
        try:
            with self._changed:
                declared = self._declarations.everywhere
            digests = [declared[rank].digest for rank in range(len(declared))]
            prepared = self._prepare(digests, numbers_of(declared))
            self._begin(self._declarations.agreement(declared, prepared))
        except WeighbridgeError as error:
            self.fail(error)
            raise
        except Exception as error:
            # nobody would make the plan any more, and the other ranks would wait for it
            self.fail(WeighbridgeError(f"the push could not be planned: {type(error).__name__}"))
            raise

    def _begin(self, agreed: Agreement) -> None:
        with self._changed:
            self._declarations.agreed = agreed
            self._changed.notify_all()
            clients = {declaration.client_id for declaration in self._declarations.here.values()}
        to_come = agreed.to_come_to(self.home)
        try:
            image = self._acquire_image(list(to_come), clients)
        except WeighbridgeError as error:
            self.fail(error)
            return
        except Exception as error:  # this thread's last chance: otherwise all ranks would wait in vain
            self.fail(WeighbridgeError(f"no image could be made for {self._name}: {error!r}"))
            return
        with self._changed:
            if self._state is VersionState.RECEIVING:
                self.image, self._buffers = image, image.buffers
                self._arrivals = Arrivals(to_come, image.region)
                self._changed.notify_all()
                return
        image.release()

    def write(self, rank: int, client_id: str, offset: int, data: memoryview, checksum: int) -> None:
        """Take a piece of a rank's stream. One that has come before is left alone.

        Raises:
            DataLoss: the piece does not agree with its checksum; send it again.
            InvalidArgument: it lies outside the stream.
            FailedPrecondition: the rank or the version is sealed, or the rank has not declared.
        """
        with self._changed:
            self._check_receiving()
            self._declarations.check_client(rank, client_id)
            if self._ranks[rank].sealed:
                raise FailedPrecondition(f"rank {rank} of {self._name} is sealed")
        with self._writing(rank) as agreed:
            self._take(agreed, rank, offset, data, checksum, forward=True)

    def write_forwarded(self, claim: str, rank: int, offset: int, data: memoryview, checksum: int) -> None:
        """Take a part of a rank's stream that another replica passes on.

        Raises:
            DataLoss: the piece does not agree with its checksum; send it again.
            InvalidArgument: it lies outside the stream.
            FailedPrecondition: the replicas have not agreed on the same plan, or nobody is to pass this part on to this one.
            Unavailable: this replica is not so far yet; try again.
        """
        with self._changed:
            self._declarations.check_rank(rank)
            agreed = self._agreed
            if agreed is not None:
                # said to the sender alone: who sends what it should not must not end the version
                agreed.check_forwarded(self.home, claim, rank, offset, offset + len(data))
                if self._complete:
                    return  # it is all here: the answer to the same bytes was lost
        try:
            with self._writing(rank) as agreed:
                agreed.check_forwarded(self.home, claim, rank, offset, offset + len(data))
                self._take(agreed, rank, offset, data, checksum, forward=False)
        except _NotBegun as error:
            raise Unavailable(error.message, fix=error.fix) from error

    def _take(
        self, agreed: Agreement, rank: int, offset: int, data: memoryview, checksum: int, *, forward: bool
    ) -> None:
        if rpc.checksum(data) != checksum:
            raise DataLoss(
                f"{self._name}, rank {rank}: the piece at byte {offset} does not agree with its checksum"
            )
        end, whole = offset + len(data), agreed.prepared.streams[rank].nbytes
        if end > whole:
            raise InvalidArgument(
                f"{self._name}, rank {rank}: bytes {offset} to {end} lie outside of its stream of {whole} bytes"
            )
        with self._changed:
            # taken by this call, before they are copied: nobody else copies and counts them again
            fresh = self._ranks[rank].received.claim(offset, end)
        for start, stop in fresh:
            self._place(agreed, rank, start, data[start - offset : stop - offset], forward=forward)

    def _place(self, agreed: Agreement, rank: int, start: int, data: memoryview, *, forward: bool) -> None:
        prepared = agreed.prepared
        filled = prepared.transfer.scatter(data, start, self._buffers, str(rank))
        self._count_filled(filled)
        if forward and prepared.spread is not None:
            for number, meant in prepared.spread.routes.get(rank, {}).items():
                if agreed.homes[number] != self.home:
                    for begin, end in meant.within(start, start + len(data)):
                        self._forwarding.forward(
                            agreed.claim, agreed.homes[number], rank, begin, data[begin - start : end - start]
                        )

    def _count_filled(self, filled: Mapping[str, int]) -> None:
        with self._changed:
            if self._arrivals is not None and self._arrivals.count(filled):
                self._changed.notify_all()

    def lend(self, rank: int, client_id: str) -> LentImage:
        """Let a rank's process write its stream to the image itself.

        Raises:
            FailedPrecondition: the rank or the version is sealed, the rank has not declared, or other replicas of the service have
                a part in the version, so that the rank's bytes do not all belong here.
        """
        with self._changed:
            self._check_receiving()
            self._declarations.check_client(rank, client_id)
            agreed = self._agreed
            if agreed is None or self.image is None or self._arrivals is None:
                raise _NotBegun(f"not all ranks of {self._name} have declared their layouts")
            if self._ranks[rank].received.size == agreed.prepared.streams[rank].nbytes:
                raise FailedPrecondition(f"all bytes of rank {rank} of {self._name} have come")
            if not agreed.alone:
                raise FailedPrecondition(f"{self._name} is received by several replicas of the service")
            self._arrivals.lend(rank)
            lent = LentImage(self.image, self.image.lease(), agreed.prepared)
            self._touch()
            return lent

    def end_lending(self, rank: int, *, complete: bool) -> None:
        """A rank's process has let go of the image.

        Args:
            rank: which rank.
            complete: whether it has written all of its stream.

        Raises:
            FailedPrecondition: the version is no longer being received.
        """
        with self._changed:
            if self._arrivals is not None:
                self._arrivals.give_back(rank)
        if complete:
            with self._writing(rank) as agreed:
                self._take_written(agreed, rank)
        else:
            self.look_again()

    def _wait_let_go(self) -> None:
        """When all bytes are here, wait until no process can write to the image.

        Raises:
            VersionFailed: one still can, though all that were lent it have said that they are done; the version has failed.
        """
        region = self._show_arrivals()
        if region is None:
            return
        self._recall(region)
        deadline = time.monotonic() + _LET_GO_SECONDS
        while self._show_arrivals() is not None:
            if time.monotonic() > deadline:
                error = VersionFailed(
                    f"{self._name} was given up: a process can still write to its memory, although all that were lent it "
                    "have said that they are done",
                    fix="close every mapping of the memory, and its descriptor, before the end of the loan; push the step "
                    "again",
                )
                self.fail(error)
                raise error
            time.sleep(_LET_GO_PAUSE)

    def _show_arrivals(self) -> Region | None:
        """Let those who wait have the files that are complete; gives the image's region if all bytes are here, all that it was lent
        have given it back, and a process can still write to it."""
        with self._changed:
            arrivals, image = self._arrivals, self.image
            if self._state is not VersionState.RECEIVING or arrivals is None or image is None:
                return None
            if arrivals.show():
                self._changed.notify_all()
            held_back = arrivals.held_back and arrivals.all_here and not arrivals.is_lent
            return image.region if held_back else None

    def _take_written(self, agreed: Agreement, rank: int) -> None:
        """All of a rank's stream was written to the image by its own process."""
        with self._changed:
            fresh = self._ranks[rank].received.claim(0, agreed.prepared.streams[rank].nbytes)
        for start, stop in fresh:
            self._count_filled(agreed.prepared.transfer.filled(start, stop, str(rank)))

    def look_again(self) -> None:
        """Go on if a process that could still write to the image has let go of it, or has ended."""
        region = self._show_arrivals()
        if region is not None:
            # whoever was lent it ahead of the version may not be one of its ranks, and there may be no rank that waits
            self._recall(region)
        with self._changed:
            complete = self._complete_if_all_is_here()
        if complete:
            self._become_ready()

    @contextmanager
    def _writing(self, rank: int) -> Iterator[Agreement]:
        """Hold the image while writing to it: it is neither published nor given away meanwhile."""
        with self._changed:
            self._check_receiving()
            if self._agreed is None or self.image is None:
                raise _NotBegun(f"not all ranks of {self._name} have declared their layouts")
            self._ranks[rank].writers += 1
            agreed = self._agreed
        broken: WeighbridgeError | None = None
        try:
            yield agreed
        except VersionFailed as error:
            broken = error
            raise
        except WeighbridgeError:
            raise
        except Exception as error:  # of bytes that are taken for received, some were not copied
            broken = WeighbridgeError(f"bytes that arrived for {self._name} could not be placed: {error!r}")
            raise
        finally:
            with self._changed:
                self._ranks[rank].writers -= 1
                self._touch()
                complete = broken is None and self._complete_if_all_is_here()
                self._changed.notify_all()
            if complete:
                self._become_ready()
            if broken is not None:
                self.fail(broken)

    def wait_agreed(self, seconds: float) -> Agreement | None:
        """Wait until all ranks have declared and there is an image; None if that takes longer.

        Raises:
            WeighbridgeError: the version has failed.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._error is not None or (self._agreed is not None and self.image is not None),
                seconds,
            )
            self._check_not_failed()
            return self._agreed if self.image is not None else None

    def wait_filled(self, known: int, seconds: float) -> list[str]:
        """Wait until more files are complete; gives them, in the order in which they were, without the first ``known``.

        Raises:
            WeighbridgeError: the version has failed.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None or len(self._filled) > known, seconds)
            self._check_not_failed()
            return self._filled[known:]

    @property
    def _filled(self) -> list[str]:
        return [] if self._arrivals is None else self._arrivals.filled

    def wait_complete(self, seconds: float) -> bool:
        """Wait until all that this replica is to receive has arrived and its ranks have sealed.

        Raises:
            WeighbridgeError: the version has failed.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None or self._complete, seconds)
            self._check_not_failed()
            return self._complete

    def push_state(self, rank: int) -> tuple[list[tuple[int, int]], int, bool]:
        """Ranges that have arrived, length of the stream, and whether the rank is sealed.

        Raises:
            FailedPrecondition: there is no stream yet.
        """
        with self._changed:
            self._declarations.check_rank(rank)
            if self._agreed is None:
                raise _NotBegun(f"not all ranks of {self._name} have declared their layouts")
            self._touch()
            state = self._ranks[rank]
            return list(state.received), self._agreed.prepared.streams[rank].nbytes, state.sealed

    def seal(self, rank: int, client_id: str) -> None:
        """The rank has pushed everything; the last one makes the version ready. Repeating it is harmless.

        Raises:
            FailedPrecondition: something is missing; names tensors and boxes.
        """
        with self._changed:
            if self._may_be_sealed(rank, client_id):
                return
            # a piece that has come a second time may still be on its way to its place, or to another replica
            self._changed.wait_for(
                lambda: not self._ranks[rank].writers or self._state is not VersionState.RECEIVING
            )
            elsewhere = self._agreed is not None and not self._agreed.alone
        if elsewhere:
            try:
                self._forwarding.flush(rank)
            except VersionFailed as error:
                self.fail(error)
                raise
        self._wait_let_go()
        with self._changed:
            if self._may_be_sealed(rank, client_id):
                return
            self._ranks[rank].sealed = True
            self._touch()
            complete = self._complete_if_all_is_here()
        if complete:
            self._become_ready()

    def _may_be_sealed(self, rank: int, client_id: str) -> bool:
        """Whether a rank is sealed already; raises if it cannot be."""
        self._declarations.check_rank(rank)
        if self._state is VersionState.READY:
            return True
        self._check_receiving()
        self._declarations.check_client(rank, client_id)
        missing = self._missing(rank)
        if missing:
            raise FailedPrecondition(
                f"rank {rank} of {self._name} cannot be sealed: parts of its stream have not arrived",
                details=missing[:_NAMED],
                fix="ask for the push state and send the rest",
            )
        return False

    def _complete_if_all_is_here(self) -> bool:
        """Take note if nothing more is to come to this replica; whether the version can become ready by that."""
        agreed = self._agreed
        if (
            agreed is None
            or self._arrivals is None
            or self._complete
            or self._state is not VersionState.RECEIVING
        ):
            return False
        here = [rank for rank, state in enumerate(self._ranks) if agreed.home_of(rank) == self.home]
        if not all(self._ranks[rank].sealed for rank in here) or not self._arrivals.complete:
            return False
        self._complete = True
        self._changed.notify_all()
        return agreed.alone

    def _become_ready(self) -> None:
        """Everything is here: be ready, unless the version was given up elsewhere meanwhile."""
        try:
            self._confirm()
        except VersionFailed as error:
            self.fail(error)
            raise
        with self._changed:
            self._check_not_failed()
            if self._state is VersionState.READY:
                return  # it has been published meanwhile
            self._make_ready()
        self._on_end(self)

    def publish_elsewhere(self) -> None:
        """The version, of which other replicas hold parts, has been published. Nothing happens if that is known already."""
        with self._changed:
            if self._state is not VersionState.RECEIVING:
                return
            self._make_ready()
        self._on_end(self)

    def _make_ready(self) -> None:
        self._state = VersionState.READY
        self._ready_time_ms = unix_ms()
        self._buffers = {}  # they would keep the image's memory after it was given away
        self._changed.notify_all()

    def fail(self, error: WeighbridgeError) -> None:
        """Give the version up: it was never visible. Nothing happens if it is no longer being received."""
        with self._changed:
            if self._state is not VersionState.RECEIVING:
                return
            self._state = VersionState.FAILED
            self._error = error
            self._changed.notify_all()
            self._forwarding.stop()  # a writer may be waiting for room there
            self._changed.wait_for(lambda: not any(rank.writers for rank in self._ranks))
            image, self.image, self._buffers = self.image, None, {}
        if image is not None:
            image.release()
        self._on_end(self)

    def time_out(self, seconds: float) -> None:
        """Fail the version if no rank has been heard of for so long; says what is missing."""
        with self._changed:
            idle = time.monotonic() - self._last_activity
            if self._state is not VersionState.RECEIVING or self._complete or idle < seconds:
                return
            missing = [f"rank {rank} has not declared" for rank in self._declarations.absent]
            if self._agreed is not None:
                for rank in sorted(self._declarations.here):
                    missing += self._missing(rank)
                if self._arrivals is not None and self._arrivals.held_back:
                    missing.append("a process can still write to the memory of files that have arrived")
                missing += [
                    f"rank {rank} has not sealed"
                    for rank, state in enumerate(self._ranks)
                    if not state.sealed
                ]
        self.fail(
            VersionFailed(
                f"{self._name} was given up: nothing was heard of its ranks for {seconds:g} s",
                details=missing[:_NAMED],
                fix="push the step again",
            )
        )

    def _missing(self, rank: int) -> list[str]:
        if self._agreed is None:
            return [f"rank {rank} has no stream yet"]
        stream, received = self._agreed.prepared.streams[rank], self._ranks[rank].received
        return [
            f"{stream.tensors[p.shard.tensor]}: box {p.shard.box} of rank {rank}"
            for p in stream.placements
            if not received.covers(p.offset, p.offset + p.nbytes)
        ]

    def _check_not_failed(self) -> None:
        if self._error is not None:
            error = self._error
            raise type(error)(error.message, fix=error.fix, details=error.details)

    def _check_receiving(self) -> None:
        self._check_not_failed()
        if self._state is not VersionState.RECEIVING:
            raise FailedPrecondition(
                f"{self._name} is sealed",
                fix="push a new version: another step or run",
            )

    def _touch(self) -> None:
        self._last_activity = time.monotonic()


class _NotBegun(FailedPrecondition):
    """Not all ranks have declared what they hold."""
