"""Opener of versions: finds the session of a version, or begins one."""

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
    """Opener of versions, and factory of their sessions. Thread-safe.

    Args:
        catalog: the registered models.
        registry: takes the sessions.
        facilities: resources that pushes share.
        max_receiving: number of versions that may be received at the same time.
        quotas: quotas of identities and namespaces.

    Attributes:
        leaving: times and successors of the shutdown, once this replica stops; it then opens no new versions.
        closed: whether this replica also refuses versions that were opened at other replicas; see `close`.
        refusals: ranks that have reported that they cannot take part.
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
        """Open a new version, or return the version that this request has opened before.

        The first version of a part registers the part. The caller chooses the numbers of a part's versions:
        ``at_least`` is the lowest number that a new version gets, which is that of the weights with which the part is
        pushed.

        A request whose version has ended opens a new one, unless the caller took part in the ended version. The
        metadata and flags in ``said`` are added to those that other ranks have sent. A new version counts toward the
        quotas of its namespace and of the identity of ``by``, the peer that opens it; the version keeps the name, in
        the policy, of the first rank's identity. ``call_age_s`` is the number of seconds since the trainer called for
        the push, by the rank's clock; None if unknown.

        Raises:
            NotFound: the model is not registered.
            InvalidArgument: a number or text is out of bounds, or contradicts another rank's.
            ResourceExhausted: too many versions are being received, or a quota of the identity or namespace is used up.
            VersionFailed: another rank has reported that it cannot take part; raised once to each process.
            WeighbridgeError: as `Bases.find` and `Bases.pin`, for a version of an adapter, whose base is in ``said``.
        """
        model_name = ModelName.parse(name)
        if at_least and not model_name.part:
            raise InvalidArgument(f"the caller may not choose the version numbers of {name}")
        if not 0 <= at_least <= MAX_VERSION:
            raise InvalidArgument(f"{at_least} is not a version number")
        if not 1 <= ranks <= _MAX_RANKS:
            raise InvalidArgument(f"the push has {ranks} ranks, not between 1 and {_MAX_RANKS}")
        if call_age_s is not None and not 0.0 <= call_age_s <= _LONGEST_S:
            raise InvalidArgument(f"a push cannot have been called for {call_age_s} seconds ago")
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
        find = partial(self._opened_before, model_name, asked_for, request_id, client_id, said, wanted, digest)
        if (there := find()) is not None:
            return there
        if model_name.part and at_least >= self._catalog.register_part(model_name).next_version:
            raise InvalidArgument(
                f"{at_least} is not the number of a version of {model_name.model}",
                fix="push weights first: a training state has the number of the weights that it is pushed with",
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
                present=self._catalog.snapshots.present(model_name),
                reached=frozenset(each.address for each in self._facilities.successors.others()),
            )
            with self._quotas.opening(identity, model_name, nbytes, is_open) as room:
                entry, head, new = self._open(model, asked, client_id, room, as_registered=bool(digest))
                self._pin(model_name, entry, wanted, identity.limits.adapters)
            if digest:
                with suppress(NotFound):  # its registration is gone: `_begin` raises for that
                    opened = self._catalog.model_opened(model_name, head, entry.files_id)
                    check_same_adapter(entry.number, opened, digest)
            if is_alone_elsewhere(entry, self._home):  # ranks are sent to that replica when they declare
                return replace(version_opened(model, entry), held=entry.held)
            if isinstance(joined, PushSession) and joined.number == entry.number and entry.number in receiving:
                joined.post(on.Described(entry))
                return replace(joined.snapshot.version, held=entry.held, metadata=entry.metadata)
            session = self._begin(model_name, entry, head, client_id, Beginning(call_age_s) if new else None)
        if told:
            log.warning("%s: another job has pushed %s since this one did", session.snapshot.version, told)
        log.info("opened %s for run %s with %s", session.snapshot.version, run, counted(ranks, "rank"))
        return session.snapshot.version

    def _pin(self, name: ModelName, entry: OpenEntry, wanted: str, most: int | None) -> None:
        """Pin the base of a version that was just opened. If that fails, give the version up.

        Raises:
            InvalidArgument: another rank has opened the version on another base.
            NotFound: the base was deleted in the meantime.
            ResourceExhausted: the identity has adapters on as many versions as its quota allows.
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
        """Bytes of the namespace's quota that a new version of a model uses; 0 if there is no quota, or if the number
        is not known yet.

        If each version has its own tensors, the next one counts as many bytes as the newest until it is durable.
        """
        if not self._quotas.stored.is_limited(model.name):
            return 0
        if model.by_version:
            return next((entry.nbytes for entry in self._catalog.history(model.name).newest(1)), 0)
        return sum(
            model.files.file_sizes.values()
        )  # not from the layout, which takes seconds the first time for some models

    def _is_open(self, name: ModelName, request_id: str, given_up: Container[int]) -> bool:
        """Whether this request has opened a version, at any replica, that this replica has not given up since."""
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
        """Open a version in the head, or find it open. Returns its entry, the head, and whether the version is new.

        With ``as_registered``, a new version requires that the registration of the model has not changed.

        Raises:
            FailedPrecondition: ``as_registered``, and the registration has changed.
            VersionFailed: the version would be new, and a rank of the push was refused.
            ResourceExhausted: the version is new, and the quota of the namespace is used up.
            Unavailable: the version would be new, but was not counted, because the version that was open has just
                ended; or the model has become an adapter in the meantime, or has ceased to be one.
        """

        name = model.name

        def open_new(head: Head) -> tuple[Head, tuple[OpenEntry, Head, bool]]:
            after, (entry, changed) = asked.open(head, unix_ms())
            new = entry.number >= head.next_version
            if new:  # checked here, as a version that a refused rank aborts may end at any moment before
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
            with suppress(WeighbridgeError):  # otherwise all replicas see it as abandoned once its lease has expired
                self.give_up(name, entry.number, error.message)
            raise
        return entry, head, True

    @contextmanager
    def opening(self, name: ModelName) -> Iterator[None]:
        """Lock under which one version of a model is opened at a time.

        Raises Unavailable after `Limits.opening_wait`.
        """
        lock = self._openings[hash(name) % _OPENINGS]
        if not lock.acquire(timeout=self._limits.opening_wait):
            # all ranks of a push call at once, and each one that waits blocks a thread of the service
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
        """Version that this request has opened before; None if there is none, or if head.json lacks some of
        ``said``.
        """
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
        """Raise ResourceExhausted if an identity of this name may open no further version, Unavailable if the replica
        is closed.

        An identity with a name that receives more than a quarter of `max_receiving` must leave a quarter free for
        others. Callers without a name cannot be distinguished, and have no such limit.
        """
        if self.closed:
            raise _shutting_down()
        names = [each.by for each in self._registry.in_states(VersionState.OPEN, VersionState.RECEIVING)]
        count, own = len(names), names.count(by) if by else 0
        if not may_have(self._max_receiving, count, own):
            raise ResourceExhausted(
                counted(count, "version is", "versions are")
                + " being received"
                + (f", {own} of them from {by}" if own else ""),
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
        """Start to receive an open version here. The lock for openings is held.

        Args:
            name: name of the model.
            entry: entry of the version in the head.
            head: head of the model.
            client_id: id of the process that has opened the version, or declares a rank of it.
            beginning: how the version began; None if another process has opened it.
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
        session.post(on.Staying(self._facilities.successors.staying()))  # a replica may have stopped since
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
            known = None  # ranks of a replica that has stopped declare at another one
        if model.known_number < entry.parent:
            known = None  # other replicas have received a version since, and ranks may have moved
        state = PushState.begin(
            opened, self._home, self._limits, known, lease_left, begun, holding, beginning
        ).described(entry)
        return self.session(state, model, entry, client_id, None)

    def session(
        self, state: PushState, model: RegisteredModel, entry: OpenEntry, client_id: str, image: Image | None
    ) -> PushSession:
        """New session in this state, not entered in the registry; ``image`` is the one that it holds already, if
        any.
        """
        store, first_version = self._catalog.store, first_version_of(model.files_id)
        publisher = Publisher(store, self._catalog.heads, model, entry, self._home)
        exchange = Exchange(store, model.name, entry.number, self._home, first_version)
        runner = EffectRunner(publisher, exchange, self._facilities, image)
        observer = PushObserver(self._facilities.figures, state, now())
        return PushSession(state, client_id, runner, self._pools, self._timers, self._registry, observer)

    def find(self, name: str, number: int) -> PushSession:
        """Session of a version that is being received here.

        Raises like `find_push`; if the push has ended, like `EndedPush.refuse`.
        """
        push = self.find_push(name, number)
        if isinstance(push, EndedPush):
            push.refuse()
        return push

    def find_push(self, name: str, number: int) -> Push:
        """Push of a version that is being received here, or was. Raises if there is none."""
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
        if entry is not None:  # no replica has claimed it in the head: the next push continues it
            raise VersionFailed(said, fix="the service was restarted since it was opened: push the step again")
        raise NotFound(said, fix="the service may have been restarted since it was opened: push again")

    def _give_up_if_lost(self, name: ModelName, entry: OpenEntry) -> None:
        """Give up an open version if an earlier process at this address had received bytes of it, which are lost."""
        exchange = Exchange(self._catalog.store, name, entry.number, self._home)
        try:
            lost = alone_at(entry) == self._home.address or (self._limits.spreading and exchange.was_here_before())
        except WeighbridgeError as error:
            log.warning("could not read which replica receives %s@%d: %s", name, entry.number, error)
            return
        if lost:
            reason = f"the replica at {self._home.address} was restarted, and has lost what it had received"
            self.give_up(name, entry.number, reason)

    def give_up(self, name: ModelName, number: int, reason: str, *, aborted: bool = False) -> None:
        """Close an open version in head.json, for this replica, or for all replicas if it is aborted."""
        store, heads = self._catalog.store, self._catalog.heads
        by = None if aborted else self._home
        give_up(store, heads, name, number, reason, by=by, aborted=aborted)

    def find_or_join(self, name: str, number: int, client_id: str) -> PushSession:
        """Session of a version; begins it now if another replica has opened the version."""
        model_name = ModelName.parse(name)
        if self._registry.find(model_name, number) is None:
            with self.opening(model_name):
                # another rank may have begun it in the meantime, and it may have ended, which the head shows only later
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
        """Take part in no further versions.

        Returns once the versions that are being opened are entered in the registry, or on timeout.
        """
        self.closed = True
        self.wait_for_openings(seconds)

    def wait_for_openings(self, seconds: float) -> None:
        """Wait up to ``seconds`` until all versions that are being opened now have their sessions."""
        until = now().seconds + seconds
        for lock in self._openings:
            if lock.acquire(timeout=max(until - now().seconds, 0.0)):
                lock.release()

    def stop(self) -> None:
        """Stop without finishing open versions; waits up to 10 s for the effects that are running."""
        self._timers.stop()
        self._pools.stop(_STOP_SECONDS)
        for session in self._registry.all():
            session.stop()


def _shutting_down() -> Unavailable:
    return Unavailable("the service is shutting down", fix="try again when it is back")


def check_text(what: str, text: str) -> None:
    """Raise InvalidArgument if an identifier is empty, too long or not printable."""
    if not text or len(text) > _MAX_TEXT or not text.isprintable():
        raise InvalidArgument(f"the {what} is empty, longer than {_MAX_TEXT} characters, or not printable")


def version_opened(model: RegisteredModel, entry: OpenEntry) -> Version:
    """The version as it was opened."""
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
