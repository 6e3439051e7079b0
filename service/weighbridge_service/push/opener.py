"""Opener of versions: finds the session of one, or begins it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Container, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial

from weighbridge._core.metadata import ADAPTER_DIGEST, BASE, OF_OPENING
from weighbridge._core.resources import Version, VersionState, why_failed
from weighbridge._core.text.counts import counted
from weighbridge.errors import (
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    Unavailable,
    VersionFailed,
    WeighbridgeError,
)
from weighbridge_service.access.identities import EVERYBODY
from weighbridge_service.access.peer import Peer
from weighbridge_service.admission.identity_quotas import Opening
from weighbridge_service.admission.policy_quotas import Quotas
from weighbridge_service.admission.quotas import may_have
from weighbridge_service.catalog.bases import (
    Bases,
    check_registered_so,
    check_same_adapter,
    registered_otherwise,
)
from weighbridge_service.catalog.catalog import Catalog
from weighbridge_service.catalog.head_versions import invisible_version
from weighbridge_service.catalog.holding import HoldReasons
from weighbridge_service.catalog.snapshots import Beginning
from weighbridge_service.models.registered_model import RegisteredModel
from weighbridge_service.models.registration import is_adapter_head, is_registered
from weighbridge_service.plan.declarations import alone_at, is_alone_elsewhere
from weighbridge_service.push.effect_pools import EffectPools
from weighbridge_service.push.effect_runner import EffectRunner, Facilities
from weighbridge_service.push.ended import EndedPush
from weighbridge_service.push.machine import events as on
from weighbridge_service.push.machine.answers import is_known, pushed_already
from weighbridge_service.push.machine.opening import OpeningRequest, check_not_received_alone
from weighbridge_service.push.machine.state import PushState
from weighbridge_service.push.observing.observer import PushObserver
from weighbridge_service.push.publisher import Publisher, give_up
from weighbridge_service.push.refusals import Refusals
from weighbridge_service.push.registry import Push, Registry, WaitsSaid
from weighbridge_service.push.replica_exchange import Exchange
from weighbridge_service.push.session import PushSession, now
from weighbridge_service.push.timers import Timers
from weighbridge_service.runtime.clock import unix_ms
from weighbridge_storage.documents.entries import OpenEntry
from weighbridge_storage.documents.names import MAX_VERSION, ModelName, first_version_of
from weighbridge_storage.head.head import Head
from weighbridge_storage.head.open_versions import Said, check_same_metadata, check_same_request
from weighbridge_storage.memory.images import Image

log = logging.getLogger(__name__)

_STOP_SECONDS = 10.0
_MAX_RANKS = 65_536
_MAX_TEXT = 256
_LONGEST_S = 10 * 365 * 86_400.0
_OPENINGS = 64
"""Locks for opening versions; models share them by their names."""
_NOTHING_SAID = Said()


class Opener:
    """Sessions of versions, found or begun. Thread-safe.

    Args:
        catalog: which models there are.
        registry: takes the sessions.
        facilities: what pushes share.
        max_receiving: how many versions may be received at one time.
        quotas: what identities and namespaces may have.

    Attributes:
        leaving: until when versions are still received, once this replica stops; no new ones are opened then.
        closed: whether it does not take part in versions any more that were opened at others either; see `close`.
        refusals: ranks that have said that they cannot take part.
    """

    def __init__(
        self,
        catalog: Catalog,
        registry: Registry,
        facilities: Facilities,
        max_receiving: int,
        quotas: Quotas,
    ) -> None:
        self.leaving: on.Draining | None = None
        self.closed = False
        self._catalog = catalog
        self._bases = Bases(catalog)
        self._registry = registry
        self._facilities = facilities
        self._home = facilities.home
        self._limits = facilities.limits
        self._max_receiving = max_receiving
        self._quotas = quotas
        self._pools = EffectPools()
        self._timers = Timers()
        self.refusals = Refusals()
        WaitsSaid(registry, self._timers)
        self._openings = [threading.Lock() for _ in range(_OPENINGS)]

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
        by: Peer | None = None,
        at_least: int = 0,
        call_age_s: float | None = None,
    ) -> Version:
        """Give a number for a new version, or the one that this request has been given before.

        A part of a model is registered by its first version. Its numbers are chosen by who pushes: ``at_least`` is the lowest that a new
        version gets, that of the weights with which it is pushed.

        A request whose version has ended is given a new one, unless the caller took part in that version. What is ``said`` of the version
        is added to what other ranks have said. A new one is counted where the identity of ``by``, the peer that opens it, or the namespace has a limit; its name in the
        policy is kept with the version, of the rank that came first. ``call_age_s`` is how many seconds ago the trainer has called for the push, by the rank's
        clock; None if it does not say.

        Raises:
            NotFound: the model is not registered.
            InvalidArgument: a number or text is out of bounds, or contradicts what another rank has said.
            ResourceExhausted: too many versions are being received, or who opens it or the namespace has no more of what the policy allows.
            VersionFailed: another rank has said that it cannot take part; is raised once.
            WeighbridgeError: as `Bases.find` and `Bases.pin`, of a version of an adapter, whose base is in what is ``said``.
        """
        model_name = ModelName.parse(name)
        if at_least and not model_name.part:
            raise InvalidArgument(f"the numbers of versions of {name} are not chosen by who pushes them")
        if not 0 <= at_least <= MAX_VERSION:
            raise InvalidArgument(f"{at_least} is no version number")
        if not 1 <= ranks <= _MAX_RANKS:
            raise InvalidArgument(f"{ranks} ranks are not between 1 and {_MAX_RANKS}")
        if call_age_s is not None and not 0.0 <= call_age_s <= _LONGEST_S:
            raise InvalidArgument(f"a push was not called for {call_age_s} seconds ago")
        if not 0 <= step < 1 << 53:
            raise InvalidArgument(f"step {step} is not between 0 and 2**53")
        for what, text in (("run", run), ("request_id", request_id), ("client_id", client_id)):
            check_text(what, text)
        wanted = str(said.metadata.get(BASE, ""))
        digest = str(said.metadata.get(ADAPTER_DIGEST, ""))
        own = {key: value for key, value in said.metadata.items() if key not in OF_OPENING}
        said = replace(said, metadata=own)
        identity, called = (EVERYBODY, "") if by is None else (by.identity, by.name)
        asked_for = (step, run, ranks)
        find = partial(
            self._opened_before, model_name, asked_for, request_id, client_id, said, wanted, digest
        )
        if (there := find()) is not None:
            return there
        if model_name.part and at_least >= self._catalog.register_part(model_name).next_version:
            raise InvalidArgument(
                f"{at_least} is no number of a version of {model_name.model}",
                fix="push weights first: a training state has the number of those that it is pushed with",
            )
        model = self._catalog.model(model_name)
        if digest:
            check_registered_so(model, digest)
        base = self._bases.find(model, wanted, by)
        nbytes = self._room_for(model)
        with self.opening(model_name):
            if (there := find()) is not None:
                return there
            known = [push.snapshot.version for push in self._registry.of_model(model_name)]
            other = self._registry.other_writer(model_name, client_id)
            told = f"{other.model}@{other.number}, step {other.step} of run {other.run}" if other else ""
            given_up = {version.number: version for version in known if version.state.given_up}
            receiving = {each.number for each in known if not (each.state.visible or each.state.given_up)}
            joined = self._registry.of_request(model_name, request_id)
            is_open = partial(self._is_open, model_name, request_id, given_up)
            if joined is None or joined.snapshot.version.number not in receiving:
                if self.draining and not is_open():
                    raise _shutting_down()
                self._check_room(called)
            asked = OpeningRequest(
                request_id=request_id,
                step=step,
                run=run,
                ranks=ranks,
                lease_ms=round(self._limits.lease * 1000),
                said=said,
                nbytes=nbytes,
                by=called,
                at_least=at_least,
                other=told,
                base=base,
                home=self._home,
                given_up=given_up,
                receiving=receiving,
                reached=frozenset(each.address for each in self._facilities.successors.others()),
            )
            with self._quotas.opening(identity, model_name, nbytes, is_open) as room:
                entry, head, new = self._open(model, asked, client_id, room, as_registered=bool(digest))
                self._pin(model_name, entry, wanted, identity.limits.adapters)
            if digest:
                with suppress(NotFound):  # what it was opened with is not registered any more: `_begin`
                    opened = self._catalog.model_opened(model_name, head, entry.files_id)
                    check_same_adapter(entry.number, opened, digest)
            if is_alone_elsewhere(entry, self._home):  # its ranks are sent there when they declare
                return replace(version_opened(model, entry), held=entry.held)
            if (
                isinstance(joined, PushSession)
                and joined.number == entry.number
                and entry.number in receiving
            ):
                joined.post(on.Described(entry))
                return replace(joined.snapshot.version, held=entry.held, metadata=entry.metadata)
            session = self._begin(model_name, entry, head, client_id, Beginning(call_age_s) if new else None)
        if told:
            log.warning("%s: another job has pushed %s since this one did", session.snapshot.version, told)
        log.info("opened %s for run %s with %s", session.snapshot.version, run, counted(ranks, "rank"))
        return session.snapshot.version

    def _pin(self, name: ModelName, entry: OpenEntry, wanted: str, most: int | None) -> None:
        """Have the base of a version that was just opened keep it; without that, the version is given up.

        Raises:
            InvalidArgument: another rank has opened the version on another base.
            NotFound: the base was deleted meanwhile.
            ResourceExhausted: who opens it has adapters on as many versions as they may.
        """
        self._bases.check_same(entry.number, entry.metadata, wanted)
        try:
            self._bases.pin(name, entry, most)
        except (NotFound, ResourceExhausted) as error:
            with suppress(WeighbridgeError):
                self.give_up(name, entry.number, error.message)
            raise

    @property
    def draining(self) -> bool:
        """Whether this replica stops."""
        return self.leaving is not None

    def _room_for(self, model: RegisteredModel) -> int:
        """Bytes that a version of a model takes of what its namespace may hold; 0 if there is no limit, or that is not known yet.

        Where each version has tensors of its own, the next one counts as many as the newest until it is durable.
        """
        if not self._quotas.stored.is_limited(model.name):
            return 0
        if model.by_version:
            return next((entry.nbytes for entry in self._catalog.history(model.name).newest(1)), 0)
        return sum(
            model.files.file_sizes.values()
        )  # their layout takes seconds the first time, for some models

    def _is_open(self, name: ModelName, request_id: str, given_up: Container[int]) -> bool:
        """Whether this request has opened a version, at whatever replica, that was not given up here since."""
        return any(
            each.request_id == request_id and each.number not in given_up
            for each in self._catalog.head(name).open.values()
        )

    def _open(
        self,
        model: RegisteredModel,
        asked: OpeningRequest,
        client_id: str,
        room: Opening,
        *,
        as_registered: bool,
    ) -> tuple[OpenEntry, Head, bool]:
        """Open a version in the head, or find it open; and whether it is a new one, which it is only if the model is still registered as it was, if so asked.

        Raises:
            FailedPrecondition: the model was registered otherwise meanwhile.
            VersionFailed: it would be a new one, and a rank of the push was refused.
            ResourceExhausted: it is a new one for which the namespace has no room.
            Unavailable: it would be a new one that is not counted, as the one that was open has just ended; or one without a base of what has
                become an adapter meanwhile, or the other way round.
        """

        name = model.name

        def open_new(head: Head) -> tuple[Head, tuple[OpenEntry, Head, bool]]:
            after, (entry, changed) = asked.open(head, unix_ms())
            new = entry.number >= head.next_version
            if new:  # asked here, as a version that a refused rank gives up may end at any moment before
                self.refusals.check(name, asked.request_id, client_id)
                if not room.new:
                    raise Unavailable(f"the version of {name} that was open has just ended", fix="ask again")
                if as_registered and not is_registered(head, model):
                    raise registered_otherwise(name)
                if is_adapter_head(head) != (asked.base is not None):
                    raise Unavailable(f"{name} was registered anew just now", fix="ask again")
            return after, (entry, changed, new)

        entry, head, new = self._catalog.heads.update(name, open_new)
        if not new:
            room.new = False
            return entry, head, False
        try:
            self._quotas.stored.take_room(name, entry.nbytes)
        except WeighbridgeError as error:
            with suppress(
                WeighbridgeError
            ):  # it is abandoned then, which all replicas see when its lease has expired
                self.give_up(name, entry.number, error.message)
            raise
        return entry, head, True

    @contextmanager
    def opening(self, name: ModelName) -> Iterator[None]:
        """Only one version of a model is opened at one time. Raises Unavailable if that takes long."""
        lock = self._openings[hash(name) % _OPENINGS]
        if not lock.acquire(timeout=self._limits.opening_wait):
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
        self,
        name: ModelName,
        asked: tuple[int, str, int],
        request_id: str,
        client_id: str,
        said: Said,
        base: str,
        digest: str,
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
        self._bases.check_same(version.number, version.metadata, base)
        if digest and isinstance(push, PushSession):
            check_same_adapter(version.number, push.model, digest)
        return version if version.state.visible or is_known(push.state, said) else None

    def _check_room(self, by: str) -> None:
        """Raise if an identity of this name can bring no further version (ResourceExhausted), or nobody any more (Unavailable).

        Who has a name leaves some of them to others; those who have none cannot be told apart.
        """
        if self.closed:
            raise _shutting_down()
        names = [each.by for each in self._registry.in_states(VersionState.OPEN, VersionState.RECEIVING)]
        count, own = len(names), names.count(by) if by else 0
        if not may_have(self._max_receiving, count, own):
            raise ResourceExhausted(
                counted(count, "version is", "versions are")
                + " being received"
                + (f", {own} of them of {by}" if own else ""),
                fix="wait until one is done, or abort one",
            )

    def _begin(
        self,
        name: ModelName,
        entry: OpenEntry,
        head: Head,
        client_id: str,
        beginning: Beginning | None = None,
    ) -> PushSession:
        """Receive an open version here. The lock for openings is held.

        Args:
            name: of the model.
            entry: of the version in the head.
            head: the model's.
            client_id: who has opened the version, or declares a rank of it.
            beginning: of a version that this process has just opened.
        """
        try:
            model = self._catalog.model_opened(name, head, entry.files_id)
        except NotFound as error:
            reason = "the files that it was opened with are not registered any more"
            self.give_up(name, entry.number, reason)
            raise VersionFailed(
                f"{name}@{entry.number} was given up: {reason}",
                fix="push the step again",
            ) from error
        session = self._session(model, entry, client_id, beginning)
        self._registry.add(session)
        session.post(on.Staying(self._facilities.successors.staying()))  # one may have left meanwhile
        if self.leaving is not None:
            session.post(self.leaving)
        return session

    def _session(
        self, model: RegisteredModel, entry: OpenEntry, client_id: str, beginning: Beginning | None
    ) -> PushSession:
        begun = now()
        lease_left = (entry.until_ms - begun.unix_ms) / 1000
        opened = version_opened(model, entry)
        known, holding = model.known_set, HoldReasons.of(entry)
        if known is not None and not known.is_of(self._facilities.successors.staying() | {self._home}):
            known = None  # ranks of a replica that has left come to another one
        if model.known_number < entry.parent:
            known = None  # others have received a version since, perhaps from ranks that have moved
        state = PushState.begin(
            opened, self._home, self._limits, known, lease_left, begun, holding, beginning
        ).described(entry)
        return self.session(state, model, entry, client_id, None)

    def session(
        self, state: PushState, model: RegisteredModel, entry: OpenEntry, client_id: str, image: Image | None
    ) -> PushSession:
        """A session in this state, which is entered nowhere yet; its image, if it holds one already."""
        store, first_version = self._catalog.store, first_version_of(model.files_id)
        publisher = Publisher(store, self._catalog.heads, model, entry, self._home)
        exchange = Exchange(store, model.name, entry.number, self._home, first_version)
        runner = EffectRunner(publisher, exchange, self._facilities, image)
        observer = PushObserver(self._facilities.figures, state, now())
        return PushSession(state, client_id, runner, self._pools, self._timers, self._registry, observer)

    def find(self, name: str, number: int) -> PushSession:
        """The session of a version that is being received here. Raises as `EndedPush.refuse` if it was."""
        push = self.find_push(name, number)
        if isinstance(push, EndedPush):
            push.refuse()
        return push

    def find_push(self, name: str, number: int) -> Push:
        """The push of a version that is being received here, or was."""
        model_name = ModelName.parse(name)
        push = self._registry.find(model_name, number)
        if push is not None:
            return push
        history = self._catalog.history(model_name)
        published = history.find(number)
        if published is not None:
            raise pushed_already(f"{name}@{number}", published.step, published.run)
        entry = history.head.open.get(number)
        if entry is not None:
            check_not_received_alone(entry, self._home)
            self._give_up_if_lost(model_name, entry)
        there = invisible_version(model_name, self._catalog.head(model_name), number)
        if there is not None and there.state.given_up:
            raise VersionFailed(why_failed(there), fix="push the step again on all ranks")
        said = f"{name}@{number} is not being received"
        if entry is not None:  # by nobody yet who says so in the head: who pushes again goes on with it
            raise VersionFailed(
                said, fix="the service was restarted since it was opened: push the step again"
            )
        raise NotFound(said, fix="the service may have been restarted since it was opened: push again")

    def _give_up_if_lost(self, name: ModelName, entry: OpenEntry) -> None:
        """Close an open version of which a process before this one, at the same address, had received something."""
        exchange = Exchange(self._catalog.store, name, entry.number, self._home)
        try:
            lost = alone_at(entry) == self._home.address or (
                self._limits.spreading and exchange.was_here_before()
            )
        except WeighbridgeError as error:
            log.warning("who receives %s@%d cannot be seen: %s", name, entry.number, error)
            return
        if lost:
            reason = f"the replica at {self._home.address} was restarted, and has lost what it had received"
            self.give_up(name, entry.number, reason)

    def give_up(self, name: ModelName, number: int, reason: str, *, aborted: bool = False) -> None:
        """Close an open version in head.json, for this replica or, if it is aborted, for all."""
        store, heads = self._catalog.store, self._catalog.heads
        by = None if aborted else self._home
        give_up(store, heads, name, number, reason, by=by, aborted=aborted)

    def find_or_join(self, name: str, number: int, client_id: str) -> PushSession:
        """The session of a version, begun now if the version was opened at another replica."""
        model_name = ModelName.parse(name)
        if self._registry.find(model_name, number) is None:
            with self.opening(model_name):
                # another rank may have begun it meanwhile, and it may have ended, which the head does not say at once
                if self._registry.find(model_name, number) is None:
                    head = self._catalog.head(model_name)
                    entry = head.open.get(number)
                    if entry is not None:
                        self._check_room(entry.by)
                        check_not_received_alone(entry, self._home)
                        self._begin(model_name, entry, head, client_id)
        return self.find(name, number)

    def has_replica_at(self, address: str) -> bool:
        """Whether another replica is known at an address, so that ranks can be sent there."""
        return any(each.address == address for each in self._facilities.successors.others())

    def close(self, seconds: float) -> None:
        """Take part in no further version; returns once those that were being opened are entered in the registry."""
        self.closed = True
        self.wait_for_openings(seconds)

    def wait_for_openings(self, seconds: float) -> None:
        """Wait until all versions that are being opened now have their sessions, or for ``seconds``."""
        until = now().seconds + seconds
        for lock in self._openings:
            if lock.acquire(timeout=max(until - now().seconds, 0.0)):
                lock.release()

    def stop(self) -> None:
        """Leave what is not done as it is; waits for what is being done."""
        self._timers.stop()
        self._pools.stop(_STOP_SECONDS)
        for session in self._registry.all():
            session.stop()


def _shutting_down() -> Unavailable:
    return Unavailable("the service is shutting down", fix="try again when it is back")


def check_text(what: str, text: str) -> None:
    """Raise InvalidArgument if a text that tells something from others is none."""
    if not text or len(text) > _MAX_TEXT or not text.isprintable():
        raise InvalidArgument(f"the {what} is empty, longer than {_MAX_TEXT} characters, or not printable")


def version_opened(model: RegisteredModel, entry: OpenEntry) -> Version:
    """A version as it was opened."""
    return Version(
        model=str(model.name),
        number=entry.number,
        state=VersionState.OPEN,
        step=entry.step,
        run=entry.run,
        ranks=entry.ranks,
        tensor_bytes=0 if model.by_version else model.files.layout.nbytes,
        create_time_ms=entry.created_ms,
        metadata=entry.metadata,
        traceparent=entry.traceparent,
    )
