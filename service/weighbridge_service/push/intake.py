"""Intake of open versions: calls of trainer ranks and of other replicas, forwarded to the version's session."""

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
"""Seconds between two checks of a stopping replica whether versions that other replicas expect from it are finished."""


class Intake:
    """Receiver of pushed versions. Thread-safe.

    Args:
        catalog: the registered models.
        registry: the sessions of versions.
        opener: opens versions, and finds those that are being received.
        facilities: resources that pushes share.

    Attributes:
        opener: as given.
        home: this process, as other replicas see it.
        bytes_in: received bytes of weights.
        bytes_in_locally: those of them that trainers have written to shared memory themselves.
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
        """Declare the layout of a rank. The answer waits for the other ranks, for a few seconds at most.

        Args:
            name: name of the model.
            number: number of the version.
            rank: the rank.
            client_id: id of the calling process.
            digest: digest of the layout.
            layout: the layout; None if the caller expects the service to know it.
            space: tensor space of its tensors' names.
            seconds: timeout of the caller.

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
        """Answer that sends a rank to the replica which receives the version alone.

        Raises the error if that replica is not known.
        """
        if not self.opener.has_replica_at(error.address):
            raise error
        return Declared(push_at=error.address)

    # --- bytes

    def write(self, name: str, number: int, rank: int, client_id: str, pieces: Pieces) -> int:
        """Write pieces of a rank's stream. Returns the number of bytes written."""
        writer = self.opener.find(name, number).writer_for(rank, client_id)
        return writer.take(rank, pieces, self._count)

    def write_of_other(self, name: str, number: int, rank: int, claim: str, pieces: Pieces) -> int:
        """Write pieces of the stream of a rank that has declared at another replica.

        Returns the number of bytes written.

        Raises:
            Unavailable: no rank has declared here yet; retry.
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
        """Grant the image to a rank's process on this machine, which writes its stream to it directly.

        See `ImageWriter.grant`.

        Memory for the next version is allocated in the background, since the process will push again.
        """
        session = self.opener.find(name, number)
        grant = session.grant(rank, client_id)
        if not self.opener.draining:
            self._allocator.begin_ahead(session.model, grant.image.sizes.keys())
        return grant

    def report_written(self, grant: MemoryGrant, ranges: Sequence[tuple[int, int]]) -> None:
        """Record ranges of its stream that a rank's process has written. See `ImageWriter.report`."""
        grant.writer.report(grant, ranges)

    def arriving(self, name: str, number: int) -> tuple[Version, ArrivingVersion]:
        """A version, and its arriving tensors. See `PushSession.arriving`."""
        session = self.opener.find(name, number)
        return session.snapshot.version, session.arriving()

    def end_grant(self, grant: MemoryGrant, *, complete: bool, sample: Sequence[tuple[int, int, int]] = ()) -> None:
        """End the grant of a rank's process. See `ImageWriter.end_grant`."""
        nbytes = grant.writer.end_grant(grant, complete=complete, sample=sample)
        with self._counting:
            self.bytes_in += nbytes
            self.bytes_in_locally += nbytes

    def warm(self, name: str) -> tuple[int, int]:
        """Allocate memory for a model's next versions now.

        Returns the number of images that fit into the memory, and the bytes of one image.

        Raises:
            NotFound: the model is not registered.
            FailedPrecondition: replicas may share versions, and the files of this one are known only when a version is
                planned.
            Unavailable: the service is shutting down.
        """
        if self.opener.draining:
            raise Unavailable("the service is shutting down")
        if self._spreading:
            raise FailedPrecondition(
                (
                    "with --advertise, which files of a version this service assembles is known "
                    "only when the version is planned"
                ),
                fix="push once: memory for the next version is allocated meanwhile",
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
        """Seal a rank, which has pushed everything. Repeated calls are harmless.

        Args:
            name: name of the model.
            number: number of the version.
            rank: the rank.
            client_id: id of its process.
            seconds: timeout of the caller.
            replicas: checksums of those of the rank's boxes that other ranks also hold.
            nonfinite: number of pushed elements that are NaN or infinite; 0 if the rank has not counted them.

        Raises:
            FailedPrecondition: bytes are missing. The error names the tensors and boxes.
            LayoutError: another rank holds different bytes under the same box; the version is aborted.
            DeadlineExceeded: the rank was not sealed within ``seconds``. The error names what the version waits for.
        """
        push = self.opener.find_push(name, number)
        if isinstance(push, EndedPush):
            push.seal(rank)
            return settled(push.snapshot.version)
        found = push.seal(rank, client_id, replicas, nonfinite)

        def answer(sealed: bool) -> Version:
            if not sealed:
                raise DeadlineExceeded(f"rank {rank} could not be sealed in time: {push.name_waits()}", fix="try again")
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
        """Abort a version. A visible version that cannot be made durable stays visible until a newer one is.

        Args:
            name: name of the model.
            number: number of the version.
            reason: reason in the error that its ranks get.
            seconds: timeout of the caller.
            refused: id of the calling process, if its rank cannot take part; empty otherwise. Ranks that open the
                version later get the error, too.
            refused_rank: that rank, if it was refused before it declared a layout.

        Raises:
            InvalidArgument: ``refused`` is not a valid id of a process.
            AlreadyExists: the refused rank has declared a layout and takes part.
            FailedPrecondition: the version is visible already, and nothing keeps it from becoming durable.
            DeadlineExceeded: the version was not aborted within ``seconds``. The error names what the version waits
                for.
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
        """Refuse new versions, and wait for the current ones or hand them over. Returns whether no version is lost.

        The replica first announces to the others that it stops. Ranks still push those versions to it that are open by
        then; later versions are opened without it. It hands over a version that is not durable after half of the time,
        or that the store does not accept.

        Args:
            seconds: timeout of the whole shutdown.
        """
        begun = now().seconds
        # first: until this call, other replicas open versions that ranks also push to this one
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
        """Wait until all versions are finished that this replica receives, or that other replicas expect it to
        receive.
        """
        expected = list(counted_on)
        while now().seconds < until:
            for session in self._registry.all():
                session.wait_finished(max(until - now().seconds, 0.0))
            expected = [each for each in expected if self._is_to_come(*each)]
            if not expected and not any(session.state.unfinished for session in self._registry.all()):
                return
            time.sleep(_LOOK_SECONDS)

    def _is_to_come(self, name: str, number: int) -> bool:
        """Whether a version is open in the store and no rank has opened it at this replica yet."""
        try:
            model = ModelName.parse(name)
            return self._registry.find(model, number) is None and number in self._catalog.head(model).open
        except (NotFound, InvalidArgument):
            return False
        except WeighbridgeError as error:  # ranks may still open it when the store is back
            log.debug("%s@%d cannot be looked up: %s", name, number, error.message)
            return True

    def stop(self) -> None:
        """Stop without finishing open versions; waits for the effects that are running."""
        self.opener.stop()
