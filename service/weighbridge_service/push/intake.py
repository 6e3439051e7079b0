"""Intake: what trainer ranks and other replicas call. Finds or begins the session of a version, and asks it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

from weighbridge._core.layouts import Layout
from weighbridge._core.resources import Version, VersionState
from weighbridge._core.tensor_spaces import TensorSpace
from weighbridge.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    LayoutError,
    NotFound,
    ResourceExhausted,
    Unavailable,
    VersionFailed,
    WeighbridgeError,
)
from weighbridge_service.catalog.catalog import Catalog
from weighbridge_service.catalog.holding import Holding
from weighbridge_service.models.registered_model import RegisteredModel
from weighbridge_service.plan.declarations import Agreement, Declarations, Home, alone_at
from weighbridge_service.plan.placed_ranges import PlacedRange
from weighbridge_service.plan.replica_checksums import ReplicaChecksum
from weighbridge_service.push.effect_pools import EffectPools
from weighbridge_service.push.ended import EndedPush
from weighbridge_service.push.handover import HandedVersion, Successors
from weighbridge_service.push.image_allocator import ImageAllocator
from weighbridge_service.push.image_writer import MemoryGrant, Pieces
from weighbridge_service.push.machine import events as on
from weighbridge_service.push.machine.answers import check_owned, is_known, not_all_declared
from weighbridge_service.push.machine.opening import OpeningRequest, check_not_received_alone
from weighbridge_service.push.machine.phases import INCOMPLETE, VISIBLE
from weighbridge_service.push.machine.shown import why_lost
from weighbridge_service.push.machine.state import Limits, PushState
from weighbridge_service.push.mappings import Mappings
from weighbridge_service.push.pending import Pending, settled
from weighbridge_service.push.publisher import Publisher, give_up
from weighbridge_service.push.registry import Push, Registry, WaitsSaid
from weighbridge_service.push.replica_exchange import Exchange
from weighbridge_service.push.session import PushSession, now
from weighbridge_service.push.timers import Timers
from weighbridge_service.runtime.clock import unix_ms
from weighbridge_service.runtime.config import ServiceConfig
from weighbridge_storage.documents.entries import OpenEntry
from weighbridge_storage.documents.names import ModelName
from weighbridge_storage.head.head import Head
from weighbridge_storage.head.head_changes import Said, check_same_metadata, check_same_request, still_open
from weighbridge_storage.memory.image_pool import ImagePool
from weighbridge_storage.memory.images import Image, place_files
from weighbridge_storage.stores.objects import ByteArray

log = logging.getLogger(__name__)

_STOP_SECONDS = 10.0
_MAX_RANKS = 65_536
_MAX_TEXT = 256
_OPENINGS = 64
"""Locks for opening versions; models share them by their names."""
_OPENING_SECONDS = 10.0
"""How long a call waits for its turn to open a version."""
_LONG_POLL = 5.0
"""Seconds that one call waits for other ranks to declare."""
_MEMORY_PAUSE = 0.1
"""Seconds between two questions for memory of what is taken over."""
_RETRY_MS = (50, 2_000)
"""Least and most milliseconds before a rank asks again."""
_NOTHING_SAID = Said()
_RETRY_MS_PER_RANK = 2
"""So that the ranks of one push make 500 calls a second together."""


@dataclass(frozen=True, slots=True)
class Declared:
    """The answer to a declaration.

    Attributes:
        layout_needed: the digest is not known: declare again, with the layout.
        assigned: indexes of the shards to push, in the order of the stream.
        stream_bytes: length of the stream.
        retry_after_ms: above 0, there is no answer yet: ask again after so many milliseconds.
        absent: then, ranks that have not declared.
        routes: which parts of the stream are pushed where: addresses of replicas, empty for this one, and their ranges. Empty if all
            of it is pushed here.
        claim: what the replicas have agreed on, if there are several.
        shared: indexes of the shards whose boxes other ranks hold, too, where nobody knows whether they are replicas.
        placed: the parts of the stream that do not lie in exactly one place of the files.
    """

    layout_needed: bool = False
    assigned: Sequence[int] = ()
    stream_bytes: int = 0
    retry_after_ms: int = 0
    absent: Sequence[int] = ()
    routes: Mapping[str, Sequence[tuple[int, int]]] = field(default_factory=dict)
    claim: str = ""
    shared: Sequence[int] = ()
    placed: Sequence[PlacedRange] = ()


class Intake:
    """Versions on their way in. Thread-safe.

    Args:
        catalog: which models there are.
        registry: takes the sessions of versions.
        images: where versions are put together.
        mappings: who has images mapped.
        config: limits and time-outs.
        home: this process, as other replicas see it.
        successors: other replicas, to which versions are handed over when this one leaves.

    Attributes:
        home: as given.
        limits: what pushes that begin now go by.
        bytes_in: bytes of weights that have arrived.
        bytes_in_locally: of these, bytes that trainers have written to shared memory themselves.
        draining: whether new versions are refused.
    """

    def __init__(
        self,
        catalog: Catalog,
        registry: Registry,
        images: ImagePool,
        mappings: Mappings,
        config: ServiceConfig,
        home: Home,
        successors: Successors,
    ) -> None:
        self.home = home
        self.limits = Limits(
            receive_timeout=config.receive_timeout,
            image_wait=config.image_wait,
            lease=config.open_lease,
            spreading=bool(config.advertise),
        )
        self.bytes_in = 0
        self.bytes_in_locally = 0
        self.draining = False
        self._catalog = catalog
        self._successors = successors
        self._mappings = mappings
        self._max_receiving = config.max_receiving
        self._allocator = ImageAllocator(images)
        self._registry = registry
        self._pools = EffectPools()
        self._timers = Timers()
        WaitsSaid(registry, self._timers)
        self._openings = [threading.Lock() for _ in range(_OPENINGS)]
        self._counting = threading.Lock()

    # --- opening

    def open_version(
        self,
        name: str,
        *,
        step: int,
        run: str,
        ranks: int,
        request_id: str,
        client_id: str,
        said: Said = _NOTHING_SAID,
    ) -> Version:
        """Give a number for a new version, or the one that this request has been given before.

        A request whose version has ended is given a new one, unless the caller took part in that version. What is ``said`` of the version
        is added to what other ranks have said.

        Raises:
            NotFound: the model is not registered.
            InvalidArgument: a number or text is out of bounds, or contradicts what another rank has said.
            ResourceExhausted: too many versions are being received.
        """
        model_name = ModelName.parse(name)
        if not 1 <= ranks <= _MAX_RANKS:
            raise InvalidArgument(f"{ranks} ranks are not between 1 and {_MAX_RANKS}")
        if not 0 <= step < 1 << 53:
            raise InvalidArgument(f"step {step} is not between 0 and 2**53")
        for what, text in (("run", run), ("request_id", request_id), ("client_id", client_id)):
            if not text or len(text) > _MAX_TEXT or not text.isprintable():
                raise InvalidArgument(
                    f"the {what} is empty, longer than {_MAX_TEXT} characters, or not printable"
                )
        asked_for = (step, run, ranks)
        find = partial(self._opened_before, model_name, asked_for, request_id, client_id, said)
        if (there := find()) is not None:
            return there
        self._catalog.model(model_name)
        with self._opening(model_name):
            if (there := find()) is not None:
                return there
            known = [push.snapshot.version for push in self._registry.of_model(model_name)]
            given_up = {version.number: version for version in known if version.state.given_up}
            receiving = {each.number for each in known if not (each.state.visible or each.state.given_up)}
            joined = self._registry.of_request(model_name, request_id)
            if joined is None or joined.snapshot.version.number not in receiving:
                self._check_room()
            lease_ms = round(self.limits.lease * 1000)
            asked = OpeningRequest(request_id, *asked_for, self.home, lease_ms, said, given_up, receiving)
            entry, head = self._catalog.heads.update(model_name, lambda head: asked.open(head, unix_ms()))
            if (
                isinstance(joined, PushSession)
                and joined.number == entry.number
                and entry.number in receiving
            ):
                joined.post(on.Described(entry))
                return replace(joined.snapshot.version, held=entry.held, metadata=entry.metadata)
            session = self._begin(model_name, entry, head, client_id)
        log.info("opened %s for run %s with %d ranks", session.snapshot.version, run, ranks)
        return session.snapshot.version

    @contextmanager
    def _opening(self, name: ModelName) -> Iterator[None]:
        """Only one version of a model is opened at one time. Raises Unavailable if that takes long."""
        lock = self._openings[hash(name) % _OPENINGS]
        if not lock.acquire(timeout=_OPENING_SECONDS):
            # all ranks of a push come at once, and with each one that waits on, a thread is missing elsewhere
            raise Unavailable(
                f"a version of {name} is being opened, and the object store does not answer",
                fix="see whether the object store can be reached; try again",
            )
        try:
            yield
        finally:
            lock.release()

    def _opened_before(
        self, name: ModelName, asked: tuple[int, str, int], request_id: str, client_id: str, said: Said
    ) -> Version | None:
        """The version that this request has been given before, if head.json need not be told more of it."""
        push = self._registry.of_request(name, request_id)
        if push is None:
            return None
        version = push.snapshot.version
        head = self._catalog.heads.last_read(name)
        if version.state.given_up or (head is not None and version.number < head.first_version):
            return None
        if version.state.visible and client_id != push.client_id and not push.takes_part(client_id):
            return None
        check_same_request(version.number, (version.step, version.run, version.ranks), asked)
        check_same_metadata(version.number, version.metadata, said.metadata)
        return version if version.state.visible or is_known(push.state, said) else None

    def _check_room(self) -> None:
        """Raise if no further version can be received (ResourceExhausted), or none any more (Unavailable)."""
        if self.draining:
            raise Unavailable("the service is shutting down", fix="try again when it is back")
        count = self._registry.count(VersionState.OPEN, VersionState.RECEIVING)
        if count >= self._max_receiving:
            raise ResourceExhausted(
                f"{count} versions are being received", fix="wait until one is done, or abort one"
            )

    def _begin(self, name: ModelName, entry: OpenEntry, head: Head, client_id: str) -> PushSession:
        """Receive an open version here. The lock for openings is held."""
        model = self._catalog.model(name, head)
        if model.files_id != entry.files_id:
            reason = "the model was registered anew while it was being received"
            self._give_up(name, entry.number, reason)
            raise VersionFailed(
                f"{name}@{entry.number} was given up: {reason}",
                fix="push the step again",
            )
        session = self._session(model, entry, client_id)
        self._registry.add(session)
        return session

    def _session(self, model: RegisteredModel, entry: OpenEntry, client_id: str) -> PushSession:
        begun = now()
        lease_left = (entry.until_ms - begun.unix_ms) / 1000
        opened = _opened(model, entry)
        known, holding = model.known_set, Holding.of(entry)
        state = PushState.begin(opened, self.home, self.limits, known, lease_left, begun, holding)
        return self._session_in(state, model, entry, client_id, None)

    def _session_in(
        self, state: PushState, model: RegisteredModel, entry: OpenEntry, client_id: str, image: Image | None
    ) -> PushSession:
        store, heads = self._catalog.store, self._catalog.heads
        return PushSession(
            state,
            client_id=client_id,
            request_id=entry.request_id,
            model=model,
            publisher=Publisher(store, heads, model, entry, self.home),
            exchange=Exchange(store, model.name, entry.number, self.home),
            allocator=self._allocator,
            successors=self._successors,
            mappings=self._mappings,
            pools=self._pools,
            timers=self._timers,
            surroundings=self._registry,
            image=image,
        )

    def _find(self, name: str, number: int) -> PushSession:
        """The session of a version that is being received here. Raises as `EndedPush.refuse` if it was."""
        push = self._find_push(name, number)
        if isinstance(push, EndedPush):
            push.refuse()
        return push

    def _find_push(self, name: str, number: int) -> Push:
        """The push of a version that is being received here, or was."""
        model_name = ModelName.parse(name)
        push = self._registry.find(model_name, number)
        if push is not None:
            return push
        history = self._catalog.history(model_name)
        if history.find(number) is not None:
            raise FailedPrecondition(f"{name}@{number} is sealed", fix="push a new version")
        entry = history.head.open.get(number)
        if entry is not None:
            check_not_received_alone(entry, self.home)
            self._give_up_if_lost(model_name, entry)
        raise NotFound(
            f"{name}@{number} is not being received",
            fix="the service may have been restarted since it was opened: push again",
        )

    def _give_up_if_lost(self, name: ModelName, entry: OpenEntry) -> None:
        """Close an open version of which a process before this one, at the same address, had received something."""
        exchange = Exchange(self._catalog.store, name, entry.number, self.home)
        try:
            lost = alone_at(entry) == self.home.address or (
                self.limits.spreading and exchange.was_here_before()
            )
        except WeighbridgeError as error:
            log.warning("who receives %s@%d cannot be seen: %s", name, entry.number, error)
            return
        if lost:
            reason = f"the replica at {self.home.address} was restarted, and has lost what it had received"
            self._give_up(name, entry.number, reason)

    def _give_up(self, name: ModelName, number: int, reason: str, *, aborted: bool = False) -> None:
        store, heads = self._catalog.store, self._catalog.heads
        by = None if aborted else self.home
        give_up(store, heads, name, number, reason, by=by, aborted=aborted)

    def _find_or_join(self, name: str, number: int, client_id: str) -> PushSession:
        """The session of a version, begun now if the version was opened at another replica."""
        model_name = ModelName.parse(name)
        if self._registry.find(model_name, number) is None:
            with self._opening(model_name):
                # another rank may have begun it meanwhile, and it may have ended, which the head does not say at once
                if self._registry.find(model_name, number) is None:
                    head = self._catalog.head(model_name)
                    entry = head.open.get(number)
                    if entry is not None:
                        self._check_room()
                        check_not_received_alone(entry, self.home)
                        self._begin(model_name, entry, head, client_id)
        return self._find(name, number)

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
            DeadlineExceeded: not all ranks came within ``seconds``, and that is sooner than the caller would be told to ask again.
        """
        session = self._find_or_join(name, number, client_id)
        if layout is not None:
            if layout.digest != digest:
                raise LayoutError("the layout does not have the digest that was sent with it")
            session.model.add_layout(space, layout)
        elif not session.model.knows_layout(digest):
            return settled(Declared(layout_needed=True))
        found = session.declare(rank, client_id, digest)

        def answer(agreed: bool) -> Declared:
            if agreed:
                return _to_push(found.result(), self.home, rank)
            if seconds < _LONG_POLL:
                raise not_all_declared(session.state)
            declarations = session.state.declarations
            least, most = _RETRY_MS
            retry_after_ms = min(max(_RETRY_MS_PER_RANK * declarations.ranks, least), most)
            return Declared(retry_after_ms=retry_after_ms, absent=declarations.absent)

        return Pending(found, min(seconds, _LONG_POLL), answer, lambda: session.leave(found), in_memory=True)

    # --- bytes

    def write(self, name: str, number: int, rank: int, client_id: str, pieces: Pieces) -> int:
        """Take pieces of a rank's stream; how many bytes came."""
        writer = self._find(name, number).writer_for(rank, client_id)
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
            raise Unavailable(f"no rank of {name}@{number} has come to {self.home} yet", fix="try again")
        writer = self._find(name, number).writer_for_other(rank, claim)
        return writer.take_of_other(claim, rank, pieces, self._count)

    def _count(self, nbytes: int) -> None:
        with self._counting:
            self.bytes_in += nbytes

    def grant_image(self, name: str, number: int, rank: int, client_id: str) -> MemoryGrant:
        """Let a rank's process, on this machine, write its stream to where it belongs. See `ImageWriter.grant`.

        Memory for the next version is made meanwhile: who writes in this way will push again.
        """
        session = self._find(name, number)
        grant = session.grant(rank, client_id)
        if not self.draining:
            self._allocator.begin_ahead(session.model, grant.image.sizes.keys())
        return grant

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
        if self.draining:
            raise Unavailable("the service is shutting down")
        if self.limits.spreading:
            raise FailedPrecondition(
                "with --advertise, which files of a version this service puts together is known only when it is planned",
                fix="push once: memory for the next version is made meanwhile",
            )
        model = self._catalog.model(ModelName.parse(name))
        names = model.files.file_sizes.keys()
        return self._allocator.make_ahead(model, names), place_files(model.files.file_sizes)[1]

    def push_state(self, name: str, number: int, rank: int) -> tuple[list[tuple[int, int]], int, bool]:
        """Ranges of a rank's stream that have arrived, its length, and whether it is sealed."""
        return self._find_push(name, number).push_state(rank)

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
        push = self._find_push(name, number)
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

    def abort_version(self, name: str, number: int, reason: str, seconds: float) -> Pending[Version]:
        """Give a version up. One that is visible and cannot be made durable stays visible until a newer one is.

        Raises:
            FailedPrecondition: it is visible already, and nothing keeps it from becoming durable.
            DeadlineExceeded: not within ``seconds``; says what is waited for.
        """
        model_name = ModelName.parse(name)
        reason = reason[:500] or "aborted"
        push = self._registry.find(model_name, number)
        if push is None and number in self._catalog.head(model_name).open:  # it is received elsewhere
            self._give_up(model_name, number, reason, aborted=True)
            return settled(self._catalog.get_version(name, str(number)))
        push = self._find_push(name, number)
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
            return self._aborted(name, number, push)

        return Pending(found, seconds, answer, lambda: push.leave(found))

    def _aborted(self, name: str, number: int, push: Push) -> Version:
        found = self._catalog.get_version(name, str(number))
        if found.state.visible and not push.snapshot.abandoned:  # another replica has just published it
            raise FailedPrecondition(f"{found} is visible already and cannot be aborted")
        return found

    # --- leaving, and others that leave

    def take_over(
        self,
        sender: Home,
        version: HandedVersion,
        fill: Callable[[Mapping[str, ByteArray]], None],
        may_wait: Callable[[], bool],
    ) -> None:
        """Own a version, or a share of one, that another replica hands over. Doing it again does nothing.

        Args:
            sender: the replica that leaves.
            version: what it hands over.
            fill: reads all files into arrays of their sizes.
            may_wait: whether there is time yet to wait for memory.

        Raises:
            FailedPrecondition: this replica leaves itself.
            AlreadyExists: it has had the version before, and it was given up or is another push's.
            ResourceExhausted: there is no memory for the files.
            WeighbridgeError: what ``fill`` raises.
        """
        if self._has_taken(version):
            return
        model, entry = version.model, version.entry
        image = self._image_for(version, may_wait)
        begun = False
        try:
            fill(image.buffers)
            image.freeze()
            with self._opening(model.name):
                if self._has_taken(version):
                    return
                opened, agreed = _opened(model, entry), version.agreed_by(self.home)
                declared = Declarations.taken_over(opened, self.home, version.ranks, agreed)
                holding = Holding.of(entry).with_elsewhere(version.number, version.nonfinite)
                state = PushState.taken_over(
                    opened, declared, version.number, self.limits, version.ready_ms, now(), holding
                )
                self._catalog.adopt(model)
                session = self._session_in(state, model, entry, version.ranks[0][0], image)
                self._enter_taken(session, agreed, version.number)
                begun = True
        finally:
            if not begun:
                image.release()
        log.info("%s: taken over from %s", session.snapshot.version, sender)
        self._registry.supersede(session)

    def _enter_taken(self, session: PushSession, agreed: Agreement, number: int) -> None:
        """Begin the session of what was taken over; beside those of a version in which this replica takes part."""
        there = self._registry.of_version(session.model.name, session.number)
        if not there:
            self._registry.add(session)
            return
        self._registry.add_taken(session)
        session.post(on.Superseded())  # nobody reads its image here once the version is durable
        for each in (push for push in there if isinstance(push, PushSession)):
            each.post(on.ShareMoved(number, self.home, agreed.handovers[number]))

    def _image_for(self, version: HandedVersion, may_wait: Callable[[], bool]) -> Image:
        """Memory for files that are taken over, in its turn."""
        request = self._allocator.request(version.model, version.entry.number, version.files)
        try:
            while True:
                try:
                    return request.take()
                except ResourceExhausted as error:
                    if error.retry_after is None or not may_wait():
                        raise
                time.sleep(_MEMORY_PAUSE)
        finally:
            request.leave()

    def _has_taken(self, version: HandedVersion) -> bool:
        """Whether what is handed over is this replica's already."""
        if self.draining:
            raise FailedPrecondition("the service is shutting down")
        there = self._registry.of_version(version.model.name, version.entry.number)
        for push in there:
            check_owned(push.state, version.claim)
        return any(version.share is None or push.share_number == version.number for push in there)

    def drain(self, seconds: float) -> bool:
        """Refuse new versions and wait for those under way, or hand them over; whether none of them is lost.

        A version that is not durable when half of the time has passed, or that the store does not take, is handed over.

        Args:
            seconds: how long to wait.
        """
        self.draining = True
        begun = now().seconds
        draining = on.Draining(tuple(self._successors.others()), begun + seconds / 2, begun + seconds)
        for session in self._registry.all():
            session.post(draining)
        for session in self._registry.all():
            session.wait_finished(max(draining.until - now().seconds, 0.0))
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

    def stop(self) -> None:
        """Leave what is not done as it is; waits for what is being done."""
        self._timers.stop()
        self._pools.stop(_STOP_SECONDS)
        for session in self._registry.all():
            session.stop()


def _to_push(agreed: Agreement, home: Home, rank: int) -> Declared:
    """What a rank of a replica is to push, and where."""
    prepared = agreed.prepared
    assigned, nbytes = prepared.assigned[rank], prepared.streams[rank].nbytes
    shared, placed = tuple(prepared.shared.get(rank, ())), prepared.placed.get(rank, ())
    if agreed.alone:
        return Declared(assigned=assigned, stream_bytes=nbytes, shared=shared, placed=placed)
    routes = {"" if to == home else to.address: list(ranges) for to, ranges in agreed.routes(rank).items()}
    return Declared(
        assigned=assigned,
        stream_bytes=nbytes,
        routes=routes,
        claim=agreed.claim,
        shared=shared,
        placed=placed,
    )


def _opened(model: RegisteredModel, entry: OpenEntry) -> Version:
    """A version as it was opened."""
    return Version(
        model=str(model.name),
        number=entry.number,
        state=VersionState.OPEN,
        step=entry.step,
        run=entry.run,
        ranks=entry.ranks,
        tensor_bytes=model.files.layout.nbytes,
        create_time_ms=entry.created_ms,
        metadata=entry.metadata,
    )
