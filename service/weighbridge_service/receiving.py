"""How does a version get from its opening to being ready, or to having failed?

The ranks of a push declare what they hold. When all have, the shards are shared out, the plan is made and coverage is
proved, before a byte moves. Then the image is filled with what the ranks send (`filling`), or by their own processes, which it is
lent to (`lending`). When every rank has sealed, all bytes are there and the version is ready.

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
from dataclasses import dataclass, replace

from weighbridge.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    Unavailable,
    VersionFailed,
    WeighbridgeError,
)
from weighbridge.resources import Version, VersionState
from weighbridge_service.declaring import Agreement, Declaration, Declarations, Home, KnownSet, numbers_of
from weighbridge_service.filling import Filling
from weighbridge_service.forwarding import Forwarding
from weighbridge_service.lending import Lending, LentImage
from weighbridge_service.lifecycle import Lifecycle
from weighbridge_service.push.push_plan import PreparedPush
from weighbridge_service.ranges import RangeSet
from weighbridge_storage.images import Image
from weighbridge_storage.regions import Region

_NAMED = 20


@dataclass
class _Rank:
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
        recall: Callable[[Region], None],
    ) -> None:
        self.request_id = request_id
        self.home = home
        self._opened = opened
        self._name = f"{opened.model}@{opened.number}"
        self._lifecycle = Lifecycle(self._name)
        self._changed = self._lifecycle.changed
        self._prepare = prepare
        self._acquire_image = acquire_image
        self._forwarding = forwarding
        self._confirm = confirm
        self._on_end = on_end
        self._recall = recall
        self._declarations = Declarations(opened, home, known)
        self._ranks = [_Rank() for _ in range(opened.ranks)]
        self._complete = False
        self.image: Image | None = None
        self._filling: Filling | None = None
        self._lending: Lending | None = None

    @property
    def version(self) -> Version:
        """The version as it stands now."""
        with self._changed:
            error = self._lifecycle.error
            return replace(
                self._opened,
                state=self._lifecycle.state,
                sealed_ranks=sum(rank.sealed for rank in self._ranks),
                received_bytes=sum(self._received(rank).size for rank in range(len(self._ranks))),
                ready_time_ms=self._lifecycle.ready_time_ms,
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
            return self._lifecycle.state is VersionState.FAILED

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
            self._lifecycle.check_receiving()
            news = rank in self._declarations.absent
            contradiction = self._declarations.declare(rank, client_id, digest)
            if news:  # who only asks again waits for others, and would wait for ever for one that has gone
                self._lifecycle.touch()
            if contradiction is None and self._declarations.agree_as_before(rank):
                agreed = self._declarations.agreed
                threading.Thread(target=self._begin, args=(agreed,), daemon=True).start()
        self._go_on(contradiction)
        with self._changed:
            while self._agreed is None or (self.image is None and self._lifecycle.is_receiving):
                self._lifecycle.check_receiving()
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
            self._lifecycle.check_receiving()
            return self._agreed

    def declare_elsewhere(self, declarations: Mapping[int, Declaration]) -> None:
        """Take note of what ranks have declared at other replicas. Makes the plan if all ranks are known by that.

        Raises:
            WeighbridgeError: the layouts contradict the model or each other; the version has failed.
        """
        with self._changed:
            if not self._lifecycle.is_receiving:
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
        try:
            image = self._acquire_image(list(agreed.to_come_to(self.home)), clients)
        except WeighbridgeError as error:
            self.fail(error)
            return
        except Exception as error:  # this thread's last chance: otherwise all ranks would wait in vain
            self.fail(WeighbridgeError(f"no image could be made for {self._name}: {error!r}"))
            return
        with self._changed:
            if self._lifecycle.is_receiving:
                filling = Filling(self._lifecycle, agreed, self.home, image, self._forwarding)
                self.image, self._filling = image, filling
                self._lending = Lending(self._lifecycle, image, filling, self._recall)
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
            self._lifecycle.check_receiving()
            self._declarations.check_client(rank, client_id)
            if self._ranks[rank].sealed:
                raise FailedPrecondition(f"rank {rank} of {self._name} is sealed")
        with self._writing(rank) as filling:
            filling.take(rank, offset, data, checksum, forward=True)

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
            with self._writing(rank) as filling:
                filling.agreed.check_forwarded(self.home, claim, rank, offset, offset + len(data))
                filling.take(rank, offset, data, checksum, forward=False)
        except _NotBegun as error:
            raise Unavailable(error.message, fix=error.fix) from error

    def lend(self, rank: int, client_id: str) -> LentImage:
        """Let a rank's process write its stream to the image itself. See `Lending.lend`.

        Raises:
            FailedPrecondition: the version is sealed, the rank has not declared, or the image cannot be lent for it.
        """
        with self._changed:
            self._lifecycle.check_receiving()
            self._declarations.check_client(rank, client_id)
            if self._lending is None:
                raise _NotBegun(f"not all ranks of {self._name} have declared their layouts")
            lent = self._lending.lend(rank)
            self._lifecycle.touch()
            return lent

    def end_lending(self, rank: int, *, complete: bool) -> None:
        """A rank's process has let go of the image.

        Args:
            rank: which rank.
            complete: whether it has written all of its stream.

        Raises:
            FailedPrecondition: the version is no longer being received.
        """
        if self._lending is not None:
            self._lending.give_back(rank)
        if complete:
            with self._writing(rank) as filling:
                filling.take_written(rank)
        else:
            self.look_again()

    def look_again(self) -> None:
        """Go on if a process that could still write to the image has let go of it, or has ended."""
        if self._lending is not None:
            self._lending.look_again()
        with self._changed:
            complete = self._complete_if_all_is_here()
        if complete:
            self._become_ready()

    @contextmanager
    def _writing(self, rank: int) -> Iterator[Filling]:
        """Hold the image while writing to it: it is neither published nor given away meanwhile."""
        with self._changed:
            self._lifecycle.check_receiving()
            filling = self._filling
            if filling is None:
                raise _NotBegun(f"not all ranks of {self._name} have declared their layouts")
            self._ranks[rank].writers += 1
        broken: WeighbridgeError | None = None
        try:
            yield filling
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
                self._lifecycle.touch()
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
            self._lifecycle.wait_for(lambda: self._agreed is not None and self.image is not None, seconds)
            return self._agreed if self.image is not None else None

    def wait_filled(self, known: int, seconds: float) -> list[str]:
        """Wait until more files are complete; gives them, in the order in which they were, without the first ``known``.

        Raises:
            WeighbridgeError: the version has failed.
        """
        with self._changed:
            self._lifecycle.wait_for(lambda: len(self._filled) > known, seconds)
            return self._filled[known:]

    @property
    def _filled(self) -> list[str]:
        return [] if self._filling is None else self._filling.arrivals.filled

    def wait_complete(self, seconds: float) -> bool:
        """Wait until all that this replica is to receive has arrived and its ranks have sealed.

        Raises:
            WeighbridgeError: the version has failed.
        """
        with self._changed:
            self._lifecycle.wait_for(lambda: self._complete, seconds)
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
            self._lifecycle.touch()
            nbytes = self._agreed.prepared.streams[rank].nbytes
            return list(self._received(rank)), nbytes, self._ranks[rank].sealed

    def seal(self, rank: int, client_id: str) -> None:
        """The rank has pushed everything; the last one makes the version ready. Repeating it is harmless.

        Raises:
            FailedPrecondition: something is missing; names tensors and boxes.
        """
        with self._changed:
            if self._may_be_sealed(rank, client_id):
                return
            # a piece that has come a second time may still be on its way to its place, or to another replica
            self._changed.wait_for(lambda: not self._ranks[rank].writers or not self._lifecycle.is_receiving)
            elsewhere = self._agreed is not None and not self._agreed.alone
        try:
            if elsewhere:
                self._forwarding.flush(rank)
            if self._lending is not None:
                self._lending.wait_let_go()
        except VersionFailed as error:
            self.fail(error)
            raise
        with self._changed:
            if self._may_be_sealed(rank, client_id):
                return
            self._ranks[rank].sealed = True
            self._lifecycle.touch()
            complete = self._complete_if_all_is_here()
        if complete:
            self._become_ready()

    def _may_be_sealed(self, rank: int, client_id: str) -> bool:
        """Whether a rank is sealed already; raises if it cannot be."""
        self._declarations.check_rank(rank)
        if self._lifecycle.state is VersionState.READY:
            return True
        self._lifecycle.check_receiving()
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
        filling = self._filling
        if filling is None or self._complete or not self._lifecycle.is_receiving:
            return False
        here = [state for rank, state in enumerate(self._ranks) if filling.agreed.home_of(rank) == self.home]
        if not all(state.sealed for state in here) or not filling.arrivals.complete:
            return False
        self._complete = True
        self._changed.notify_all()
        return filling.agreed.alone

    def _become_ready(self) -> None:
        """Everything is here: be ready, unless the version was given up elsewhere meanwhile."""
        try:
            self._confirm()
        except VersionFailed as error:
            self.fail(error)
            raise
        with self._changed:
            self._lifecycle.check_not_failed()
            if self._lifecycle.state is VersionState.READY:
                return  # it has been published meanwhile
            self._make_ready()
        self._on_end(self)

    def publish_elsewhere(self) -> None:
        """The version, of which other replicas hold parts, has been published. Nothing happens if that is known already."""
        with self._changed:
            if not self._lifecycle.is_receiving:
                return
            self._make_ready()
        self._on_end(self)

    def _make_ready(self) -> None:
        self._lifecycle.become_ready()
        if self._filling is not None:
            self._filling.close()  # it would keep the image's memory after it was given away

    def fail(self, error: WeighbridgeError) -> None:
        """Give the version up: it was never visible. Nothing happens if it is no longer being received."""
        with self._changed:
            if not self._lifecycle.is_receiving:
                return
            self._lifecycle.fail(error)
            self._forwarding.stop()  # a writer may be waiting for room there
            self._changed.wait_for(lambda: not any(rank.writers for rank in self._ranks))
            image, self.image = self.image, None
            if self._filling is not None:
                self._filling.close()
        if image is not None:
            image.release()
        self._on_end(self)

    def time_out(self, seconds: float) -> None:
        """Fail the version if no rank has been heard of for so long; says what is missing."""
        with self._changed:
            if not self._lifecycle.is_receiving or self._complete or self._lifecycle.idle_seconds < seconds:
                return
            missing = [f"rank {rank} has not declared" for rank in self._declarations.absent]
            if self._agreed is not None:
                for rank in sorted(self._declarations.here):
                    missing += self._missing(rank)
                if self._filling is not None and self._filling.arrivals.held_back:
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
        stream, received = self._agreed.prepared.streams[rank], self._received(rank)
        return [
            f"{stream.tensors[p.shard.tensor]}: box {p.shard.box} of rank {rank}"
            for p in stream.placements
            if not received.covers(p.offset, p.offset + p.nbytes)
        ]

    def _received(self, rank: int) -> RangeSet:
        return RangeSet() if self._filling is None else self._filling.received[rank]


class _NotBegun(FailedPrecondition):
    """Not all ranks have declared what they hold."""
