"""Intake: what trainer ranks and other replicas call, once a version is open. Asks its session."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Sequence

from weighbridge._core.layouts import Layout
from weighbridge._core.resources import Version
from weighbridge._core.tensor_spaces import TensorSpace
from weighbridge._core.text.shortening import shortened
from weighbridge.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    LayoutError,
    NotFound,
    Unavailable,
    VersionFailed,
    WeighbridgeError,
)
from weighbridge_service.catalog.catalog import Catalog
from weighbridge_service.push.effect_runner import Facilities
from weighbridge_service.push.ended import EndedPush
from weighbridge_service.push.filling.arrivals import ArrivingVersion
from weighbridge_service.push.filling.image_writer import MemoryGrant, Pieces
from weighbridge_service.push.machine import events as on
from weighbridge_service.push.machine.answers import (
    Declared,
    ask_again,
    check_absent,
    elsewhere,
    to_push,
)
from weighbridge_service.push.machine.opening import ReceivedElsewhere
from weighbridge_service.push.machine.phases import INCOMPLETE, VISIBLE
from weighbridge_service.push.machine.shown import aborted, why_lost
from weighbridge_service.push.opener import Opener, check_text
from weighbridge_service.push.pending import Pending, settled
from weighbridge_service.push.registry import Push, Registry
from weighbridge_service.push.replica_checksums import ReplicaChecksum
from weighbridge_service.push.session import now
from weighbridge_storage.documents.names import ModelName
from weighbridge_storage.head.open_versions import still_open
from weighbridge_storage.memory.images import place_files

log = logging.getLogger(__name__)

_LONG_POLL = 5.0
"""Seconds that one call waits for other ranks to declare."""
_LOOK_SECONDS = 0.1
"""Between two looks of a replica that stops at versions that others count on it for."""


class Intake:
    """Versions on their way in. Thread-safe.

    Args:
        catalog: which models there are.
        registry: the sessions of versions.
        opener: opens versions, and finds those that are being received.
        facilities: what pushes share.

    Attributes:
        opener: as given.
        home: this process, as other replicas see it.
        bytes_in: bytes of weights that have arrived.
        bytes_in_locally: of these, bytes that trainers have written to shared memory themselves.
    """

    def __init__(self, catalog: Catalog, registry: Registry, opener: Opener, facilities: Facilities) -> None:
        self.opener = opener
        self.home = facilities.home
        self.bytes_in = 0
        self.bytes_in_locally = 0
        self._catalog = catalog
        self._registry = registry
        self._allocator = facilities.allocator
        self._successors = facilities.successors
        self._spreading = facilities.limits.spreading
        self._counting = threading.Lock()

    # --- declaring

    def declare_layout(
        self,
        name: str,
        number: int,
        rank: int,
        client_id: str,
        digest: str,
        layout: Layout | None,
        space: TensorSpace,
        seconds: float,
    ) -> Pending[Declared]:
        """Say what a rank holds. The answer waits for the other ranks, for a few seconds at most.

        Args:
            name: the model.
            number: the version.
            rank: which rank.
            client_id: the calling process.
            digest: of the layout.
            layout: the layout; None if the service is believed to know it.
            space: to which the names of its tensors belong.
            seconds: how long the caller waits.

        Raises:
            LayoutError: the layouts contradict the model or each other; the version has failed.
        """
        try:
            session = self.opener.find_or_join(name, number, client_id)
        except ReceivedElsewhere as error:
            return settled(self._sent_on(error))
        if layout is not None:
            if layout.digest != digest:
                raise LayoutError("the layout does not have the digest that was sent with it")
            session.layouts.add(space, layout)
        elif not session.layouts.knows(digest):
            return settled(Declared(layout_needed=True))
        if (moved := elsewhere(session.state, rank, digest)) is not None:
            return settled(moved)
        found = session.declare(rank, client_id, digest)

        def answer(agreed: bool) -> Declared:
            if agreed:
                try:
                    return to_push(found.result(), self.home, rank)
                except ReceivedElsewhere as error:
                    return self._sent_on(error)
            return elsewhere(session.state, rank, digest) or ask_again(session.state)

        return Pending(found, min(seconds, _LONG_POLL), answer, lambda: session.leave(found), in_memory=True)

    def _sent_on(self, error: ReceivedElsewhere) -> Declared:
        """The answer to a rank of a version that another replica receives alone. Raises the error if that replica is not known."""
        if not self.opener.has_replica_at(error.address):
            raise error
        return Declared(push_at=error.address)

    # --- bytes

    def write(self, name: str, number: int, rank: int, client_id: str, pieces: Pieces) -> int:
        """Take pieces of a rank's stream; how many bytes came."""
        writer = self.opener.find(name, number).writer_for(rank, client_id)
        return writer.take(rank, pieces, self._count)

    def write_of_other(self, name: str, number: int, rank: int, claim: str, pieces: Pieces) -> int:
        """Take pieces of the stream of a rank that has declared at another replica; how many bytes came.

        Raises:
            Unavailable: no rank has declared here yet; try again.
            VersionFailed: the version is not open any more, or the replicas do not agree.
        """
        model_name = ModelName.parse(name)
        if self._registry.find(model_name, number) is None:
            still_open(self._catalog.head(model_name), number)
            raise Unavailable(f"no rank of {name}@{number} has declared at {self.home} yet", fix="try again")
        writer = self.opener.find(name, number).writer_for_other(rank, claim)
        return writer.take_of_other(claim, rank, pieces, self._count)

    def _count(self, nbytes: int) -> None:
        with self._counting:
            self.bytes_in += nbytes

    def grant_image(self, name: str, number: int, rank: int, client_id: str) -> MemoryGrant:
        """Let a rank's process, on this machine, write its stream to where it belongs. See `ImageWriter.grant`.

        Memory for the next version is made meanwhile: who writes in this way will push again.
        """
        session = self.opener.find(name, number)
        grant = session.grant(rank, client_id)
        if not self.opener.draining:
            self._allocator.begin_ahead(session.model, grant.image.sizes.keys())
        return grant

    def report_written(self, grant: MemoryGrant, ranges: Sequence[tuple[int, int]]) -> None:
        """A rank's process has written ranges of its stream. See `ImageWriter.report`."""
        grant.writer.report(grant, ranges)

    def arriving(self, name: str, number: int) -> tuple[Version, ArrivingVersion]:
        """A version, and what has arrived of it. See `PushSession.arriving`."""
        session = self.opener.find(name, number)
        return session.snapshot.version, session.arriving()

    def end_grant(
        self, grant: MemoryGrant, *, complete: bool, sample: Sequence[tuple[int, int, int]] = ()
    ) -> None:
        """A rank's process writes no more. See `ImageWriter.end_grant`."""
        nbytes = grant.writer.end_grant(grant, complete=complete, sample=sample)
        with self._counting:
            self.bytes_in += nbytes
            self.bytes_in_locally += nbytes

    def warm(self, name: str) -> tuple[int, int]:
        """Have memory for a model's next versions now; how many images there is memory for, and the bytes of one.

        Raises:
            NotFound: the model is not registered.
            FailedPrecondition: several services may receive versions together, and which files are this one's is known when one is planned.
            Unavailable: the service is shutting down.
        """
        if self.opener.draining:
            raise Unavailable("the service is shutting down")
        if self._spreading:
            raise FailedPrecondition(
                "with --advertise, which files of a version this service puts together is known only when it is planned",
                fix="push once: memory for the next version is made meanwhile",
            )
        model = self._catalog.model(ModelName.parse(name))
        names = model.files.file_sizes.keys()
        return self._allocator.make_ahead(model, names), place_files(model.files.file_sizes)[1]

    def push_state(self, name: str, number: int, rank: int) -> tuple[list[tuple[int, int]], int, bool]:
        """Ranges of a rank's stream that have arrived, its length, and whether it is sealed."""
        return self.opener.find_push(name, number).push_state(rank)

    # --- the end

    def seal_rank(
        self,
        name: str,
        number: int,
        rank: int,
        client_id: str,
        seconds: float,
        replicas: Iterable[ReplicaChecksum] = (),
        nonfinite: int = 0,
    ) -> Pending[Version]:
        """The rank has pushed everything. Repeating it is harmless.

        Args:
            name: of the model.
            number: of the version.
            rank: which rank.
            client_id: of its process.
            seconds: how long it waits.
            replicas: checksums of what other ranks hold, too.
            nonfinite: how many elements of what it has pushed are NaN or infinite; 0 if it has not counted.

        Raises:
            FailedPrecondition: something is missing; names tensors and boxes.
            LayoutError: another rank holds different bytes under one box; the version is given up.
            DeadlineExceeded: not sealed within ``seconds``; says what is waited for.
        """
        push = self.opener.find_push(name, number)
        if isinstance(push, EndedPush):
            push.seal(rank)
            return settled(push.snapshot.version)
        found = push.seal(rank, client_id, replicas, nonfinite)

        def answer(sealed: bool) -> Version:
            if not sealed:
                raise DeadlineExceeded(
                    f"rank {rank} could not be sealed in time: {push.name_waits()}", fix="try again"
                )
            found.result()
            return push.snapshot.version

        return Pending(found, seconds, answer, lambda: push.leave(found), in_memory=True)

    def abort_version(
        self,
        name: str,
        number: int,
        reason: str,
        seconds: float,
        refused: str = "",
        refused_rank: int | None = None,
    ) -> Pending[Version]:
        """Give a version up. One that is visible and cannot be made durable stays visible until a newer one is.

        Args:
            name: of the model.
            number: of the version.
            reason: is told to its ranks.
            seconds: how long the caller waits.
            refused: the process of a rank that cannot take part; empty if the caller is none. Ranks that have not come yet are told, too.
            refused_rank: that rank, if it was refused before it declared a layout.

        Raises:
            InvalidArgument: there cannot be such a process.
            AlreadyExists: the rank that is said to be refused takes part.
            FailedPrecondition: it is visible already, and nothing keeps it from becoming durable.
            DeadlineExceeded: not within ``seconds``; says what is waited for.
        """
        model_name = ModelName.parse(name)
        reason = shortened(reason, 500) or "aborted"
        push = self._registry.find(model_name, number)
        if refused and push is not None:
            check_text("client_id", refused)
            if refused_rank is not None and not isinstance(push, EndedPush):
                check_absent(push.state, refused_rank)
            self._note_refused(push, model_name, refused, reason)
        if push is None and number in self._catalog.head(model_name).open:  # it is received elsewhere
            self.opener.give_up(model_name, number, reason, aborted=True)
            return settled(self._catalog.get_version(name, str(number)))
        push = self.opener.find_push(name, number)
        if isinstance(push, EndedPush):
            push.abort()
            return settled(self._aborted(name, number, push))
        found = push.abort(reason)

        def answer(given_up: bool) -> Version:
            if not given_up:
                raise DeadlineExceeded(
                    f"the version could not be given up in time: {push.name_waits()}", fix="try again"
                )
            found.result()
            try:
                return self._aborted(name, number, push)
            except FailedPrecondition:
                self.opener.refusals.forget(model_name, push.request_id)
                raise

        return Pending(found, seconds, answer, lambda: push.leave(found))

    def _note_refused(self, push: Push, name: ModelName, client_id: str, reason: str) -> None:
        refusals = self.opener.refusals
        there = refusals.told(name, push.request_id, client_id)
        if there or isinstance(push, EndedPush) or push.state.phase not in INCOMPLETE:
            return
        here = push.state.declarations.here.values()
        refusals.note(
            name,
            push.request_id,
            push.state.opened.ranks,
            aborted(push.state, VersionFailed(reason)),
            {client_id, *(each.client_id for each in here)},
        )

    def _aborted(self, name: str, number: int, push: Push) -> Version:
        found = self._catalog.get_version(name, str(number))
        if found.state.visible and not push.snapshot.abandoned:  # another replica has just published it
            raise FailedPrecondition(f"{found} is visible already and cannot be aborted")
        return found

    # --- leaving

    def drain(self, seconds: float) -> bool:
        """Refuse new versions and wait for those under way, or hand them over; whether none of them is lost.

        A version that is not durable when half of the time has passed, or that the store does not take, is handed over. Other replicas are told
        first. Ranks still push to this one what is open by then; other versions are opened without it.

        Args:
            seconds: how long to wait.
        """
        begun = now().seconds
        # first: until then, others open versions that ranks are to push to this replica
        counted_on = self._successors.leave()
        leaving = on.Draining(tuple(self._successors.others()), begun + seconds / 2, begun + seconds)
        self.opener.leaving = leaving
        for session in self._registry.all():
            session.post(leaving)
        self._finish(counted_on, leaving.until)
        self.opener.close(max(leaving.until - now().seconds, 0.0))
        self._finish((), leaving.until)
        lost = False
        for session in self._registry.all():
            state = session.state
            lost = lost or state.needed_here
            if state.phase in INCOMPLETE:
                log.warning("not finished: %s", session.name_waits())
            elif state.needed_here:
                log.warning("%s is lost: %s", session.snapshot.version, why_lost(state))
            elif state.phase in VISIBLE:
                log.info("%s is left to other replicas", session.snapshot.version)
        return not lost

    def _finish(self, counted_on: Iterable[tuple[str, int]], until: float) -> None:
        """Wait until all versions are done that are received here, or that others count on this replica for."""
        expected = list(counted_on)
        while now().seconds < until:
            for session in self._registry.all():
                session.wait_finished(max(until - now().seconds, 0.0))
            expected = [each for each in expected if self._is_to_come(*each)]
            if not expected and not any(session.state.unfinished for session in self._registry.all()):
                return
            time.sleep(_LOOK_SECONDS)

    def _is_to_come(self, name: str, number: int) -> bool:
        """Whether a version is open, as far as the store says, of which no rank has come to this replica yet."""
        try:
            model = ModelName.parse(name)
            return self._registry.find(model, number) is None and number in self._catalog.head(model).open
        except (NotFound, InvalidArgument):
            return False
        except WeighbridgeError as error:  # ranks come when the store is back
            log.debug("%s@%d cannot be looked up: %s", name, number, error.message)
            return True

    def stop(self) -> None:
        """Leave what is not done as it is; waits for what is being done."""
        self.opener.stop()
